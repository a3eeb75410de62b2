"""Figures of evaluations."""

from typing import Any


def new_figure(width: float = 6.0, panels: int = 1) -> tuple[Any, list[Any]]:
    """Returns a figure without a window, and the axes of its panels, side by side. `width` is that
    of a panel, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(panels * width, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, panels, squeeze=False)[0].tolist()


def mark(axes: Any, x: float, trained: int) -> None:
    """Draws the line of the trained length, in tokens, at `x`."""
    axes.axvline(x, color="black", linestyle="--", label=f"trained length, {trained:,}")
    axes.legend(fontsize="small", loc="upper right")
