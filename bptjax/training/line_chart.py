"""Line charts of metrics: positions of lines, ticks and bands in an SVG of fixed size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Size of the image, and margins of the plot inside it: left, top, right, bottom.
SIZE, MARGINS = (420, 230), (58, 10, 16, 26)
# A longer line is drawn as means of this many groups of points, in a band from minimum to maximum.
POINTS = 300


@dataclass(frozen=True)
class Chart:
    """A chart, in pixels of the SVG.

    Attributes:
      title: title, with the unit.
      label: title and horizontal axis.
      x_ticks, y_ticks: positions and labels.
      lines: name, points and band of each line; short lines have dots.
      levels: name and height of each horizontal line.
    """

    title: str
    label: str
    size: tuple[int, int] = SIZE
    box: tuple[int, int, int, int] = (
        *MARGINS[:2],
        SIZE[0] - MARGINS[0] - MARGINS[2],
        SIZE[1] - MARGINS[1] - MARGINS[3],
    )
    x_ticks: list[tuple[float, str]] = field(default_factory=list)
    y_ticks: list[tuple[float, str]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    levels: list[tuple[str, float]] = field(default_factory=list)


def line_chart(
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    levels: Mapping[str, float],
    from_zero: bool,
    by_step: bool = True,
) -> Chart:
    """Lays out a chart.

    Args:
      lines: finite (x, y) points of each line, by name; at least one line has points.
      levels: heights of horizontal lines, by name.
      from_zero: whether the vertical axis starts at 0.
      by_step: whether x is the optimizer step. Otherwise y is a number of things.
    """
    from matplotlib.ticker import MaxNLocator

    groups = {name: _groups(points) for name, points in lines.items() if len(points)}
    each = np.concatenate([*groups.values()])
    heights = [*each[:, 2:].ravel(), *levels.values(), *[0.0] * from_zero]
    chart = Chart(title, title + " by optimizer step" * by_step)
    left, upper, width, height = chart.box
    x_ticks, y_ticks = (
        MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=integer).tick_values(*_range(values))
        for values, integer in ((each[:, 0], by_step), (heights, not by_step))
    )
    (x0, x1), (y0, y1) = _range(each[:, 0]), (y_ticks[0], y_ticks[-1])

    def across(values):
        return (left + (np.asarray(values) - x0) / (x1 - x0) * width).round(1).tolist()

    def up(values):
        return (upper + (y1 - np.asarray(values)) / (y1 - y0) * height).round(1).tolist()

    chart.x_ticks.extend((across(x), f"{x:,.7g}") for x in x_ticks if x0 <= x <= x1)
    chart.y_ticks.extend((up(y), f"{y:,.7g}") for y in y_ticks)
    for name, line in groups.items():
        points = list(zip(across(line[:, 0]), up(line[:, 1]), strict=True))
        low, high = (list(zip(across(line[:, 0]), up(line[:, i]), strict=True)) for i in (2, 3))
        band = [] if len(lines[name]) <= POINTS else low + high[::-1]
        chart.lines.append(dict(name=name, points=points, band=band, dots=len(points) <= 30))
    chart.levels.extend((name, up(value)) for name, value in levels.items())
    return chart


def _groups(points: Sequence[tuple[float, float]]) -> np.ndarray:
    """Returns the means of x and y, and the minimum and maximum of y, of up to `POINTS` groups of
    points: float64 `[n, 4]`."""
    groups = np.array_split(np.asarray(points, np.float64), min(len(points), POINTS))
    return np.array([(*g.mean(0), g[:, 1].min(), g[:, 1].max()) for g in groups])


def _range(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Returns the minimum and the maximum, which is raised if both are equal."""
    low, high = float(min(values)), float(max(values))
    return (low, high) if low < high else (low, low + (abs(low) or 1))
