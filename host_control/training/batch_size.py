"""`--batch-size auto`: the size that a study of this very build on this board found, or finds now."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cross.errors import UnstableError
from host_control.console import Console, duration
from host_control.preparation import Built, session_memory
from host_control.run_folder import RUNS, RunFolder, default_folder
from host_control.search.space import memory_budget
from host_control.search.strategies import DEFAULT

if TYPE_CHECKING:
    from host_control.boards import DeployedBoard

STUDY_TIME_S = 300.0
"""Longest study that `train` runs by itself; `tune` takes longer and finds better."""


@dataclass(frozen=True)
class Choice:
    """A batch size and where it comes from: 'flag', or the folder of the study."""

    batch_size: int
    source: str


def find_study(built: Built, board: str, args: argparse.Namespace, runs: Path = RUNS) -> Choice | None:
    """bs_opt of the newest complete study of this build on this board with the same threads and cores, or None."""
    for file in sorted(runs.glob("*/study.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        folder = file.parent
        study, result, record = (_read(folder / name) for name in ("study.json", "result.json", "environment.json"))
        build = record.get("build") or {}
        alike = all(build.get(key) == built.manifest.get(key) for key in ("model", "target", "version", "build_id"))
        cores = list(args.cores) if args.cores else None
        same_run = study.get("threads") == args.threads and study.get("cores") == cores
        if alike and same_run and study.get("complete") and record.get("board_name") == board:
            if result.get("program") == "train" and isinstance(result.get("bs_opt"), int):
                return Choice(result["bs_opt"], str(folder))
    return None


def choose_batch_size(
    args: argparse.Namespace, board: DeployedBoard, built: Built, largest: int, console: Console
) -> Choice:
    """--batch-size, or that of a study; one is run first where there is none. That of a study is never above `largest`, nor
    above what fits now."""
    if isinstance(args.batch_size, int):
        return Choice(args.batch_size, "flag")
    found = find_study(built, board.name, args)
    if found is None:
        found = _run_study(args, board, built, largest, console)
    else:
        console.line(f"batch size {found.batch_size}: bs_opt of {found.source}")
    if found.batch_size > largest:
        console.line(f"batch size {largest} instead of {found.batch_size}: no more than the effective batch")
    chosen = min(found.batch_size, largest)
    fits = _largest_that_fits(args, board, built)
    if built.minimum_batch <= fits < chosen:
        console.line(f"batch size {fits} instead of {chosen}: what fits in the memory that is free now")
        chosen = fits
    return Choice(chosen, found.source)


def _largest_that_fits(args: argparse.Namespace, board: DeployedBoard, built: Built) -> int:
    """0 where nothing does: the board says so, with numbers."""
    budget = memory_budget(board.facts().memory_available_bytes, args.memory)
    # Gradients that are added up over micro-batches come on top of the closed form.
    sums = 4 * int(built.manifest.get("trained_parameters") or 0)
    return sys.maxsize if budget is None else session_memory(board.info(), "train").largest(budget - sums)


def _run_study(args: argparse.Namespace, board: DeployedBoard, built: Built, largest: int, console: Console) -> Choice:
    from host_control.study_run import STUDY_RECORD, StudyRun, study_identity

    console.line(f"no study of this build on {board.name} yet: one is run first, at most {duration(STUDY_TIME_S)}")
    own: dict[str, Any] = {
        "build": None,
        "out": None,
        "search": DEFAULT,
        "inference": False,
        "max_batch_size": max(largest, built.minimum_batch),
        "time_budget": STUDY_TIME_S,
        "seconds": 1.0,
    }
    settings = argparse.Namespace(**{**vars(args), **own})
    with RunFolder(default_folder(f"{Path(args.model).stem}-tune", args.board)) as folder:
        try:
            StudyRun(settings, folder, board, built, console).search()
        except UnstableError as error:
            # A busy board still trains; the study is not complete, so that the next run measures again.
            console.line(f"warning: {error} This run goes on with the best of what was measured.")
        else:
            # Short of its time a study still says which of the sizes it measured was best.
            folder.write_json(STUDY_RECORD, study_identity(settings) | {"complete": True})
        result = folder.read_json("result.json") or {}
        return Choice(int(result["bs_opt"]), str(folder.path))


def _read(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
