"""A board that runs out of memory, or has less than it says, and a CPU that lacks an instruction, under a real kernel."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cross.errors import CompatibilityError, DoesNotFitError
from host_control.board import OperatingPoint
from host_control.boards import DeployedBoard, open_board
from host_control.boards.bench import BenchSettings
from host_control.emulation.state import find_up
from tests.test_emulated_boards import build_for
from tests.tiny_elf import write_aarch64_program

pytestmark = pytest.mark.needs("vm-boards", "zig")
NAME = "rpi4-vm"
CAP_BYTES = 96 << 20
TOO_LARGE = 200_000
"""A batch of several hundred MiB."""

Opened = Callable[[], DeployedBoard]


@pytest.fixture
def opened(board_up: Callable[..., str], built: Callable[..., Path]) -> Iterator[Opened]:
    """`opened()`: a new login to the board, which has the program."""
    boards: list[DeployedBoard] = []

    def open_one() -> DeployedBoard:
        board = open_board(board_up(NAME), settings=BenchSettings(seconds=0.05)).__enter__()
        assert isinstance(board, DeployedBoard)
        boards.append(board)
        return board

    open_one().deploy(build_for(built, NAME))
    yield open_one
    for board in boards:
        board.close()


def login(user: str, script: str) -> list[str]:
    return ["ssh", "-F", str(find_up(NAME)), "-l", user, NAME, script]


def run_as(user: str, script: str) -> str:
    done = subprocess.run(
        login(user, script), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


_FILL = """echo ready
until pgrep -f 'taste-train benc[h]' >/dev/null; do sleep 0.1; done
for part in $(seq 60); do
    pgrep -f 'taste-train benc[h]' >/dev/null || break
    head -c 8M /dev/zero >/dev/shm/fill-$part 2>/dev/null || head -c 8M /dev/zero >/tmp/fill-$part
done
rm -f /dev/shm/fill-* /tmp/fill-*"""


@pytest.mark.acceptance
def test_when_memory_runs_out_the_trainer_goes_first(opened: Opened) -> None:
    board, server = opened(), run_as("root", "pgrep -o -x sshd")
    # Files in memory, which the kernel cannot take away, until something has to go.
    with subprocess.Popen(login("root", _FILL), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as filler:
        try:
            assert filler.stdout is not None and filler.stdout.readline() == "ready\n"
            with pytest.raises(DoesNotFitError, match="killed by the board's kernel .exit 137.*smaller batch size"):
                board.measure(OperatingPoint(20_000))
            assert filler.wait(60) == 0
        finally:
            filler.kill()
    killed = re.findall(r"Killed process \d+ \(([^)]+)\)", run_as("root", "dmesg"))
    assert killed and set(killed) == {"taste-train"} and run_as("root", "pgrep -o -x sshd") == server
    assert board.measure(OperatingPoint(4)).emulated, "the board and its link have survived"


_CAP = f"""cd /sys/fs/cgroup && mkdir -p capped && echo {CAP_BYTES} >capped/memory.max
echo $(pgrep -o -x sshd) >capped/cgroup.procs"""
_UNCAP = "cd /sys/fs/cgroup; for pid in $(cat capped/cgroup.procs); do echo $pid >cgroup.procs; done; :"


def refuses_what_is_too_large(board: DeployedBoard) -> None:
    with pytest.raises(DoesNotFitError, match=r"Largest that fits: \d+") as caught:
        board.measure(OperatingPoint(TOO_LARGE))
    assert caught.value.exit_code == 10 and board.measure(OperatingPoint(4)).emulated


def test_a_cap_below_what_is_available_is_honoured(opened: Opened) -> None:
    """A control group of version 2 around the SSH server, and an address space that the login shell limits."""
    run_as("root", _CAP)
    try:
        board = opened()
        assert board.facts().memory_available_bytes < CAP_BYTES
        refuses_what_is_too_large(board)
    finally:
        run_as("root", _UNCAP)
    run_as("board", f"echo 'ulimit -v {CAP_BYTES // 1024}' >.bashrc")
    try:
        refuses_what_is_too_large(opened())
    finally:
        run_as("board", "rm .bashrc")


def test_an_instruction_that_the_cpu_lacks_is_explained(
    opened: Opened, built: Callable[..., Path], tmp_path: Path
) -> None:
    build, program = build_for(built, NAME), write_aarch64_program(tmp_path / "taste-train", "")
    code = bytearray(program.read_bytes())
    # The first instruction, right behind the headers, becomes one that no CPU has.
    code[120:124] = bytes(4)
    program.write_bytes(code)
    manifest = json.loads((build / "manifest.json").read_text())
    manifest["files"]["taste-train"]["sha256"] = hashlib.sha256(code).hexdigest()
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    board = opened()
    with pytest.raises(CompatibilityError, match="SIGILL, exit 132.*Build for its own target"):
        board.deploy(tmp_path)
    assert board.info()["event"] == "info", "what was there is still current"
