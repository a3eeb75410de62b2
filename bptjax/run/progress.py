"""Progress of long work with the time left; announcements of compilations."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import Any

from bptjax.run.heartbeat import beat

# Seconds before the first line or the bar, so that short work shows none; and between lines.
FIRST, EVERY = 5.0, 10.0


class Progress:
    """Shows how much of `total` is done: on stderr, as a bar on a terminal and as lines elsewhere;
    or as lines through `show`. A context manager."""

    def __init__(self, description: str, total: float, show: Callable[[str], None] | None = None):
        self._description, self._total, self._done = description, total, 0.0
        self._show = show
        self._start = monotonic()
        self._next_line = self._start + FIRST
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        beat(self._description)
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def describe(self, description: str) -> None:
        """Describes the work that follows."""
        self._description = description
        self._update()

    def advance(self, amount: float = 1.0) -> None:
        self._done += amount
        self._update()

    def _update(self) -> None:
        beat(self._description)
        now = monotonic()
        if self._bar is not None:
            self._move_bar()
        elif now >= self._next_line and self._done < self._total:
            self._next_line = now + EVERY
            if self._show is not None:
                self._show(self._line(now - self._start))
            elif sys.stderr.isatty():
                self._start_bar()
            else:
                print(self._line(now - self._start), file=sys.stderr, flush=True)

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import Progress as ProgressBar

        self._bar = ProgressBar(console=Console(stderr=True), transient=True)
        self._bar.add_task(self._description, total=self._total)
        self._move_bar()
        self._bar.start()

    def _move_bar(self) -> None:
        task = self._bar.task_ids[0]
        self._bar.update(task, description=self._description, completed=self._done)

    def _line(self, elapsed: float) -> str:
        share = self._done / self._total
        text = f"{self._description}: {share:.0%}"
        if share:
            text += f", {timedelta(seconds=round(elapsed * (1 / share - 1)))} left"
        return text


class Compilations:
    """Announces compilations, whose progress cannot be measured, with the duration of the last one.

    Attributes:
      seconds: duration of the last compilation; None if unknown.
    """

    def __init__(self, say: Callable[[str], None], seconds: float | None = None):
        self._say, self.seconds = say, seconds

    @contextmanager
    def announce(self, text: str) -> Iterator[None]:
        """Prints `text` and the duration of the last compilation, and times this compilation."""
        if self.seconds is not None:
            text += f"; the last compilation took {self.seconds:.0f} s"
        beat(text)
        self._say(text)
        start = monotonic()
        yield
        self.seconds = monotonic() - start
