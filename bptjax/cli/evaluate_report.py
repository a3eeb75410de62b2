"""Tables and plots of `bptjax evaluate`."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bptjax.run.output import plural


def perplexity_table(rows: list[dict[str, Any]]) -> Table:
    """Returns a table with a row for each range of positions."""
    shown = Table(title=f"Perplexity by position ({plural(rows[0]['documents'], 'document')})")
    for name in ("positions", "loss (nats per token)", "perplexity"):
        shown.add_column(name, justify="right")
    for row in rows:
        positions = f"{row['start']:,} to {row['end']:,}"
        shown.add_row(positions, f"{row['loss']:.4f}", f"{row['perplexity']:.4g}")
    return shown


def passkey_table(rows: list[dict[str, Any]]) -> Table:
    """Returns a table of found and hidden keys by length and depth. The longer axis is vertical."""
    title = "Pass keys found, by prompt length (tokens) and depth of the key"
    shown = Table(title=title, min_width=min(len(title) + 4, 80))
    lengths, depths, cells = _grid(rows)
    columns, lines = [f"{n:,}" for n in lengths], [f"{d:g}" for d in depths]
    corner = "depth \\ tokens"
    if len(lengths) > len(depths):
        columns, lines, corner = lines, columns, "tokens \\ depth"
        cells = {(i, j): text for (j, i), text in cells.items()}
    for name in (corner, *columns):
        shown.add_column(name, justify="right")
    for i, line in enumerate(lines):
        shown.add_row(line, *(cells[i, j] for j in range(len(columns))))
    return shown


def _grid(rows: list[dict[str, Any]]) -> tuple[list[int], list[float], dict]:
    """Returns lengths, depths, and "found/hidden" by (index of depth, index of length)."""
    lengths, depths = (sorted({row[key] for row in rows}) for key in ("length", "depth"))
    cells = {
        (depths.index(row["depth"]), lengths.index(row["length"])): (
            f"{round(row['accuracy'] * row['trials'])}/{row['trials']}"
        )
        for row in rows
    }
    return lengths, depths, cells


def plot_perplexity(rows: list[dict[str, Any]], file: Path, trained: int | None) -> None:
    """Plots perplexity against position; a line marks the trained length, in tokens."""
    figure, axes = _figure()
    edges = [row["start"] for row in rows] + [rows[-1]["end"]]
    axes.stairs([row["perplexity"] for row in rows], edges, baseline=None, linewidth=2)
    axes.set(
        xlabel="position (tokens)",
        ylabel="perplexity",
        title=f"Perplexity by position ({plural(rows[0]['documents'], 'document')})",
    )
    axes.grid(alpha=0.3)
    # A mark far beyond the data would squeeze them.
    if trained is not None and trained <= 1.25 * edges[-1]:
        _mark(axes, trained, trained)
    figure.savefig(file, dpi=120)


def plot_passkey(rows: list[dict[str, Any]], file: Path, trained: int | None) -> None:
    """Plots keys found by length and depth; a line separates lengths beyond the trained length."""
    lengths, depths, cells = _grid(rows)
    figure, axes = _figure(max(6.0, 0.8 * len(lengths) + 2.5))
    grid = np.zeros((len(depths), len(lengths)))
    for row in rows:
        grid[depths.index(row["depth"]), lengths.index(row["length"])] = row["accuracy"]
    image = axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for (i, j), text in cells.items():
        axes.text(j, i, text, ha="center", va="center", fontsize="small")
    axes.set(
        xlabel="prompt length (tokens)",
        ylabel="depth of the key (0 start, 1 end)",
        title="Pass keys found",
    )
    axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    axes.set_yticks(range(len(depths)), [f"{d:.2f}" for d in depths])
    figure.colorbar(image, label="share of keys found")
    within = sum(n <= trained for n in lengths) if trained is not None else len(lengths)
    if trained is not None and within < len(lengths):
        _mark(axes, within - 0.5, trained)
    figure.savefig(file, dpi=120)


def _figure(width: float = 6.0) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _mark(axes: Any, x: float, trained: int) -> None:
    axes.axvline(x, color="black", linestyle="--", label=f"trained length, {trained:,}")
    axes.legend(fontsize="small", loc="upper right")
