"""build a model for a target: taste-train, libtaste.so, weights and manifest"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from host_control.console import Console
from host_control.flags import add_board_flags, add_model_flags, not_negative
from host_control.preparation import build_model, choose_target, emulated_target, opened_board
from host_control.run_folder import RunFolder, default_folder

if TYPE_CHECKING:
    from cross.target import Target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    add_board_flags(parser)
    parser.add_argument("--seed", type=not_negative, default=0, help="seed of --init seeded (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Build into --out; probes --board where --target is not given."""
    console = Console(args.json)
    target = _target(args)
    out: Path = args.out or default_folder(args.model, target.name)
    with RunFolder(out) as folder:
        _, result = build_model(args, target, out, console)
        fields = {key: value for key, value in asdict(result).items() if key != "out"}
        fields |= {"model": args.model, "target": target.name, "out": str(out)}
        folder.write_json("result.json", {"verb": "build", **fields})
    console.line(f"{out}")
    console.result("build", fields)
    return 0


def _target(args: argparse.Namespace) -> Target:
    if args.target is not None or emulated_target(args.board) is not None:
        return choose_target(args.target, args.board, None)
    from host_control.boards import DeployedBoard

    with opened_board(args) as board:
        return choose_target(None, args.board, board.facts() if isinstance(board, DeployedBoard) else None)
