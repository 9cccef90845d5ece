"""A memory cap for the processes of a board: one control group, of version 1 or 2, whichever this machine has."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from cross.errors import MissingToolError

ROOT = Path("/sys/fs/cgroup")


def make_group(name: str, memory_bytes: int, root: Path = ROOT) -> Path:
    """A new group whose processes may use so much; MissingToolError (22) where this machine lets us make none."""
    version_1 = (root / "memory" / "memory.limit_in_bytes").exists()
    folder = (root / "memory" if version_1 else root) / name
    try:
        if not version_1:
            # A group's children have a memory controller where its own file says so.
            with contextlib.suppress(OSError):
                (root / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir(exist_ok=True)
        (folder / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(memory_bytes))
        with contextlib.suppress(OSError):
            # Swap beyond the cap would hide it; a kernel without swap accounting has no such file.
            swap = ("memory.memsw.limit_in_bytes", str(memory_bytes)) if version_1 else ("memory.swap.max", "0")
            if (folder / swap[0]).exists():
                (folder / swap[0]).write_text(swap[1])
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise MissingToolError(
            f"--memory needs a control group for memory, and {folder} cannot be made: {error.strerror}. "
            "Start the board without --memory, or a -vm board."
        ) from error
    return folder


def remove_group(folder: Path) -> None:
    """Remove a group once its processes are gone; nothing where it is not there."""
    for _ in range(100):
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.05)
        else:
            return
