"""send a build to a board and make it the current one"""

from __future__ import annotations

import argparse
from pathlib import Path

from cross.errors import UsageError
from host_control.console import Console
from host_control.flags import add_board_flags, add_built_flags, not_negative
from host_control.preparation import built_for, opened_board, send
from host_control.run_folder import RunFolder, default_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_built_flags(parser)
    add_board_flags(parser)
    parser.add_argument("--python", action="store_true", help="also libtaste.so, the weights and device_runtime")
    parser.add_argument("--seed", type=not_negative, default=0, help="seed of --init seeded (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Build where needed, then upload what the board does not have."""
    from host_control.boards import DeployedBoard

    console = Console(args.json)
    out: Path = args.out or default_folder(args.model or args.build.name, args.board)
    with RunFolder(out) as folder, opened_board(args) as board:
        if not isinstance(board, DeployedBoard):
            raise UsageError(f"{args.board} is a table, not a board: there is nowhere to send to.")
        built = built_for(args, board, out / "build", console)
        sent = send(board, built, console, python=args.python)
        fields = {"remote_dir": sent.remote_dir, "sha256": sent.sha256, "sent_bytes": sent.sent_bytes}
        fields |= {"board": board.name, "target": built.manifest.get("target")}
        folder.write_json("result.json", {"verb": "deploy", **fields})
    console.result("deploy", fields)
    return 0
