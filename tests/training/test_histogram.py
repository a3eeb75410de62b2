"""Histograms: values in their bins, whatever the range, and the outline of the chart."""

from itertools import pairwise

import numpy as np
import pytest

from bptjax.training.histogram import BINS, histogram, histogram_chart

CASES = {
    "zeros": [0.0] * 5,
    "small": [-1e-7, 1e-7, 0.0],
    "positive": [7.0, 7.5, 100.0],
    "negative": [-3.0, -2.5],
    "edges": np.arange(-20, 21) / 8,
    "normal": np.random.default_rng(0).normal(1, 2, 10_000).astype(np.float32),
    "huge": [1e30, -1e30],
}


@pytest.mark.parametrize("name", CASES)
def test_each_value_is_in_its_bin(name):
    values = np.array(CASES[name])
    low, width, counts = histogram(values).values()
    edges = low + width * np.arange(len(counts) + 1)
    assert len(counts) <= BINS + 2 and edges[0] <= 0 <= edges[-1] and 0 in edges
    assert counts == [((a < values) & (values <= b)).sum() for a, b in pairwise(edges)]
    assert sum(np.array(counts)[edges[:-1] >= 0]) == (values > 0).sum()
    # A range is not in a few bins.
    assert len(counts) > BINS / 2 or abs(values).max() < 0.01


def test_the_chart_has_a_step_for_each_bin():
    chart = histogram_chart("pairs", -0.5, 0.5, [1, 0, 4])
    left, top, width, height = chart.box
    (line,) = chart.lines
    x, y = np.array(line["points"]).T
    assert np.allclose(x, left + width / 3 * np.arange(4).repeat(2), atol=0.1)
    assert np.allclose(y, top + height * (1 - np.array([0, 1, 1, 0, 0, 4, 4, 0]) / 4), atol=0.1)
    assert line["band"] == line["points"] and not line["dots"]
    assert [label for _, label in chart.x_ticks] == ["-0.5", "0", "0.5", "1"]
    assert [label for _, label in chart.y_ticks] == ["0", "1", "2", "3", "4"]
    assert chart.label == "pairs"
