"""The scripts that boards run, with nothing but BusyBox on the PATH: probe, signs, who is alive, tied programs."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from cross.probe import PROBE_SCRIPT, parse_probe
from host_control.boards.detached import _ALIVE_SCRIPT
from host_control.connection import TIED_SCRIPT
from host_control.doctor.signs import SIGNS_SCRIPT, parse_signs
from tests.test_boards import gone

pytestmark = pytest.mark.needs("busybox")


@pytest.fixture
def shell(tmp_path: Path) -> list[str]:
    """The command of BusyBox's shell in a world where every program is one of its applets."""
    busybox = shutil.which("busybox")
    assert busybox is not None
    subprocess.run([busybox, "--install", "-s", str(tmp_path)], check=True)
    return ["env", "-i", f"PATH={tmp_path}", f"HOME={tmp_path}", str(tmp_path / "sh"), "-c"]


def test_the_probe_and_the_signs(shell: list[str], tmp_path: Path) -> None:
    facts = parse_probe(subprocess.run([*shell, PROBE_SCRIPT], capture_output=True, text=True, check=True).stdout)
    assert facts.arch == os.uname().machine and facts.cores >= 1 and facts.memory_available_bytes > 0
    found = subprocess.run([*shell, SIGNS_SCRIPT, "taste-doctor", "~/x y"], capture_output=True, text=True, check=True)
    signs = parse_signs(found.stdout)
    assert signs.folder == str(tmp_path.resolve()) and signs.writable and signs.free_bytes
    assert abs((signs.clock_s or 0) - time.time()) < 60 and signs.memory_bytes > 0 and not signs.throttling


def test_who_is_alive(shell: list[str]) -> None:
    said = subprocess.run(
        [*shell, _ALIVE_SCRIPT, "taste-alive", str(os.getpid()), "4194303"], capture_output=True, text=True
    )
    assert f"== {os.getpid()}\n" in said.stdout and "pytest" in said.stdout and said.stdout.endswith("== 4194303\n\n")


def test_a_tied_program_ends_with_our_side(shell: list[str], tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    words = [*shell, TIED_SCRIPT, "taste-run", "sh", "-c", f"echo $$ >{pid}; while :; do sleep 1; done"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as tied:
        until = time.monotonic() + 10
        while not (pid.exists() and pid.read_text().strip()) and time.monotonic() < until:
            time.sleep(0.02)
        assert tied.stdin is not None
        tied.stdin.close()
        assert tied.wait(10) == 143
    assert gone(int(pid.read_text()))
