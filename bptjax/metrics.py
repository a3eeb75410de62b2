"""What a run tells: metrics.jsonl, progress on the terminal, tokens per second, the loss curve."""

import json
import math
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar


def read_metrics(path: Path | str) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl, in order. Half-written lines are left out."""
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and "step" in record:
                yield record


class JsonlWriter:
    """Appends one JSON object a record to `<run_dir>/<name>`, on disk when `write` returns.

    Continues after `resume_step`: the records of later steps, which the run will take again, are
    dropped. None starts an empty file.
    """

    def __init__(
        self, run_dir: Path | str, *, name: str = "metrics.jsonl", resume_step: int | None = None
    ):
        path = Path(run_dir) / name
        kept = []
        if resume_step is not None and path.exists():
            kept = [r for r in read_metrics(path) if r["step"] <= resume_step]
        rewritten = path.with_suffix(".tmp")
        rewritten.write_text("".join(json.dumps(record) + "\n" for record in kept))
        rewritten.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Values are numbers, arrays of one, or texts. JSON has no NaN: non-finite values become
        null.
        """
        record = {name: _plain(value) for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **record}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Throughput:
    """Tokens per second and seconds per step over the last `window` steps.

    The first step compiles and is left out. The caller counts tokens without padding.
    """

    def __init__(self, *, window: int = 20, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._steps: deque[tuple[float, int]] = deque(maxlen=window)
        self._last: float | None = None

    def step(self, tokens: int) -> None:
        """A step over `tokens` tokens has just finished."""
        now = self._clock()
        if self._last is not None:
            self._steps.append((now - self._last, tokens))
        self._last = now

    def resume(self) -> None:
        """The time since the last step was not training (evaluation, a checkpoint): forget it."""
        if self._last is not None:
            self._last = self._clock()

    def metrics(self, steps_left: int) -> dict[str, float]:
        """Empty until two steps are done."""
        seconds = sum(seconds for seconds, _ in self._steps)
        if not seconds:
            return {}
        step_time = seconds / len(self._steps)
        return {
            "throughput/tokens_per_second": sum(tokens for _, tokens in self._steps) / seconds,
            "throughput/step_time": step_time,
            "run/eta_seconds": step_time * steps_left,
        }


class Progress:
    """Steps, loss, tokens per second and time left: a live bar on a terminal, else plain lines.

    Plain lines come with the first update, then at most one each `every` seconds, and with the
    last. A context manager; the terminal is restored however the block ends.
    """

    def __init__(
        self,
        run_dir: Path | str,
        total: int,
        *,
        console: Console | None = None,
        every: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._log = Path(run_dir) / "log.txt"
        self._total = total
        self._every = every
        self._clock = clock
        # A stated False, because FORCE_COLOR would make rich take a pipe for a terminal.
        self._console = console or Console(force_terminal=None if sys.stdout.isatty() else False)
        self._printed = self._spoke = -math.inf
        self._pending: str | None = None
        self._bar: Bar | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(None))
            tail = TextColumn("{task.fields[tail]}", markup=False)
            self._bar = Bar(*columns, tail, console=self._console, refresh_per_second=4)
            self._task = self._bar.add_task(f"step 0/{total}", total=total, tail="")

    def __enter__(self) -> "Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error) -> None:
        if self._bar:
            self._bar.stop()
        elif self._pending:
            self._print(self._pending)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows `train/loss` and, where they are given, what `Throughput.metrics` gives."""
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
        if step >= self._total or self._clock() - self._printed >= self._every:
            self._print(self._pending)
            self._pending, self._printed = None, self._clock()

    def status(self, text: str) -> None:
        """Shows what is being done between steps: in the bar, or a line each `every` seconds."""
        if self._bar:
            self._bar.update(self._task, tail=text)
        elif self._clock() - self._spoke >= self._every:
            self._print(text)

    def log(self, line: str) -> None:
        """Prints a line, above the bar where there is one, and appends it to log.txt."""
        self._print(line)
        with self._log.open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {line}\n")

    def _print(self, line: str) -> None:
        self._spoke = self._clock()
        self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)


class NullLogger:
    """A `JsonlWriter` and `Progress` that write nothing, for all processes but the first."""

    def __enter__(self) -> "NullLogger":
        return self

    def __exit__(self, *error) -> None:
        pass

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        pass

    update = write

    def status(self, text: str) -> None:
        pass

    def log(self, line: str) -> None:
        pass

    def close(self) -> None:
        pass


def plot_loss(metrics_jsonl: Path | str, out_png: Path | str, title: str = "") -> Any:
    """Draws `train/loss` and `eval/loss` against tokens seen, or steps where no tokens are noted.

    A record without `train/tokens_seen` stands at the count of the record before it. Returns the
    matplotlib figure.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = list(read_metrics(metrics_jsonl))
    tokens = any("train/tokens_seen" in record for record in records)
    key, label = ("train/tokens_seen", "tokens seen") if tokens else ("step", "optimizer steps")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel=label, ylabel="loss (nats per token)")
    # A directory's name may hold $, matplotlib's mark of a formula, and letters that no font has.
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
    """The text without control characters, which would steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
