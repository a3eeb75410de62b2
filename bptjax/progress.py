"""Progress of long work: a bar with the time left on a terminal, else a line every 30 seconds."""

import sys
import time
from datetime import timedelta
from typing import Any

# Seconds before the bar appears, so that short work shows none, and seconds between plain lines.
SILENT, EVERY = 1.0, 30.0


class Progress:
    """Shows on stderr how much of `total` is done. A context manager."""

    def __init__(self, description: str, total: float):
        self._description, self._total, self._done = description, total, 0.0
        self._start = time.monotonic()
        self._next_line = self._start + EVERY
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def describe(self, description: str) -> None:
        """Sets the description of the work that follows."""
        self._description = description
        self._show()

    def advance(self, amount: float = 1.0) -> None:
        self._done += amount
        self._show()

    def _show(self) -> None:
        now = time.monotonic()
        if not sys.stderr.isatty():
            if now >= self._next_line:
                self._next_line = now + EVERY
                print(self._line(now - self._start), file=sys.stderr, flush=True)
            return
        if self._bar is None and now - self._start >= SILENT:
            from rich.console import Console
            from rich.progress import Progress as ProgressBar

            self._bar = ProgressBar(console=Console(stderr=True), transient=True)
            self._bar.add_task(self._description, total=self._total)
            self._bar.start()
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, description=self._description, completed=self._done)

    def _line(self, elapsed: float) -> str:
        share = self._done / self._total if self._total else 1.0
        text = f"{self._description}: {share:.0%}"
        if share:
            text += f", {timedelta(seconds=round(elapsed * (1 / share - 1)))} left"
        return text
