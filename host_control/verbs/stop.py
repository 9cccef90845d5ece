"""end a run on a board in order: it saves a checkpoint first"""

from __future__ import annotations

import argparse
import time

from cross.errors import LinkLostError
from host_control.connection import SAVE_S
from host_control.console import Console
from host_control.flags import add_board_run_flags
from host_control.preparation import deployed, opened_board

_POLL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_board_run_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Ask the run to end, and wait until it has."""
    from host_control.boards.runs import RunSummary, choose_run, list_runs

    console = Console(args.json)
    with opened_board(args) as opened:
        board = deployed(opened)
        chosen = choose_run(list_runs(board), args.name, board.name, running=args.name is None)
        there, until = board.detached(chosen.name), time.monotonic() + SAVE_S
        there.stop()
        while (state := there.state()).status == "running":
            if time.monotonic() > until:
                raise LinkLostError(
                    f"run {chosen.name} on {board.name} was asked to end {SAVE_S:.0f} s ago and still saves. "
                    "Look again with `status`."
                )
            time.sleep(_POLL_S)
        ended = RunSummary(chosen.name, state, there.record(), there.progress())
    if chosen.status == "running":
        after = "; the same command with its --out goes on from there" if ended.status == "stopped" else ""
        console.line(f"{board.name}: run {ended.name} is {ended.status}{after}")
    else:
        console.line(f"{board.name}: run {ended.name} was not under way, it is {ended.status}")
    fields = {name: value for name, value in ended.fields().items() if name != "verb"}
    console.result("stop", {"board": board.name, **fields})
    return 0
