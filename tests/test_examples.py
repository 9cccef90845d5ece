"""The examples run as their first lines say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent


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
