"""boards: list what can be built for and emulated, start and end emulated ones, remove everything of ours from one"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import asdict
from typing import Any

from cross.errors import UsageError
from host_control.console import Console
from host_control.flags import add_board_flags, add_output_flags, byte_count
from host_control.preparation import opened_board


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="the boards that can be built for and emulated, and those that are up")
    up = actions.add_parser("up", help="start an emulated board, which --board NAME then means")
    up.add_argument("name", metavar="NAME", help="such as rpi4-vm or rpi4-netns; see `board list`")
    up.add_argument("--memory", type=byte_count, metavar="BYTES", help="RAM of a -vm (512M), cap of a -netns (none)")
    up.add_argument("--icount", action="store_true", help="a -vm whose clock counts instructions: times repeat")
    up.add_argument(
        "--cpufreq",
        action="store_true",
        help="an arm64 -vm whose kernel has cpufreq with four rates, and a thermal zone",
    )
    up.add_argument(
        "--packages",
        default="",
        metavar="NAMES",
        help="Debian packages to have beside the usual ones: python3,python3-numpy",
    )
    down = actions.add_parser("down", help="end an emulated board and remove what it left")
    down.add_argument("name", metavar="NAME")
    clean = actions.add_parser("clean", help="remove everything of ours from a board")
    add_board_flags(clean)
    for action in (listing, up, down, clean):
        add_output_flags(action)


def run(args: argparse.Namespace) -> int:
    console = Console(args.json)
    actions = {"list": _list, "up": _up, "down": _down, "clean": _clean}
    return actions[args.action](args, console)


def _list(_args: argparse.Namespace, console: Console) -> int:
    """The table of cross/boards.toml, and what is emulated of it."""
    from cross.target import load_targets
    from host_control.emulation.catalogue import load_catalogue
    from host_control.emulation.state import list_boards

    targets, recorded = load_targets(), list_boards()
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
    emulated: list[dict[str, Any]] = []
    for board in load_catalogue().values():
        running = recorded.get(board.name)
        state = "down" if running is None else "up" if running.alive else "died"
        where = {"host": running.host, "port": running.port, "pid": running.pid} if running and running.alive else {}
        emulated.append({"name": board.name, "target": board.target.name, "state": state, **where})
    shown = [
        [row["name"], row["state"], f"{row['host']} port {row['port']}" if "host" in row else ""] for row in emulated
    ]
    console.table([("emulated", "left"), ("state", "left"), ("at", "left")], shown)
    boards = [asdict(target) for target in targets.values()]
    console.result("board", {"action": "list", "boards": boards, "emulated": emulated})
    return 0


def _up(args: argparse.Namespace, console: Console) -> int:
    from host_control.emulation.lifecycle import start_board
    from host_control.emulation.state import board_folder

    packages = tuple(sorted({name.strip() for name in args.packages.split(",") if name.strip()}))
    with console.progress(args.name) as progress:
        running = start_board(
            args.name,
            progress,
            memory_bytes=args.memory,
            icount=args.icount,
            cpufreq=args.cpufreq,
            packages=packages,
        )
    config = shlex.quote(str(board_folder(args.name) / "ssh_config"))
    console.line(
        f"{args.name} is up at {running.host} port {running.port}. Use it as --board {args.name}, log in with:"
    )
    console.line(f"    ssh -F {config} {args.name}")
    fields = {"name": args.name, "host": running.host, "port": running.port, "pid": running.pid, "emulated": True}
    console.result("board", {"action": "up", **fields})
    return 0


def _down(args: argparse.Namespace, console: Console) -> int:
    from host_control.emulation.lifecycle import end_board

    there = end_board(args.name)
    console.line(f"{args.name} {'is ended, and nothing of it is left' if there else 'was not up'}")
    console.result("board", {"action": "down", "name": args.name, "was_there": there})
    return 0


def _clean(args: argparse.Namespace, console: Console) -> int:
    from host_control.boards import DeployedBoard
    from host_control.boards.runs import refuse_where_busy

    with opened_board(args) as board:
        if not isinstance(board, DeployedBoard):
            raise UsageError(f"{args.board} is a table, not a board: there is nothing to remove.")
        refuse_where_busy(board, None)
        board.clean()
        console.line(f"{board.name}: everything of ours is removed")
        console.result("board", {"action": "clean", "board": board.name})
    return 0
