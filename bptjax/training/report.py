"""The results of a run: summary, answers, a sample, the adapter for PEFT."""

import json
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np

from bptjax.data.records import readable
from bptjax.data.text import byte_baselines
from bptjax.data.tokenizer import ByteTokenizer
from bptjax.models.decoder import Decoder
from bptjax.models.generation import generate
from bptjax.models.sampling import Sampling
from bptjax.run.checkpoint import BEST
from bptjax.run.metrics import plot_loss, printable, read_metrics
from bptjax.run.output import atomic_directory, plural
from bptjax.run.progress import Progress
from bptjax.training.eval_tasks import describe_tasks
from bptjax.training.logs import TASK_ROWS
from bptjax.training.setup import TrainingRun
from bptjax.training.state import TrainState, gather_adapters
from bptjax.weights.adapter_export import export_note, write_adapter

Log = Callable[[str], None]
# Directory of the exported adapter.
ADAPTER = "adapter"


def export_adapter(run: TrainingRun, state: TrainState, log: Log) -> None:
    """Writes the trained adapters of a Hugging Face model and the tokenizer to `adapter/` for PEFT
    or for `adapter.serve`, and logs how to use them. All processes must call it; the first writes.
    """
    pretrained = run.spec.pretrained
    if run.base_fingerprint is None or pretrained is None or pretrained.family is None:
        return
    adapters = gather_adapters(run.spec, state)
    if jax.process_index() != 0:
        return
    model, out = pretrained.adapted(adapters), run.directory / ADAPTER
    form = run.config.adapter.serve or "peft"
    with atomic_directory(out, replace=True) as directory:
        write_adapter(model, directory, form)
        run.tokenizer.save(directory)
    if text := export_note(model, out, form):
        log(text)


def log_summary(run: TrainingRun, state: TrainState, sample: str, log: Log) -> list[str]:
    """Draws the loss curve, and logs the held-out loss, the tasks, the sources, the sample and the
    files. Returns the lines about held-out loss, tasks and sources."""
    records = [r for r in read_metrics(run.directory / "metrics.jsonl") if "eval/loss" in r]
    held_out, sources = _held_out_loss(run, records) if records else [], []
    if run.tasks:
        held_out += describe_tasks(list(read_metrics(run.directory / TASK_ROWS)))
    if shares := run.batches.token_shares():
        weights = [source.weight for source in run.config.data.sources]
        each = zip(run.config.data.sources, shares, weights, strict=True)
        percentages = [
            f"{source.name} {x:.2%} (weight {w / sum(weights):.2%})" for source, x, w in each
        ]
        sources = ["tokens by source:", *(f"  {text}" for text in percentages)]
    for line in (*held_out, *run.check.summary(), *sources):
        log(line)
    if sample:
        log("sample: " + sample)
    title = f"{run.directory.name}: loss over {int(state.step):,} steps"
    plot_loss(run.directory / "metrics.jsonl", run.directory / "loss.png", title)
    _log_files(run, int(state.step), log)
    return held_out + sources


def _held_out_loss(run: TrainingRun, records: list[dict[str, Any]]) -> list[str]:
    """Formats the held-out loss of the first and last evaluation, also by source if there are
    several. Warns if the loss rose. With the tokenizer `byte`, the loss of text is in bits per
    byte, next to simple baselines; otherwise it is in nats."""
    losses, config = _values(records, "eval/loss"), run.config
    before, after = losses[0], losses[-1]
    # A resumed run may have lost its first records.
    when = "before training" if records[0]["step"] == 0 else f"at step {records[0]['step']:,}"
    complete = not run.eval_is_partial and run.check.held_out.complete
    complete &= run.spec.objective.likelihood
    texts = list(readable(run.held_out, config.data.bad_records)) if complete else []
    only_bytes = isinstance(run.processor, ByteTokenizer) and all(isinstance(x, str) for x in texts)
    if only_bytes and (size := sum(len(run.tokenizer.encode(text)) for text in texts)):
        labels = run.check.held_out.loss_tokens
        first, last = (loss * labels / size / math.log(2) for loss in (before, after))
        baselines = byte_baselines(texts)
        lines = [
            f"held-out text: {size:,} bytes",
            f"bits per byte: {first:.3f} {when}, {last:.3f} after",
            "baselines on the same bytes: "
            + ", ".join(f"{name} {x:.3f}" for name, x in baselines.items()),
        ]
    else:
        limit = f" (sample of {plural(run.eval_total, 'batch', 'es')})" * run.eval_is_partial
        unit = run.spec.objective.unit if run.spec.model.encoder.image_size is None else "image"
        lines = [f"held-out nats per {unit}{limit}: {before:.4f} {when}, {after:.4f} after"]
    for name in (name for name in records[-1] if name.startswith("eval/loss/")):
        own = _values(records, name)
        lines.append(
            f"  {name.removeprefix('eval/loss/')}: {own[0]:.4f} {when}, {own[-1]:.4f} after"
        )
    if not after <= before:  # Also true if a loss is NaN.
        best = min(filter(math.isfinite, losses), default=math.nan)
        lines.append(
            f"warning: held-out loss rose from {before:.4f} {when} to {after:.4f} after "
            f"it (best {best:.4f}): lower optimizer.learning_rate="
            f"{config.optimizer.learning_rate:g}, or train for fewer steps if it overfits"
        )
    return lines


def _values(records: list[dict[str, Any]], name: str) -> list[float]:
    """Returns the values of a metric in the records that have it."""
    return [math.nan if r[name] is None else r[name] for r in records if name in r]


def _log_files(run: TrainingRun, step: int, log: Log) -> None:
    directory = run.directory
    log(f"checkpoint: {directory / 'checkpoints' / str(step)}")
    if run.config.checkpoint.keep_best and (directory / BEST).exists():
        best = json.loads((directory / BEST).read_text())
        where = directory / "checkpoints" / str(best["step"])
        name, value = next(item for item in best.items() if item[0] != "step")
        text = f"best:       {where}, {name} {value:.4f}"
        # The best evaluation may be from before checkpoint.keep_best was set.
        text += "" if where.exists() else "; not saved"
        log(f"{text}; generate, evaluate and convert use the newest checkpoint")
    if (directory / ADAPTER).exists():
        log(f"adapter:    {directory / ADAPTER}")
    log(f"metrics:    {directory / 'metrics.jsonl'}")
    log(f"plot:       {directory / 'loss.png'}")


def predict_answers(
    run: TrainingRun, state: TrainState, show: Callable[[str], None] | None = None
) -> list[dict[str, str]]:
    """Returns `question`, `prompt`, `prediction` and `reference` of each of the run's eval_prompts.

    A prediction ends at a stop token, or at the length of the longest reference. If its reference
    has no stop token, the prediction is truncated to the length of that reference. `show` prints
    lines of progress.
    """
    prompts, references, questions = zip(*run.eval_prompts, strict=True)
    stop, longest = run.tokenizer.stop_ids, max(map(len, references))
    steps = []
    with jax.set_mesh(run.spec.mesh), Progress("answering", longest, show) as progress:
        for tokens in generate(
            cast(Decoder, state.model),
            prompts,
            new_tokens=longest,
            sampling=Sampling(temperature=0.0),
            stop=stop,
            dtype=run.spec.compute_dtype,
        ):
            steps.append(tokens)
            progress.advance()
    predictions = np.stack(steps, axis=1)

    def text(ids):
        ends = np.flatnonzero(np.isin(ids, stop) | (ids < 0))
        return run.tokenizer.decode(ids[: ends[0] if ends.size else None]).strip()

    def comparable(ids, reference):
        return ids if np.isin(reference, stop).any() else ids[: len(reference)]

    return [
        {
            "question": question,
            "prompt": run.tokenizer.decode(prompt),
            "prediction": text(comparable(ids, reference)),
            "reference": text(reference),
        }
        for question, prompt, ids, reference in zip(
            questions, prompts, predictions, references, strict=True
        )
    ]


def sample_text(run: TrainingRun, state: TrainState) -> str:
    """Returns a generated text, no longer than the training sequences. The text starts like a
    document, or after a newline if the tokenizer has no `prefix`."""
    prompt, train = run.tokenizer.prefix, run.config.train
    if not len(prompt):
        try:
            prompt = run.tokenizer.encode("\n")
        except ValueError:  # The vocabulary of a one-line text has no newline.
            prompt = [0]
    with jax.set_mesh(run.spec.mesh):
        new = list(
            generate(
                cast(Decoder, state.model),
                [prompt],
                new_tokens=min(train.sample_tokens, max(train.seq_len - len(prompt), 1)),
                sampling=Sampling(temperature=0.8),
                seed=run.config.seed,
                dtype=run.spec.compute_dtype,
            )
        )
    return printable(run.tokenizer.decode([int(token[0]) for token in new]))
