"""Tiny runs on a CPU: their configs, their data, and the results that must be equal in two runs."""

import pickle
import random
import shutil
from pathlib import Path
from typing import Any

from bptjax.run.metrics import read_metrics

STEPS = 24
CONFIG = f"""
device: cpu
parallel: PARALLEL
model: MODEL
data: {{path: TEXTS, eval_fraction: 0.1}}
train: {{max_steps: {STEPS}, seq_len: 32, per_device_train_batch_size: 2, eval_steps: 8,
  sample_tokens: 0, on_spike: SPIKE}}
optimizer: {{learning_rate: 1.0e-2, CLIP}}
execution: {{q_chunk: 16, k_chunk: 16, ffn_chunk: 16}}
checkpoint: {{save_steps: 3, local_dir: LOCAL}}
adapter: {{type: ADAPTER}}
"""
DEFAULTS = {
    "PARALLEL": "{fsdp: 1}",
    "MODEL": "{hidden_size: 16, num_layers: LAYERS, num_heads: 2, attention_dropout: 0.1}",
    "LAYERS": "1",
    "SPIKE": "{max_rollbacks: 0}",
    "CLIP": "clip: exact",
    "LOCAL": "null",
    "ADAPTER": "none",
}
ADAPTER = {"MODEL": "{name_or_path: WORK/base}", "ADAPTER": "lora"}
# Kinds of runs: changes of the defaults.
RUNS: dict[str, dict[str, str]] = {
    "plain": {},
    "local": {"LOCAL": "WORK/local"},  # Checkpoints go to a local directory first.
    # The loss varies more than by this factor, so that the run rolls back some times.
    "spikes": {"SPIKE": "{max_rollbacks: 99, factor: 1.15, window: 5}"},
    # Updates inside the backward pass, or after it from gradients in host memory; a part of the
    # steps is clipped.
    "delayed": {"LAYERS": "3", "CLIP": "clip: delayed, max_grad_norm: 0.9"},
    "held": {"LAYERS": "3", "CLIP": "in_backward: true, max_grad_norm: 0.9"},
    "adapter": ADAPTER,
    "pair": {"PARALLEL": "{dp: 2, fsdp: 1}"},  # Two processes.
    "conversions": ADAPTER,
}
# Kinds with a base model.
ADAPTERS = ("adapter", "conversions")
# Metrics that the clock does not change.
EXACT = (
    *("train/loss", "train/grad_norm", "train/learning_rate", "train/tokens_seen"),
    *("train/rollbacks", "eval/loss"),
)


def config(kind: str, work: Path) -> str:
    """Returns the config of a kind of runs, as YAML."""
    text = CONFIG
    for name, value in (DEFAULTS | RUNS[kind] | {"TEXTS": "WORK/texts"}).items():
        text = text.replace(name, value)
    return text.replace("WORK", str(work))


def write_texts(directory: Path, rng: random.Random) -> None:
    """Writes 20 documents of random words."""
    directory.mkdir(parents=True)
    words = "the quick brown fox jumps over a lazy dog".split()
    for i in range(20):
        text = " ".join(rng.choices(words, k=rng.randrange(5, 60)))
        (directory / f"{i:02}.txt").write_text(text)


def write_base(directory: Path) -> None:
    """Writes a base model with random weights, and its tokenizer."""
    import fuzz_kinds

    made = directory.with_name("made")
    made.mkdir()
    fuzz_kinds.tokenizer(made)
    (made / "hf").rename(directory)
    fuzz_kinds.model(directory, vocab_size=300)
    shutil.rmtree(made)


def result(run: Path, step: int = STEPS) -> tuple[list[Any], dict[str, bytes]]:
    """Returns the exact metrics by step, and the bytes of each array of the checkpoint of `step`,
    which is the last. Starts JAX."""
    from bptjax.run.checkpoint import Checkpoints

    rows = [[(r["step"], name, r[name]) for name in EXACT if name in r] for r in metrics(run)]
    checkpoints, arrays = Checkpoints(run), {}
    if checkpoints.newest() == step:
        arrays = {x: checkpoints.read(step, x).tobytes() for x in checkpoints.specs(step)}
    return rows, arrays


def write_result(run: Path, file: Path) -> None:
    file.write_bytes(pickle.dumps(result(run)))


def metrics(run: Path) -> list[dict[str, Any]]:
    """Returns the metrics of a run; empty if there are none."""
    try:
        return list(read_metrics(run / "metrics.jsonl"))
    except OSError:
        return []
