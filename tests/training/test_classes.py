"""Runs of classifiers: they learn, resume exactly and are exported."""

import json
import random
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import yaml
from weights.hf.loading import random_weights

from bptjax.cli.convert import main as convert
from bptjax.cli.preview import main as preview
from bptjax.cli.train import main
from bptjax.data.split import draw
from bptjax.run.json_files import read_json
from bptjax.weights.hf.config import read_config
from training.runs import rows, stop_at
from training.test_setup import CONFIGS

NAMES = {0: "low", 1: "middle", 2: "high"}
LETTERS = "ab", "mn", "yz"


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Command line of a run without its run directory. The letters of a text tell its class."""
    from transformers import BertConfig

    folder = tmp_path_factory.mktemp("classes")
    (folder / "base").mkdir()
    sizes = dict(vocab_size=257, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    raw = BertConfig(**sizes, intermediate_size=32, max_position_embeddings=64, id2label=NAMES)
    raw.architectures = ["BertForSequenceClassification"]
    (folder / "base" / "config.json").write_text(raw.to_json_string())
    random_weights(folder / "base", *read_config(folder / "base"))
    rng = random.Random(0)
    labels = [rng.randrange(3) for _ in range(120)]
    texts = ["".join(rng.choices(LETTERS[n], k=rng.randrange(2, 18))) for n in labels]
    records = [dict(text=text, label=n) for text, n in zip(texts, labels, strict=True)]
    for record in records[::3]:
        text = record["text"]
        record |= dict(text=text[: len(text) // 2], text_pair=text[len(text) // 2 :])
    (folder / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    config = dict(
        device="cpu",
        model=dict(name_or_path=str(folder / "base")),
        data=dict(path=str(folder / "records.jsonl"), tokenizer="byte"),
        train=dict(max_steps=24, seq_len=32, per_device_train_batch_size=4, eval_steps=8),
        optimizer=dict(learning_rate=2e-2, warmup_steps=0),
        execution=dict(q_chunk=16, k_chunk=16, ffn_chunk=16),
        checkpoint=dict(save_steps=6),
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return ["--config", str(folder / "config.yaml")]


@pytest.mark.thorough
def test_a_classifier_learns_resumes_and_is_exported(command, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert main([*command, f"--run_dir={whole}"]) == 0
    accuracy = rows(whole, "eval/accuracy")
    assert accuracy[0] < 0.7 and accuracy[24] > 0.9
    assert max(rows(whole, "train/accuracy").values()) > 0.9
    # One label a document.
    counts, seen = rows(whole, "train/loss_tokens"), rows(whole, "train/tokens_seen")
    assert 10 < seen[24] / sum(counts.values()) < 14
    with monkeypatch.context() as patch:
        stop_at(9, signal.SIGTERM, patch)
        assert main([*command, f"--run_dir={run}"]) == 143
    assert main([*command, f"--run_dir={run}"]) == 0
    for name in ("train/loss", "train/accuracy", "eval/loss", "eval/accuracy"):
        assert rows(run, name) == rows(whole, name)
    assert convert(["bptjax-to-hf", str(run), str(tmp_path / "hf"), "--verify"]) == 0
    exported = read_json(tmp_path / "hf" / "config.json")
    assert exported["id2label"] == {str(n): name for n, name in NAMES.items()}

    # transformers finds the same loss over the held-out documents, one at a time.
    import torch
    import transformers

    kind = transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(tmp_path / "hf").eval()
    records = Path(yaml.safe_load(Path(command[1]).read_text())["data"]["path"]).read_text()
    losses, pairs, held_out = [], 0, draw([120], 0.1, 0)
    assert len(held_out) == 12
    for i, line in enumerate(records.splitlines()):
        if i in held_out:
            record = json.loads(line)
            texts = [256, *record["text"].encode(), 256], []
            if pair := record.get("text_pair"):
                pairs, texts = pairs + 1, (texts[0], [*pair.encode(), 256])
            ids, types = sum(texts, []), [0] * len(texts[0]) + [1] * len(texts[1])
            inputs = dict(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types]))
            with torch.no_grad():
                found = model(**inputs, labels=torch.tensor([record["label"]]))
            losses.append(found.loss.item())
    assert 0 < pairs < len(losses)
    np.testing.assert_allclose(rows(run, "eval/loss")[24], np.mean(losses), rtol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert", "modernbert, bare"])
def test_new_classes(kind, command, tmp_path, capsys):
    """A masked language model, or a bare encoder, becomes a classifier, which transformers reads
    with its classes."""
    pytest.importorskip("torch")
    import torch
    import transformers

    base = tmp_path / "base"
    sizes = dict(vocab_size=257, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    sizes |= dict(intermediate_size=32, max_position_embeddings=64)
    tokens = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
    family, _, bare = kind.partition(", ")
    config = transformers.AutoConfig.for_model(family, **sizes, **tokens)
    if family == "modernbert":
        config.classifier_pooling = "mean"  # As published.
    torch.manual_seed(0)
    start = transformers.AutoModel if bare else transformers.AutoModelForMaskedLM
    start.from_config(config).save_pretrained(base)

    def train(to, *flags, base=base):
        flags = [f"--model.name_or_path={base}", f"--run_dir={tmp_path / to}", *flags]
        return main([*command, "--checkpoint.save_steps=2", *flags])

    assert train("run", "--model.encoder.classes=3", "--train.max_steps=4") == 0
    out = " ".join(capsys.readouterr().out.split())
    new = "classes.kernel, classes.bias" if family == "modernbert" else "pooler.kernel, pooler.b"
    new = "masked.linear.kernel, masked.norm.scale, classes.kernel" if bare else new
    assert f"new parameters, which the files do not hold: {new}" in out
    hf = tmp_path / "hf"
    assert convert(["bptjax-to-hf", str(tmp_path / "run"), str(hf), "--verify"]) == 0
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(hf)
    assert classifier.num_labels == 3 and "Classification" in type(classifier).__name__
    if family == "modernbert":
        assert classifier.config.classifier_pooling == "mean"
    # The classifier has a number of classes.
    assert train("more", "--model.encoder.classes=4", base=hf) == 2
    assert (
        "model.encoder.classes=4: must not be set, because the checkpoint"
        in capsys.readouterr().err
    )
    for flag in (
        "--model.encoder.classes=1",
        "--model.encoder.classes=2000000",
        "--model.init_std=-1",
    ):
        assert train("bad", flag) == 2 and not (tmp_path / "bad").exists()
    if kind == "bert":
        # The run goes on.
        assert train("run", "--model.encoder.classes=3", "--train.max_steps=6") == 0
        assert rows(tmp_path / "run", "eval/accuracy").keys() >= {0, 6}
        # A classifier whose config names no class keeps the names of its classes.
        raw = read_json(hf / "config.json")
        del raw["architectures"]
        raw["id2label"] = {str(n): name for n, name in NAMES.items()}
        (hf / "config.json").write_text(json.dumps(raw))
        assert train("unnamed", "--model.encoder.classes=3", "--train.max_steps=4", base=hf) == 0
        again = tmp_path / "again"
        assert convert(["bptjax-to-hf", str(tmp_path / "unnamed"), str(again)]) == 0
        assert read_json(again / "config.json")["id2label"] == raw["id2label"]
        # A head for other work is not taken for that of a classifier.
        raw["architectures"] = ["BertForTokenClassification"]
        (hf / "config.json").write_text(json.dumps(raw))
        assert train("tokens", "--model.encoder.classes=3", base=hf) == 2
        assert "must be one of BertModel" in capsys.readouterr().err
        assert train("other", "--model.encoder.classes=3", "--train.max_steps=4", "--seed=1") == 0
        first, other = (rows(tmp_path / name, "train/loss")[1] for name in ("run", "other"))
        assert first != other


@pytest.mark.thorough
def test_long_documents_keep_their_start(command, tmp_path, capsys):
    flags = ["--train.seq_len=8", "--train.max_steps=1", f"--run_dir={tmp_path / 'run'}"]
    assert main([*command, *flags, "--data.too_long=truncate_right"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "are longer than train.seq_len=8 and" in out and "lost their end" in out
    assert "without a token in the loss" not in out


def test_a_preview_shows_both_texts(command, capsys):
    assert preview(command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"label \d: \w+ second text: \w+ ", out)


BAD = {
    "truncated at the start": (
        ["--data.too_long=truncate_left"],
        "data.too_long=truncate_left: must be drop or truncate_right or error",
    ),
    "format": (
        ["--data.format=messages"],
        "data.format=messages: must be label with objective.type=class",
    ),
    "format of a source": (
        ["--data.path=null", "--data.sources=[{path: README.md, format: text}]"],
        "data.sources: format=text: must be label with objective.type=class",
    ),
    "class": (dict(text="a", label=3), "label=3: must be in [0, 3), the model's classes"),
    "no label": (dict(text="a"), "must have text in 'text' and the number of a class in 'label'"),
    "pair": (dict(text="a", text_pair=["b"], label=0), "'text_pair' must be the second text"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(command, tmp_path, capsys, name, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    flags, message = BAD[name]
    if isinstance(flags, dict):
        (tmp_path / "bad.jsonl").write_text((json.dumps(flags) + "\n") * 40)
        flags = [f"--data.path={tmp_path / 'bad.jsonl'}"]
    assert main([*command, f"--run_dir={tmp_path / 'run'}", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()
