"""A running study as people see it: a live table on a terminal, plain lines elsewhere, events for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Group
from rich.live import Live
from rich.text import Text

from host_control.console import Console, duration, make_table, mib, rate
from host_control.search.forecast import Forecast
from host_control.search.selection import select
from host_control.search.strategy import summarise
from host_control.study import Trial
from host_control.study_report import StudyReport

COLUMNS = [("batch", "right"), ("samples/s", "right"), ("spread", "right"), ("peak", "right"), ("note", "left")]


class StudyView:
    """Listens to a `StudyLoop`."""

    def __init__(self, console: Console, region: Live | None, budget: int, trials: Sequence[Trial] = ()) -> None:
        self._console = console
        self._region = region
        self._budget = budget
        self._trials = list(trials)

    def started(self, batch_size: int, forecast: Forecast) -> None:
        self._redraw(f"measuring batch size {batch_size}", forecast)

    def finished(self, trial: Trial, forecast: Forecast) -> None:
        self._trials.append(trial)
        record = {} if trial.counters is None else asdict(trial.counters)
        self._console.event(
            "trial",
            number=trial.number,
            **{"batch_size": trial.batch_size, **record},
            note=trial.note,
            forecast_s=forecast.remaining_s,
        )
        if self._region is None:
            batch, samples_per_s, spread, peak, note = _cells(trial)
            again = sum(seen.batch_size == trial.batch_size and seen.counters is not None for seen in self._trials) > 1
            left = f", about {duration(forecast.remaining_s)} left" if forecast.remaining_sizes else ""
            progress = "second look" if again else f"{self._sizes()} of {self._budget} sizes{left}"
            self._console.line(
                f"batch size {batch}: {samples_per_s} samples/s, spread {spread}, peak {peak}"
                f"{', ' + note if note else ''} ({progress})"
            )
        self._redraw("", forecast)

    def waiting(self, seconds: float, reason: str) -> None:
        self._console.event("cool_down", seconds=seconds, reason=reason)
        if self._region is None:
            self._console.line(f"measured again in {duration(seconds)}: {reason}")

    def _sizes(self) -> int:
        return len({trial.batch_size for trial in self._trials if trial.counters or trial.plan_error})

    def _redraw(self, doing: str, forecast: Forecast) -> None:
        if self._region is None:
            return
        left = f"about {duration(forecast.remaining_s)} left" if forecast.known else "forecast after the first size"
        status = f"{self._sizes()} of {self._budget} sizes, {left}" + (f"; {doing}" if doing else "")
        rows = [_cells(trial) for trial in sorted(self._trials, key=lambda trial: trial.batch_size)]
        self._region.update(Group(make_table(COLUMNS, rows), Text(status)))


def print_report(console: Console, report: StudyReport, sentences: Sequence[str]) -> None:
    """The final table, then what it means."""
    marks = {report.selection.bs_peak: "bs_peak", report.selection.bs_opt: "bs_opt"}
    rows = []
    for row in report.throughput:
        note = ", ".join(
            part
            for part in (
                marks.get(row["batch_size"], ""),
                "bs_max" if row["batch_size"] == report.space.bs_max else "",
                f"mean of {row['measurements']}" if row["measurements"] > 1 else "",
                "disturbed" if row["tainted"] else "",
            )
            if part
        )
        peak = mib(row["peak_rss_bytes"]) if row["peak_rss_bytes"] else "-"
        rows.append([str(row["batch_size"]), rate(row["samples_per_s"]), f"{row['spread']:.1%}", peak, note])
    columns = [(heading.replace("samples/s", _speed(report)), side) for heading, side in COLUMNS]
    console.table(columns, rows)
    for sentence in sentences:
        console.line(sentence)


def _speed(report: StudyReport) -> str:
    return "emulated samples/s" if report.emulated else "samples/s"


def _cells(trial: Trial) -> list[str]:
    if trial.counters is None:
        return [str(trial.batch_size), "-", "-", "-", trial.note]
    counters = trial.counters
    peak = mib(counters.peak_rss_bytes) if counters.peak_rss_bytes else "-"
    note = ("emulated" if counters.emulated else "") or trial.note
    return [str(trial.batch_size), rate(counters.samples_per_s), f"{counters.spread:.1%}", peak, note]


def best_so_far(trials: Sequence[Trial], bs_max: int) -> str:
    """One clause on an interrupted study."""
    history = [seen for seen in (trial.observation() for trial in trials) if seen is not None]
    results = summarise(history)
    if not results:
        return "no size was measured yet"
    selection = select(results, bs_max)
    return f"best so far: batch size {selection.bs_opt}, {rate(results[selection.bs_opt].samples_per_s)} samples/s"
