"""The examples run as their first lines say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.host import host_target
from tests.packed_data import pack

_ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.needs("zig")
def test_python_on_the_board_learns_class_by_class(built: Callable[..., Path], tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    y = (np.arange(600) % 3).astype(np.int32)
    x = (draw.integers(0, 180, (3, 1, 8, 8))[y] + draw.integers(0, 76, (600, 1, 8, 8))).astype(np.uint8)
    pack(tmp_path / "train", x, y, [0.5], [0.25])
    library = built("mlp", host_target(), input_shape=(1, 8, 8), classes=3) / "libtaste.so"
    lines = _run("examples/learn_on_the_board.py", str(library), str(tmp_path / "train")).splitlines()
    assert [line.split(":")[0] for line in lines] == [f"{n} samples, {n // 10} updates" for n in (200, 400, 600)]
    assert int(lines[-1].split()[-1].rstrip("%")) >= 80 and "3 classes" in lines[-1]


def _run(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    run = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_a_recorded_board_is_tuned(tmp_path: Path) -> None:
    table = json.loads((_ROOT / "examples" / "recorded_board.json").read_text(encoding="utf-8"))["throughput"]
    rates = {row["batch_size"]: row["samples_per_s"] for row in table}
    board = "recorded:examples/recorded_board.json"
    lines = _run("-m", "host_control", "tune", "--board", board, "--out", str(tmp_path / "run"), "--json")
    result = json.loads(lines.splitlines()[-1])
    assert result["complete"] and result["verdict"] == "peak"
    assert rates[result["bs_opt"]] > 0.9 * max(rates.values())


@pytest.mark.needs("torch", "onnxscript", "zig")
def test_a_model_of_ones_own_goes_from_torch_to_throughput(tmp_path: Path) -> None:
    model = tmp_path / "my_model.onnx"
    _run("examples/export_from_torch.py", str(model))
    lines = _run("examples/own_model.py", str(model)).splitlines()
    assert [line.split(":")[0] for line in lines] == ["batch size 2", "batch size 8", "batch size 32"]
