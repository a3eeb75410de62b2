"""Outputs of a run: metrics.jsonl, progress on the terminal, tokens per second, the loss curve."""

import itertools
import json
import math
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as ProgressBar

from bptjax.run.output import write_atomically
from bptjax.run.progress import EVERY


def read_metrics(path: Path | str) -> Iterator[dict[str, Any]]:
    """Yields the records of a metrics.jsonl in order, without half-written or damaged lines."""
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and _is_record(record):
                yield record


def _is_record(record: dict[str, Any]) -> bool:
    """Returns whether the step and the metrics (names with a slash) have values that a run
    writes."""
    step = record.get("step")
    return (
        type(step) is int
        and 0 <= step < 2**31
        and all(
            value is None or type(value) in (int, float) and abs(value) < 1e300
            for name, value in record.items()
            if "/" in name
        )
    )


def lost_records(file: Path, step: int, saved: int | None) -> str | None:
    """Returns a warning if a file lacks records up to a step; None if it does not.

    Args:
      saved: number of records when the step was saved; None if unknown: then one record is enough.
    """
    records = [r for r in read_metrics(file) if r["step"] <= step] if file.exists() else []
    wanted = 1 if saved is None else saved
    if len(records) >= wanted:
        return None
    steps = {r["step"] for r in records if "train/loss" in r} or {r["step"] for r in records}
    edges = sorted({0, step + 1} | steps)
    every = min((b - a for a, b in itertools.pairwise(sorted(steps))), default=1)
    gaps = [(a + 1, b - 1) for a, b in itertools.pairwise(edges) if b - a > every]
    ranges = [f"{a:,}" if a == b else f"{a:,} to {b:,}" for a, b in gaps]
    shown = ", ".join(ranges[:3]) + f" and {len(ranges) - 3} more" * (len(ranges) > 3)
    count = f"{wanted - len(records):,} of {wanted:,} records" if saved else "the records"
    which = f" of steps {shown}" if ranges else ""
    return f"warning: {file.name} lacks {count} up to step {step:,}{which}; the run continues"


class JsonlWriter:
    """Writer of `<run_dir>/<name>`, one JSON object per record, on disk when `write` returns.

    Continues after `resume_step`, and drops the records of later steps and those after the first
    `saved`, which the run will repeat. With None, starts an empty file, and drops none.

    Attributes:
      count: number of records in the file.
    """

    def __init__(
        self,
        run_dir: Path | str,
        *,
        name: str = "metrics.jsonl",
        resume_step: int | None = None,
        saved: int | None = None,
    ):
        self._path = Path(run_dir) / name
        self._file = self._open(resume_step, saved)

    def _open(self, resume_step: int | None, saved: int | None) -> TextIO:
        records = []
        if resume_step is not None and self._path.exists():
            records = [r for r in read_metrics(self._path) if r["step"] <= resume_step][:saved]
        self.count = len(records)
        write_atomically(self._path, "".join(json.dumps(record) + "\n" for record in records))
        return self._path.open("a", encoding="utf-8")

    def rewind(self, step: int, saved: int | None = None) -> None:
        """Drops the records that a run resumed at `step` would drop."""
        self._file.close()
        self._file = self._open(step, saved)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes a record of numbers, arrays with one element, strings, and dicts for JSON. Numbers
        that are not finite become null, because JSON has no NaN."""
        record = {name: _plain(value) for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **record}, allow_nan=False) + "\n")
        self._file.flush()
        self.count += 1

    def close(self) -> None:
        self._file.close()


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Throughput:
    """Tokens per second and seconds per step over the last `window` steps.

    The first step does not count, because it compiles. The caller counts tokens without padding.
    """

    def __init__(self, *, window: int = 20, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._steps: deque[tuple[float, int]] = deque(maxlen=window)
        self._last: float | None = None

    def step(self, tokens: int) -> None:
        """Counts a step over `tokens` tokens, which has just finished."""
        now = self._clock()
        if self._last is not None:
            self._steps.append((now - self._last, tokens))
        self._last = now

    def resume(self) -> None:
        """Discards the time since the last step, which was spent on other work (evaluation, a
        checkpoint)."""
        if self._last is not None:
            self._last = self._clock()

    def skip(self) -> None:
        """Leaves the next step out of the averages."""
        self._last = None

    def metrics(self, steps_left: int) -> dict[str, float]:
        """Returns the metrics; empty until two steps are done."""
        seconds = sum(seconds for seconds, _ in self._steps)
        if not seconds:
            return {}
        step_time = seconds / len(self._steps)
        return {
            "throughput/tokens_per_second": sum(tokens for _, tokens in self._steps) / seconds,
            "throughput/step_time": step_time,
            "run/eta_seconds": step_time * steps_left,
        }


class RunProgress:
    """Progress of a run (step, loss, tokens per second, time left): a live bar, or plain lines.

    The bar needs a terminal. Plain lines are printed for the first and the last update, and at most
    once every `EVERY` seconds in between. A context manager that always restores the terminal.
    """

    def __init__(
        self,
        run_dir: Path | str,
        total: int,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._run_dir = Path(run_dir)
        self._total = total
        self._clock = clock
        # Pass False explicitly, because FORCE_COLOR would make rich treat a pipe as a terminal.
        self._console = console or Console(force_terminal=None if sys.stdout.isatty() else False)
        self._last_update = -math.inf
        self._pending: str | None = None
        self._bar: ProgressBar | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(None))
            tail = TextColumn("{task.fields[tail]}", markup=False)
            self._bar = ProgressBar(*columns, tail, console=self._console, refresh_per_second=4)
            self._task = self._bar.add_task(f"step 0/{total}", total=total, tail="")

    def __enter__(self) -> "RunProgress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error) -> None:
        if self._bar:
            self._bar.stop()
        elif self._pending:
            self._print(self._pending)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows `train/loss` and, if there are any, the results of `Throughput.metrics`."""
        head = f"step {step}/{self._total}"
        parts = [f"loss {float(metrics['train/loss']):.4f}"]
        if "throughput/tokens_per_second" in metrics:
            parts.append(f"{metrics['throughput/tokens_per_second']:,.0f} tokens/s")
        if "run/eta_seconds" in metrics:
            parts.append(f"{timedelta(seconds=round(metrics['run/eta_seconds']))} left")
        if self._bar:
            tail = "  ".join(parts)
            self._bar.update(self._task, completed=step, description=head, tail=tail)
            return
        self._pending = "  ".join([head, *parts])
        if step >= self._total or self._clock() - self._last_update >= EVERY:
            self._print(self._pending)
            self._pending, self._last_update = None, self._clock()

    def status(self, text: str) -> None:
        """Shows the work between steps, in the bar or as a line."""
        if self._bar:
            self._bar.update(self._task, tail=text)
        else:
            self._print(text)

    def log(self, line: str) -> None:
        """Prints a line, above any bar, and appends it to log.txt."""
        self._print(line)
        append_log(self._run_dir, line)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)


def append_log(run_dir: Path, line: str) -> None:
    """Appends a line to log.txt."""
    with (run_dir / "log.txt").open("a", encoding="utf-8") as file:
        file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {line}\n")


class NullLogger:
    """A `JsonlWriter` and `RunProgress` that write nothing, for processes other than the first."""

    def __enter__(self) -> "NullLogger":
        return self

    def _ignore(self, *arguments: Any) -> None:
        pass

    __exit__ = write = update = rewind = status = log = close = _ignore


def plot_loss(metrics_jsonl: Path | str, out_png: Path | str, title: str = "") -> Any:
    """Draws `train/loss` and `eval/loss` against tokens seen. Returns the matplotlib figure.

    If no record has `train/tokens_seen`, the losses are drawn against steps. Otherwise, a record
    without it is drawn at the count of the previous record.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = list(read_metrics(metrics_jsonl))
    tokens = any("train/tokens_seen" in record for record in records)
    key, label = ("train/tokens_seen", "tokens seen") if tokens else ("step", "optimizer steps")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel=label, ylabel="loss (nats per token)")
    # The title is a directory name: it may hold $, which starts a formula in matplotlib, and
    # characters that no font has.
    axes.set_title(title, parse_math=False)
    for name, meaning in (("train/loss", "training"), ("eval/loss", "held-out data")):
        x, points = 0, []
        for record in records:
            x = record.get(key, x)
            if name in record:
                points.append((x, math.nan if record[name] is None else record[name]))
        if points:
            marker = "o" if name == "eval/loss" or len(points) == 1 else None
            axes.plot(*zip(*points, strict=True), marker=marker, label=f"{name} ({meaning})")
    if axes.lines:
        axes.legend()
    axes.grid(alpha=0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        FigureCanvasAgg(figure).print_png(out_png)
    return figure


def printable(text: str) -> str:
    """Returns the text without control characters, which would affect the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
