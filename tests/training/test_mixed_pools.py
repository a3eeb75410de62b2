"""A run on texts and chats in one pool learns both."""

import json
import random

import pytest

import bptjax
from bptjax.config import Config, TrainConfig
from bptjax.data.config import DataConfig
from bptjax.models.config import ModelConfig
from bptjax.optim.optimizer import OptimizerConfig
from bptjax.run.metrics import read_metrics


@pytest.mark.thorough
def test_chats_pooled_with_texts_are_learned(tmp_path):
    """One epoch of 400 texts and 60 chats, at the default packing and the product's windows."""
    rng = random.Random(0)

    def chat():
        word = "".join(rng.choices("ABCDEFGH", k=6))
        return {"prompt": word, "answer": "! ? " * 8}

    texts = [{"text": " ".join(rng.choices(["the", "fox", "dog"], k=60))} for _ in range(400)]
    records = [*texts, *(chat() for _ in range(60))]
    rng.shuffle(records)
    held_out = [chat() for _ in range(8)]
    for name, found in (("train", records), ("held_out", held_out)):
        lines = "".join(json.dumps(one) + "\n" for one in found)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    config = Config(
        run_dir=str(tmp_path / "run"),
        device="cpu",
        model=ModelConfig(hidden_size=32, num_layers=1, num_heads=2),
        data=DataConfig(str(tmp_path / "train.jsonl"), eval_path=str(tmp_path / "held_out.jsonl")),
        train=TrainConfig(epochs=1, seq_len=256, per_device_train_batch_size=1),
        optimizer=OptimizerConfig(learning_rate=1e-2),
    )
    run = bptjax.train(config)
    found = read_metrics(run / "metrics.jsonl")
    before, after = (row["eval/loss"] for row in found if "eval/loss" in row)
    assert after < 0.6 * before
