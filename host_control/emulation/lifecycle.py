"""Up and down: from the name of an emulated board to one that answers, and back to nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from cross.errors import BusyError, CorruptInputError, UsageError
from host_control.emulation.binfmt import unregister
from host_control.emulation.catalogue import EmulatedKind, find_emulated, load_catalogue
from host_control.emulation.control_group import remove_group
from host_control.emulation.image_cache import remove_tree
from host_control.emulation.namespace_board import CABLE, check_rights, start_namespaces
from host_control.emulation.packages import binfmt_file, check_packages
from host_control.emulation.root_image import find_image, make_image
from host_control.emulation.state import Running, end_process, held, list_boards, read_board
from host_control.emulation.virtual_machine import MachineSettings, start_machine

Report = Callable[[str, int, int], None]

_SMALLEST_BYTES = 96 << 20
_CABLE_GONE_S = 1.0


def start_board(
    name: str,
    report: Report,
    *,
    memory_bytes: int | None = None,
    icount: bool = False,
    cpufreq: bool = False,
    packages: tuple[str, ...] = (),
) -> Running:
    """Start an emulated board and return once its SSH server answers; its image is built where it is not cached.

    `memory_bytes`: RAM of a `-vm`, cap on the processes of a `-netns`; `icount`, `cpufreq`: see MachineSettings; `packages`:
    Debian packages in its image beside the usual ones. An interruption leaves nothing behind. Raises BusyError (16)
    where it is up already, MissingToolError (22) for packages and rights that are not there, LinkLostError (17).
    """
    board = find_emulated(name)
    if memory_bytes is not None and memory_bytes < _SMALLEST_BYTES:
        raise UsageError(
            f"--memory of {memory_bytes} bytes is too little for Debian. At least {_SMALLEST_BYTES >> 20}M."
        )
    if icount and board.kind != "vm":
        raise UsageError(f"--icount needs a machine of its own, which {name} is not. Use {board.target.name}-vm.")
    if cpufreq and (board.kind, board.architecture) != ("vm", "arm64"):
        raise UsageError(f"--cpufreq needs an arm64 machine of its own, which {name} is not. Use rpi4-vm.")
    check_packages(board, cpufreq=cpufreq, build=not find_image(board.architecture, packages).is_dir())
    if board.kind == "netns":
        check_rights(board)
    image = make_image(board.architecture, packages, report)
    with held(name) as folder:
        running = _recorded(name)
        if running is not None and running.alive:
            raise BusyError(
                f"{name} is up already, at {running.host} port {running.port}. `board down {name}` ends it."
            )
        _remove(board, running, folder)
        folder.mkdir(mode=0o700)
        try:
            if board.kind == "netns":
                return start_namespaces(board, image, folder, memory_bytes, report)
            settings = MachineSettings(memory_bytes or MachineSettings.memory_bytes, icount, cpufreq)
            return start_machine(board, image, folder, settings, report)
        except BaseException:
            _remove(board, None, folder)
            raise


def end_board(name: str) -> bool:
    """End an emulated board and remove all it left here, also of one that died; whether there was anything."""
    board = find_emulated(name)
    with held(name) as folder:
        there = folder.exists()
        _remove(board, _recorded(name), folder)
    return there


def _recorded(name: str) -> Running | None:
    try:
        return read_board(name)
    except CorruptInputError:
        return None


def _remove(board: EmulatedKind, running: Running | None, folder: Path) -> None:
    if running is not None and running.alive:
        end_process(running.pid, running.started)
    if board.kind == "netns" and folder.exists():
        group = (folder / "group").read_text() if (folder / "group").exists() else ""
        if group:
            remove_group(Path(group))
    if folder.exists():
        remove_tree(folder)
    if board.kind == "netns" and not _others_up(board):
        unregister(binfmt_file(board))


def _others_up(board: EmulatedKind) -> bool:
    """Whether another `-netns` board may use the emulator: one of ours, or one that another user's records know."""
    known = load_catalogue()
    if any(known[name].kind == "netns" and name != board.name and one.alive for name, one in list_boards().items()):
        return True
    until = time.monotonic() + _CABLE_GONE_S
    while there := any(name.startswith(CABLE) for name in os.listdir("/sys/class/net")):
        # The cable of a board that just ended is gone in a moment.
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return there
