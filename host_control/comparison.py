"""Settings side by side, each with several seeds: what is finished is not done again, and what the runs add up to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from host_control.run_folder import RunFolder

Run = dict[str, Any]


def run_each(folder: RunFolder, record: str, runs: Mapping[str, Callable[[], Run]]) -> dict[str, Run]:
    """The result of every run by its key; those that the file `record` holds already are taken from there."""
    done = folder.read_json(record) or {}
    for key, one in runs.items():
        if key not in done:
            done[key] = one()
            folder.write_json(record, done)
    return done


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """`mean`, `std` (of a sample; 0 for one) and `values`; null means of nothing."""
    found = [value for value in values if value is not None]
    mean = statistics.fmean(found) if found else None
    return {"mean": mean, "std": deviation(found) if found else None, "values": list(values)}


def deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def percent(found: Mapping[str, Any]) -> str:
    """A spread of fractions as '93.1% +- 0.4%', '-' where there is none."""
    return "-" if found["mean"] is None else f"{found['mean']:.1%} +- {found['std']:.1%}"
