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


def mark_trained(axes: Any, length: int | None, longest: int, names: list[str], color: str) -> None:
    """Draws the line of a trained length, in tokens, if it is known and near the data, which end at
    `longest`: one far beyond would squeeze the plot.

    Args:
      names: what the legend says before the length.
    """
    if length is not None and length <= 1.25 * longest:
        mark(axes, length, ", ".join([*names, f"trained length, {length:,}"]), color)


def mark(axes: Any, x: float, label: str, color: str = "black") -> None:
    """Draws the line of a trained length at `x`."""
    axes.axvline(x, color=color, linestyle=":", linewidth=2, label=label)


def finish(axes: Any) -> None:
    """Adds a grid, and a legend below the axes, in which curves may go anywhere."""
    axes.grid(alpha=0.3)
    if any(axes.get_legend_handles_labels()):
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15))
