"""curves.png: loss and accuracy of training and test over epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from host_control.figure import new_figure, write_figure


def plot_curves(path: Path, records: Sequence[Mapping[str, Any]], title: str) -> Path:
    """Draw the records of a run (`metrics.read_records`)."""
    figure = new_figure(10, 4)
    axes = figure.subplots(1, 2)
    for axis, what in zip(axes, ("loss", "accuracy"), strict=True):
        steps, tests = (_points(records, event, what) for event in ("step", "eval"))
        axis.plot(*_columns(steps), color="C0", alpha=0.3, linewidth=0.8)
        axis.plot(*_columns(_epoch_means(steps)), "-", color="C0", label="training, mean of an epoch")
        axis.plot(*_columns(tests), "o-", color="C1", markersize=4, label="test")
        axis.set_xlabel("epoch")
        axis.set_ylabel(what)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(title)
    return write_figure(path, figure)


Points = list[tuple[float, float]]


def _points(records: Sequence[Mapping[str, Any]], event: str, what: str) -> Points:
    """(epoch, value) of the records that have both."""
    found = ((record.get("epoch"), record.get(what)) for record in records if record["event"] == event)
    return [(float(x), float(y)) for x, y in found if x is not None and y is not None]


def _epoch_means(points: Points) -> Points:
    """The mean over each epoch, at its end; epoch k ends at k."""
    epochs: dict[int, list[float]] = {}
    for epoch, value in points:
        epochs.setdefault(math.ceil(epoch - 1e-9), []).append(value)
    return [(min(float(end), points[-1][0]), sum(values) / len(values)) for end, values in epochs.items()]


def _columns(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
