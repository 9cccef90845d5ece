"""measure the throughput of one batch size on a board"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from host_control.board import Board, Counters, OperatingPoint
from host_control.console import Console, duration, mib, rate
from host_control.flags import add_board_flags, add_built_flags, add_running_flags, positive
from host_control.preparation import built_for, opened_board, send
from host_control.run_folder import RunFolder, default_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_built_flags(parser)
    add_board_flags(parser)
    add_running_flags(parser, frequency=True)
    parser.add_argument("--batch-size", type=positive, required=True, help="samples a step")
    parser.add_argument("--inference", action="store_true", help="measure the forward program instead of a train step")


def run(args: argparse.Namespace) -> int:
    """Build and send where needed, then one measurement."""
    from host_control.boards import DeployedBoard
    from host_control.boards.runs import refuse_where_busy

    console = Console(args.json)
    program = "eval" if args.inference else "train"
    point = OperatingPoint(args.batch_size, program, args.threads, args.cores, args.frequency)
    out: Path = args.out or default_folder(args.model or "build", args.board)
    with RunFolder(out) as folder, opened_board(args, folder.path) as board:
        if isinstance(board, DeployedBoard):
            refuse_where_busy(board, folder.path)
            send(board, built_for(args, board, out / "build", console), console)
        counters = measure(board, point, console)
        fields = asdict(counters) | {"board": board.name}
        folder.write_json("result.json", {"verb": "bench", **fields})
    console.result("bench", fields)
    return 0


def measure(board: Board, point: OperatingPoint, console: Console) -> Counters:
    """Measure one point and say what came out."""
    counters = board.measure(point)
    emulated = " emulated" if counters.emulated else ""
    console.line(
        f"batch size {point.batch_size} on {board.name}: {rate(counters.samples_per_s)}{emulated} samples/s "
        f"(spread {counters.spread:.1%}), peak {mib(counters.peak_rss_bytes)} of {mib(counters.planned_bytes)} planned, "
        f"program {counters.program}"
    )
    parts = {"forward": counters.forward_s, "backward": counters.backward_s, "optimizer": counters.optimizer_s}
    if any(parts.values()):
        console.line(", ".join(f"{name} {_time(value)}" for name, value in parts.items()) + " a step" + emulated)
    if counters.tainted:
        console.line(f"warning: disturbed while measured ({counters.taint or 'no reason given'}). Measure again.")
    return counters


def _time(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 1 else duration(value)
