"""One run of the deployed program that takes long: `train`, `learn`. Begun, followed to its end, and what it left fetched.

On a board behind a link it is detached (host_control.boards.detached); on this machine it is tied to this process, and
ends with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cross.errors import INTERRUPTED, BusyError, CompatibilityError, LinkLostError, TasteError
from host_control.boards.bench import check_exit
from host_control.boards.deployed import DeployedBoard
from host_control.boards.detached import DetachedRun, Patience
from host_control.boards.service import remove_service
from host_control.connection import RunResult

OnEvent = Callable[[Mapping[str, Any]], None]

_SIGNALS = 128
"""Exit codes above it stand for a signal that ended the program."""

_REPORT_RATE = "2"
"""Step events a second of a detached run: its events lie on the board's card until they are fetched."""


@dataclass(frozen=True)
class LongRun:
    """The run `name` on a board. `what` it is, for errors; `again` says how to go on with it.

    `on_event` gets every event of the program, and `link` {message} of the host's own when the link is lost or back.
    `tied`: it must not run without this process, wherever it runs.
    """

    board: DeployedBoard
    name: str
    what: str
    again: str
    on_event: OnEvent
    tied: bool = False

    @property
    def outlives_link(self) -> bool:
        """Whether the run is detached."""
        return self.board.outlives_link and not self.tied

    @cached_property
    def detached(self) -> DetachedRun:
        say = lambda text: self.on_event({"event": "link", "message": text})  # noqa: E731
        return self.board.detached(self.name, Patience(say=say))

    @property
    def folder(self) -> str:
        return self.detached.folder

    def goes_on_by_itself(self) -> bool:
        """Whether the board has the run under way, or its result ready: there is nothing to begin."""
        if not self.outlives_link:
            return False
        return self.detached.patience.keep_trying(self.detached.state).delivers

    def begin(
        self, words: Callable[[], list[str]], record: Mapping[str, Any], *, anew: bool
    ) -> Callable[[], RunResult]:
        """Begin the run, `anew` without what an earlier one left; what follows it to its end.

        BusyError (16) where another run holds the board, or this one is under way there already.
        """
        if self.outlives_link:
            if anew:
                if self.goes_on_by_itself():
                    raise BusyError(
                        f"{self.board.name} has a run {self.name} of this folder already. "
                        f"`attach --board {self.board.name} {self.name}` follows it, `stop` ends it."
                    )
                self.detached.remove()
            command = self.board.program_words([*words(), "--report-rate", _REPORT_RATE])
            self.detached.start(command, record)
            return self.follow
        if anew:
            self.board.remove_folder(self.folder)
        self.board.run_folder(self.name)
        arguments = words()
        return lambda: self.board.follow_program(arguments, self._on_line)

    def follow(self) -> RunResult:
        """Follow the run, from its first event on, to its end."""
        return self.detached.follow(self._on_line)

    def finish(self, follow: Callable[[], RunResult]) -> dict[str, Any]:
        """The program's `result`, once it ended. Raises what its exit code stands for; KeyboardInterrupt, with how to go
        on, once a request to end was obeyed."""
        self._results.clear()
        try:
            outcome = follow()
        except LinkLostError as error:
            if self.outlives_link:
                raise
            raise LinkLostError(f"{error} The program there ends and saves where it was. {self.again}") from error
        if outcome.exit_code == INTERRUPTED:
            raise KeyboardInterrupt(f"interrupted; {self.board.name} has saved where it was. {self.again}")
        try:
            check_exit(outcome, f"{self.what} on {self.board.name}")
        except TasteError as error:
            if outcome.exit_code <= _SIGNALS:
                raise
            raise type(error)(f"{error} Its checkpoints are kept. {self.again}") from error
        if not self._results:
            raise CompatibilityError(
                f"taste-train on {self.board.name} ended without a result: not this host's version. Deploy again."
            )
        return self._results[-1]

    def fetch(self, path: str, destination: Path) -> None:
        """Bring one of its files home."""
        patience = self.detached.patience if self.outlives_link else Patience(seconds=0)
        try:
            patience.keep_trying(lambda: self.board.connection.get(path, destination))
        except LinkLostError as error:
            raise LinkLostError(f"{error} {self.again}") from error

    def remove(self) -> None:
        """Remove what it left on the board."""
        if self.outlives_link:
            self.detached.patience.keep_trying(lambda: remove_service(self.detached))
            self.detached.remove()
        else:
            self.board.remove_folder(self.folder)

    @cached_property
    def _results(self) -> list[dict[str, Any]]:
        return []

    def _on_line(self, line: str) -> None:
        event = event_of(line)
        if event is not None:
            self.on_event(event)
            if event["event"] == "result":
                self._results.append(event)


def event_of(line: str) -> dict[str, Any] | None:
    """A JSON object of the program, or None for any other line."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("event"), str) else None
