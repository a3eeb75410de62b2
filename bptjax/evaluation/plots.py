"""Figures of evaluations."""

from typing import Any


def new_figure(width: float = 6.0) -> tuple[Any, Any]:
    """Returns a figure without a window, and its axes. `width` is in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def mark(axes: Any, x: float, trained: int) -> None:
    """Draws the line of the trained length, in tokens, at `x`."""
    axes.axvline(x, color="black", linestyle="--", label=f"trained length, {trained:,}")
    axes.legend(fontsize="small", loc="upper right")
