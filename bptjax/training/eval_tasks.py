"""Tasks that a run measures at each evaluation: train.eval_tasks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from bptjax.config import Config
from bptjax.data.tokenizer import Tokenizer
from bptjax.models.config import ModelConfig
from bptjax.models.decoder import Decoder
from bptjax.run.progress import Progress
from bptjax.tasks import TASKS, task_names
from bptjax.tasks.sample import Sampler, encoder
from bptjax.tasks.scores import Scores, answers, falls
from bptjax.training.spec import TrainSpec
from bptjax.training.state import TrainState

# Mean score of all tasks and lengths. Each score has the name of its task and length after it.
METRIC = "eval/tasks"


def open_tasks(config: Config, model: ModelConfig, tokenizer: Tokenizer) -> list[Sampler]:
    """Returns the samples of each task and length, in the chat template if there is one. Makes
    first samples now, so that a length that is too short fails at the start.

    Raises:
      ValueError: a length is too short for a task or exceeds the model's learned positions, the
        tokenizer cannot encode a task, or the chat template cannot write its answer.
    """
    train, most = config.train, model.max_position_embeddings
    lengths = sorted({*train.eval_task_lengths}) or [train.seq_len]
    if not train.eval_tasks:
        return []
    key = "train.eval_task_lengths" if train.eval_task_lengths else "train.seq_len"
    if model.position_embedding == "learned" and lengths[-1] > (most or 0):
        raise ValueError(f"{key}={lengths[-1]}: must be at most {most}, the model's positions")
    how: dict[str, Any] = dict(tokenizer=tokenizer, seed=config.data.seed, key=key)
    try:
        how["encode"] = encoder(tokenizer, tokenizer.chat_template is not None)
        names = task_names(train.eval_tasks, "train.eval_tasks")
        return [Sampler(name, TASKS[name], n, **how) for n in lengths for name in names]
    except ValueError as error:
        if str(error).startswith(key):
            raise
        raise ValueError(f"train.eval_tasks: {error}") from error


def task_metrics(tasks: Sequence[Sampler]) -> list[str]:
    """Returns the names of the metrics of the tasks."""
    names = [f"{METRIC}/{task.name}/{task.length}" for task in tasks]
    return [METRIC] * bool(names) + names


def measure(
    spec: TrainSpec,
    state: TrainState,
    tokenizer: Tokenizer,
    tasks: Sequence[Sampler],
    show: Callable[[str], None] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Lets the model of a run answer its tasks. All processes must call it. `show` prints lines of
    progress.

    Returns:
      The rows of the tasks (see `Scores.row`), and their metrics.
    """
    rows, count, seed = [], spec.config.train.eval_task_samples, spec.config.data.seed
    total = count * sum(task.length for task in tasks)
    with jax.set_mesh(spec.mesh), Progress("tasks", total, show) as progress:
        for task in tasks:
            progress.describe(f"{task.name}, {task.length:,} tokens")
            scores, model = Scores(task, seed), cast(Decoder, state.model)
            for answer in answers(model, tokenizer, task, count, spec.compute_dtype):
                scores.add(answer)
                progress.advance(task.length)
            rows.append(scores.row())
    mean = float(np.mean([row["score"] for row in rows]))
    values = [mean, *(row["score"] for row in rows)]
    return rows, dict(zip(task_metrics(tasks), values, strict=True))


def describe_tasks(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a line for each task and length of the last evaluation in tasks.jsonl, and a warning
    for each whose score fell since the first evaluation by more than its interval."""
    if not records:
        return
    first, last = ([r for r in records if r["step"] == records[i]["step"]] for i in (0, -1))
    step = first[0]["step"]
    when = f"at step {step:,}" if step else "before training"
    for row in last:
        before = [r for r in first if _same(r, row) and r["step"] < row["step"]]
        text = "".join(f"{score(r)} {when}, " for r in before)
        yield f"{row['task']}, {row['length']:,} tokens: {text}{score(row)} at step {row['step']:,}"
    for before, after in falls(first, last):
        yield (
            f"warning: {before['task']} in {before['length']:,} tokens fell by more than its "
            f"interval: {score(before)} {when}, {score(after)} at step {after['step']:,}"
        )


def score(row: Mapping[str, Any]) -> str:
    """Formats the score of a row with its interval."""
    return f"{row['score']:.2f} ({row['low']:.2f}–{row['high']:.2f})"


def _same(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return (row["task"], row["length"]) == (other["task"], other["length"])
