"""Other people's models train: over 5 steps at lr 1e-3 on one batch the loss falls by at least 5 %, and every trainable
tensor's gradient is finite and not zero."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from cross.load_model import load_model
from device_runtime import Trainer, load_library
from tests.host import host_target
from tests.onnx_graphs import keras_style

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def train_five_steps(folder: Path, batch: int, momentum: float = 0.0) -> list[float]:
    """Losses of 5 steps on one batch, and the check of the gradients before the first."""
    library = load_library(folder / "libtaste.so")
    rng = np.random.default_rng(3)
    x = rng.standard_normal((batch, *library.input_shape)).astype("float32")
    y = rng.integers(0, library.classes, batch).astype("int32")
    with Trainer(library, batch_size=batch, weights=folder / "weights.safetensors", programs=("train",)) as trainer:
        trainer.gradients(x, y)
        sizes = {}
        for tensor in library.tensors:
            if tensor.kind == "parameter":
                gradient = trainer.gradient(tensor.name)
                assert np.isfinite(gradient).all(), tensor.name
                sizes[tensor.name] = float(np.linalg.norm(gradient.astype("float64")))
        whole = float(np.linalg.norm(list(sizes.values())))
        still = [name for name, size in sizes.items() if size == 0.0]
        assert not still and whole > 0, still
        losses = [trainer.step(x, y, learning_rate=1e-3, momentum=momentum).loss for _ in range(6)]
    assert all(np.isfinite(losses))
    return losses


def falls(losses: list[float]) -> bool:
    return losses[-1] <= 0.95 * losses[0]


def test_keras_style_file_trains(built: Callable[..., Path], tmp_path: Path) -> None:
    path = keras_style(tmp_path / "keras.onnx")
    folder = built(path, host_target())
    assert falls(train_five_steps(folder, 2))


LIGHT_MODELS = [
    "resnet50",
    "squeezenet",
    "vgg19",
    "bvlc_alexnet",
    "densenet121",
    "shufflenet",
    "inception_v1",
    "inception_v2",
]


@pytest.mark.acceptance
@pytest.mark.parametrize("name", LIGHT_MODELS)
def test_models_of_the_onnx_package_train(name: str, built: Callable[..., Path]) -> None:
    folder = built(LIGHT / f"light_{name}.onnx", host_target(), init="seeded")
    assert falls(train_five_steps(folder, 2)), name


@pytest.mark.acceptance
@pytest.mark.needs("rapidocr")
def test_text_direction_model_of_rapidocr_trains(built: Callable[..., Path]) -> None:
    files = metadata.files("rapidocr") or []
    path = next(Path(str(f.locate())) for f in files if f.name == "ch_ppocr_mobile_v2.0_cls_mobile.onnx")
    folder = built(path, host_target(), input_shape=(3, 48, 192))
    assert falls(train_five_steps(folder, 2))


@pytest.mark.acceptance
@pytest.mark.needs("torch", "onnxscript")
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_inference_export_of_resnet18_trains(dynamo: bool, built: Callable[..., Path], tmp_path: Path) -> None:
    """Batch norms folded by the exporter, weights seeded (an untrained network's own hardly move at this rate)."""
    import torch

    from tests.torch_zoo import torch_like

    module: Any = torch_like(load_model("resnet18"), "resnet18", torch.float32).eval()
    path = tmp_path / "resnet18_eval.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (torch.zeros(1, 3, 32, 32),), str(path), dynamo=dynamo, input_names=["input"])
    folder = built(path, host_target(), init="seeded")
    assert falls(train_five_steps(folder, 2))
