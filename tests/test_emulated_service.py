"""A board that systemd starts: a run goes on after a power cut, and gives up, with the reason, where it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from host_control.cli import main
from host_control.emulation.debian_tree import SYSTEMD_PACKAGES
from host_control.emulation.lifecycle import end_board, start_board
from host_control.emulation.qmp import ask_monitor
from host_control.emulation.state import board_folder
from tests.test_emulated_boards import training_of
from tests.test_emulated_memory import run_as

pytestmark = [pytest.mark.acceptance, pytest.mark.needs("vm-boards", "zig", "qemu")]
_ROOT = Path(__file__).resolve().parent.parent
NAME = "rpi4-vm"
_BOOT_S, _FAIL_S = 300.0, 240.0

Said = Callable[..., dict[str, Any]]


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A board of its own, of an image with systemd."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    start_board(NAME, lambda *_: None, packages=tuple(SYSTEMD_PACKAGES))
    yield NAME
    end_board(NAME)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    def call(*words: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main([*words, "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))

    return call


def begin(words: list[str], out: Path) -> int:
    """Begin a training there and leave it alone once it has a checkpoint, whose step is returned."""
    command = [sys.executable, "-m", "host_control", *words, "--board", NAME, "--out", str(out), "--json"]
    with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None and host.stderr is not None
        for line in host.stdout:
            event = json.loads(line)
            if event["event"] == "checkpoint":
                host.kill()
                return int(event["step"])
        raise AssertionError(host.stderr.read())


def the_run(said: Said) -> dict[str, Any]:
    runs = said("status", "--board", NAME)["runs"]
    assert len(runs) == 1
    return dict(runs[0])


def wait_until(reached: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < until
        time.sleep(2)


def answers() -> bool:
    try:
        return run_as("board", "systemctl --user is-system-running || :").strip() in ("running", "degraded")
    except subprocess.SubprocessError:
        return False


def install(said: Said) -> str:
    """Install the service; without rights of its own, whoever may do so lets it start before any login."""
    service = said("install-service", "--board", NAME)
    if not service["linger"]:
        run_as("root", "loginctl enable-linger board")
    run_as("root", "sync")
    return str(service["unit"])


def test_a_service_goes_on_after_a_power_cut_and_gives_up_after_five_failures(
    board: str, said: Said, tmp_path: Path
) -> None:
    words = [*training_of(tmp_path, 40), "--checkpoint-every", "50steps"]
    there = ["--board", "emulated:rpi4", "--remote-dir", str(tmp_path / "there")]
    straight = said(*words, *there, "--out", str(tmp_path / "straight"))

    committed = begin(words, tmp_path / "run")
    unit = install(said)
    assert the_run(said)["status"] == "running", "the run was over before the power was cut"
    ask_monitor(board_folder(board), "system_reset")
    time.sleep(5)
    wait_until(answers, _BOOT_S)
    wait_until(lambda: the_run(said)["status"] in ("running", "finished"), _BOOT_S)
    events = run_as("board", "cat .local/share/taste-edge/runs/run-*/events.jsonl").splitlines()
    resumed = [json.loads(line) for line in events if '"resume"' in line]
    assert [event["step"] >= committed for event in resumed] == [True]
    finished = said("attach", "--board", board)
    assert (finished["sha256"], finished["steps"]) == (straight["sha256"], straight["steps"])
    assert unit not in run_as("board", "systemctl --user list-unit-files --no-legend"), "it goes with its run"

    begin(words, tmp_path / "other")
    unit = install(said)
    run_as("board", "mv .local/share/taste-edge/data gone; pkill -KILL taste-train; sleep 1")
    run_as("board", f"systemctl --user start {unit} || :")
    wait_until(lambda: "failed" in run_as("board", f"systemctl --user is-failed {unit} || :"), _FAIL_S)
    shown = run_as("board", f"systemctl --user show -p NRestarts,Result {unit}").split()
    assert sorted(shown) == ["NRestarts=5", "Result=exit-code"] or "Result=start-limit-hit" in shown, shown
    ended = the_run(said)
    assert ended["status"] == "failed" and "train.safetensors" in ended["reason"]
