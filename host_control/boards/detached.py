"""A run that outlives the link: begun on the board in a process group of its own, and followed by reading what it writes.

    DIR/runs/lock                  held by the run for its life; a second run is refused (16)
    DIR/runs/NAME/run.json         what a host needs to finish the run: written by the host that began it
    DIR/runs/NAME/events.jsonl     what the program says, from its first line on; messages: its stderr
    DIR/runs/NAME/process, exit    its process number, and once it ended its exit code (native/taste-train/detached.h)
    DIR/runs/NAME/progress.json    its last reported step

A cut link changes nothing of it. The host tries again for RETRY_S and then says how to attach.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from cross.errors import FileError, LinkLostError, TasteError, UsageError
from host_control.boards.bench import check_exit, last_line
from host_control.connection import SAVE_S, Connection, Lines, RunResult, shell_line

RETRY_S = 300.0
"""How long a host tries to reach a board again whose link was lost while a run is followed."""

RECORD, EVENTS, MESSAGES, PROCESS, EXIT, PROGRESS = (
    "run.json",
    "events.jsonl",
    "messages",
    "process",
    "exit",
    "progress.json",
)
STOPPED, SERVICE = "stopped", "service.sh"
"""The mark of a run that was stopped on purpose; what a unit calls (host_control.boards.service)."""

_START_S = 60.0
_POLL_S = (0.1, 0.5)
_QUIET_S = 10.0
_MOST_PAUSE_S = 15.0
_KEPT_MESSAGES_BYTES = 1 << 16

_ALIVE_SCRIPT = r"""for pid do echo "== $pid"; tr '\000' '\n' <"/proc/$pid/cmdline"; echo; done 2>/dev/null; exit 0"""
"""Prints of each process the words it was begun with: its number alone may long be somebody else's."""

Status = Literal["none", "running", "ended", "lost"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class RunState:
    """`none`: never begun. `lost`: it neither runs nor noted how it ended, as after a reboot. `exit_code` of `ended`."""

    status: Status
    exit_code: int | None = None
    pid: int | None = None

    @property
    def delivers(self) -> bool:
        """Whether it is under way, or its result ready: there is nothing to begin."""
        return self.status == "running" or (self.status, self.exit_code) == ("ended", 0)


@dataclass
class Patience:
    """Repeats what a lost link ended, for at most `seconds` after the link was there last; `say` is told once."""

    seconds: float = field(default_factory=lambda: RETRY_S)
    say: Callable[[str], None] = lambda _: None
    sleep: Callable[[float], None] = time.sleep
    waiting: bool = field(default=False, init=False)

    def keep_trying(self, action: Callable[[], Result], *, after: Callable[[], None] = lambda: None) -> Result:
        """The result of `action`; the last LinkLostError once the time is up. `after` is called before it is repeated."""
        lost_at: float | None = None
        pause = 1.0
        while True:
            try:
                if lost_at is not None:
                    after()
                result = action()
            except (LinkLostError, UsageError) as error:
                # A network that is down knows no names either, which otherwise is a wrong --board.
                if lost_at is None and not isinstance(error, LinkLostError):
                    raise
                now = time.monotonic()
                if lost_at is None:
                    lost_at, self.waiting = now, True
                    if self.seconds > 0:
                        self.say(f"{error} The run there goes on; trying again for {self.seconds:.0f} s.")
                if now - lost_at + pause > self.seconds:
                    raise LinkLostError(str(error)) from error
                self.sleep(pause)
                pause = min(2 * pause, _MOST_PAUSE_S)
            else:
                if lost_at is not None:
                    self.waiting = False
                    self.say("the link is there again.")
                return result


_UNPREPARED = 99
_STALE = " ".join(f'"$0/{name}"' for name in (EVENTS, MESSAGES, PROCESS, EXIT, PROGRESS, STOPPED))
_BEGIN_SCRIPT = f"""{{
mkdir -p "$0" && rm -f {_STALE} && printf %s "$1" >"$0/{RECORD}.part" && mv -f "$0/{RECORD}.part" "$0/{RECORD}"
}} || exit {_UNPREPARED}
shift; exec "$@"
"""
"""Begins "$2"... in the folder $0, with the record $1 and without what an earlier attempt said. One command: a study begins
a run for every trial, and each answer takes the link's time."""


@dataclass(frozen=True)
class DetachedRun:
    """The run `name` in `folder` of a board; `program` is the words that start the deployed taste-train."""

    connection: Connection
    folder: str
    name: str
    patience: Patience = field(default_factory=Patience)

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def state(self) -> RunState:
        """Where the run is; asked of the board's kernel, not believed of a file."""
        for _ in range(2):
            (ended, *_), processes = (_numbers(self.connection.read(self.path(name))) for name in (EXIT, PROCESS))
            if ended is not None:
                return RunState("ended", ended, processes[0])
            if processes[0] is None:
                return RunState("none")
            # Its watcher counts too: on a slow card it takes a while to note how the run ended.
            pids = [pid for pid in processes if pid is not None]
            if any(is_run(words, self.folder) for words in alive(self.connection, pids).values()):
                return RunState("running", pid=processes[0])
        return RunState("lost", pid=processes[0])

    def start(self, command: Sequence[str], record: Mapping[str, Any]) -> None:
        """Begin the run: `command` is the program with all its arguments but --run. BusyError (16) names who holds the board.

        What an earlier attempt said is removed, its checkpoints are kept. A link that is cut meanwhile is no reason to
        begin it twice.
        """

        def begin() -> None:
            if self.state().status != "running":
                check_exit(self._begin(command, record), f"beginning run {self.name} on {self.connection.name}")

        try:
            self.patience.keep_trying(begin)
        except LinkLostError as error:
            again = shell_line(["status", "--board", self.connection.name])
            raise LinkLostError(f"{error} Whether it has begun, `{again}` says.") from error
        except KeyboardInterrupt:
            # It may have begun: what nobody follows yet is not to go on after Ctrl-C.
            with contextlib.suppress(TasteError):
                self._ask_to_end()
            raise

    def run_through(
        self, command: Sequence[str], record: Mapping[str, Any], on_line: Callable[[str], None], *, limit_s: float
    ) -> RunResult:
        """`start` and `follow` of a short run in one command; where its link is cut, the run goes on and is followed."""
        until = time.monotonic() + limit_s
        try:
            done = self._begin(command, record, "--follow", timeout=limit_s)
        except LinkLostError:
            try:
                state = self.patience.keep_trying(self.state)
            except LinkLostError as error:
                raise LinkLostError(f"{error} {self.how_to_attach()}") from error
            if not state.delivers:
                self.start(command, record)
                until = time.monotonic() + limit_s
            return self.follow(on_line, limit_s=max(0.0, until - time.monotonic()))
        except KeyboardInterrupt:
            with contextlib.suppress(TasteError):
                self.stop()
                self.follow(lambda _: None, limit_s=SAVE_S)
            raise
        started, *lines = done.stdout.splitlines() or [""]
        if '"started"' not in started:
            check_exit(done, f"beginning run {self.name} on {self.connection.name}")
        if not done.ok:
            # How the run itself ended, and what it said of that, stands in its files.
            return self.follow(on_line, limit_s=limit_s)
        for line in lines:
            on_line(line)
        return RunResult((self.folder,), 0, "", "")

    def _begin(
        self, command: Sequence[str], record: Mapping[str, Any], *flags: str, timeout: float = _START_S
    ) -> RunResult:
        words, text = [*command, "--run", self.folder, *flags], json.dumps({**record, "program": list(command)})
        done = self.connection.run(["sh", "-c", _BEGIN_SCRIPT, self.folder, text, *words], timeout=timeout)
        if done.exit_code == _UNPREPARED:
            said = " ".join(done.stderr.split()).rstrip(".")
            raise FileError(f"{self.connection.name}: {said}. Pass a --remote-dir that can be written.")
        return replace(done, arguments=tuple(words))

    def record(self) -> dict[str, Any]:
        """run.json as the host that began the run left it; empty where there is none."""
        return _read_json(self.connection, self.path(RECORD))

    def progress(self) -> dict[str, Any]:
        """The last reported step: step, epoch, loss, accuracy, samples_per_s."""
        return _read_json(self.connection, self.path(PROGRESS))

    def follow(self, on_line: Callable[[str], None], *, limit_s: float | None = None) -> RunResult:
        """Give on every line that the run has said and will say, to its end; the result has its exit code and stderr.

        Ctrl-C here asks the run to end, and it is followed on for at most SAVE_S. Raises LinkLostError, with how to
        attach, once the link was gone for too long; TasteError where the run is gone without having noted how.
        """
        follower = _Follower(self, Lines(on_line))
        until = math.inf if limit_s is None else time.monotonic() + limit_s
        stopped = False
        while time.monotonic() < until:
            try:
                code = follower.step()
                if code is not None:
                    return RunResult((self.folder,), code, "", self._messages())
            except KeyboardInterrupt:
                if stopped or self.patience.waiting:
                    raise KeyboardInterrupt(f"interrupted. {self.how_to_attach()}") from None
                stopped, until = True, time.monotonic() + SAVE_S
                self.stop()
            except LinkLostError as error:
                raise LinkLostError(f"{error} {self.how_to_attach()}") from error
        self.stop()
        what = f"run {self.name} on {self.connection.name}"
        raise LinkLostError(f"{what} did not end in time, and was stopped. See what else the board is doing.")

    def stop(self) -> None:
        """Ask the run to save and end; returns at once, and does nothing where it does not run."""
        self.patience.keep_trying(self._ask_to_end)

    def _ask_to_end(self) -> None:
        state = self.state()
        if state.status == "running":
            self.connection.run(["touch", self.path(STOPPED)])
            self.connection.run(["kill", "-TERM", str(state.pid)])

    def remove(self, *, ended: bool = False) -> None:
        """Remove everything of the run from the board; never of one that runs, which is asked unless it is known to have
        `ended`."""

        def clear() -> None:
            if ended or self.state().status != "running":
                self.connection.run(["rm", "-rf", self.folder])

        self.patience.keep_trying(clear)

    def last_message(self) -> str:
        """The last line of its stderr, without the `error: ` in front."""
        return last_line(self._messages()).removeprefix("error: ")

    def how_to_attach(self) -> str:
        return (
            f"Run {self.name} goes on there: "
            f"{shell_line(['attach', '--board', self.connection.name, self.name])} follows it again."
        )

    def _messages(self) -> str:
        def fetch() -> bytes:
            size = self.connection.size(self.path(MESSAGES)) or 0
            if size == 0:
                return b""
            return self.connection.read(self.path(MESSAGES), max(0, size - _KEPT_MESSAGES_BYTES)) or b""

        return self.patience.keep_trying(fetch).decode(errors="replace")


class _Follower:
    """How far a run's events were read, and when it was last heard of."""

    def __init__(self, run: DetachedRun, lines: Lines) -> None:
        self._run, self._lines = run, lines
        self._offset, self._pause = 0, _POLL_S[0]
        self._heard = time.monotonic()

    def step(self) -> int | None:
        """Give on what is new, then wait a moment; the exit code once everything was given on."""
        run = self._run
        code, data = run.patience.keep_trying(self._look, after=self._after_a_cut)
        if data:
            self._offset += len(data)
            self._heard, self._pause = time.monotonic(), _POLL_S[0]
        # Without data too: a listener that raised (Ctrl-C) has left lines behind.
        self._lines.feed(data)
        if data:
            return None
        if code is not None:
            return code
        if time.monotonic() - self._heard > _QUIET_S:
            run.patience.keep_trying(self._after_a_cut)
        run.patience.sleep(self._pause)
        self._pause = min(1.5 * self._pause, _POLL_S[1])
        return None

    def _look(self) -> tuple[int | None, bytes]:
        """The exit code is read first: whatever was said before it stands in the events then."""
        run = self._run
        code, *_ = _numbers(run.connection.read(run.path(EXIT)))
        # Mostly nothing is new, and to ask for the size costs a fifth of a read.
        if (run.connection.size(run.path(EVENTS)) or 0) <= self._offset:
            return code, b""
        return code, run.connection.read(run.path(EVENTS), self._offset) or b""

    def _after_a_cut(self) -> None:
        """TasteError where the run is not there any more: a board that was rebooted looks like a quiet one."""
        run, self._heard = self._run, time.monotonic()
        if run.state().status in ("lost", "none"):
            raise TasteError(
                f"run {run.name} on {run.connection.name} is gone and has not noted how it ended, as after a reboot. "
                "Its checkpoints are kept: the same command with its --out goes on from the last one."
            )
        if (run.connection.size(run.path(EVENTS)) or 0) < self._offset:
            # A power cut took the end of the events, and a service goes on with the run: they are heard from the start.
            self._offset = 0
            self._lines.begin_again()


def alive(connection: Connection, pids: Sequence[int]) -> dict[int, str]:
    """The words of every process of `pids` that lives, one a line."""
    said = connection.run(["sh", "-c", _ALIVE_SCRIPT, "taste-alive", *map(str, pids)]).stdout
    marks = list(re.finditer(r"^== (\d+)$", said, re.MULTILINE))
    ends = [mark.start() for mark in marks[1:]] + [len(said)]
    words = {int(mark[1]): said[mark.end() : end] for mark, end in zip(marks, ends, strict=True)}
    return {pid: text for pid, text in words.items() if text.strip()}


def is_run(words: str, folder: str) -> bool:
    """Whether a process with these words, one a line, is the run of `folder`."""
    return f"\n--run\n{folder}\n" in words


def _numbers(text: bytes | None) -> list[int | None]:
    """The numbers that a file begins with; [None] where it is not there or begins with none."""
    return [int(word) for word in (text or b"").split() if word.isdigit()] or [None]


def _read_json(connection: Connection, path: str) -> dict[str, Any]:
    try:
        value = json.loads(connection.read(path) or b"{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
