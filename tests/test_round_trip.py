"""There and back: a PyTorch export trains on an emulated board, and ONNX Runtime computes what that board does."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from host_control.boards import open_board
from host_control.cli import main
from host_control.console import Console
from host_control.training.data import normalised
from host_control.training.inference import evaluator_of_run
from host_control.training.record import read_run
from tests.onnx_graphs import run_onnxruntime

COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}


def photos(folder: Path, each: int) -> Path:
    """Noisy images of three colours, in three folders, PNG and JPEG of several sizes."""
    rng = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for number in range(each):
            height, width = rng.integers(14, 30, 2)
            pixels = np.clip(rng.normal(colour, 50, (height, width, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.{'png' if number % 2 else 'jpg'}")
    return folder


def torch_export(path: Path, classes: int) -> Path:
    """Two convolutions with batch norm, in inference mode: the exporter folds them."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    more = (nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(*layers, *more, nn.Linear(12, classes), nn.Softmax(1)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, (torch.zeros(2, 3, 16, 16),), str(path), dynamo=False, input_names=["image"],
            dynamic_axes={"image": {0: "batch"}},
        )  # fmt: skip
    return path


@pytest.mark.needs("torch", "onnxruntime", "qemu")
def test_torch_to_the_emulated_board_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source, data, run = torch_export(tmp_path / "own.onnx", 4), photos(tmp_path / "photos", 20), tmp_path / "run"
    command = ["train", "--model", str(source), "--data", str(data), "--board", "emulated:rpi4", "--batch-size", "6"]
    command += ["--epochs", "20", "--unfold-bn", "--lr", "0.05", "--out", str(run), "--json"]
    assert main(command) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["emulated"] and result["classes"] == 3 and result["test_accuracy"] >= 0.9
    assert main(["export", "--run", str(run), "--onnx", str(tmp_path / "trained.onnx")]) == 0
    trained = read_run(run)
    written = onnx.load(str(tmp_path / "trained.onnx"))
    properties = {entry.key: entry.value for entry in written.metadata_props}
    assert json.loads(properties["classes"]) == ["blue", "green", "red"]
    assert [n.op_type for n in written.graph.node] == [n.op_type for n in onnx.load(str(source)).graph.node]
    images = np.random.default_rng(1).integers(0, 256, (5, 3, 16, 16)).astype(np.uint8)
    x = normalised(images, json.loads(properties["mean"]), json.loads(properties["std"]))
    args = argparse.Namespace(target=None, board="emulated:rpi4", batch_size=2, threads=None)
    with open_board("emulated:rpi4") as board:
        logits = evaluator_of_run(args, trained, board, Console()).logits(x).astype(np.float64)  # type: ignore[arg-type]
    shares = np.exp(logits - logits.max(1, keepdims=True))
    np.testing.assert_allclose(
        run_onnxruntime(tmp_path / "trained.onnx", x), shares / shares.sum(1, keepdims=True), atol=1e-4
    )
    capsys.readouterr()
    red = str(data / "red" / "0.jpg")
    assert main(["predict", "--run", str(run), "--board", "emulated:rpi4", red, "--json"]) == 0
    prediction = json.loads(capsys.readouterr().out.splitlines()[-1])["predictions"][0]
    assert prediction["class"] == "red" and sum(p["probability"] for p in prediction["probabilities"]) == pytest.approx(
        1
    )
    assert main(["eval", "--run", str(run), "--board", "emulated:rpi4", "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert evaluated["test_accuracy"] == result["test_accuracy"] and evaluated["samples"] == 12
