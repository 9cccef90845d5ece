"""Figures without a display: made, and written whole or not at all."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from host_control.run_folder import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float, dpi: int = 120) -> Figure:
    """An empty white figure of so many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def write_figure(path: Path, figure: Figure) -> Path:
    """As PNG."""
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return write_whole(path, data.getvalue())
