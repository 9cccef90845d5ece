"""Starting what outlives this process, but only once it is known to work."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cross.errors import LinkLostError
from host_control.emulation.packages import TOOL_ENVIRONMENT
from host_control.emulation.state import end_process, start_of

_READY_S = 240.0

# The child's stdin and its group are its own. Where our end of stdin closes without a word, we are gone: so is the child.
_GUARD = r"""
log=$1; shift
exec 3<&0
setsid "$@" </dev/null >"$log" 2>&1 3<&- &
child=$!
echo "$child"
read -r word <&3 || kill -9 "$child"
"""


@dataclass(frozen=True)
class Started:
    """A process of a board that is coming up; see state.Running."""

    pid: int
    started: int
    log: Path

    @property
    def alive(self) -> bool:
        return self.started != 0 and start_of(self.pid) == self.started


@contextlib.contextmanager
def guarded(command: Sequence[str], folder: Path) -> Iterator[Started]:
    """Start `command` in `folder`. It goes on after a block that ends well; otherwise, and if we are killed, it ends."""
    with subprocess.Popen(
        ["sh", "-c", _GUARD, "guard", str(folder / "log"), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=TOOL_ENVIRONMENT,
        start_new_session=True,
    ) as guard:
        assert guard.stdin is not None and guard.stdout is not None
        pid = int(guard.stdout.readline())
        started = Started(pid, start_of(pid), folder / "log")
        try:
            yield started
            guard.stdin.write("ready\n")
        except BaseException:
            end_process(started.pid, started.started)
            raise
        finally:
            with contextlib.suppress(OSError):
                guard.stdin.close()


def wait_for_ssh(name: str, host: str, port: int, process: Started, *logs: Path) -> None:
    """Return once an SSH server greets there; LinkLostError (17) with the last lines of the logs where none will."""
    until = time.monotonic() + _READY_S
    while not _greets(host, port):
        if not process.alive:
            raise LinkLostError(f"{name} ended before its SSH server answered: {_tail(process.log, *logs)}")
        if time.monotonic() > until:
            raise LinkLostError(
                f"no SSH server answered on {name} within {_READY_S:.0f} s: {_tail(process.log, *logs)}"
            )
        time.sleep(0.1)


def _greets(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=5) as link:
            return link.recv(4) == b"SSH-"
    except OSError:
        return False


def _tail(*logs: Path) -> str:
    texts = [log.read_text(encoding="utf-8", errors="replace") for log in logs if log.exists()]
    lines = [line.strip() for text in texts for line in text.splitlines()[-3:] if line.strip()]
    return " / ".join(lines) or "it said nothing"
