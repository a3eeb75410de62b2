"""The held-out loss of `bptjax evaluate` is that of a run's own evaluations."""

import json
import math
import random
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bptjax.cli import evaluate, train
from bptjax.cli.main import PARSERS
from bptjax.config import Config
from bptjax.data.config import DataConfig
from bptjax.data.files import Location
from bptjax.data.records import RecordReader
from bptjax.data.rows import RowReader
from bptjax.data.tokenizer import ByteTokenizer, CharTokenizer
from bptjax.evaluation.held_out import HeldOut
from bptjax.models.config import ModelConfig
from bptjax.models.decoder import Decoder
from bptjax.parsing.keys import replace_keys
from bptjax.parsing.other_names import with_flags
from bptjax.run.metrics import read_metrics
from bptjax.training.setup import setup
from bptjax.training.state import init_state
from bptjax.training.step import evaluator

BYTES = ByteTokenizer()
TINY = dict(hidden_size=16, num_layers=1, num_heads=2)


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def problems(count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        a, b = rng.randrange(99), rng.randrange(99)
        yield {
            "task": {"text": f"{a} + {b}?"},
            "result": f"It is {a + b}." + "!" * rng.randrange(9),
        }


def arguments(*flags):
    return PARSERS["evaluate"]().parse_args([*flags])


@pytest.mark.parametrize("limit", [None, 3])
def test_the_loss_of_a_run_on_the_same_file(tmp_path, limit, monkeypatch):
    """With the run's fields, packing and sequence length, and the same sample."""
    fields = {"question": "task.text", "answer": "result"}
    data = DataConfig(
        write(tmp_path / "a.jsonl", problems(20, 0)),
        eval_path=write(tmp_path / "b.jsonl", problems(30, 1)),
        fields=fields,
        packing="best_fit",
    )
    config = Config(run_dir=str(tmp_path / "run"), device="cpu", data=data)
    own = dict(seq_len=128, max_steps=1, per_device_train_batch_size=2, eval_batches=limit)
    config = replace(config, train=replace(config.train, **own))
    config = replace(config, model=replace(config.model, **TINY))
    # Samples depend on the number of sequences in a batch.
    monkeypatch.setattr("bptjax.training.setup.select_devices", lambda _: jax.devices()[:1])
    run = setup(config)
    run.batches.close()
    model = init_state(run.spec).model
    wanted = evaluator(run.spec)(model, run.evaluation.sources)["eval/loss"]
    args = arguments("--model", str(tmp_path / "run"), "--data", data.eval_path)
    args.batches = limit
    task = HeldOut(args)
    name = str(tmp_path / "run")
    task.check(name, run.tokenizer)
    (row,) = task.rows(name, model, run.tokenizer)
    assert row["loss"] == pytest.approx(wanted, rel=1e-6) and row["seq_len"] == 128
    assert row["perplexity"] == pytest.approx(math.exp(wanted), rel=1e-6)
    assert row["records"] == 30 if limit is None else row["records"] < 30
    labels = sum((batch["labels"] >= 0).sum() for batch in run.evaluation)
    assert row["tokens"] == labels and "bits_per_byte" not in row


@pytest.fixture(scope="module")
def model():
    return Decoder(ModelConfig(vocab_size=257, **TINY), jax.random.key(0))


def measured(model, *flags):
    (row,) = HeldOut(arguments("--model=it", "--seq_len=64", *flags)).rows("it", model, BYTES)
    return row


def test_answers_alone_count_and_text_has_bits_per_byte(tmp_path, model):
    chats = [{"q": "Why?", "a": "So"}, {"q": "How?", "a": "Thus"}]
    flags = "--data", write(tmp_path / "a.jsonl", chats), "--fields={prompt: q, answer: a}"
    assert measured(model, *flags)["tokens"] == len("SoThus") + 2
    texts = "ab cd", "äöü"
    rows = [{"body": text} for text in texts]
    row = measured(model, "--data", write(tmp_path / "b.jsonl", rows), "--text_key=body")
    total = 0.0
    for text in texts:
        ids = np.append(BYTES.encode_prompt(text), BYTES.eos_id)[None]
        hidden, _ = model(jnp.asarray(ids[:, :-1]), dtype=jnp.float32)
        logits = jax.nn.log_softmax(hidden @ model.head_matrix.T.astype(jnp.float32))
        total -= np.take_along_axis(np.asarray(logits), ids[:, 1:, None], -1).sum()
    size = sum(len(text.encode()) for text in texts)
    # The end of each text is predicted too.
    assert row["tokens"] == size + 2 and row["loss"] == pytest.approx(total / 13, rel=1e-4)
    assert row["bits_per_byte"] == pytest.approx(total / size / math.log(2), rel=1e-4)


def test_the_interval_is_over_records(tmp_path, model):
    """Also where several records share a sequence; each has the loss that it has alone."""
    chats = [{"q": "Why?", "a": "because " * n} for n in range(1, 8)]
    fields = "--fields={prompt: q, answer: a}"
    task = HeldOut(arguments("--model=it", "--data", write(tmp_path / "a.jsonl", chats), fields))
    (row,) = task.rows("it", model, BYTES)
    alone = [
        measured(model, "--data", write(tmp_path / "b.jsonl", [chat]), fields) for chat in chats
    ]
    assert not any("low" in each for each in alone)
    losses, counts = np.array([(each["loss"], each["tokens"]) for each in alone]).T
    assert task.last is not None
    order = task.last[1].argsort()
    np.testing.assert_allclose(task.last[:, order], (losses * counts, counts), rtol=1e-5)
    found = np.random.default_rng(1).integers(7, size=(4000, 7))
    means = (losses * counts)[found].sum(1) / counts[found].sum(1)
    width = np.diff(np.quantile(means, (0.025, 0.975)))
    assert row["low"] < row["loss"] < row["high"]
    assert row["high"] - row["low"] == pytest.approx(width, rel=0.1)


def test_a_long_text_counts_once_per_sequence(tmp_path, model):
    row = measured(model, "--data", write(tmp_path / "a.jsonl", [{"text": "ab" * 64}]))
    assert row["records"] == 1 and row["low"] < row["loss"] < row["high"]


def test_differences_are_over_the_same_records(tmp_path, model):
    """Their interval is narrower than those of the losses. Models with other tokens have none."""
    other = Decoder(model.config, jax.random.key(0))
    other.embedding = other.embedding.replace(other.embedding[...] * 1.02)
    texts = [{"text": text * 3} for text in ("ab", "cd", "äöü", "xyz", "0000")]
    flags = "--model=before", "--model=after", "--seq_len=64"
    task = HeldOut(arguments(*flags, "--data", write(tmp_path / "a.jsonl", texts)))
    (after,), (before,) = (
        task.rows(name, own, BYTES) for name, own in (("after", other), ("before", model))
    )
    assert "difference" not in after
    assert before["difference"] == pytest.approx(before["loss"] - after["loss"], abs=1e-6)
    assert before["difference_low"] < before["difference"] < before["difference_high"]
    widths = (before[f"{name}high"] - before[f"{name}low"] for name in ("difference_", ""))
    assert next(widths) < 0.5 * next(widths)
    rows = [dict(model=name) | row for name, row in (("before", before), ("after", after))]
    (cells, *_) = (list(column.cells) for column in task.table(rows).columns[1:])
    assert f"{before['loss']:.4f}\n{before['low']:.4f} to {before['high']:.4f}" == cells[0]
    assert cells[1].startswith(f"{before['difference']:+.4f}\n{before['difference_low']:+.4f} to ")
    assert cells[2].endswith(f" to {math.exp(before['high']):.4g}")
    (row,) = task.rows("before", model, CharTokenizer("abcdxyz0äöü"))
    assert "low" in row and "difference" not in row


@pytest.mark.parametrize(
    "flags, key, value",
    [([], "data.packing", "best_fit"), (["--batches=2"], "data.seed", 1)],
    ids=["order", "sample"],
)
def test_records_that_count_equally_many_tokens_are_not_taken_for_the_same(
    tmp_path, model, flags, key, value
):
    """Each answer is one letter. Another packing has another order, and another seed other records
    in a sample."""
    rng = random.Random(0)
    chats = [{"q": "x" * rng.randrange(4, 40), "a": rng.choice("ABCD")} for _ in range(60)]
    given = "--seq_len=64", "--fields={prompt: q, answer: a}", *flags
    path = write(tmp_path / "a.jsonl", chats)
    task = HeldOut(arguments("--model=a", "--model=b", "--model=c", "--data", path, *given))
    for name, changes in (("c", {}), ("b", {}), ("a", {key: value})):
        own = task.of[name]
        own.config = replace_keys(own.config, {"data.packing": "none"} | changes)
        (row,) = task.rows(name, model, BYTES)
        assert row["tokens"] == 2 * row["records"] and ("difference" in row) == (name == "b")


def test_a_table_without_a_plot(tmp_path, capsys, model, monkeypatch):
    monkeypatch.setattr(evaluate, "open_decoder", lambda *a, **k: (model, BYTES))
    monkeypatch.setattr(evaluate, "load_opened", lambda found, *a, **k: found)
    data = write(tmp_path / "a.jsonl", [{"question": "A?", "answer": "B"}] * 9)
    command = ["--model=it", f"--data={data}", "--seq-len=64", f"--out={tmp_path / 'out'}"]
    assert evaluate.main(command) == 0
    out = capsys.readouterr().out
    assert "9 records" in out and re.search(r"tokens in the loss .* 27 ", out)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["held_out.json"]
    (row,) = json.loads((tmp_path / "out" / "held_out.json").read_text())
    assert row["tokens"] == 27 and f"{row['loss']:.4f}" in out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--fields=q"], "--fields: q: must be names and fields, {name: field}"),
        (["--fields={promt: q}"], "--fields: promt: must be a field's name in --format=auto; near"),
        (["--fields={prompt: x, answer: a}"], "record 1: --fields.prompt=x: must be a field of th"),
        (["--format=dolly"], "must have 'instruction'.*see --format and --fields"),
        (["--format=x"], "--format=x: must be one of auto, text, "),
        (["--seq_len=0"], "--seq_len=0: must be in"),
        (["--batches=0"], "--batches=0: must be in"),
        (["--perplexity=64", "--format=dolly"], "--format: must not be given with --perplexity"),
        ([], "record 1: must have text in 'text'.*set --text_key to the field with the text"),
        (["--fields={prompt: q, answer: n}"], "'answer' .--fields: n. must be text"),
        (
            ["--fields={prompt: q, answer: a}"],
            "record 2: 'answer' .--fields: a. must be text; correct or remove the record\n",
        ),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, flags, message, model, monkeypatch):
    monkeypatch.setattr(evaluate, "open_decoder", lambda *a, **k: (model, BYTES))
    monkeypatch.setattr(evaluate, "load_opened", lambda found, *a, **k: found)
    rows = {"q": "Q", "a": "A", "n": 1}, {"q": "Q", "a": 2}
    data, out = write(tmp_path / "a.jsonl", rows), tmp_path / "out"
    assert evaluate.main(["--model=it", f"--data={data}", *flags, f"--out={out}"]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1 and not out.exists()


def test_advice_about_keys_without_a_flag():
    reader = RecordReader(lambda _: [dict(tokens=np.ones(9), labels=np.array([-100]))], 8, "error")
    with pytest.raises(ValueError, match="set data.too_long to drop") as raised:
        reader(lambda: "", Location("a.jsonl", "record 1"))
    wanted = "a.jsonl, record 1: 9 tokens: must be at most --seq_len=8; raise it"
    assert with_flags(str(raised.value), ["--seq_len"]) == wanted
    row = {"prompt": "Color: ", "completion": "ten", "label": False}
    with pytest.raises(ValueError, match="set objective.type=kto") as raised:
        RowReader(format="auto")(row, "record 1")
    wanted = "bad answers: set --format=self_instruct to take bad answers as good"
    assert with_flags(str(raised.value), ["--format"]).endswith(wanted)


@pytest.mark.thorough
def test_the_score_of_a_finished_run(tmp_path, capsys):
    """Through its checkpoint and its saved tokenizer."""
    for name, count in (("a", 60), ("b", 20)):
        write(tmp_path / f"{name}.jsonl", problems(count, count))
    run, data = tmp_path / "run", tmp_path / "b.jsonl"
    keys = ["model.hidden_size=16", "model.num_layers=1", "model.num_heads=2", "device=cpu"]
    keys += ["data.fields={question: task.text, answer: result}", f"data.eval_path={data}"]
    keys += ["train.max_steps=4", "train.seq_len=128", f"data.path={tmp_path / 'a.jsonl'}"]
    assert train.main([f"--{key}" for key in (*keys, f"run_dir={run}")]) == 0
    wanted = [r["eval/loss"] for r in read_metrics(run / "metrics.jsonl") if "eval/loss" in r]
    command = [f"--model={run}", f"--data={data}", f"--out={tmp_path / 'out'}"]
    assert evaluate.main(command) == 0
    (row,) = json.loads((tmp_path / "out" / "held_out.json").read_text())
    assert row["loss"] == pytest.approx(wanted[-1], rel=1e-6) != wanted[0]
