"""Emulated boards, long runs: a clock that counts instructions gives one curve, and a reboot costs no committed step."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from host_control.board import OperatingPoint
from host_control.boards import DeployedBoard, open_board
from host_control.boards.bench import BenchSettings
from host_control.cli import main
from host_control.emulation.lifecycle import end_board, start_board
from host_control.emulation.qmp import ask_monitor
from host_control.emulation.state import board_folder, find_up
from tests.test_emulated_boards import training_of

pytestmark = pytest.mark.acceptance
_ROOT = Path(__file__).resolve().parent.parent
SIZES = (1, *range(2, 17, 2))


@pytest.mark.needs("vm-boards", "zig")
def test_the_curve_of_a_counting_machine_repeats_and_tune_finds_its_best(
    built: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ResNet-8 at 1..16 on two boots: within 1 %; tune on that curve: within 1 % of the best of all."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    build, curves = built("resnet8", "rpi3"), []
    for _ in range(2):
        start_board("rpi3-vm", lambda *_: None, icount=True)
        try:
            with open_board("rpi3-vm", settings=BenchSettings(seconds=0.1)) as board:
                assert isinstance(board, DeployedBoard)
                board.deploy(build)
                # The first run after a resume reads its program from the disk.
                board.measure(OperatingPoint(1))
                counters = [board.measure(OperatingPoint(size)) for size in SIZES]
        finally:
            end_board("rpi3-vm")
        assert all(one.emulated for one in counters)
        curves.append([one.samples_per_s for one in counters])
    print(json.dumps(curves))
    first, second = np.array(curves)
    assert np.abs(second / first - 1).max() <= 0.01
    rows = [{"batch_size": size, "samples_per_s": float(rate)} for size, rate in zip(SIZES, first, strict=True)]
    table = tmp_path / "curve.json"
    table.write_text(json.dumps({"board": "rpi3-vm", "emulated": True, "throughput": rows}))
    assert main(["tune", "--board", f"recorded:{table}", "--out", str(tmp_path / "tune"), "--json"]) == 0
    tuned = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert dict(zip(SIZES, first, strict=True))[tuned["bs_peak"]] >= 0.99 * first.max()


@pytest.mark.needs("vm-boards", "zig", "qemu")
@pytest.mark.parametrize("name", ["rpi4-vm", "visionfive2-vm"])
def test_three_power_cuts_in_a_run_lose_nothing_committed(
    name: str, board_up: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine is reset while it trains; each time the run goes on from its last checkpoint, to the same bits."""
    board_up(name)
    words = [*training_of(tmp_path, 40), "--checkpoint-every", "50steps", "--json"]

    def finished(*more: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main([*words, *more]) == 0
        return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))

    there = ["--board", f"emulated:{name.removesuffix('-vm')}", "--remote-dir", str(tmp_path / "there")]
    straight = finished(*there, "--out", str(tmp_path / "straight"))
    run, committed = ["--board", name, "--out", str(tmp_path / "run")], 0
    for number in range(3):
        command = [sys.executable, "-m", "host_control", *words, *run, *(["--resume"] if number else [])]
        with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as host:
            assert host.stdout is not None
            for line in host.stdout:
                event = json.loads(line)
                if event["event"] == "resume":
                    assert event["step"] >= committed
                if event["event"] == "checkpoint" and event["step"] > committed:
                    committed = event["step"]
                    break
            ask_monitor(board_folder(name), "system_reset")
            host.kill()
        until = time.monotonic() + 240
        while subprocess.run(
            ["ssh", "-F", find_up(name), "-o", "ConnectTimeout=5", name, "true"], check=False
        ).returncode:
            assert time.monotonic() < until
            time.sleep(1)
    resumed = finished(*run, "--resume")
    assert resumed["sha256"] == straight["sha256"] and resumed["steps"] == straight["steps"] > committed > 0
