"""let a run go on from its last checkpoint after its board was restarted (systemd)"""

from __future__ import annotations

import argparse

from host_control.console import Console
from host_control.flags import add_board_run_flags
from host_control.preparation import deployed, opened_board


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_board_run_flags(parser)
    parser.add_argument("--remove", action="store_true", help="take it back; the run itself is left alone")


def run(args: argparse.Namespace) -> int:
    """Install a user unit for the run, or remove it."""
    from host_control.boards.runs import choose_run, list_runs
    from host_control.boards.service import install_service, remove_service, unit_name

    console = Console(args.json)
    with opened_board(args) as opened:
        board = deployed(opened)
        there = board.detached(choose_run(list_runs(board), args.name, board.name).name)
        fields = {"board": board.name, "name": there.name, "unit": unit_name(there.name)}
        if args.remove:
            remove_service(there)
            console.line(f"{board.name}: {fields['unit']} is removed")
            console.result("install-service", fields | {"installed": False, "linger": None})
            return 0
        service = install_service(there)
    console.line(f"{board.name}: after a restart, {service.unit} goes on with run {there.name}")
    if not service.linger:
        console.line(f"warning: it starts only once its user logs in. {service.remedy}")
    console.result("install-service", fields | {"installed": True, "linger": service.linger})
    return 0
