"""boards: list what can be built for, or remove everything of ours from one"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from cross.errors import UsageError
from host_control.console import Console
from host_control.flags import add_board_flags, add_output_flags
from host_control.preparation import opened_board


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="the boards that can be built for and emulated")
    clean = actions.add_parser("clean", help="remove everything of ours from a board")
    add_board_flags(clean)
    for action in (listing, clean):
        add_output_flags(action)


def run(args: argparse.Namespace) -> int:
    console = Console(args.json)
    return _clean(args, console) if args.action == "clean" else _list(console)


def _list(console: Console) -> int:
    """The table of cross/boards.toml."""
    from cross.target import load_targets

    targets = load_targets()
    columns = [("name", "left"), ("board", "left"), ("CPU", "left")]
    columns += [("vector", "right"), ("cores", "right"), ("RAM", "right")]
    rows = [
        [
            target.name,
            target.title,
            target.cpu,
            f"{target.vector_bits} bits" if target.vector_bits else "none",
            str(target.cores),
            f"{target.ram_mib} MiB",
        ]
        for target in targets.values()
    ]
    console.table(columns, rows)
    console.result("board", {"action": "list", "boards": [asdict(target) for target in targets.values()]})
    return 0


def _clean(args: argparse.Namespace, console: Console) -> int:
    from host_control.boards import DeployedBoard

    with opened_board(args) as board:
        if not isinstance(board, DeployedBoard):
            raise UsageError(f"{args.board} is a table, not a board: there is nothing to remove.")
        board.clean()
        console.line(f"{board.name}: everything of ours is removed")
        console.result("board", {"action": "clean", "board": board.name})
    return 0
