"""Where images are kept: a folder a content hash, built aside and renamed when whole, by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cross.errors import BusyError, FileError

_WAIT_S = 900.0


def images_folder() -> Path:
    """`$TASTE_CACHE/boards` or `~/.cache/taste-edge/boards`."""
    named = os.environ.get("TASTE_CACHE")
    return (Path(named).absolute() if named else Path.home() / ".cache" / "taste-edge") / "boards"


def cached(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, made by `make(part)` in a folder beside it where it is not there yet.

    A second process that wants the same waits for the first. What a killed one left is removed. BusyError (16) after
    a quarter of an hour.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / f".{folder.name}.lock"):
        if folder.is_dir():
            return folder
        for left in folder.parent.glob(f".{folder.name}.part-*"):
            remove_tree(left)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.part-", dir=folder.parent))
        try:
            part.chmod(0o755)
            make(part)
            for path in (*part.iterdir(), part):
                _sync(path)
            part.rename(folder)
        finally:
            if part.exists():
                remove_tree(part)
        _sync(folder.parent)
    return folder


def remove_tree(folder: Path) -> None:
    """Remove a folder; what is mounted in it is never touched. FileError (12) where something stays."""
    done = subprocess.run(
        ["rm", "-rf", "--one-file-system", "--", folder], check=False, capture_output=True, text=True, errors="replace"
    )
    if done.returncode != 0:
        raise FileError(f"cannot remove {folder}: {' '.join(done.stderr.split())}. Remove it by hand.")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    until = time.monotonic() + _WAIT_S
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > until:
                    raise BusyError(f"another process has held {path} for {_WAIT_S:.0f} s. End it first.") from None
                time.sleep(0.2)
        yield


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
