"""`power` on a board with the kernel's own cpufreq: really set, read back, restored after every end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from host_control.boards import DeployedBoard, open_board
from host_control.power.measuring import read_policies, settable_frequencies
from tests.needs import cpufreq_board

pytestmark = [pytest.mark.needs("boards", "cpufreq-board")]
_ROOT = Path(__file__).resolve().parent.parent
_MODEL = ("--model", "mlp", "--input-shape", "1,8,8", "--classes", "3")


@pytest.fixture
def board() -> Iterator[DeployedBoard]:
    with open_board(cpufreq_board() or "", accept_new=True) as opened:
        assert isinstance(opened, DeployedBoard)
        yield opened


def command(*words: object) -> list[str]:
    fixed = [
        sys.executable,
        "-m",
        "host_control",
        *map(str, words),
        "--board",
        str(cpufreq_board()),
        "--accept-new",
        "--json",
    ]
    return fixed


def run(folder: Path, *words: object) -> tuple[int, list[dict[str, Any]], str]:
    done = subprocess.run(
        command(*words), cwd=folder, capture_output=True, text=True, timeout=600, env=_environment(), check=False
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(_ROOT)}


def _set(board: DeployedBoard) -> str:
    """What cpufreq is set to, as the board's kernel says it: all that has to be as before."""
    folder = "/sys/devices/system/cpu/cpufreq/policy*/scaling_"
    return board.connection.run(["sh", "-c", f"cat {folder}governor {folder}min_freq {folder}max_freq"]).stdout


def test_measure_select_and_train_leave_the_frequency_as_it_was(board: DeployedBoard, tmp_path: Path) -> None:
    words = ("power", "measure", *_MODEL, "--batch-sizes", "4,8,16,32", "--seconds", 0.5, "--power-source", "model")
    before = _set(board)
    code, lines, err = run(tmp_path, *words, "--out", tmp_path / "table")
    assert code == 0, err
    result = lines[-1]
    assert _set(board) == before
    steps = settable_frequencies(read_policies(board.info()))
    assert tuple(result["frequencies_khz"]) == steps and len(result["points"]) == 4 * len(steps) and result["estimated"]
    assert result["emulated"] == board.facts().emulated
    table = json.loads((tmp_path / "table/power.json").read_text())
    for p in table["points"]:
        assert p["lowest_khz"] == p["highest_khz"] == pytest.approx(p["frequency_khz"], rel=0.01), (
            "really set, and read back"
        )
    select = [
        sys.executable,
        "-m",
        "host_control",
        "power",
        "select",
        "--table",
        "table",
        "--limit-watts",
        "4",
        "--json",
    ]
    done = subprocess.run(select, cwd=tmp_path, capture_output=True, text=True, check=True, env=_environment())
    choice = json.loads(done.stdout.splitlines()[-1])["choice"]
    assert choice["watts"] < 4 and choice["frequency_khz"] in steps

    train = _training(tmp_path)
    code, lines, err = run(tmp_path, *train, "--steps", 300, "--out", tmp_path / "run")
    assert code == 0, err
    moves = [e for e in lines if e["event"] == "operating_point"]
    assert moves and moves[0]["frequency_khz"] in steps
    seen = {e["frequency_khz"] for e in lines if e["event"] == "power" and e["t_ns"] > moves[0]["t_ns"]}
    assert all(khz == pytest.approx(moves[0]["frequency_khz"], rel=0.01) for khz in seen)
    assert _set(board) == before
    code, _, err = run(tmp_path, *train, "--steps", 300, "--lr", 1e20, "--out", tmp_path / "diverged")
    assert code == 15 and _set(board) == before

    with subprocess.Popen(
        command(*train, "--steps", 10**6, "--out", tmp_path / "stopped"),
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment(),
    ) as process:  # fmt: skip
        _wait_for_step(process)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert process.returncode == 130 and _set(board) == before

    with subprocess.Popen(
        command(*train, "--steps", 10**6, "--out", tmp_path / "killed"),
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment(),
    ) as process:  # fmt: skip
        _wait_for_step(process)
        # The program on the board, not ours here: nothing of it can put anything back.
        board.connection.run(["sh", "-c", "kill -9 $(pgrep -x taste-train)"])
        process.communicate(timeout=120)
    assert process.returncode not in (0, 130)
    board.info()
    assert _set(board) == before, "the next start of the program puts it right"


def _training(folder: Path) -> tuple[object, ...]:
    rng = np.random.default_rng(0)
    y = np.arange(96) % 3
    x = (rng.integers(0, 120, (96, 8, 8)) + rng.integers(0, 130, (3, 8, 8))[y]).astype(np.uint8)
    np.savez(folder / "data.npz", x_train=x[:80], y_train=y[:80], x_test=x[80:], y_test=y[80:])
    return ("power", "train", *_MODEL, "--data", "data.npz", "--table", "table", "--limit-watts", 4)


def _wait_for_step(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["event"] == "step":
            time.sleep(0.3)
            return
    assert process.stderr is not None
    raise AssertionError(process.stderr.read())
