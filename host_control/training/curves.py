"""curves.png: loss and accuracy of training and test over epochs."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from host_control.run_folder import write_whole


def plot_curves(path: Path, records: Sequence[Mapping[str, Any]], title: str) -> Path:
    """Draw the records of a run (`metrics.read_records`)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    for axis, what in zip(axes, ("loss", "accuracy"), strict=True):
        for event, label, style in (("step", "training", "-"), ("eval", "test", "o-")):
            points = [(r["epoch"], r[what]) for r in records if r["event"] == event and r.get(what) is not None]
            points = [(x, y) for x, y in points if x is not None]
            if points:
                axis.plot(*zip(*points, strict=True), style, label=label, markersize=4, linewidth=1)
        axis.set_xlabel("epoch")
        axis.set_ylabel(what)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    figure.suptitle(title)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return write_whole(path, data.getvalue())
