"""follow a run on a board again, and finish it as if nobody had been away"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from cross.errors import UsageError
from host_control.console import Console
from host_control.flags import add_board_run_flags
from host_control.preparation import deployed, opened_board
from host_control.run_folder import RUNS, RunFolder
from host_control.training.record import OPTIONS, TRAIN_RECORD

if TYPE_CHECKING:
    from host_control.boards import DeployedBoard
    from host_control.boards.runs import RunSummary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_board_run_flags(parser)


def run(args: argparse.Namespace) -> int:
    """`train` is followed and finished here; of `learn`, `tune` and `bench` the command that began it goes on."""
    from host_control.boards.runs import choose_run, list_runs

    console = Console(args.json)
    with opened_board(args) as opened:
        board = deployed(opened)
        chosen = choose_run(list_runs(board), args.name, board.name)
        if chosen.status not in ("running", "finished"):
            raise UsageError(
                f"run {chosen.name} on {board.name} is {chosen.status}, there is nothing to follow. "
                f"{_how_to_go_on(chosen)}"
            )
        if isinstance(chosen.record.get("options"), dict):
            return _finish(args, board, chosen, console)
    return _repeat(args, chosen)


def _how_to_go_on(run: RunSummary) -> str:
    return f"Go on with its own command and --out {run.record.get('out') or 'DIR'}."


def _is_here(run: RunSummary) -> bool:
    return run.record.get("host") == platform.node()


def _finish(args: argparse.Namespace, board: DeployedBoard, run: RunSummary, console: Console) -> int:
    """Follow a `train`, whose options lie beside it, in the folder it was begun with where that was on this host."""
    from host_control.training.finish import Finish

    held = run.record["options"]
    out: Path = args.out or (Path(run.record["out"]) if _is_here(run) else RUNS / run.name)
    with RunFolder(out) as folder:
        if folder.read_json(OPTIONS) is None:
            folder.write_json(OPTIONS, held)
            folder.write_json(TRAIN_RECORD, dict(held["flags"]) | {"complete": False})
        finish = Finish(console, folder, board, held, run.name)
        finish.say(finish.collect())
    return 0


def _repeat(args: argparse.Namespace, run: RunSummary) -> int:
    """Give the command of a `learn`, `tune` or `bench` again: it collects what the board has, and does the rest."""
    from host_control.cli import make_parser

    record = run.record
    if not _is_here(run) or not Path(record.get("directory", "")).is_dir() or not record.get("command"):
        raise UsageError(
            f"run {run.name} belongs to a `{record.get('verb')}` on host {record.get('host')}, folder "
            f"{record.get('out')}. Attach there."
        )
    os.chdir(record["directory"])
    again = make_parser().parse_args(record["command"])
    again.command, again.out = record["command"], Path(record["out"])
    again.json, again.debug = args.json, args.debug
    if "new" in again:
        again.new = False
    code: int = again.run(again)
    return code
