"""throughput.png: the curve of a study, with bs_opt, bs_peak and the plateau marked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from host_control.console import rate
from host_control.figure import new_figure, write_figure
from host_control.study_report import StudyReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, QUIET, LINE, ACCENT, SECOND, BAND = "#1f2933", "#7b8794", "#3e6fa3", "#c2410c", "#0f766e", "#f4e3d3"


def plot_throughput(path: Path, report: StudyReport) -> Path:
    """Draw samples/s over batch size (logarithmic) with the spread as error bars; written whole or not at all."""
    figure = new_figure(8, 4.6, dpi=150)
    axes = figure.add_subplot()
    _draw_curve(axes, report)
    _draw_marks(axes, report)
    _label(axes, report)
    return write_figure(path, figure)


def _draw_curve(axes: Axes, report: StudyReport) -> None:
    sizes = [row["batch_size"] for row in report.throughput]
    speeds = [row["samples_per_s"] for row in report.throughput]
    # Half the interquartile range to either side: what half of the windows showed.
    errors = [row["samples_per_s"] * row["spread"] / 2 for row in report.throughput]
    axes.errorbar(sizes, speeds, yerr=errors, fmt="none", ecolor=QUIET, elinewidth=1, capsize=2, zorder=2)
    axes.plot(sizes, speeds, "-", color=LINE, linewidth=1.4, zorder=3)
    axes.plot(*_points(report, tainted=False), "o", color=LINE, markersize=4.5, zorder=4)
    shaky = _points(report, tainted=True)
    if shaky[0]:
        axes.plot(*shaky, "o", color=LINE, markerfacecolor="white", markersize=4.5, zorder=4, label="disturbed")
        axes.legend(loc="lower right", frameon=False, fontsize=8)
    axes.set_ylim(0, max(speeds) * 1.22)


def _points(report: StudyReport, tainted: bool) -> tuple[list[int], list[float]]:
    rows = [row for row in report.throughput if row["tainted"] == tainted]
    return [row["batch_size"] for row in rows], [row["samples_per_s"] for row in rows]


def _draw_marks(axes: Axes, report: StudyReport) -> None:
    selection = report.selection
    low, high = selection.plateau
    if low < high:
        axes.axvspan(low, high, color=BAND, zorder=0)
        axes.text(
            (low * high) ** 0.5, 0.03, "as good as the best", transform=axes.get_xaxis_transform(), ha="center",
            color=ACCENT, fontsize=8, alpha=0.85,
        )  # fmt: skip
    best = report.row(selection.bs_opt)["samples_per_s"]
    axes.plot([selection.bs_opt], [best], "o", color=ACCENT, markersize=9, zorder=5)
    _annotate(axes, selection.bs_opt, best, f"bs_opt {selection.bs_opt}\n{rate(best)} samples/s", ACCENT, 16)
    if selection.bs_peak != selection.bs_opt:
        peak = report.row(selection.bs_peak)["samples_per_s"]
        axes.plot([selection.bs_peak], [peak], "D", color=SECOND, markersize=6, zorder=5)
        close = 0.5 < selection.bs_peak / selection.bs_opt < 2.2
        _annotate(axes, selection.bs_peak, peak, f"bs_peak {selection.bs_peak}", SECOND, -22 if close else 12)


def _annotate(axes: Axes, size: int, speed: float, text: str, color: str, above: float) -> None:
    axes.annotate(
        text, (size, speed), xytext=(0, above), textcoords="offset points", ha="center",
        va="bottom" if above > 0 else "top", color=color, fontsize=9, fontweight="bold", zorder=6,
    )  # fmt: skip


def _label(axes: Axes, report: StudyReport) -> None:
    """Title, axes and ticks; the title says 'emulated' where it was."""
    space = report.space
    axes.set_xscale("log", base=2)
    ticks = sorted({size for size in space.sizes if size & (size - 1) == 0} | {space.bs_max})
    axes.set_xticks(ticks, [str(size) for size in ticks])
    axes.minorticks_off()
    axes.set_xlim(space.sizes[0] / 1.3, space.bs_max * 1.3)
    axes.set_xlabel("batch size, samples a step", color=INK)
    axes.set_ylabel("emulated samples/s" if report.emulated else "samples/s", color=INK)
    what = "forward pass" if report.program == "eval" else "training"
    emulated = " (emulated)" if report.emulated else ""
    title = f"{report.model} on {report.board}: {what} throughput by batch size{emulated}"
    gain = f"{report.selection.speedup:.2f}x bs_max" if report.selection.speedup else "bs_max not measured"
    note = f"{len(report.throughput)} of {len(space)} sizes measured; bs_opt is {gain}; bars: interquartile range"
    axes.set_title(note, loc="left", fontsize=8.5, color=QUIET, pad=6)
    axes.figure.suptitle(title, x=0.012, ha="left", fontsize=11.5, color=INK, fontweight="bold")
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8, zorder=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
