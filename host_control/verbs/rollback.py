"""make the deployment before the current one current again"""

from __future__ import annotations

import argparse

from host_control.console import Console
from host_control.flags import add_board_flags
from host_control.preparation import deployed, opened_board


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_board_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Switch back by one rename; once more switches forth again."""
    console = Console(args.json)
    with opened_board(args) as opened:
        board = deployed(opened)
        before = board.roll_back()
    console.line(f"{board.name}: {before.id} is current again ({before.folder})")
    console.result(
        "rollback",
        {"board": board.name, "remote_dir": before.folder, "deployment": before.id, "sha256": before.sha256},
    )
    return 0
