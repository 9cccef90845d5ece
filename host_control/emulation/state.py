"""What is up: one folder a board, with what is needed to reach it and to end it.

    board.json   Running        ssh_config, id, known_hosts   for `ssh -F .../ssh_config NAME` and for --board NAME
    log          what QEMU or the board's sshd said           console     what a -vm's kernel said

The folder is `$XDG_STATE_HOME/taste-edge/boards/NAME` (default `~/.local/state`). A process is known by its number, its
start and the boot of this machine, so that a number which another program has by now is never mistaken for a board.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from cross.errors import BusyError, CorruptInputError, UsageError
from host_control.emulation.catalogue import load_catalogue
from host_control.emulation.debian_tree import USER
from host_control.run_folder import write_whole

_END_S = 10.0


@dataclass(frozen=True)
class Running:
    """A board that was started. `started` is the process's start in clock ticks since `boot`; `interface` and `group`
    are a `-netns` board's: its end of the cable on this machine, and its control group."""

    name: str
    host: str
    port: int
    pid: int
    started: int
    boot: str
    image: str
    interface: str = ""
    group: str = ""

    @property
    def alive(self) -> bool:
        """Whether it is still this very process."""
        return self.boot == boot_id() and self.started == start_of(self.pid) != 0


def boards_folder() -> Path:
    """Where the folders of running boards are."""
    named = os.environ.get("XDG_STATE_HOME")
    return (Path(named).absolute() if named else Path.home() / ".local" / "state") / "taste-edge" / "boards"


def board_folder(name: str) -> Path:
    """The folder of one board, whether it is there or not."""
    return boards_folder() / name


def boot_id() -> str:
    """A name of this machine's present boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def start_of(pid: int) -> int:
    """When a process started, in clock ticks since the boot; 0 where there is none, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


def read_board(name: str) -> Running | None:
    """What is recorded of a board, alive or not; None where nothing is. CorruptInputError where it is no record."""
    file = board_folder(name) / "board.json"
    try:
        return Running(**json.loads(file.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError) as error:
        raise CorruptInputError(f"{file} is no record of a board: {error}. Run `board down {name}`.") from error


def write_board(running: Running, image: Path) -> None:
    """Record a board whose process runs, with the files that a connection needs."""
    folder = board_folder(running.name)
    key = " ".join((image / "host.pub").read_text().split()[:2])
    # A file of ours with a mode that ssh accepts, whatever the image's folder allows.
    shutil.copyfile(image / "id", folder / "id")
    (folder / "id").chmod(0o600)
    shutil.copyfile(image / "id.pub", folder / "id.pub")
    (folder / "known_hosts").write_text(f"{running.name} {key}\n")
    settings = {
        "HostName": running.host,
        "Port": running.port,
        "User": USER,
        "HostKeyAlias": running.name,
        "IdentityFile": f'"{folder / "id"}"',
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "UserKnownHostsFile": f'"{folder / "known_hosts"}"',
        "GlobalKnownHostsFile": "none",
        "StrictHostKeyChecking": "yes",
        # A key exchange that an emulated core is done with in a moment.
        "KexAlgorithms": "curve25519-sha256",
    }
    lines = [f"Host {running.name}", *(f"    {key} {value}" for key, value in settings.items())]
    (folder / "ssh_config").write_text("\n".join(lines) + "\n")
    write_whole(folder / "board.json", (json.dumps(asdict(running), indent=2) + "\n").encode())


def find_up(name: str) -> Path:
    """The ssh_config of an emulated board that is up; UsageError where it is not."""
    running = read_board(name)
    if running is None or not running.alive:
        raise UsageError(f"emulated board {name} is not up. Start it: python -m host_control board up {name}")
    return board_folder(name) / "ssh_config"


def list_boards() -> dict[str, Running]:
    """What is recorded, alive or not, by name."""
    found = {name: _read_if_whole(name) for name in load_catalogue()}
    return {name: running for name, running in found.items() if running is not None}


def _read_if_whole(name: str) -> Running | None:
    try:
        return read_board(name)
    except CorruptInputError:
        return None


@contextlib.contextmanager
def held(name: str) -> Iterator[Path]:
    """The folder of a board while one `up` or `down` works on it; a second one is refused (BusyError, 16)."""
    folder = board_folder(name)
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder.parent / f".{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BusyError(f"board {name} is being started or ended by another process. Wait for it.") from None
        yield folder


def end_process(pid: int, started: int) -> None:
    """Kill a process that is still the one that started then, and wait for its end: a board's disk is thrown away."""
    until = time.monotonic() + _END_S
    with contextlib.suppress(ProcessLookupError):
        if started != 0 and start_of(pid) == started:
            os.kill(pid, signal.SIGKILL)
    while started != 0 and start_of(pid) == started:
        if time.monotonic() > until:
            raise BusyError(f"process {pid} of a board does not end. See what holds it: cat /proc/{pid}/stack")
        time.sleep(0.02)
