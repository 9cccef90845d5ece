"""check this host, or with --board a board: what stands in the way of training, and what to do about it"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cross.errors import AuthenticationError, LinkLostError, SecurityError, TasteError
from host_control.console import Console
from host_control.doctor.finding import Finding, failed
from host_control.flags import add_board_flags
from host_control.preparation import deployed, opened_board, read_build
from host_control.run_folder import RUNS

if TYPE_CHECKING:
    from cross.target import Target
    from host_control.boards import DeployedBoard


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_board_flags(parser)
    parser.set_defaults(board=None)
    parser.add_argument("--target", metavar="NAME", help="what is to run there (default: what the board suggests)")
    parser.add_argument("--build", type=Path, metavar="DIR", help="a build that is to run there, instead of --target")


def run(args: argparse.Namespace) -> int:
    """A table of findings; 0, or the exit code of the first one that fails."""
    console = Console(args.json)
    if args.board is None:
        from host_control.doctor.host import host_findings

        findings = host_findings(args.out or RUNS)
    else:
        findings = _examine(args)
    _show(console, findings)
    console.result("doctor", {"board": args.board, "findings": [finding.fields() for finding in findings]})
    failing = [finding for finding in findings if finding.level == "fail"]
    if not failing:
        return 0
    first = failing[0]
    print(f"error: {first.name}: {first.consequence}. {first.remedy}".replace("..", "."), file=sys.stderr)
    return first.exit_code


def _program(args: argparse.Namespace) -> Target | dict[str, Any] | None:
    from cross.target import find_target

    if args.build is not None:
        return read_build(args.build).manifest
    return find_target(args.target) if args.target is not None else None


def _examine(args: argparse.Namespace) -> list[Finding]:
    """Reach the board and read it; a board that cannot be reached is a finding too."""
    from host_control.doctor.board import board_findings
    from host_control.doctor.signs import SIGNS_SCRIPT, parse_signs

    program = _program(args)
    with opened_board(args) as opened:
        board = deployed(opened)
        began = time.monotonic()
        try:
            facts = board.facts()
            reached_s = time.monotonic() - began
            asked = time.time()
            script = ["sh", "-c", SIGNS_SCRIPT, "taste-doctor", board.remote_dir]
            signs = parse_signs(board.connection.run(script).stdout)
        except (LinkLostError, SecurityError, AuthenticationError) as error:
            name = {SecurityError: "host key", AuthenticationError: "login"}.get(type(error), "reachable")
            return [failed(name, args.board, error)]
        except TasteError as error:
            return [failed("login shell", args.board, error)]
        return [
            Finding("reachable", f"{args.board}, read in {reached_s:.1f} s"),
            *([Finding("host key", "known")] if board.outlives_link else []),
            *board_findings(facts, signs, asked, program),
            _busy(board),
        ]


def _busy(board: DeployedBoard) -> Finding:
    from host_control.boards.runs import list_runs

    running = [run.name for run in list_runs(board) if run.status == "running"]
    if not running:
        return Finding("run", "none is under way")
    remedy = "`status` shows it, `attach` follows it, `stop` ends it."
    return Finding("run", f"{running[0]} is under way", "warn", "another one is refused (16)", remedy)


def _show(console: Console, findings: Sequence[Finding]) -> None:
    columns = [("", "left"), ("what", "left"), ("found", "left"), ("consequence", "left")]
    console.table(columns, [[f.level, f.name, f.value, f.consequence] for f in findings])
    for finding in findings:
        if finding.remedy:
            console.line(f"{finding.name}: {finding.remedy}")
