"""Logs of a run: metrics, predictions, progress."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import jax

from bptjax.config import flatten
from bptjax.metrics import JsonlWriter, NullLogger, RunProgress
from bptjax.trackers import Trackers
from bptjax.training.setup import TrainingRun


@dataclass(frozen=True)
class Logs:
    """Logs of a run. Only the first process writes them."""

    metrics: JsonlWriter | Trackers | NullLogger
    predictions: JsonlWriter | NullLogger
    progress: RunProgress | NullLogger

    def rewind(self, step: int) -> None:
        """Drops the records of later steps, which the run will repeat."""
        self.metrics.rewind(step)
        self.predictions.rewind(step)


@contextmanager
def open_logs(run: TrainingRun, start: int) -> Iterator[Logs]:
    """Opens the logs of a run that starts or resumes at step `start`."""
    null = NullLogger()
    if jax.process_index() != 0:
        yield Logs(null, null, null)
        return
    config, directory, resume_step = run.config, run.directory, start or None
    writer = JsonlWriter(directory, resume_step=resume_step)
    predictions: JsonlWriter | NullLogger = null
    if run.eval_prompts:
        predictions = JsonlWriter(directory, name="predictions.jsonl", resume_step=resume_step)
    progress = RunProgress(directory, run.spec.steps)
    metrics: JsonlWriter | Trackers = writer
    if config.logging.report_to and start < run.spec.steps:
        names, keys = config.logging.report_to, flatten(config)
        metrics = Trackers(writer, names, directory, keys, resume_step, progress.log)
    with ExitStack() as stack:
        stack.callback(metrics.close)
        stack.callback(predictions.close)
        stack.enter_context(progress)
        yield Logs(metrics, predictions, progress)
