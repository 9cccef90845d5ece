"""`train --compare`: effective batches that grow or stay, side by side; error over epochs and over seconds."""

from __future__ import annotations

import argparse
import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cross.errors import UsageError
from host_control.comparison import deviation, percent, spread
from host_control.console import duration, rate
from host_control.figure import new_figure, write_figure
from host_control.flags import positive
from host_control.run_folder import write_whole
from host_control.training.options import TrainOptions
from host_control.training.schedule import Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RUNS, COMPARISON_TABLE, COMPARISON_PICTURE = "compared.json", "comparison.csv", "comparison.png"
SEEDS = 3
GROWING, FIXED = "adabatch", "fixed:"
COLUMNS = ("setting", "seed", "epoch", "seconds", "error")


def compared(text: str) -> tuple[str, ...]:
    """'fixed:16,fixed:512,adabatch': names of settings, each once."""
    names = tuple(word if word == GROWING else FIXED + str(_size(word)) for word in text.split(","))
    if len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names a setting twice")
    return names


def _size(word: str) -> int:
    if not word.startswith(FIXED):
        raise argparse.ArgumentTypeError(f"{word!r} is no setting: use {GROWING} and {FIXED}N")
    return positive(word.removeprefix(FIXED))


def setting_options(name: str, growing: TrainOptions, samples: int) -> TrainOptions:
    """The options of a setting: `growing`, or the same rate and intervals with an effective batch that stays."""
    if name == GROWING:
        return growing
    size = int(name.removeprefix(FIXED))
    if size > samples:
        raise UsageError(f"{name} is more than the {samples} training samples. Use {FIXED}{samples} or less.")
    assert growing.adabatch is not None
    return replace(
        growing,
        batch_size=min(growing.batch_size, size),
        effective_batch=size,
        adabatch=replace(growing.adabatch, start=size, cap=size),
    )


def setting_flags(options: TrainOptions) -> dict[str, Any]:
    """The flags with which `train` alone does a run of these options."""
    plan = options.adabatch
    assert plan is not None
    return {
        "batch_schedule": GROWING,
        "effective_batch_start": plan.start,
        "effective_batch_cap": plan.cap,
        "batch_factor": plan.factor,
        "interval": plan.interval,
        "lr_decay": plan.lr_decay,
        "lr": options.lr,
        "epochs": None if options.steps else options.epochs,
        "seed": options.seed,
    }


def finished_run(result: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is kept of a run: `curve` holds [epoch, seconds of training, error] of every test."""
    curve = [
        [record["epoch"], record.get("seconds") or 0.0, 1 - record["accuracy"]]
        for record in records
        if record["event"] == "eval" and record.get("accuracy") is not None
    ]
    kept = ("test_accuracy", "samples_per_s", "sha256", "batch_size")
    return {name: result[name] for name in kept} | {"updates": result["steps"], "diverged": False, "curve": curve}


DIVERGED: dict[str, Any] = {"test_accuracy": None, "samples_per_s": None, "sha256": None, "diverged": True, "curve": []}


@dataclass(frozen=True)
class Outcome:
    """A setting and what `finished_run` kept of each seed, in their order."""

    name: str
    schedule: Schedule
    seeds: tuple[int, ...]
    runs: tuple[Mapping[str, Any], ...]

    def summary(self) -> dict[str, Any]:
        """One element of the result's `settings`. A diverged run has no accuracy: null in `values`, not in the mean."""
        options, whole = self.schedule.options, [run for run in self.runs if not run["diverged"]]
        assert options.adabatch is not None
        accuracies = [run["test_accuracy"] for run in self.runs]
        return {
            "name": self.name,
            "effective_batch": options.effective_batch,
            "effective_batch_cap": options.adabatch.cap,
            "batch_size": options.batch_size,
            "lr": options.lr,
            "error": spread([None if value is None else 1 - value for value in accuracies]),
            "test_accuracy": spread(accuracies),
            "updates": self.schedule.updates,
            "seconds": statistics.fmean(run["curve"][-1][1] for run in whole) if whole else None,
            "samples_per_s": statistics.fmean(run["samples_per_s"] for run in whole) if whole else None,
            "diverged": len(whole) < len(self.runs),
        }

    def points(self) -> list[tuple[float, float, float, float]]:
        """(epoch, mean seconds, mean error, its standard deviation) of every test, over the seeds that did not diverge."""
        tests: dict[float, list[tuple[float, float]]] = {}
        for run in self.runs:
            for epoch, seconds, error in [] if run["diverged"] else run["curve"]:
                tests.setdefault(epoch, []).append((seconds, error))
        columns = {epoch: tuple(zip(*found, strict=True)) for epoch, found in sorted(tests.items())}
        return [
            (epoch, statistics.fmean(seconds), statistics.fmean(errors), deviation(errors))
            for epoch, (seconds, errors) in columns.items()
        ]


def summary_table(
    summaries: Sequence[Mapping[str, Any]], emulated: bool
) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """Columns and rows for people."""
    columns = ("effective batch", "lr", "updates", "test error", "time", "samples/s")
    rows = [
        [
            s["name"],
            f"{s['lr']:g}",
            str(s["updates"]),
            percent(s["error"]) + (" diverged" if s["diverged"] else ""),
            "-" if s["seconds"] is None else duration(s["seconds"]) + (" emulated" if emulated else ""),
            "-" if s["samples_per_s"] is None else rate(s["samples_per_s"]),
        ]
        for s in summaries
    ]
    return [(name, "right") for name in columns], rows


def write_table(path: Path, outcomes: Sequence[Outcome]) -> Path:
    """comparison.csv: a row for each setting, seed and test."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for outcome in outcomes:
        for seed, run in zip(outcome.seeds, outcome.runs, strict=True):
            writer.writerows((outcome.name, seed, *point) for point in run["curve"])
    return write_whole(path, text.getvalue().encode())


def plot_comparison(path: Path, outcomes: Sequence[Outcome], title: str, emulated: bool) -> Path:
    """comparison.png: means over seeds, with one standard deviation to either side."""
    figure = new_figure(10, 4)
    axes = figure.subplots(1, 2, sharey=True)
    for axis, what, column in ((axes[0], "epochs", 0), (axes[1], "seconds of training", 1)):
        for number, outcome in enumerate(outcomes):
            _draw(axis, outcome, column, f"C{number % 10}")
        axis.set_xlabel(f"{what}, emulated" if emulated and column else what)
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("test error")
    axes[0].set_yscale("log")
    axes[0].legend(title="effective batch")
    figure.suptitle(title)
    return write_figure(path, figure)


def _draw(axis: Axes, outcome: Outcome, column: int, colour: str) -> None:
    points, plan = outcome.points(), outcome.schedule.options.adabatch
    assert plan is not None
    label = outcome.name if outcome.name != GROWING else f"{GROWING} {plan.start} to {plan.cap}"
    if not points:
        label += " (diverged)"
    # A logarithm has no zero: an error of nothing is drawn as a tenth of a per mille.
    x, means = [p[column] for p in points], [max(p[2], 1e-4) for p in points]
    low, high = ([max(p[2] + sign * p[3], 1e-4) for p in points] for sign in (-1, 1))
    axis.plot(x, means, "o-", color=colour, markersize=4, label=label)
    axis.fill_between(x, low, high, color=colour, alpha=0.15)
