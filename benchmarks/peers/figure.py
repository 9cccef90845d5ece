"""Throughput over batch size, a line an engine, as PNG."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from host_control.run_folder import write_whole

COLOURS = ("#c2410c", "#3e6fa3", "#0f766e", "#7b8794", "#8b5cf6")
"""Ours first, then peers in the order they were asked for."""


def plot(path: Path, result: dict[str, Any]) -> Path:
    """Draw samples/s over batch size (logarithmic); written whole or not at all. Disturbed points are hollow."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    engines = list(dict.fromkeys(row["engine"] for row in result["rows"]))
    for engine, colour in zip(engines, COLOURS, strict=False):
        rows = [row for row in result["rows"] if row["engine"] == engine and row["samples_per_s"]]
        rows.sort(key=lambda row: row["batch_size"])
        sizes, rates = [row["batch_size"] for row in rows], [row["samples_per_s"] for row in rows]
        axes.plot(sizes, rates, "-", color=colour, linewidth=1.4, label=engine)
        for row in rows:
            face = "white" if row["tainted"] else colour
            axes.plot(row["batch_size"], row["samples_per_s"], "o", color=colour, markerfacecolor=face, markersize=4.5)
    axes.set_xscale("log", base=2)
    shown = sorted({row["batch_size"] for row in result["rows"]})
    axes.set_xticks(shown, labels=[str(size) for size in shown])
    axes.set_xlabel("batch size")
    axes.set_ylabel("training samples/s")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{result['model']}, {result['threads']} threads", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return write_whole(path, image.getvalue())
