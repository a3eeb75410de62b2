"""Figures of evaluations."""

from typing import Any


def new_figure(width: float = 6.0, panels: int = 1, height: float = 3.8) -> tuple[Any, list[Any]]:
    """Returns a figure without a window, and the axes of its panels, side by side. `width` and
    `height` are those of a panel, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(panels * width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, panels, squeeze=False)[0].tolist()


def mark(axes: Any, x: float, label: str, color: str = "black") -> None:
    """Draws the line of a trained length at `x`."""
    axes.axvline(x, color=color, linestyle=":", linewidth=2, label=label)
