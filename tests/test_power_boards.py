"""`power` on an emulated board whose kernel has cpufreq: the frequency is really set, read back, and restored after every end."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from host_control.boards import DeployedBoard, open_board
from host_control.cli import main
from host_control.emulation.device_tree import CELSIUS, RATES_MHZ
from host_control.power.measuring import read_policies, settable_frequencies

pytestmark = [pytest.mark.needs("vm-boards", "zig")]
_ROOT = Path(__file__).resolve().parent.parent
_MODEL = ("--model", "mlp", "--input-shape", "1,8,8", "--classes", "3")
_STEPS = tuple(1000 * rate for rate in RATES_MHZ)
_BATCHES = (4, 8, 16, 32)


@pytest.fixture(scope="module")
def board(board_up: Callable[..., str]) -> Iterator[DeployedBoard]:
    """Its clock counts instructions: what is measured does not depend on what else this machine does."""
    with open_board(board_up("rpi3-vm", icount=True, cpufreq=True)) as opened:
        assert isinstance(opened, DeployedBoard)
        yield opened


def run(board: DeployedBoard, *words: object) -> tuple[int, str]:
    """Exit code and output of a command on the board."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main([*map(str, words), "--board", board.name])
    return code, out.getvalue()


def is_set(board: DeployedBoard) -> list[str]:
    """What cpufreq is set to, as the board's kernel says it: all that has to be as before."""
    folder = "/sys/devices/system/cpu/cpufreq/policy*/scaling_"
    return board.connection.run(["sh", "-c", f"cat {folder}governor {folder}min_freq {folder}max_freq"]).stdout.split()


@pytest.fixture(scope="module")
def before(board: DeployedBoard) -> list[str]:
    """The kernel's own choice, between the lowest and the highest."""
    words = is_set(board)
    assert words[0] != "userspace" and words[1:] == [str(_STEPS[0]), str(_STEPS[-1])]
    return words


@pytest.fixture(scope="module")
def folder(board: DeployedBoard, before: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds data.npz and what `power measure` left and said: 4 frequencies x 4 batch sizes."""
    path = tmp_path_factory.mktemp("power")
    rng = np.random.default_rng(0)
    y = np.arange(96) % 3
    x = (rng.integers(0, 120, (96, 8, 8)) + rng.integers(0, 130, (3, 8, 8))[y]).astype(np.uint8)
    np.savez(path / "data.npz", x_train=x[:80], y_train=y[:80], x_test=x[80:], y_test=y[80:])
    sizes = ",".join(map(str, _BATCHES))
    code, said = run(
        board, "power", "measure", *_MODEL, "--batch-sizes", sizes, "--seconds", 0.1, "--power-source", "model",
        "--out", path / "table",
    )  # fmt: skip
    assert code == 0 and is_set(board) == before
    (path / "said").write_text(said)
    return path


def test_measure_sets_and_reads_back_every_frequency(board: DeployedBoard, folder: Path) -> None:
    assert settable_frequencies(read_policies(board.info())) == _STEPS
    table = json.loads((folder / "table/power.json").read_text())
    assert sorted((p["batch_size"], p["frequency_khz"]) for p in table["points"]) == [
        (b, khz) for b in _BATCHES for khz in _STEPS
    ]
    for p in table["points"]:
        assert p["lowest_khz"] == p["highest_khz"] == p["frequency_khz"]
        assert p["temperature_c"] == pytest.approx(CELSIUS, abs=0.3), "the sensor's step is 0.54 degrees"
    assert table["emulated"] and table["estimated"]
    said = (folder / "said").read_text()
    rates = [line for line in said.splitlines() if "samples/s" in line]
    assert len(rates) == 16 and all("emulated samples/s" in line and "(estimated)" in line for line in rates)
    assert "(estimated, emulated)" in said


def choice_below(folder: Path, watts: float, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    words = ["power", "select", "--table", str(folder / "table"), "--limit-watts", str(watts), "--json"]
    assert main([*words, "--out", str(folder / "selected")]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["emulated"] and result["estimated"] and result["choice"]["watts"] < watts
    return dict(result["choice"])


def test_train_runs_at_the_chosen_point(
    board: DeployedBoard, before: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choice = choice_below(folder, 4, capsys)
    code, said = run(board, *training(folder, 4), "--steps", 300, "--out", folder / "run", "--json")
    events = [json.loads(line) for line in said.splitlines()]
    assert code == 0 and events[-1]["emulated"] and is_set(board) == before
    moves = [e for e in events if e["event"] == "operating_point"]
    assert [e["frequency_khz"] for e in moves] == [choice["frequency_khz"]] == [_STEPS[1]]
    assert moves[0]["batch_size"] == choice["batch_size"]
    seen = {e["frequency_khz"] for e in events if e["event"] == "power" and e["t_ns"] > moves[0]["t_ns"]}
    assert seen <= {_STEPS[1]} and {e["temperature_c"] for e in events if e["event"] == "step"} == {
        p["temperature_c"] for p in json.loads((folder / "table/power.json").read_text())["points"]
    }


def training(folder: Path, watts: float) -> tuple[object, ...]:
    data, table = folder / "data.npz", folder / "table"
    return ("power", "train", *_MODEL, "--data", data, "--table", table, "--limit-watts", watts)


def test_an_error_puts_the_frequency_back(
    board: DeployedBoard, before: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = run(board, *training(folder, 3), "--steps", 300, "--lr", 1e20, "--out", folder / "diverged")
    assert code == 15 and is_set(board) == before
    assert "loss" in capsys.readouterr().err


@contextlib.contextmanager
def under_way(board: DeployedBoard, folder: Path, *words: object) -> Iterator[subprocess.Popen[str]]:
    """A run of its own process that has made steps, at the lowest frequency."""
    command = [
        *training(folder, 3),
        "--steps",
        10**6,
        "--board",
        board.name,
        "--out",
        folder / "long",
        "--json",
        *words,
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "host_control", *map(str, command)],
        cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(_ROOT)},
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        if not any('"event": "step"' in line for line in process.stdout):
            raise AssertionError(process.stderr.read())
        yield process


def test_an_interrupted_run_and_a_killed_one_put_the_frequency_back(
    board: DeployedBoard, before: list[str], folder: Path
) -> None:
    with under_way(board, folder) as process:
        assert is_set(board) != before
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=180)
    assert process.returncode == 130 and is_set(board) == before

    with under_way(board, folder, "--resume") as process:
        # The program on the board: nothing of it can put anything back.
        board.connection.run(["pkill", "-9", "-x", "taste-train"])
        process.communicate(timeout=180)
    assert process.returncode not in (0, 130) and is_set(board) != before
    board.info()
    assert is_set(board) == before, "the next start of the program puts it right"
