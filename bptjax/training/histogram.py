"""Histograms of single values, such as the reward margins of held-out pairs: counts and charts."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bptjax.training.line_chart import Chart, line_chart

# Key of the reward margins' histogram in a record of metrics.jsonl, next to the names of metrics.
MARGINS = "margins"
# Widest range of the values and 0, in bins; and the least width of a bin.
BINS, LEAST_WIDTH = 40, 2.0**-10


def histogram(values: np.ndarray) -> dict[str, Any]:
    """Counts finite values in bins of equal width, a power of 2. A bin includes its upper edge, and
    0 is an edge, so a bin with values above 0 has no others. The bins reach at least to 0.

    Returns:
      `low`, the lower edge of the first bin; `width` of a bin; `counts` of the bins.
    """
    values = values.astype(np.float64)
    span = max(values.max(), 0.0) - min(values.min(), 0.0)
    width = 2.0 ** math.ceil(math.log2(max(span / BINS, LEAST_WIDTH)))
    bins = np.ceil(values / width).astype(np.int64) - 1
    first = min(int(bins.min()), 0)
    counts = np.bincount(bins - first, minlength=-first)
    return dict(low=first * width, width=width, counts=counts.tolist())


def histogram_chart(title: str, low: float, width: float, counts: Sequence[int]) -> Chart:
    """Lays out the chart of a `histogram`."""
    edges = low + width * np.arange(len(counts) + 1)
    heights = [0, *np.repeat(counts, 2).tolist(), 0]
    points = list(zip(edges.repeat(2).tolist(), heights, strict=True))
    chart = line_chart(title, {"": points}, levels={}, from_zero=True, by_step=False)
    chart.lines[0] |= dict(band=chart.lines[0]["points"], dots=False)
    return chart
