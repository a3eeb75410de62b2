"""A converted checkpoint trained, exported, and read by transformers."""

import json

import numpy as np
import pytest

from bptjax.cli import convert
from bptjax.cli.train import main
from bptjax.data.tokenizer import ByteTokenizer, load_tokenizer
from bptjax.run.metrics import read_metrics
from bptjax.weights.hf.checkpoint import SIDECARS
from bptjax.weights.hf.config import read_config
from bptjax.weights.loading import load
from weights.hf.cases import config

STEPS = 20
SEQ = 48
# Dropout off: the last evaluation is of the model as it is exported.
FAMILIES = {
    "llama": {},
    # Experts sharded as they are loaded; a sample of one sequence, which four devices cannot share.
    "qwen3_moe": {"parallel.fsdp": 2, "parallel.ep": 2, "train.sample_tokens": 4},
    # Made longer than it was: its positions are tiled.
    "gpt2": {"model.max_position_embeddings": 100, "model.residual_dropout": 0.0},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_has_the_same_loss(tmp_path, name):
    torch = pytest.importorskip("torch")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    raw = config(name)
    raw.vocab_size = ByteTokenizer.vocab_size
    if name == "gpt2":
        raw.attn_pdrop = raw.embd_pdrop = 0.0
        raw.n_positions = 32
    transformers.AutoModelForCausalLM.from_config(raw).save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    text = "".join(f"{i} plus {i % 7} is {i + i % 7}. " for i in range(400))
    (tmp_path / "text.txt").write_text(text)
    options = {
        "run_dir": tmp_path / "run",
        "device": "cpu",
        "model.name_or_path": tmp_path / "hf",
        "data.path": tmp_path / "text.txt",
        "data.tokenizer": "byte",
        "data.packing": "none",
        "train.max_steps": STEPS,
        "train.seq_len": SEQ,
        "train.per_device_train_batch_size": 2,
        "optimizer.learning_rate": 0.01,
        "parallel.fsdp": 4,
        "parallel.dp": 2,
    } | FAMILIES[name]
    assert main([f"--{key}={value}" for key, value in options.items()]) == 0
    losses = [
        r["eval/loss"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "eval/loss" in r
    ]
    assert losses[-1] < losses[0] - 0.5
    assert (tmp_path / "run" / SIDECARS / "config.json").exists()

    out = tmp_path / "out"
    assert convert.main(["bptjax-to-hf", str(tmp_path / "run"), str(out), "--verify"]) == 0
    # That of the run, not the one that the model came with.
    assert isinstance(load_tokenizer(out), ByteTokenizer) and not (out / "tokenizer.json").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    # The held-out tail in rows of SEQ, as the run saw it.
    tail = text[int(len(text) * 0.9) :]
    tokens = np.concatenate([[256], ByteTokenizer().encode(tail), [256]])
    total = count = 0
    for at in range(0, len(tokens) - 1, SEQ):
        row = torch.tensor(tokens[at : at + SEQ + 1], dtype=torch.long)[None]
        with torch.no_grad():
            logits = model(row[:, :-1]).logits
        total += torch.nn.functional.cross_entropy(logits[0], row[0, 1:], reduction="sum").item()
        count += row.shape[1] - 1
    assert abs(total / count - losses[-1]) < 1e-4 * losses[-1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "pattern, ids",
    [
        (
            {"type": "window", "window": 8, "global_tokens": 2, "global_markers": ["7"]},
            {"global_markers": [ord("7")]},
        ),
        ({"type": "landmark", "block_size": 8, "token": "\0"}, {"token": 0}),
    ],
    ids=["window", "landmark"],
)
def test_a_sparse_pattern_stays_with_the_model(pattern, ids, tmp_path, capsys):
    """Set on a checkpoint with full attention, in the run and in the export."""
    pytest.importorskip("torch")
    import transformers

    raw = config("llama")
    raw.vocab_size = ByteTokenizer.vocab_size
    transformers.AutoModelForCausalLM.from_config(raw).save_pretrained(tmp_path / "hf")
    (tmp_path / "text.txt").write_text("".join(f"{i} and " for i in range(200)))

    def train(base, run, **more):
        options = {
            "run_dir": run,
            "device": "cpu",
            "model.name_or_path": base,
            "data.path": tmp_path / "text.txt",
            "data.tokenizer": "byte",
            "train.max_steps": 1,
            "train.seq_len": SEQ,
        } | more
        assert main([f"--{key}={value}" for key, value in options.items()]) == 0
        return [r for r in read_metrics(run / "metrics.jsonl") if "eval/loss" in r]

    first = train(
        tmp_path / "hf", tmp_path / "a", **{"model.attention_pattern": json.dumps(pattern)}
    )
    assert (tmp_path / "a" / "report.html").exists()
    out = tmp_path / "out"
    capsys.readouterr()
    assert convert.main(["bptjax-to-hf", str(tmp_path / "a"), str(out), "--verify"]) == 0
    printed = capsys.readouterr().out
    assert "transformers computes full attention in place of" in printed
    assert "bptjax reads the pattern; not verified" in printed
    assert read_config(out)[1].attention_pattern == pattern
    assert load(out, tokenizer="byte")[2].attention_pattern == pattern | ids
    assert type(transformers.AutoConfig.from_pretrained(out)).__name__ == "LlamaConfig"
    full = train(tmp_path / "hf", tmp_path / "c")
    assert abs(full[0]["eval/loss"] - first[0]["eval/loss"]) > 1e-4
