"""show where the time of a step goes, kernel by kernel, and what bounds each"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from cross.errors import UsageError
from host_control.board import OperatingPoint
from host_control.console import Console
from host_control.flags import add_board_flags, add_built_flags, add_running_flags, positive
from host_control.preparation import built_for, opened_board, send
from host_control.run_folder import RunFolder, default_folder

if TYPE_CHECKING:
    from host_control.boards.profile import Profile

SLOWEST = 25
"""Kernels of the table for people; --json and result.json have all of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_built_flags(parser)
    add_board_flags(parser)
    add_running_flags(parser)
    parser.add_argument("--batch-size", type=positive, required=True, help="samples a step")
    parser.add_argument("--inference", action="store_true", help="profile the forward program instead of a train step")


def run(args: argparse.Namespace) -> int:
    """Build and send where needed, then one profile."""
    from host_control.boards import DeployedBoard
    from host_control.boards.profile import profile

    console = Console(args.json)
    point = OperatingPoint(args.batch_size, "eval" if args.inference else "train", args.threads, args.cores)
    out: Path = args.out or default_folder(args.model or "build", args.board)
    with RunFolder(out) as folder, opened_board(args) as board:
        if not isinstance(board, DeployedBoard):
            raise UsageError(f"{board.name} is a recorded table and has no kernels. Choose a board that runs.")
        send(board, built_for(args, board, out / "build", console), console)
        found = profile(board, point)
        fields = asdict(found) | {"board": board.name}
        folder.write_json("result.json", {"verb": "profile", **fields})
    show(found, board.name, console)
    console.result("profile", fields)
    return 0


def show(found: Profile, board: str, console: Console) -> None:
    """Two tables: by operator, and the slowest kernels."""
    from host_control.boards.profile import by_operator

    emulated = " emulated" if found.emulated else ""
    console.line(
        f"{found.program} at batch size {found.batch_size} on {board}, {found.threads} threads: "
        f"{found.ms:.2f} ms{emulated} in {len(found.kernels)} kernels. Limits measured: {found.limit_gflops:.0f} GFLOP/s "
        f"of multiply-adds, {found.limit_gb_per_s:.1f} GB/s of memory"
    )
    numbers = [("ms", "right"), ("share", "right"), ("GFLOP/s", "right"), ("of limit", "right"), ("GB/s", "right")]
    rows = [
        (o.name, str(o.calls), f"{o.ms:.2f}", f"{o.share:.1%}", *_rates(o.gflops, o.limit_share, o.gb_per_s))
        for o in by_operator(found.kernels)
    ]
    console.table([("operator", "left"), ("calls", "right"), *numbers], rows)
    slowest = sorted(found.kernels, key=lambda kernel: -kernel.ms)[:SLOWEST]
    rows = [
        (k.name, f"{k.ms:.3f}", f"{k.share:.1%}", *_rates(k.gflops, k.limit_share, k.gb_per_s), k.bound)
        for k in slowest
    ]
    console.table([("kernel", "left"), *numbers, ("bound by", "left")], rows, f"the {len(rows)} slowest")


def _rates(gflops: float, limit_share: float, gb_per_s: float) -> tuple[str, str, str]:
    return f"{gflops:.1f}", f"{limit_share:.0%}", f"{gb_per_s:.1f}"
