"""What comes of a run: answers and a sample, adapters for PEFT, a last account."""

import json
import math
from collections.abc import Callable

import jax
import numpy as np

from bptjax.adapter_export import remedy_for_peft, write_adapter
from bptjax.checkpoint import BEST
from bptjax.data.records import readable
from bptjax.data.text import byte_baselines
from bptjax.data.tokenizer import ByteTokenizer
from bptjax.generation import Sampling, generate
from bptjax.hf.output import atomic_directory
from bptjax.metrics import plot_loss, printable, read_metrics
from bptjax.training.setup import TrainingRun
from bptjax.training.state import TrainState, gather_adapters

# Directory of the adapters for PEFT.
ADAPTER = "adapter"


def export_adapter(run: TrainingRun, state: TrainState, log: Callable[[str], None]) -> None:
    """Writes the trained adapters of a Hugging Face model and the tokenizer to `adapter/`, as PEFT
    reads them, and logs what else PEFT needs. Each process must call it; the first one writes."""
    pretrained = run.spec.pretrained
    if run.base is None or pretrained is None or pretrained.family is None:
        return
    adapters = gather_adapters(run.spec, state)
    if jax.process_index() != 0:
        return
    model, out = pretrained.adapted(adapters), run.directory / ADAPTER
    with atomic_directory(out, replace=True) as directory:
        write_adapter(model, directory)
        run.tokenizer.save(directory)
    if text := remedy_for_peft(model, out):
        log(text)


def report(run: TrainingRun, state: TrainState, text: str, say: Callable[[str], None]) -> None:
    """What came of it: held-out loss (for bytes, in bits beside the baselines), sample, files."""
    config = run.config
    losses = [
        math.nan if r["eval/loss"] is None else r["eval/loss"]
        for r in read_metrics(run.directory / "metrics.jsonl")
        if "eval/loss" in r
    ]
    everything = losses and not run.eval_is_partial and run.check.held_out.complete
    texts = list(readable(run.held_out, config.data.bad_records)) if everything else []
    known = isinstance(run.tokenizer, ByteTokenizer) and all(isinstance(x, str) for x in texts)
    if known and (size := sum(len(run.tokenizer.encode(text)) for text in texts)):
        labels = run.check.held_out.loss_tokens
        before, after = (losses[i] * labels / size / math.log(2) for i in (0, -1))
        base = byte_baselines(texts)
        say(f"held-out text: {size:,} bytes")
        say(f"bits per byte: {before:.3f} before training, {after:.3f} after")
        say("baselines on the same bytes: " + ", ".join(f"{n} {b:.3f}" for n, b in base.items()))
    elif losses:
        part = f" (first {config.train.eval_batches} batches)" if run.eval_is_partial else ""
        before, after = losses[0], losses[-1]
        say(f"held-out nats per token{part}: {before:.4f} before training, {after:.4f} after")
    if losses and not losses[-1] <= losses[0]:
        # Also where the loss is not finite.
        best = min(filter(math.isfinite, losses), default=math.nan)
        say(
            f"warning: held-out loss rose from {losses[0]:.4f} before training to "
            f"{losses[-1]:.4f} after it (best {best:.4f}): lower optimizer.learning_rate="
            f"{config.optimizer.learning_rate:g}, or train for fewer steps if it overfits"
        )
    for line in run.check.summary():
        say(line)
    if shares := run.batches.token_shares():
        weights = [source.weight for source in config.data.sources]
        each = zip(config.data.sources, shares, weights, strict=True)
        found = [f"{source.name} {x:.2%} (weight {w / sum(weights):.2%})" for source, x, w in each]
        say("tokens by source: " + ", ".join(found))
    if text:
        say("sample: " + text)
    title = f"{run.directory.name}: loss over {int(state.step):,} steps"
    plot_loss(run.directory / "metrics.jsonl", run.directory / "loss.png", title)
    say(f"checkpoint: {run.directory / 'checkpoints' / str(int(state.step))}")
    if config.checkpoint.keep_best and (run.directory / BEST).exists():
        best = json.loads((run.directory / BEST).read_text())
        where = run.directory / "checkpoints" / str(best["step"])
        text = f"best:       {where}, eval/loss {best['eval/loss']:.4f}"
        # An evaluation before checkpoint.keep_best was set may have been the best.
        text += "" if where.exists() else "; not saved"
        say(f"{text}; generate, evaluate and convert take the newest checkpoint")
    if (run.directory / ADAPTER).exists():
        say(f"adapter:    {run.directory / ADAPTER}")
    say(f"metrics:    {run.directory / 'metrics.jsonl'}")
    say(f"plot:       {run.directory / 'loss.png'}")


def answers(run: TrainingRun, state: TrainState) -> list[dict[str, str]]:
    """Returns `prompt`, `prediction` and `reference` of each of the run's questions.

    A prediction ends at a stop token, and has as many tokens as the longest reference without one.
    Only references that no stop token ends either are compared by their own length.
    """
    prompts, wanted = zip(*run.questions, strict=True)
    stop = run.tokenizer.stop_ids
    with jax.set_mesh(run.spec.mesh):
        new = generate(
            state.model,
            prompts,
            new_tokens=max(map(len, wanted)),
            sampling=Sampling(temperature=0.0),
            stop=stop,
            dtype=run.spec.compute_dtype,
        )
        written = np.stack(list(new), axis=1)

    def text(ids):
        ends = np.flatnonzero(np.isin(ids, stop) | (ids < 0))
        return run.tokenizer.decode(ids[: ends[0] if ends.size else None]).strip()

    def whole(ids, reference):
        return ids if np.isin(reference, stop).any() else ids[: len(reference)]

    return [
        {"prompt": run.tokenizer.decode(p), "prediction": text(whole(w, r)), "reference": text(r)}
        for p, w, r in zip(prompts, written, wanted, strict=True)
    ]


def sample(run: TrainingRun, state: TrainState) -> str:
    """Returns new text from the start of a document, or from a newline if the tokenizer puts
    nothing in front of a text; no longer than the sequences of training.
    """
    prompt, train = run.tokenizer.prefix, run.config.train
    if not len(prompt):
        try:
            prompt = run.tokenizer.encode("\n")
        except ValueError:  # The text was one line.
            prompt = [0]
    with jax.set_mesh(run.spec.mesh):
        new = list(
            generate(
                state.model,
                [prompt],
                new_tokens=min(train.sample_tokens, max(train.seq_len - len(prompt), 1)),
                sampling=Sampling(temperature=0.8),
                seed=run.config.seed,
                dtype=run.spec.compute_dtype,
            )
        )
    return printable(run.tokenizer.decode([int(token[0]) for token in new]))
