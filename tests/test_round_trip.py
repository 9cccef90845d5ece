"""There and back: a PyTorch export trains on an emulated board, and ONNX Runtime computes what that board does."""

from __future__ import annotations

import argparse
import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

import host_control.boards as boards
from host_control.boards import open_board
from host_control.cli import main
from host_control.console import Console
from host_control.preparation import deployed, opened_board
from host_control.training.data import normalised
from host_control.training.inference import evaluator_of_run
from host_control.training.record import read_run
from tests.onnx_graphs import run_onnxruntime
from tests.sshd.emulated_board import run_emulated_board
from tests.sshd.server import ALIAS

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


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder: a model and photos."""
    monkeypatch.chdir(tmp_path)
    torch_export(tmp_path / "own.onnx", 4)
    photos(tmp_path / "photos", 20)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The result of a verb that must succeed."""
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


def there_and_back(own: Path, capsys: pytest.CaptureFixture[str], *board: str) -> None:
    """Train, export, and compare what ONNX Runtime computes with the logits of the board that trained."""
    run, words = own / "run", dict(zip(board[::2], board[1::2], strict=True))
    command = [
        "train",
        "--model",
        "own.onnx",
        "--data",
        "photos",
        "--batch-size",
        "6",
        "--epochs",
        "15",
        "--lr",
        "0.05",
    ]
    result = said(capsys, *command, "--out", str(run), *board)
    assert result["emulated"] == words["--board"].startswith("emulated:") and result["classes"] == 3
    assert result["test_accuracy"] >= 0.9
    said(capsys, "export", "--run", str(run), "--onnx", "trained.onnx")
    written = onnx.load("trained.onnx")
    properties = {entry.key: entry.value for entry in written.metadata_props}
    assert json.loads(properties["classes"]) == ["blue", "green", "red"]
    assert [node.op_type for node in written.graph.node] == [node.op_type for node in onnx.load("own.onnx").graph.node]
    images = np.random.default_rng(1).integers(0, 256, (5, 3, 16, 16)).astype(np.uint8)
    x = normalised(images, json.loads(properties["mean"]), json.loads(properties["std"]))
    names = {"target": None, "batch_size": 2, "threads": None, "accept_new": False, "remote_dir": None}
    args = argparse.Namespace(**names | {"board": words["--board"]} | {"remote_dir": words.get("--remote-dir")})
    with opened_board(args) as opened:
        logits = evaluator_of_run(args, read_run(run), deployed(opened), Console(True)).logits(x).astype(np.float64)
    shares = np.exp(logits - logits.max(1, keepdims=True))
    expected = shares / shares.sum(1, keepdims=True)
    np.testing.assert_allclose(run_onnxruntime(own / "trained.onnx", x), expected, atol=1e-4)
    evaluated = said(capsys, "eval", "--run", str(run), *board)
    assert evaluated["test_accuracy"] == result["test_accuracy"] and evaluated["samples"] == 12


@pytest.mark.needs("torch", "onnxruntime", "qemu")
def test_torch_to_an_emulated_board_and_back(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there_and_back(own, capsys, "--board", "emulated:rpi4")
    capsys.readouterr()
    words = ("predict", "--run", "run", "photos/red/0.jpg", "--board", "emulated:rpi4")
    (prediction,) = said(capsys, *words)["predictions"]
    assert prediction["class"] == "red"
    assert sum(share["probability"] for share in prediction["probabilities"]) == pytest.approx(1)


@pytest.mark.needs("torch", "onnxruntime", "boards")
def test_torch_to_a_board_behind_ssh_and_back(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (own / "sshd").mkdir()
    with run_emulated_board(own / "sshd", "rpi4", step=["train"], loss=0.0, table={}) as emulated:
        monkeypatch.setattr(boards, "open_board", partial(open_board, ssh_config=emulated.sshd.config))
        there_and_back(own, capsys, "--board", ALIAS, "--remote-dir", str(own / "there"))
        assert not list((own / "there" / "runs").glob("*/*")), "what was fetched does not stay"
