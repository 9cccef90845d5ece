"""`power train`: the straight line of `train`, at the chosen point, with its frequency set on the board."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from cross.errors import UsageError
from host_control.console import Console
from host_control.power.proxy_run import RATES
from host_control.power.relation import read_relation, scaled_rate
from host_control.power.selection import select
from host_control.power.steering import Steering, best_point, candidates_for, read_limit
from host_control.power.table import PowerTable, megahertz, read_table
from host_control.preparation import session_memory
from host_control.search.space import memory_budget

if TYPE_CHECKING:
    from host_control.boards import DeployedBoard
    from host_control.training.options import TrainOptions


def run(args: argparse.Namespace, console: Console) -> int:
    """Choose, then train. Without --effective-batch the chosen batch size is the effective one too, as in the paper."""
    from host_control.verbs import train

    if args.frequency is not None:
        raise UsageError("`power train` chooses the frequency itself. Leave --frequency out, or use `train`.")
    if args.compare or args.batch_schedule != "fixed":
        raise UsageError(
            "`power train` is one run with one effective batch. Leave --compare and --batch-schedule out, or use `train`."
        )
    table = read_table(args.table)
    limit = read_limit(args.limit_file) if args.limit_file is not None else args.limit_watts
    if args.batch_size != "auto":
        raise UsageError("`power train` chooses the batch size itself. Leave --batch-size out, or use `train`.")
    if args.effective_batch is None:
        chosen = _choose(args, table, limit, console)
        own: dict[str, object] = {"batch_size": chosen, "effective_batch": chosen}
        if args.lr is None and args.optimizer in ("adam", "adamw"):
            own["lr"] = scaled_rate(RATES[args.optimizer], chosen)
    else:
        own = {
            "batch_size": best_point(candidates_for(table, args.effective_batch, 1), limit, args.effective_batch)[
                0
            ].batch_size
        }
        console.line(
            "with a fixed effective batch every batch size needs as many examples: the fastest below the limit is taken"
        )
    settled = argparse.Namespace(**{**vars(args), **own})

    def steer(board: DeployedBoard, options: TrainOptions, minimum: int) -> Steering:
        free = memory_budget(board.facts().memory_available_bytes, args.memory) or 0
        fitting = max(session_memory(board.info(), "train").largest(free), options.batch_size)
        usable = candidates_for(table, min(options.effective_batch, fitting), minimum)
        return Steering(
            table=usable,
            limit_watts=limit,
            files=board.connection,
            console=console,
            largest=max(p.batch_size for p in usable.points),
            limit_file=args.limit_file,
            drift_every_s=args.drift_every,
            drift_s=args.drift_seconds,
        )

    return train.run(settled, steer)


def _choose(args: argparse.Namespace, table: PowerTable, limit: float, console: Console) -> int:
    relation = read_relation(args.relation[0]) if args.relation else None
    found = select(table, limit, relation, args.safe_frequency)
    point = found.choice.point
    console.line(
        f"below {limit:g} W: batch size {point.batch_size}, {megahertz(point.frequency_khz)}, {point.watts:.2f} W{table.labels}"
    )
    return point.batch_size
