"""pareto.csv and pareto.png: which points nothing beats in samples/s, joules a sample and watts."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from host_control.power.selection import Selection, pareto
from host_control.power.table import PowerTable, megahertz
from host_control.run_folder import write_whole

PARETO_CSV, PARETO_PNG = "pareto.csv", "pareto.png"


def write_pareto(
    folder: Path, table: PowerTable, selection: Selection | None = None, limit: float | None = None
) -> None:
    """The file and the figure; with a selection, its points are named and the limit is drawn."""
    kept = pareto(table.points)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow("batch_size frequency_khz samples_per_s joules_per_sample watts source".split())
    for p in kept:
        rows.writerow(
            [p.batch_size, p.frequency_khz, p.samples_per_s, p.joules_per_sample, p.watts, table.source + table.labels]
        )
    write_whole(folder / PARETO_CSV, text.getvalue().encode())
    write_whole(folder / PARETO_PNG, _picture(table, selection, limit))


def _picture(table: PowerTable, selection: Selection | None, limit: float | None) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    front = {p.key for p in pareto(table.points)}
    for axes, name, title in ((left, "watts", "peak watts"), (right, "joules_per_sample", "joules a sample")):
        for batch_size in table.batch_sizes:
            row = sorted((p for p in table.points if p.batch_size == batch_size), key=lambda p: p.frequency_khz)
            axes.plot([getattr(p, name) for p in row], [p.samples_per_s for p in row], "-", linewidth=0.8, alpha=0.6)
            for on_front, marker in ((False, "x"), (True, "o")):
                some = [p for p in row if (p.key in front) == on_front]
                axes.plot([getattr(p, name) for p in some], [p.samples_per_s for p in some], marker, color="0.3")
            if row:
                axes.annotate(f"{batch_size}", (getattr(row[-1], name), row[-1].samples_per_s), fontsize=8)
        axes.set_xlabel(title + table.labels)
        axes.set_ylabel("samples/s" + (" (emulated)" if table.emulated else ""))
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    if limit is not None:
        left.axvline(limit, color="tab:red", linestyle="--", label=f"limit {limit:g} W")
    marks = (("baseline2", "tab:blue", 19), ("baseline1", "tab:orange", 15), ("choice", "tab:green", 11))
    for name, colour, size in marks:
        chosen = getattr(selection, name, None)
        if chosen is not None:
            p = chosen.point
            label = f"{name}: {p.batch_size}, {megahertz(p.frequency_khz)}"
            left.plot([p.watts], [p.samples_per_s], "o", markersize=size, fillstyle="none", color=colour, label=label)
    if left.get_legend_handles_labels()[0]:
        left.legend(fontsize=8)
    figure.suptitle(f"{table.model} on {table.board}: numbers are batch sizes, o what nothing beats", fontsize=10)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return data.getvalue()
