"""What a board's files and commands look like to `deploy` and to a measurement, wherever the board is.

Remote commands are argument lists. `shell_line` is the only place that turns one into text for a shell.
"""

from __future__ import annotations

import shlex
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cross.errors import UsageError

ANSWER_S = 15.0
"""Longest wait for an answer to anything small; with what follows it, nothing takes longer than 20 s on a dead link."""

SAVE_S = 120.0
"""Longest wait for a program that was asked to end: what it saves may go to a slow card."""

READ_BYTES = 1 << 20
"""Most that one `read` returns."""

TIED_SCRIPT = r"""
exec 3<&0
( echo 1000 >/proc/self/oom_score_adj; exec "$@" 2>&4 4>&- ) 4>&2 2>/dev/null 3<&- </dev/null & child=$!
{ cat; kill "$child"; } <&3 >/dev/null 2>&1 3<&- & watcher=$!
exec 3<&-
wait "$child"; code=$?
kill "$watcher" 2>/dev/null
exit "$code"
"""
"""Runs "$@" tied to our end of stdin: when that closes (Ctrl-C here, a killed host, a dropped link) it is ended.

The kernel is told to take the program first when memory runs out, and not the board's sshd.
"""


@dataclass(frozen=True)
class RunResult:
    """A finished command; `exit_code` is 128 + n where signal n ended it."""

    arguments: tuple[str, ...]
    exit_code: int
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


class Connection(Protocol):
    """Commands and files of one machine. Paths are absolute. Every operation ends in bounded time.

    Raises LinkLostError where the machine does not answer, FileError or NoSpaceError where its files refuse.
    """

    name: str

    def run(self, arguments: Sequence[str], *, timeout: float | None = None, tied: bool = False) -> RunResult:
        """Run to the end, at most `timeout` seconds (default ANSWER_S); `tied` ends it when this side goes away."""
        ...

    def follow(self, arguments: Sequence[str], on_line: Callable[[str], None]) -> RunResult:
        """Run a tied command to its end, however long it takes; `on_line` gets each line of its stdout as it comes.

        Ctrl-C here ends the command's input, so it is asked to end, and is followed on for at most SAVE_S; the result
        then has the exit code that the command chose. `stdout` of the result is empty.
        """
        ...

    def put(self, source: Path, path: str, *, offset: int = 0) -> int:
        """Write `source` from byte `offset` on to the same place of `path`; the number of bytes sent."""
        ...

    def get(self, path: str, destination: Path) -> None:
        """Fetch one file."""
        ...

    def read(self, path: str, offset: int = 0) -> bytes | None:
        """What a file holds from byte `offset` on, at most READ_BYTES of it; None where there is no such file."""
        ...

    def home(self) -> str:
        """The user's home folder."""
        ...

    def size(self, path: str) -> int | None:
        """Bytes of a regular file, or None where there is none."""
        ...

    def names(self, path: str) -> list[str]:
        """What a folder holds, sorted; nothing where there is no folder."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Atomically; replaces `new`."""
        ...

    def link(self, target: str, path: str) -> None:
        """A new symbolic link."""
        ...

    def read_link(self, path: str) -> str | None:
        """Where a symbolic link points, or None where there is none."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class Files(Protocol):
    """The part of a Connection that `put_text` needs."""

    def put(self, source: Path, path: str, *, offset: int = 0) -> int: ...

    def rename(self, old: str, new: str) -> None: ...


def put_text(files: Files, text: str, path: str) -> None:
    """Make `path` hold `text`: the old content or all of the new one, whenever it is looked at."""
    with tempfile.TemporaryDirectory(prefix="taste-") as folder:
        source = Path(folder) / "text"
        source.write_text(text, encoding="utf-8", errors="surrogateescape")
        files.put(source, f"{path}.part")
    files.rename(f"{path}.part", path)


class Lines:
    """Bytes in any pieces -> whole lines of text, each given to `on_line`."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._rest = b""
        self._whole: deque[bytes] = deque()

    def begin_again(self) -> None:
        """What comes next is the beginning of a line."""
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take a piece; a line is given on as soon as its end has come, or with the next piece where `on_line` raised."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        self._whole.extend(whole)
        while self._whole:
            self._on_line(self._whole.popleft().decode(errors="replace"))


def shell_line(arguments: Sequence[str]) -> str:
    """One line that a POSIX shell reads back as exactly these arguments; UsageError where one holds a NUL."""
    if any("\0" in word for word in arguments):
        raise UsageError("a name with a NUL byte cannot be given to a program. Rename it.")
    return shlex.join(arguments)


def tied_arguments(arguments: Sequence[str]) -> list[str]:
    """The command that runs `arguments` tied to stdin (see TIED_SCRIPT)."""
    return ["sh", "-c", TIED_SCRIPT, "taste-run", *arguments]
