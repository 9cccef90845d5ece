"""`local`: this machine as the board. The same deployment and the same program as over SSH, in a folder here."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cross.errors import FileError, LinkLostError, NoSpaceError
from host_control.boards.bench import BenchSettings
from host_control.boards.deployed import DeployedBoard
from host_control.connection import ANSWER_S, READ_BYTES, SAVE_S, Lines, RunResult, tied_arguments

_BLOCK_BYTES = 1 << 20
_END_S = 5.0


class LocalConnection:
    """Commands and files of this machine, as a Connection."""

    def __init__(self, name: str = "local") -> None:
        self.name = name

    def run(self, arguments: Sequence[str], *, timeout: float | None = None, tied: bool = False) -> RunResult:
        """As in Connection. A command that this machine lacks ends with exit code 127, as a shell would say it."""
        command, limit = tied_arguments(arguments) if tied else list(arguments), timeout or ANSWER_S
        try:
            # A session of its own: Ctrl-C in the terminal reaches us alone, and we end the program.
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if tied else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            code = 127 if error.errno == errno.ENOENT else 126
            return RunResult(tuple(arguments), code, "", f"{command[0]}: {error.strerror}")
        with process:
            try:
                stdout, stderr = _communicate(process, limit)
            except subprocess.TimeoutExpired:
                raise LinkLostError(
                    f"{os.path.basename(arguments[0])} on {self.name} did not end within {limit:.0f} s: stopped. "
                    "Use a smaller batch size, or see what else the machine is doing."
                ) from None
            finally:
                _end(process, tied)
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        return RunResult(tuple(arguments), code, stdout.decode(errors="replace"), stderr.decode(errors="replace"))

    def follow(self, arguments: Sequence[str], on_line: Callable[[str], None]) -> RunResult:
        """As in Connection."""
        lines = Lines(on_line)
        with tempfile.TemporaryFile() as messages:
            process = subprocess.Popen(
                tied_arguments(arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                start_new_session=True,
            )
            with process:
                try:
                    try:
                        _pass_on(process, lines, None)
                    except KeyboardInterrupt:
                        assert process.stdin is not None
                        process.stdin.close()
                        _pass_on(process, lines, SAVE_S)
                finally:
                    if process.stdin is not None:
                        process.stdin.close()
                    _end(process, tied=True)
            messages.seek(0)
            said = messages.read().decode(errors="replace")
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        return RunResult(tuple(arguments), code, "", said)

    def put(self, source: Path, path: str, *, offset: int = 0) -> int:
        with _explained(path), source.open("rb") as reader, open(path, "r+b" if offset else "wb") as writer:
            reader.seek(offset)
            writer.seek(offset)
            shutil.copyfileobj(reader, writer, _BLOCK_BYTES)
            writer.truncate()
            return writer.tell() - offset

    def get(self, path: str, destination: Path) -> None:
        with _explained(path):
            shutil.copyfile(path, destination)

    def read(self, path: str, offset: int = 0) -> bytes | None:
        try:
            with _explained(path), open(path, "rb") as reader:
                reader.seek(offset)
                return reader.read(READ_BYTES)
        except FileError as error:
            if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
                return None
            raise

    def home(self) -> str:
        return str(Path.home())

    def size(self, path: str) -> int | None:
        return os.path.getsize(path) if os.path.isfile(path) else None

    def names(self, path: str) -> list[str]:
        return sorted(os.listdir(path)) if os.path.isdir(path) else []

    def rename(self, old: str, new: str) -> None:
        with _explained(new):
            os.replace(old, new)

    def link(self, target: str, path: str) -> None:
        with _explained(path):
            os.symlink(target, path)

    def read_link(self, path: str) -> str | None:
        return os.readlink(path) if os.path.islink(path) else None

    def close(self) -> None:
        """Nothing is open between two calls."""


def open_local(remote_dir: str | None, settings: BenchSettings) -> DeployedBoard:
    """This machine; `remote_dir` defaults to build/boards/local under the current folder."""
    return DeployedBoard("local", LocalConnection(), os.path.abspath(remote_dir or "build/boards/local"), settings)


def _communicate(process: subprocess.Popen[bytes], timeout: float) -> tuple[bytes, bytes]:
    """Like Popen.communicate, which would close a tied program's stdin at once and so end it."""
    stdin, process.stdin = process.stdin, None
    try:
        return process.communicate(timeout=timeout)
    finally:
        if stdin is not None:
            stdin.close()


def _pass_on(process: subprocess.Popen[bytes], lines: Lines, seconds: float | None) -> None:
    """Give on what the process writes until it ends, or for some seconds. Ctrl-C loses nothing: it comes between reads."""
    assert process.stdout is not None
    until = None if seconds is None else time.monotonic() + seconds
    while True:
        left = None if until is None else max(until - time.monotonic(), 0.0)
        if not select.select([process.stdout], [], [], left)[0]:
            return
        data = os.read(process.stdout.fileno(), 1 << 16)
        if not data:
            process.wait(left)
            return
        lines.feed(data)


def _end(process: subprocess.Popen[bytes], tied: bool) -> None:
    """Whatever happened, nothing of ours keeps running: the closed stdin ends a tied program, a signal the rest."""
    if process.poll() is not None:
        return
    if tied:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
            return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(
                f"no space left for {path}: {error.strerror}. Free some, or choose another folder."
            ) from error
        raise FileError(f"cannot write {path}: {error.strerror}. Check the folder and its permissions.") from error
