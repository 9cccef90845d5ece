"""find the fastest batch size of a model on a board"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cross.errors import UsageError
from host_control.console import Console
from host_control.flags import add_board_flags, add_built_flags, add_running_flags, positive, seconds
from host_control.preparation import built_for, opened_board, send
from host_control.run_folder import RUNS, RunFolder, default_folder, find_resumable
from host_control.search.space import DEFAULT_MAX_BATCH_SIZE
from host_control.search.strategies import DEFAULT, NAMES
from host_control.study_run import DEFAULT_TIME_BUDGET_S, STUDY_RECORD, StudyRun, study_identity
from host_control.verbs.power import add_power_flags

OBJECTIVES = ("throughput", "energy", "time-to-accuracy")
JOINT_BUDGET = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_built_flags(parser)
    add_board_flags(parser)
    add_running_flags(parser)
    group = parser.add_argument_group("search")
    group.add_argument("--search", choices=NAMES, default=DEFAULT, help=f"strategy (default: {DEFAULT})")
    group.add_argument(
        "--max-batch-size",
        type=positive,
        default=DEFAULT_MAX_BATCH_SIZE,
        help=f"largest size to consider, where the memory holds it (default: {DEFAULT_MAX_BATCH_SIZE})",
    )
    group.add_argument(
        "--time-budget",
        type=seconds,
        default=DEFAULT_TIME_BUDGET_S,
        metavar="TIME",
        help="stop measuring after this long, such as 90s or 20m (default: 20m)",
    )
    group.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default=OBJECTIVES[0],
        help="samples/s, joules a sample, or time to an accuracy by --relation (default: throughput)",
    )
    group.add_argument("--joint", action="store_true", help="search threads, cores and frequency too (docs/power.md)")
    group.add_argument(
        "--budget",
        type=positive,
        default=JOINT_BUDGET,
        metavar="N",
        help=f"settings that a joint search measures ({JOINT_BUDGET})",
    )
    group.add_argument(
        "--relation", type=Path, action="append", default=[], metavar="DIR", help="what `power proxy` left"
    )
    add_power_flags(parser)
    group.add_argument("--inference", action="store_true", help="search the forward program instead of the train step")
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "--resume", action="store_true", help="insist on going on: an error where no study is unfinished"
    )
    which.add_argument("--new", action="store_true", help="begin anew, even where the same study is unfinished")


def run(args: argparse.Namespace) -> int:
    """Build and send where needed, search, report. An unfinished study of the same flags and the same build goes on."""
    from host_control.study import OtherStudyError

    if args.joint or args.objective != OBJECTIVES[0]:
        from host_control.power import joint_run

        return joint_run.run(args, Console(args.json))
    # The sensors are not read where nothing depends on them.
    args.power_every = None
    console, identity = Console(args.json), study_identity(args)
    name = args.model or (args.build.name if args.build else args.board)
    unfinished = None if args.new or args.out is not None else find_resumable(identity)
    if args.resume and args.out is None and unfinished is None:
        raise UsageError(f"no unfinished study with these flags in {RUNS}/. Run without --resume to begin one.")
    if unfinished is not None:
        try:
            return _run_in(unfinished, args, identity, console)
        except OtherStudyError as error:
            if args.resume:
                raise
            console.line(f"{unfinished} is not the same study any more, a new one begins: {error}")
    return _run_in(args.out or default_folder(name, args.board), args, identity, console)


def _run_in(path: Path, args: argparse.Namespace, identity: dict[str, Any], console: Console) -> int:
    from host_control.boards import DeployedBoard
    from host_control.boards.runs import refuse_where_busy

    with RunFolder(path) as folder, opened_board(args, folder.path) as board:
        built = None
        if isinstance(board, DeployedBoard):
            refuse_where_busy(board, folder.path)
            built = built_for(args, board, folder.path / "build", console)
            send(board, built, console)
        report = StudyRun(args, folder, board, built, console).search()
        folder.write_json(STUDY_RECORD, identity | {"complete": report.complete})
        console.result("tune", report.result() | {"out": str(folder.path)})
    return 0
