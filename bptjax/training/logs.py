"""Logs of a run: metrics, predictions, progress."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from bptjax.parallel.distributed import all_gather_json
from bptjax.parsing.keys import flatten
from bptjax.run.checkpoint import Best
from bptjax.run.checkpoint_files import BEST
from bptjax.run.json_files import read_json
from bptjax.run.metrics import JsonlWriter, NullLogger, RunProgress, lost_records, read_metrics
from bptjax.run.trackers import Trackers
from bptjax.training.resume import Start
from bptjax.training.setup import TrainingRun

METRICS, PREDICTIONS, LOG = "metrics.jsonl", "predictions.jsonl", "log.txt"
TASK_ROWS = "tasks.jsonl"


@dataclass(frozen=True)
class Logs:
    """Logs of a run, written by the first process only.

    Attributes:
      sizes: returns the number of records of each file, and the bytes of log.txt.
    """

    metrics: JsonlWriter | Trackers | NullLogger
    predictions: JsonlWriter | NullLogger
    tasks: JsonlWriter | NullLogger
    progress: RunProgress | NullLogger
    sizes: Callable[[], dict[str, int]] = dict

    def rewind(self, step: int, saved: Mapping[str, int]) -> None:
        """Drops the records after `step`, at which the sizes were `saved`; the run will repeat
        them."""
        self.metrics.rewind(step, saved.get(METRICS))
        self.predictions.rewind(step, saved.get(PREDICTIONS))
        self.tasks.rewind(step, saved.get(TASK_ROWS))


def with_repeated_evaluation(run: TrainingRun, start: Start) -> Start:
    """Returns the start as if it had been saved after the evaluation of its step, if the evaluation
    failed before the save and succeeded when the run was resumed. All processes must call it."""
    if not start.extra.get("unevaluated", False):
        return start
    saved, keep = start.extra["logged"][METRICS], run.config.checkpoint.keep_best
    best = Best.continued(run.config.checkpoint.best_metric, start.extra["best"])
    metrics, named = run.directory / METRICS, run.directory / BEST
    found: list[Any] = [None, None]
    if jax.process_index() == 0 and metrics.exists():
        rows = [row for row in read_metrics(metrics) if row["step"] <= start.step]
        step = read_json(named)["step"] if keep and named.exists() else None
        found = [next(iter(rows[saved:]), None), step]
    row, step = all_gather_json(found)[0]
    if row is None:
        return start
    value = row.get(best.metric)
    best.add(start.step, math.nan if value is None else value)
    if keep and best.step == start.step != step:  # Killed before best.json was written.
        return start
    extra = dict(unevaluated=False, logged={METRICS: saved + 1}, best=vars(best))
    return start._replace(extra=start.extra | extra)


@contextmanager
def open_logs(run: TrainingRun, start: Start) -> Iterator[Logs]:
    """Opens the logs of a run that starts or resumes, and warns if records are missing. The values
    saved with the state name the `Logs.sizes` as `logged`; unknown for older runs."""
    null = NullLogger()
    if jax.process_index() != 0:
        yield Logs(null, null, null, null)
        return
    config, directory, resume_step = run.config, run.directory, start.step or None
    saved = start.extra.get("logged", {})
    lost = list(_lost(directory, start.step, saved)) if start.step else []
    writer = JsonlWriter(directory, resume_step=resume_step, saved=saved.get(METRICS))
    files = {METRICS: writer}
    for name, wanted in ((PREDICTIONS, run.eval_prompts), (TASK_ROWS, run.tasks)):
        if wanted:
            more: dict[str, Any] = dict(resume_step=resume_step, saved=saved.get(name))
            files[name] = JsonlWriter(directory, name=name, **more)
    predictions, tasks = files.get(PREDICTIONS, null), files.get(TASK_ROWS, null)

    def sizes():
        return {name: file.count for name, file in files.items()} | {LOG: _size(directory / LOG)}

    progress = RunProgress(directory, run.spec.steps)
    metrics: JsonlWriter | Trackers = writer
    writes = start.step < run.spec.steps or start.extra.get("unevaluated", False)
    if config.logging.report_to and writes:
        names, keys = config.logging.report_to, flatten(config)
        metrics = Trackers(writer, names, directory, keys, resume_step, progress.log)
    with ExitStack() as stack:
        stack.callback(metrics.close)
        stack.callback(predictions.close)
        stack.callback(tasks.close)
        stack.enter_context(progress)
        for line in lost:
            progress.log(line)
        yield Logs(metrics, predictions, tasks, progress, sizes)


def _lost(directory: Path, step: int, saved: Mapping[str, int]) -> Iterator[str]:
    """Yields a warning for each log with missing records."""
    for name, least in ((METRICS, None), (PREDICTIONS, 0), (TASK_ROWS, 0)):
        if line := lost_records(directory / name, step, saved.get(name, least)):
            yield line
    size, then = _size(directory / LOG), saved.get(LOG, 0)
    if size < then:
        yield f"warning: {LOG} lacks {then - size:,} of {then:,} bytes up to step {step:,}"


def _size(file: Path) -> int:
    """Returns the size of a file in bytes; 0 if there is none."""
    return file.stat().st_size if file.exists() else 0
