"""A tiny run, and functions that read and stop it."""

import os
import random

from bptjax.run.metrics import JsonlWriter, read_metrics

TINY = """
device: cpu
model: {hidden_size: 16, num_layers: 1, num_heads: 2, attention_dropout: 0.1, residual_dropout: 0.1}
data: {packing: best_fit, eval_fraction: 0.1}
train: {max_steps: 20, seq_len: 32, per_device_train_batch_size: 2, eval_steps: 8, sample_tokens: 8}
optimizer: {learning_rate: 1.0e-2}
execution: {q_chunk: 16, k_chunk: 16, ffn_chunk: 16}
checkpoint: {save_steps: 6}
"""
# Python's arguments for a process that trains.
TRAIN = "-m", "bptjax.train"
# The model of a tiny BERT, in place of the model of the tiny run.
ENCODER = """model:
  {causal: false, hidden_size: 16, num_layers: 1, num_heads: 2,
  norms: {type: layer, bias: true, position: post, embedding: true, final: false},
  position_embedding: learned, max_position_embeddings: 32, activation: gelu,
  gated: false, attention: {qkv_bias: true, out_bias: true}, mlp_bias: true,
  encoder: {token_types: 2, masked_head: true}, head_bias: true,
  residual_dropout: 0.1}
"""


def write_config(folder):
    """Writes the tiny run's config and texts; returns its command line without run_dir."""
    texts = folder / "texts"
    (folder / "config.yaml").write_text(TINY.replace("data: {", f"data: {{path: {texts}, "))
    texts.mkdir()
    words = "the quick brown fox jumps over a lazy dog".split()
    rng = random.Random(0)
    for i in range(20):
        (texts / f"{i:02}.txt").write_text(" ".join(rng.choices(words, k=rng.randrange(5, 60))))
    return ["--config", str(folder / "config.yaml")]


def rows(run_dir, name="train/loss"):
    return {r["step"]: r[name] for r in read_metrics(run_dir / "metrics.jsonl") if name in r}


def stop_at(step, number, monkeypatch):
    """Sends the signal while the metrics of `step` are being written."""
    write = JsonlWriter.write

    def signalled(self, at, metrics):
        write(self, at, metrics)
        if at == step and "train/loss" in metrics:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(JsonlWriter, "write", signalled)


def saved_steps(run_dir):
    return sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir())
