"""The runs of a board: what is under way, what has ended and waits to be fetched, and which one a name means."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cross.errors import INTERRUPTED, BusyError, UsageError
from host_control.boards.deployed import DeployedBoard
from host_control.boards.detached import RunState

LOCK = "lock"


@dataclass(frozen=True)
class RunSummary:
    """A run on a board. `record`: what the host that began it left; `progress`: its last reported step. Both may be empty.

    `reason`: the last line that a failed one said.
    """

    name: str
    state: RunState
    record: dict[str, Any]
    progress: dict[str, Any]
    reason: str = ""

    @property
    def status(self) -> str:
        """In one word: running, finished, stopped, failed, or lost."""
        if self.state.status != "ended":
            return self.state.status
        return {0: "finished", INTERRUPTED: "stopped"}.get(self.state.exit_code or 0, "failed")

    def fields(self) -> dict[str, Any]:
        """As `status --json` says it."""
        return {
            "name": self.name,
            "verb": self.record.get("verb"),
            "status": self.status,
            "exit_code": self.state.exit_code,
            "reason": self.reason or None,
            "process": self.state.pid if self.status == "running" else None,
            "host": self.record.get("host"),
            "out": self.record.get("out"),
            "begun": self.record.get("begun"),
            **{name: self.progress.get(name) for name in ("step", "epoch", "loss", "accuracy", "samples_per_s")},
        }


def list_runs(board: DeployedBoard) -> list[RunSummary]:
    """Every run that was begun on a board and not fetched yet, by name."""
    found = []
    for name in board.connection.names(board.runs_folder()):
        if name == LOCK:
            continue
        run = board.detached(name)
        state = run.state() if board.connection.names(run.folder) else RunState("none")
        if state.status != "none":
            failed = state.status == "ended" and state.exit_code not in (0, INTERRUPTED)
            found.append(RunSummary(name, state, run.record(), run.progress(), run.last_message() if failed else ""))
    return found


def refuse_where_busy(board: DeployedBoard, folder: Path | None) -> None:
    """BusyError (16) where somebody else's run holds the board: said before anything is built, sent or measured.

    A run of the same `folder` of this host is no obstacle: it is collected. None: whoever it is, it is in the way.
    """
    if not board.outlives_link:
        return
    holder = re.match(
        r"(.+) \(process \d+\)$",
        (board.connection.read(f"{board.runs_folder()}/{LOCK}") or b"").decode(errors="replace").strip(),
    )
    run = board.detached(holder[1]) if holder else None
    if holder is None or run is None or run.state().status != "running":
        return
    record = run.record()
    if folder is None or (record.get("host"), record.get("out")) != (platform.node(), os.path.abspath(folder)):
        raise BusyError(f"{board.name} is in use by run {holder[0]}. Wait for it, `attach` to it, or `stop` it.")


def choose_run(runs: Sequence[RunSummary], name: str | None, board: str, *, running: bool = False) -> RunSummary:
    """The run of that name; without one the run that is under way, or the only one. UsageError says what there is.

    `running`: only one that is under way will do.
    """
    known = ", ".join(f"{run.name} ({run.status})" for run in runs) or "none"
    if name is not None:
        for run in runs:
            if run.name == name:
                return run
        raise UsageError(f"{board} has no run {name!r}. It has: {known}.")
    under_way = [run for run in runs if run.status == "running"]
    others = [] if running else [run for run in runs if run.status == "finished"]
    for group in (under_way, others):
        if len(group) == 1:
            return group[0]
        if group:
            raise UsageError(f"{board} has several runs: {known}. Name one.")
    what = "that is under way" if running else "to attach to"
    raise UsageError(f"{board} has no run {what}. It has: {known}.")
