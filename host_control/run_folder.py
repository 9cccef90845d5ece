"""The folder of a run: its lock, and files that are written whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cross.errors import BusyError, CorruptInputError, UsageError
from host_control.console import finite

RUNS = Path("runs")
"""Where run folders go without --out, under the current folder."""


def now_utc() -> str:
    """The date and time in UTC, ISO 8601 with seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def default_folder(model: str, board: str, now: datetime | None = None) -> Path:
    """`runs/<time>-<model>-<board>`, with anything but letters, digits, dot, dash and underscore replaced."""
    stamp = (now or datetime.now()).strftime("%Y%m%d-%H%M%S")
    words = [re.sub(r"[^A-Za-z0-9._-]+", "-", word).strip("-.") for word in (Path(model).stem, board)]
    return RUNS / "-".join([stamp, *(word for word in words if word)])


class RunFolder:
    """A run folder held by this process: a second run in it is refused (BusyError) as long as this one lives.

    The lock is `flock`ed, so it dies with its holder; the file names the holder for the message. A new folder in which
    nothing was written is gone when it is closed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_new = not path.exists()
        if path.exists() and not path.is_dir():
            raise UsageError(f"--out {path} is a file. Name a folder.")
        path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(self._lock, 100).decode("ascii", "replace").strip() or "unknown"
            os.close(self._lock)
            raise BusyError(
                f"run folder {path} is in use by process {holder}. Wait for it, or choose another --out."
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Let the folder go; safe to call twice."""
        if self._lock >= 0:
            if self._is_new and os.listdir(self.path) == [".lock"]:
                (self.path / ".lock").unlink()
                self.path.rmdir()
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write_json(self, name: str, value: dict[str, Any]) -> Path:
        """Write `value` as indented JSON under `name`, whole or not at all."""
        return write_whole(self.path / name, (json.dumps(finite(value), indent=2) + "\n").encode())

    def read_json(self, name: str) -> dict[str, Any] | None:
        """What `write_json` left under `name`, or None; CorruptInputError where it is not that any more."""
        return read_json(self.path / name) if (self.path / name).exists() else None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object that `RunFolder.write_json` wrote; CorruptInputError where the file holds something else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("it holds no object")
    except ValueError as error:
        raise CorruptInputError(f"{file} was not written by taste-edge: {error}. Use another --out.") from error
    return value


def write_whole(path: Path, data: bytes) -> Path:
    """Write a file so that a reader finds the old or the new one: temporary file, fsync, rename, fsync the folder."""
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return path


def find_resumable(identity: dict[str, Any], runs: Path = RUNS, record: str = "study.json") -> Path | None:
    """The newest run folder whose `record` has this identity, is not complete, and is not in use; None where none is."""
    for file in sorted(runs.glob(f"*/{record}"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if stored == identity | {"complete": False} and not _in_use(file.parent):
            return file.parent
    return None


def _in_use(path: Path) -> bool:
    try:
        RunFolder(path).close()
    except BusyError:
        return True
    return False
