"""The report of `bptjax profile`: tables, plots and CSV files of time by part and of memory."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bptjax.cost.devices import GIB
from bptjax.cost.timeline import KINDS

Row = dict[str, Any]
# Colors of `KINDS`.
PALETTE = "#4c72b0", "#8da0cb", "#b3b3b3", "#dd8452", "#55a868", "#c44e52", "#ccb974"
COLORS = dict(zip(KINDS, PALETTE, strict=True))


def write_csv(rows: list[Row], file: Path) -> None:
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def memory_table(rows: list[Row]) -> Table:
    """Returns a table of each kind of memory, at the step's peak and at the kind's own peak."""
    peak = max(rows, key=_device_bytes)
    columns = f"at the peak ({peak['phase']})", "most in the step"
    shown = plain_table("Memory of a step per device, GiB", "", *columns)
    for kind in (*COLORS, "host"):
        most = max(row[kind] for row in rows)
        if most >= _device_bytes(peak) / 1000:
            shown.add_row(kind, _gib(peak[kind]), _gib(most))
    total = _gib(_device_bytes(peak))
    shown.add_row("device", total, total)
    return shown


def time_table(rows: list[Row], passes: Sequence[str]) -> Table:
    """Returns a table of milliseconds by part and pass, with the floor of each part."""
    shown = plain_table("Time of a step, ms", "", *passes, "all", "share", "floor", "floor/time")
    total = sum(row["seconds"] for row in rows)
    for part in (*dict.fromkeys(row["part"] for row in rows), None):
        of = [row for row in rows if part in (None, row["part"])]
        seconds = sum(row["seconds"] for row in of)
        floors = [row["floor"] for row in of if row["floor"] is not None]
        cells = [sum(row["seconds"] for row in of if row["pass"] == name) for name in passes]
        shown.add_row(
            part or "step",
            *(f"{1e3 * cell:,.1f}" if cell else "" for cell in cells),
            f"{1e3 * seconds:,.1f}",
            f"{seconds / total:.0%}",
            f"{1e3 * sum(floors):,.1f}" if floors else "",
            f"{sum(floors) / seconds:.0%}" if floors and seconds else "",
        )
    return shown


def table_lines(table: Table) -> list[str]:
    """Formats a table as lines of text."""
    shown = io.StringIO()
    Console(file=shown, width=100).print(table)
    return [line.rstrip() for line in shown.getvalue().splitlines()]


def plain_table(title: str, *columns: str) -> Table:
    """Returns a table without lines. The first column has no name."""
    shown = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        shown.add_column(name, justify="right" if name else "left", no_wrap=True)
    return shown


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size >= GIB else f"{size / GIB:.3g}"


def _device_bytes(row: Row) -> float:
    return sum(row[kind] for kind in COLORS)


def plot_memory(panels: dict[str, list[Row]], file: Path, title: str = "") -> None:
    """Plots memory over the progress of a step, with one panel per title."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.6 + 3.6 * len(panels)), layout="constrained")
    figure.suptitle(title)
    grid = figure.subplots(len(panels), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    most = max(_device_bytes(row) for rows in panels.values() for row in rows) / GIB
    for axes, (name, rows) in zip(grid, panels.items(), strict=True):
        # A row holds until the next one.
        ends = [row["progress"] for row in rows] + [1.0]
        below = [0.0] * len(ends)
        for kind, color in COLORS.items():
            sizes = [row[kind] / GIB for row in rows]
            above = [a + b for a, b in zip(below, [*sizes, sizes[-1]], strict=True)]
            if max(sizes) >= most / 200:
                axes.fill_between(
                    ends, below, above, step="post", color=color, label=kind, linewidth=0
                )
            below = above
        if any(row["host"] for row in rows):
            host = [row["host"] / GIB for row in [*rows, rows[-1]]]
            axes.step(ends, host, where="post", color="black", linestyle=":", label="host memory")
        peak = max(rows, key=_device_bytes)
        size = _device_bytes(peak) / GIB
        axes.axhline(size, color="0.3", linewidth=0.8, linestyle="--")
        axes.annotate(
            f"peak {size:.3g} GiB", (0.005, size), (0, 3), textcoords="offset points", fontsize=9
        )
        starts = {row["phase"]: row["progress"] for row in reversed(rows)}
        for phase, start in starts.items():
            axes.axvline(start, color="0.3", linewidth=0.8)
            axes.annotate(
                phase, (start, 1.0), (3, -12), xycoords=("data", "axes fraction"),
                textcoords="offset points", fontsize=9,
            )  # fmt: skip
        axes.set(title=name, ylabel="GiB per device", xlim=(0, 1), ylim=(0, 1.22 * most))
        axes.spines[["top", "right"]].set_visible(False)
    grid[-1].set_xlabel("progress of the step, as a share of its least time at data-sheet rates")
    legend = {}
    for axes in grid:
        handles, labels = axes.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    figure.legend(
        list(legend.values())[::-1], list(legend)[::-1], loc="outside right center", frameon=False
    )
    FigureCanvasAgg(figure).print_png(file, pil_kwargs={"optimize": True})


def plot_time(rows: list[Row], passes: Sequence[str], file: Path, title: str) -> None:
    """Plots milliseconds by part, stacked by pass, above the floor of each part."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    parts = list(dict.fromkeys(row["part"] for row in rows))
    figure = Figure(figsize=(9, 1.2 + 0.55 * len(parts)), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="ms")
    left = dict.fromkeys(parts, 0.0)
    for number, name in enumerate(passes):
        milliseconds = {row["part"]: 1e3 * row["seconds"] for row in rows if row["pass"] == name}
        widths = [milliseconds.get(part, 0.0) for part in parts]
        if any(widths):
            axes.barh(
                [n - 0.15 for n in range(len(parts))], widths, 0.45, list(left.values()),
                color=f"C{number}", label=name,
            )  # fmt: skip
        left = {part: left[part] + width for part, width in zip(parts, widths, strict=True)}
    total = sum(left.values())
    for n, part in enumerate(parts):
        text = f" {left[part]:,.1f} ms, {left[part] / total:.0%}"
        axes.text(left[part], n - 0.15, text, va="center", fontsize=9)
    floors = [
        sum(1e3 * row["floor"] for row in rows if row["part"] == part and row["floor"] is not None)
        for part in parts
    ]
    if any(floors):
        at = [n + 0.2 for n in range(len(parts))]
        axes.barh(at, floors, 0.2, color="0.6", label="floor at data-sheet rates")
    axes.set_yticks(range(len(parts)), parts)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(left.values()))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False)
    FigureCanvasAgg(figure).print_png(file)
