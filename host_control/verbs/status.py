"""show what runs on a board, and what has ended there and waits to be fetched"""

from __future__ import annotations

import argparse
from typing import Any

from host_control.console import Console, rate
from host_control.flags import add_board_run_flags
from host_control.preparation import deployed, opened_board


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_board_run_flags(parser)


def run(args: argparse.Namespace) -> int:
    """A table of the board's runs, or of the one that is named."""
    from host_control.boards.runs import choose_run, list_runs

    console = Console(args.json)
    with opened_board(args) as opened:
        board = deployed(opened)
        runs = list_runs(board)
        if args.name is not None:
            runs = [choose_run(runs, args.name, board.name)]
        fields = [run.fields() for run in runs]
    if not fields:
        console.line(f"{board.name}: no run is under way, and none waits to be fetched")
    else:
        columns = [("run", "left"), ("verb", "left"), ("status", "left"), ("epoch", "right"), ("loss", "right")]
        columns += [("samples/s", "right"), ("begun", "left"), ("folder", "left")]
        console.table(columns, [_row(run) for run in fields])
        for run in fields:
            if run["reason"]:
                console.line(f"{run['name']}: {run['reason']}")
    busy = next((run["name"] for run in fields if run["status"] == "running"), None)
    console.result("status", {"board": board.name, "busy": busy, "runs": fields})
    return 0


def _row(run: dict[str, Any]) -> list[str]:
    code = f" ({run['exit_code']})" if run["status"] == "failed" else ""
    return [
        run["name"],
        run["verb"] or "-",
        run["status"] + code,
        "-" if run["epoch"] is None else f"{run['epoch']:.2f}",
        "-" if run["loss"] is None else f"{run['loss']:.4f}",
        "-" if not run["samples_per_s"] else rate(run["samples_per_s"]),
        run["begun"] or "-",
        f"{run['host']}:{run['out']}" if run["out"] else "-",
    ]
