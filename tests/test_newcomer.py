"""A newcomer's path in three commands, defaults only: folders of photos, somebody's ONNX file, a trained file back."""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image
from safetensors.numpy import load_file

from cross.load_model import load_model
from cross.weights.load import load_weights
from host_control.cli import main
from host_control.training.data import normalised
from tests.onnx_graphs import run_onnxruntime

CHANCE = 0.2
MODELS = {"resnet20": 0.5, "resnet18": 0.35}
"""What ONNX Runtime must get right of photos that were held out: after training on another task, and after none."""


def photos(archive: Path, folder: Path, each: int) -> Path:
    """Five folders of real photos, JPEG as they are and PNG of other sizes."""
    rng = np.random.default_rng(0)
    with zipfile.ZipFile(archive) as source:
        names = [name for name in source.namelist() if "/train/" in name and name.endswith(".JPEG")]
        for number, kind in enumerate(sorted({name.split("/")[-3] for name in names})[::4]):
            (folder / f"kind {number}").mkdir(parents=True)
            for index, name in enumerate(sorted(name for name in names if name.split("/")[-3] == kind)[:each]):
                data, place = source.read(name), folder / f"kind {number}"
                if index % 3:
                    (place / f"{index}.jpeg").write_bytes(data)
                else:
                    width, height = map(int, rng.integers(50, 90, 2))
                    Image.open(io.BytesIO(data)).convert("RGB").resize((width, height)).save(place / f"{index}.png")
    return folder


def inference_export(name: str, path: Path, weights: Path | None) -> Path:
    """A model as its owner would export it: inference mode, batch norms folded."""
    import torch

    from tests.torch_zoo import torch_like

    module: Any = torch_like(load_model(name), name, torch.float32)
    if weights is not None:
        named = {n.removeprefix("module."): torch.from_numpy(a.copy()) for n, a in load_weights(weights).items()}
        module.load_state_dict(named, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        example, batch = torch.zeros(2, 3, 32, 32), torch.export.Dim("batch")
        torch.onnx.export(module.eval(), (example,), str(path), dynamo=True, dynamic_shapes=({0: batch},))
    return path


@pytest.mark.acceptance
@pytest.mark.needs("data", "torch", "onnxruntime", "onnxscript")
@pytest.mark.parametrize("name", MODELS)
def test_photos_and_a_file_for_inference(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = photos(data / "tinyimagenet20.zip", tmp_path / "photos", 80)
    published = data / "resnet_cifar10" / "resnet20-12fca82f.th"
    inference_export(name, tmp_path / "mine.onnx", published if name == "resnet20" else None)
    assert main(["train", "--model", "mine.onnx", "--data", str(folder), "--out", "run"]) == 0
    assert main(["export", "--run", "run", "--onnx", "trained.onnx"]) == 0
    options = json.loads((tmp_path / "run" / "options.json").read_text())
    test = load_file(Path(options["data"]["folder"]) / "test.safetensors")
    properties = {e.key: e.value for e in onnx.load("trained.onnx").metadata_props}
    assert json.loads(properties["classes"]) == [f"kind {number}" for number in range(5)]
    x = normalised(test["x"], json.loads(properties["mean"]), json.loads(properties["std"]))
    accuracy = float((run_onnxruntime(tmp_path / "trained.onnx", x).argmax(1) == test["y"]).mean())
    print(f"accuracy {accuracy:.1%} of {len(test['y'])}, chance {CHANCE:.0%}")
    assert accuracy == pytest.approx(
        json.loads((tmp_path / "run" / "result.json").read_text())["test_accuracy"], abs=0.02
    )
    assert accuracy >= MODELS[name]
    capsys.readouterr()
    assert main(["predict", "--run", "run", str(folder / "kind 0" / "0.png"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["predictions"][0]["class"].startswith("kind ")
