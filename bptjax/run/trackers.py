"""Sends the metrics to experiment trackers. A failing tracker never stops a run."""

import math
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from bptjax.run.metrics import JsonlWriter

Name = Literal["tensorboard", "wandb"]
# Maximum number of records that wait for a tracker, and seconds to wait for it at the end of a run.
WAITING, CLOSING = 1000, 10.0


class Trackers:
    """A `JsonlWriter` that also sends the metrics to trackers, each on its own thread.

    A tracker may hang as well as raise: on a network, on a disk, or on a full queue. After its
    first failure, which prints one warning, a tracker gets no more records.

    Args:
      names: trackers to open.
      config: keys and values to show with the metrics.
      resume_step: step after which the run continues; None for a new run.
      log: prints a line.
    """

    def __init__(
        self,
        writer: JsonlWriter,
        names: list[Name],
        run_dir: Path,
        config: Mapping[str, Any],
        resume_step: int | None,
        log: Callable[[str], None],
    ):
        self._writer = writer
        self._open = lambda step: [
            _Tracker(name, run_dir, config, step, log) for name in dict.fromkeys(names)
        ]
        self._trackers = self._open(resume_step)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._writer.write(step, metrics)
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if not isinstance(value, str | dict)
        }
        for tracker in self._trackers:
            tracker.put((step, numbers))

    def rewind(self, step: int, saved: int | None = None) -> None:
        """Continues after `step`, like a resumed run."""
        self._writer.rewind(step, saved)
        for tracker in self._trackers:
            tracker.close()
        self._trackers = self._open(step or None)

    def close(self) -> None:
        self._writer.close()
        for tracker in self._trackers:
            tracker.close()


class _Tracker:
    """One tracker and its thread."""

    def __init__(self, name: Name, run_dir, config, resume_step, log):
        self._name, self._log, self._failed = name, log, threading.Event()
        self._records: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(WAITING)
        arguments = (OPEN[name], run_dir, config, resume_step)
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._thread.start()

    def put(self, record: tuple[int, dict[str, float]] | None) -> None:
        """Hands a record to the thread; None ends the thread."""
        if self._failed.is_set():
            return
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._fail(f"{WAITING} records wait for it")

    def close(self) -> None:
        self.put(None)
        if self._failed.is_set():
            return
        self._thread.join(CLOSING)
        if self._thread.is_alive():
            self._fail(f"it did not finish within {CLOSING:g} s")

    def _run(self, opened, run_dir, config, resume_step) -> None:
        try:
            write, close = opened(run_dir, config, resume_step)
            while (record := self._records.get()) is not None:
                write(*record)
            close()
        except Exception as error:  # Third-party code may raise any exception.
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            self._fail(reason)

    def _fail(self, reason: str) -> None:
        if not self._failed.is_set():
            self._failed.set()
            self._log(
                f"warning: logging.report_to: {self._name} failed ({reason}); the run continues "
                "without it"
            )


def _tensorboard(run_dir: Path, config: Mapping[str, Any], resume_step: int | None):
    """Opens TensorBoard event files in `<run_dir>/tensorboard`."""
    try:
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
    except ImportError as error:
        raise ImportError(f'{error}; pip install -e ".[tensorboard]"') from error

    directory = run_dir / "tensorboard"
    directory.mkdir(exist_ok=True)
    # Not a SummaryWriter: its thread only prints errors, and then its queue fills and blocks. The
    # suffix distinguishes event files of the same second.
    events = EventsWriter(str(directory / "events"), f".{uuid.uuid4().hex[:8]}")
    if resume_step is not None:
        # Make TensorBoard drop the steps that the run repeats.
        start = SessionLog(status=SessionLog.START)
        events.write_event(Event(step=resume_step + 1, session_log=start))

    def write(step: int, numbers: dict[str, float]) -> None:
        now = time.time()
        for name, value in numbers.items():
            event = Event(step=step, wall_time=now, summary=summary.scalar(name, value))
            events.write_event(event)
        events.flush()

    return write, events.close


def _wandb(run_dir: Path, config: Mapping[str, Any], resume_step: int | None):
    """Opens a Weights & Biases run named after the run directory. A resumed run continues it."""
    try:
        import wandb
    except ImportError as error:
        raise ImportError(f'{error}; pip install -e ".[wandb]"') from error

    online = wandb.setup().settings.mode in (None, "online")
    # Otherwise wandb would ask for a key on the terminal.
    if online and not wandb.login(prompt=False):
        raise RuntimeError("no API key; run `wandb login`, or set WANDB_MODE=offline")
    file = run_dir / "wandb_id"
    if resume_step is None or not file.exists():
        file.write_text(uuid.uuid4().hex)
    run = wandb.init(
        dir=str(run_dir),
        id=file.read_text().strip(),
        resume="allow",
        name=run_dir.name,
        config=dict(config),
        settings=wandb.Settings(silent=True, console="off"),
    )
    # wandb's own step must increase, but a resumed run repeats some steps.
    run.define_metric("*", step_metric="step")

    def write(step: int, numbers: dict[str, float]) -> None:
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        run.log({"step": step} | finite)

    return write, run.finish


OPEN = {"tensorboard": _tensorboard, "wandb": _wandb}
