"""Scores the answers of all data with the model at the start of a run, for losses that compare a
model with it."""

import signal
from collections.abc import Iterator
from functools import partial

import jax
import numpy as np

from bptjax.data.examples import Example, blank, sequence
from bptjax.data.grouping import stacked
from bptjax.data.packing import pack
from bptjax.data.references import FILE, REFERENCE, key_of
from bptjax.objectives.preferences import AnswersObjective
from bptjax.parallel.distributed import all_reduce_max, raise_together
from bptjax.run.metrics import NullLogger, RunProgress
from bptjax.run.output import plural, replaced_files
from bptjax.run.progress import Progress
from bptjax.training.setup import TrainingRun
from bptjax.training.state import TrainState
from bptjax.training.step import answer_scorer

# The keys of the examples of a sequence, in order, and the sequence.
Keyed = tuple[list[bytes], Example]


def load_references(run: TrainingRun) -> None:
    """Reads the log-probabilities that a run has stored. A resumed run must do so before it reads
    data.

    Raises:
      ValueError: the file is damaged.
    """
    path = run.directory / FILE
    with raise_together():
        if REFERENCE in run.spec.encoding.fields and path.exists():
            run.spec.references.load(path)


def complete_references(
    run: TrainingRun,
    state: TrainState,
    step: int,
    progress: RunProgress | NullLogger,
    stopped: list[int],
) -> int:
    """Scores the answers of the training and held-out data before the first step, and stores the
    log-probabilities in the run directory. Does nothing if the objective does not read them.

    Returns:
      The number of a signal in `stopped` of any process, after which nothing is stored; else 0.

    Raises:
      ValueError: the run is resumed, and the file is missing.
    """
    if REFERENCE not in run.spec.encoding.fields:
        return 0
    path = run.directory / FILE
    if step:
        with raise_together():
            if not path.exists():
                raise ValueError(
                    f"{path}: must be there to resume step {step}; restore it, or choose another "
                    "run_dir"
                )
        return 0
    assert isinstance(run.spec.objective, AnswersObjective)
    logps: dict[bytes, np.ndarray] = {}
    answers = run.spec.objective.answers
    score, spec, total = answer_scorer(run.spec), run.spec, run.check.total or 0
    with jax.set_mesh(spec.mesh), Progress("scoring", total, progress.status) as shown:
        for keys, batch in _batches(run):
            if number := int(all_reduce_max(max(stopped, default=0), spec.mesh)):
                name = signal.Signals(number).name
                progress.log(f"{name}: stopping; the next start scores all answers again")
                return number
            scores = np.asarray(score(state.model, spec.layout.put(batch)))
            for own, values in zip(keys, scores, strict=True):
                each = values[: answers * len(own)].reshape(-1, answers)
                logps |= {key: x.copy() for key, x in zip(own, each, strict=True)}
                shown.advance(len(own))
    scored = plural(len(logps), f"different {run.spec.objective.unit}")
    progress.log(f"reference: scored {scored} once, in {path}")
    run.spec.references.fill(logps)
    with raise_together():
        if jax.process_index() == 0:
            with replaced_files(run.directory) as fresh:
                run.spec.references.save(fresh / FILE)
    return 0


def _batches(run: TrainingRun) -> Iterator[tuple[list[list[bytes]], Example]]:
    """Yields all examples in packed batches `[B, T]`, with their keys in each sequence."""
    seq_len, size, rows = run.config.train.seq_len, run.spec.micro_batch_size, []
    for records in run.check.records:
        examples = records.epoch(0, 0, 1, seed=None)
        layout = partial(_keyed, seq_len=seq_len)
        for row in pack(examples, packing="best_fit", seq_len=seq_len, layout=layout):
            rows.append(row)
            if len(rows) == size:
                yield _stacked(rows)
                rows = []
    if rows:
        nothing = sequence([blank(rows[0][1])], seq_len)
        yield _stacked([*rows, *[([], nothing)] * (size - len(rows))])


def _keyed(examples: list[Example], seq_len: int) -> Keyed:
    return [key_of(example) for example in examples], sequence(examples, seq_len)


def _stacked(rows: list[Keyed]) -> tuple[list[list[bytes]], Example]:
    return [keys for keys, _ in rows], stacked([own for _, own in rows])
