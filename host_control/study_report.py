"""What a study leaves for people and scripts: the result, trials.csv, and the record of where it was measured."""

from __future__ import annotations

import csv
import io
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any

from cross.version import VERSION
from host_control.console import duration, mib, rate
from host_control.run_folder import now_utc, write_whole
from host_control.search.selection import Selection, select
from host_control.search.space import SearchSpace
from host_control.search.strategy import summarise
from host_control.study import Trial

_COUNTERS = (
    "samples_per_s",
    "spread",
    "forward_s",
    "backward_s",
    "optimizer_s",
    "peak_rss_bytes",
    "planned_bytes",
    "page_faults",
    "emulated",
    "tainted",
)


@dataclass(frozen=True)
class StudyReport:
    """A study's outcome. `plan_errors`: sizes that the plan said fit and the board said do not."""

    selection: Selection
    space: SearchSpace
    budget: int
    throughput: tuple[dict[str, Any], ...]
    plan_errors: tuple[int, ...]
    complete: bool
    emulated: bool
    program: str
    board: str
    model: str
    seed: int

    def result(self) -> dict[str, Any]:
        """The fields of interface.md, and a few more."""
        selection = self.selection
        return {
            "model": self.model,
            "board": self.board,
            "program": self.program,
            "emulated": self.emulated,
            "bs_opt": selection.bs_opt,
            "bs_peak": selection.bs_peak,
            "bs_max": self.space.bs_max,
            "plateau": list(selection.plateau),
            "verdict": selection.verdict,
            "speedup": selection.speedup,
            "budget": self.budget,
            "space_size": len(self.space),
            "limited_by": self.space.limited_by,
            "complete": self.complete,
            "seed": self.seed,
            "plan_errors": list(self.plan_errors),
            "throughput": list(self.throughput),
        }

    def row(self, batch_size: int) -> dict[str, Any]:
        """The throughput row of a measured size."""
        return next(row for row in self.throughput if row["batch_size"] == batch_size)


def make_report(
    trials: Sequence[Trial],
    space: SearchSpace,
    *,
    budget: int,
    complete: bool,
    program: str,
    board: str,
    model: str,
    seed: int,
) -> StudyReport:
    """Report on a study with at least one measurement; sizes measured more than once are averaged."""
    kept = [trial for trial in trials if trial.counters is not None]
    observations = [seen for seen in (trial.observation() for trial in kept) if seen is not None]
    results = summarise(observations)
    rows = []
    for size, result in results.items():
        counters = [trial.counters for trial in kept if trial.batch_size == size and trial.counters is not None]
        counters = [one for one in counters if not one.tainted] or counters
        rows.append(
            {
                "batch_size": size,
                "samples_per_s": result.samples_per_s,
                "spread": result.spread,
                "peak_rss_bytes": max(one.peak_rss_bytes for one in counters),
                "planned_bytes": max(one.planned_bytes for one in counters),
                "tainted": any(one.tainted for one in counters),
                "measurements": result.measurements,
                "step_s": size / result.samples_per_s if result.samples_per_s else None,
                "forward_s": fmean(one.forward_s for one in counters),
                "backward_s": fmean(one.backward_s for one in counters),
                "optimizer_s": fmean(one.optimizer_s for one in counters),
            }
        )
    return StudyReport(
        selection=select(results, space.bs_max),
        space=space,
        budget=budget,
        throughput=tuple(rows),
        plan_errors=tuple(sorted({trial.batch_size for trial in trials if trial.plan_error})),
        complete=complete,
        emulated=any(trial.counters.emulated for trial in kept if trial.counters is not None),
        program=program,
        board=board,
        model=model,
        seed=seed,
    )


def verdict_sentences(report: StudyReport) -> list[str]:
    """What the study found, in sentences with numbers."""
    selection, space = report.selection, report.space
    best, speed = report.row(selection.bs_opt), "emulated samples/s" if report.emulated else "samples/s"
    sentences = [
        f"bs_opt {selection.bs_opt}: {rate(best['samples_per_s'])} {speed} on {report.board}"
        + (f", {selection.speedup:.2f}x bs_max ({space.bs_max})" if selection.speedup and not _at_end(report) else "")
        + "."
    ]
    if selection.verdict == "plateau" and not _at_end(report):
        sentences.append(_plateau_gain(report))
    elif _at_end(report):
        sentences.append(
            f"The largest size was the fastest ({space.bs_max}, set by "
            + ("the memory of the board" if space.limited_by == "memory" else "--max-batch-size")
            + "): there is nothing to gain from a smaller batch."
        )
    if selection.bs_peak != selection.bs_opt:
        peak = report.row(selection.bs_peak)
        gap = peak["samples_per_s"] / best["samples_per_s"] - 1
        sentences.append(f"The plain best was bs_peak {selection.bs_peak}, {gap:.1%} faster: within the noise.")
    if report.plan_errors:
        sizes = ", ".join(map(str, report.plan_errors))
        sentences.append(f"Plan error: batch size {sizes} should fit by the plan, but the board had no memory for it.")
    if not report.complete:
        sentences.append(
            "The time budget ran out: this is the best so far. Run the same command with the same --out to go on."
        )
    return sentences


def _at_end(report: StudyReport) -> bool:
    return report.selection.bs_opt == report.space.bs_max


def _plateau_gain(report: StudyReport) -> str:
    """What a small batch gains where throughput is flat: memory and latency, not throughput."""
    low, high = report.row(report.selection.bs_opt), report.throughput[-1]
    latency = f"{_step(low['step_s'])} a step instead of {_step(high['step_s'])}"
    memory = ""
    if low["peak_rss_bytes"] and high["peak_rss_bytes"]:
        memory = f"{mib(low['peak_rss_bytes'])} instead of {mib(high['peak_rss_bytes'])}, and "
    return (
        f"Throughput is flat from {low['batch_size']} to {high['batch_size']} samples: what bs_opt gains is memory and "
        f"latency ({memory}{latency}), not throughput."
    )


def _step(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s" if seconds < 90 else duration(seconds)


def write_trials(path: Path, trials: Sequence[Trial]) -> Path:
    """Every trial in order, one line each; times in seconds, sizes in bytes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", "state", "batch_size", *_COUNTERS, "seconds", "started", "note"])
    for trial in trials:
        record = {} if trial.counters is None else asdict(trial.counters)
        values = [record.get(name, "") for name in _COUNTERS]
        state = "complete" if trial.counters is not None else "fail"
        writer.writerow(
            [trial.number, state, trial.batch_size, *values, f"{trial.seconds:.3f}", trial.started, trial.note]
        )
    return write_whole(path, text.getvalue().encode())


def environment(command: Sequence[str], facts: Mapping[str, Any] | None, **more: Any) -> dict[str, Any]:
    """Where, with what and how a study was measured: facts of the board, versions, the command, the date."""
    packages = ("optuna", "numpy", "matplotlib", "paramiko", "apache-tvm", "ziglang")
    return {
        "date": now_utc(),
        "command": list(command),
        "host": {"python": sys.version.split()[0], "system": platform.platform(), "machine": platform.machine()},
        "versions": {"taste-edge": VERSION} | {name: _version(name) for name in packages},
        "board": dict(facts) if facts is not None else None,
        **more,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
