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
    or as lines through `show`. A context manager.

    The time left is estimated without the first piece of work, which may compile, so it is not
    shown before the second one.
    """

    def __init__(self, description: str, total: float, show: Callable[[str], None] | None = None):
        self._description, self._total, self._done = description, total, 0.0
        self._show = show
        self._next_line = monotonic() + FIRST
        # The end of the first piece of work: the time, and the amount done.
        self._first: tuple[float, float] | None = None
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
        if self._done and self._first is None:
            self._first = now, self._done
        if self._bar is not None:
            self._move_bar()
        elif now >= self._next_line and self._done < self._total:
            self._next_line = now + EVERY
            if self._show is not None:
                self._show(self._line(now))
            elif sys.stderr.isatty():
                self._start_bar()
            else:
                print(self._line(now), file=sys.stderr, flush=True)

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

    def _line(self, now: float) -> str:
        text = f"{self._description}: {self._done / self._total:.0%}"
        if self._first is not None and self._done > self._first[1]:
            start, before = self._first
            seconds = (now - start) / (self._done - before) * (self._total - self._done)
            text += f", {timedelta(seconds=round(seconds))} left"
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
