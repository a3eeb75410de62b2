"""Evaluation of long text by position, and the command line."""

import gzip
import io
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.comparing import quick
from rich.console import Console
from tiers import fast
from weights.hf.cases import config as hf_config
from weights.hf.loading import random_base

from bptjax import load
from bptjax.cli import evaluate
from bptjax.data.stream import Stream, StreamSizes
from bptjax.data.text import open_documents
from bptjax.data.tokenizer import ByteTokenizer
from bptjax.evaluation import context, perplexity
from bptjax.evaluation.likelihoods import log_likelihoods
from bptjax.models.config import ModelConfig
from bptjax.models.decoder import Decoder
from bptjax.models.generation import mesh_setter
from bptjax.ops.loss import linear_cross_entropy

BYTES = ByteTokenizer()


@pytest.fixture(scope="module")
def model():
    config = ModelConfig(vocab_size=257, hidden_size=32, num_layers=1, num_heads=2, init_std=0.3)
    return Decoder(config, jax.random.key(0))


@quick
def losses(model, tokens, labels):
    return linear_cross_entropy(model(tokens)[0], model.head_matrix, labels, reduction="none")


def test_buckets_are_the_loss_cut_in_pieces(model):
    documents = ["a short one", "abcdefg" * 10, "the quick brown fox " * 5]
    rows = perplexity.by_position(
        model, BYTES, documents, length=41, buckets=3, limit=9, dtype=jnp.float32
    )
    assert [(r["start"], r["end"]) for r in rows] == [(1, 14), (15, 27), (28, 40)]
    assert rows[0]["documents"] == 2
    wanted = []
    for text in documents[1:]:
        tokens = jnp.asarray(BYTES.encode_prompt(text)[None, :41])
        labels = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-100)
        wanted.append(losses(model, tokens, labels)[0, :40])
    means = np.mean(wanted, 0)
    for row, part in zip(rows, np.array_split(means, 3), strict=True):
        assert row["loss"] == pytest.approx(part.mean(), rel=1e-5)
        assert row["perplexity"] == pytest.approx(np.exp(part.mean()), rel=1e-4)


def test_intervals_are_over_documents(model):
    """From the least document to the greatest, if there are two; none of a single document."""
    documents = ["abcdefg" * 10, "the quick brown fox " * 5]
    how = dict(length=41, buckets=2, limit=9, dtype=jnp.float32, short_context=8)
    each = [perplexity.by_position(model, BYTES, [text], **how) for text in documents]
    rows = perplexity.by_position(model, BYTES, documents, **how)
    for row, *of in zip(rows, *each, strict=True):
        assert "low" not in of[0] and "ratio_low" not in of[0]
        ratios = [x["perplexity"] / x["short_perplexity"] for x in of]
        for name, values in (("", [x["perplexity"] for x in of]), ("ratio_", ratios)):
            ends = row[f"{name}low"], row[f"{name}high"]
            assert ends == pytest.approx((min(values), max(values)))
    # The ends of a ratio near 1 tell on which side of 1 it is.
    shown = rows[0] | dict(low=1432.4, high=1936.0, ratio_low=1.0021, ratio_high=1.0049)
    text = printed(perplexity.perplexity_table(named([shown])))
    assert "1432–1936" in text and "1.002–1.005" in text
    # All tokens are read within the short context.
    same = perplexity.by_position(model, BYTES, documents, **how | {"short_context": 40})
    assert {(row["ratio_low"], row["ratio_high"]) for row in same} == {(1.0, 1.0)}


@pytest.mark.parametrize("context", fast([4, 9, 16, 35], {16}))
def test_short_context_leaves_out_earlier_tokens(model, context):
    """With windows that end within the document, and one as long as it."""
    text, step = "".join(chr(97 + i * i % 26) for i in range(41)), max(context // 4, 1)
    how = dict(length=41, buckets=40, limit=1, dtype=jnp.float32, short_context=context)
    rows = perplexity.by_position(model, BYTES, [text], **how)
    tokens, width = BYTES.encode_prompt(text)[:41], context + step
    found, wanted = [row["short_loss"] for row in rows], np.full(40, np.nan)
    for start in sorted({*range(0, max(40 - width, 0), step), max(40 - width, 0)}):
        part = jnp.asarray(tokens[None, start : start + width + 1])
        each = losses(model, part[:, :-1], part[:, 1:])
        counted = context if start else 0
        wanted[start + counted : start + width] = each[0, counted:]
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    full = [row["loss"] for row in rows]
    assert (np.abs(np.subtract(found, full)) > 1e-3).sum() >= 40 - width
    table = perplexity.perplexity_table(named(rows))
    assert len(table.columns) == 5 and "ratio" in printed(table)


def test_tokens_that_need_the_long_context():
    """In documents that follow the most likely token of the full context."""
    config = ModelConfig(vocab_size=257, hidden_size=32, num_layers=1, num_heads=2, init_std=0.8)
    model = Decoder(config, jax.random.key(0))
    logs = jax.jit(lambda tokens: jax.nn.log_softmax(model.logits(model(tokens[None])[0])[0]))
    documents = np.random.default_rng(0).integers(0, 256, (2, 41))
    for tokens in documents:
        for i in range(1, 41):
            tokens[i] = np.asarray(logs(tokens))[i - 1].argmax()
    how = dict(length=41, limit=2, dtype=jnp.float32, short_context=8)
    rows = named(perplexity.by_position(model, BYTES, list(documents), buckets=2, **how))
    needed, losses = np.zeros((2, 40), bool), np.zeros((2, 40))
    for tokens, need, loss in zip(documents, needed, losses, strict=True):
        for i in range(1, 41):
            full = np.asarray(logs(tokens))[i - 1, tokens[i]]
            # Windows of 10 tokens, each 2 after the one before.
            start = 2 * max(-(-(i - 10) // 2), 0)
            short = np.asarray(logs(np.pad(tokens[start:i], (0, 41 - i + start))))
            need[i - 1] = full - short[i - 1 - start, tokens[i]] > 2 and full > -2
            loss[i - 1] = -full
    for row, at in zip(rows, (slice(0, 20), slice(20, 40)), strict=True):
        chosen = losses[:, at][needed[:, at]]
        assert 0 < row["long_tokens"] == len(chosen) < 40
        assert row["long_loss"] == pytest.approx(chosen.mean(), rel=1e-4)
    text = " ".join(printed(perplexity.perplexity_table(rows)).split())
    line = f"LongPPL, of {needed.sum()} tokens ({needed.mean():.2%}) that need the long context: "
    assert line + f"{np.exp(losses[needed].mean()):.4g}" in text
    none = [row | dict(long_tokens=0, long_loss=None) for row in rows]
    assert "LongPPL, of 0 tokens" in printed(perplexity.perplexity_table(none))


def test_another_model_chooses_the_tokens(model):
    how = dict(length=41, buckets=1, limit=9, dtype=jnp.float32, short_context=8)
    documents, need = [np.arange(41), np.arange(9, 50)], {}
    need[documents[0][:40].tobytes()] = np.arange(40) % 5 == 0
    (row,) = perplexity.by_position(model, BYTES, documents, need=need, **how)
    assert row["long_tokens"] == 8 + sum(need[documents[1][:40].tobytes()])
    assert len(need) == 2 and row["long_loss"] > 2


def test_a_stream_is_read_up_to_the_limit(tmp_path, model):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write('{"text": "a text of some length"}\n' * 5)
    documents = open_documents(tmp_path / "a.jsonl.gz", sizes=StreamSizes(memory=10))
    assert isinstance(documents, Stream)
    how = dict(length=16, buckets=2, limit=3, dtype=jnp.float32)
    rows = perplexity.by_position(model, BYTES, documents, **how)
    assert [row["documents"] for row in rows] == [3, 3]


def test_too_short_documents_are_refused(model):
    with pytest.raises(ValueError, match="--perplexity=400: must be at most 12"):
        perplexity.by_position(
            model, BYTES, ["a short one"], length=400, buckets=3, limit=9, dtype=jnp.float32
        )


def test_command_line(tmp_path, capsys, model, monkeypatch):
    text = tmp_path / "long.txt"
    text.write_text("it was a dark and stormy night. " * 40)
    monkeypatch.setattr(evaluate, "open_decoder", lambda *a, **k: (model, BYTES))
    monkeypatch.setattr(evaluate, "load_opened", lambda found, *a, **k: found)
    options = ["--model", "it", "--data", str(text), "--perplexity", "64", "--buckets", "2"]
    options += ["--tasks", "passkey", "--lengths", "500", "--samples", "1"]
    assert evaluate.main([*options, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "Perplexity by position (1 document)" in said and "by task and length" in said
    assert re.search(r"passkey .* 0\.00 ", said) and "trained length" not in said
    for name, count in (("perplexity", 2), ("tasks", 1)):
        assert len(json.loads((tmp_path / "out" / f"{name}.json").read_text())) == count
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 1000
    options[1] = "other"
    assert evaluate.main([*options, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "perplexity.json has rows of the model it; choose another --out" in error


@pytest.mark.thorough
def test_two_models_in_one_call(tmp_path, capsys, model, monkeypatch):
    """Rows in the order of the command; the last one is measured first."""
    (tmp_path / "long.txt").write_text("it was a dark and stormy night. " * 40)
    models = dict(a=model, b=Decoder(model.config, jax.random.key(1)))
    monkeypatch.setattr(evaluate, "open_decoder", lambda name, *a: (models[name], BYTES))
    monkeypatch.setattr(evaluate, "load_opened", lambda found, *a, **k: found)
    out, data = tmp_path / "out", f"--data={tmp_path / 'long.txt'}"
    command = ["--model=a", "--model=b", data, f"--out={out}", "--save_prompts"]
    more = ["--perplexity=64", "--tasks=passkey", "--lengths=500", "--samples=1"]
    assert evaluate.main([*command, *more]) == 0
    said = capsys.readouterr().out
    assert said.index("measuring b") < said.index("measuring a") < said.index("Perplexity by pos")
    assert said.count("Perplexity by position") == 1
    assert evaluate.main([*command, "--seq_len=64"]) == 0
    said, losses = capsys.readouterr().out, []
    for name, count in (("perplexity", 16), ("tasks", 2), ("held_out", 2)):
        rows = json.loads((out / f"{name}.json").read_text())
        assert [row["model"] for row in rows] == ["a"] * (count // 2) + ["b"] * (count // 2)
        losses += [row["loss"] for row in rows if name == "held_out"]
    assert losses[0] != losses[1] and re.search(rf"{losses[0]:.4f} .* {losses[1]:.4f}", said)
    assert (out / "model_2" / "prompts" / "passkey_500.jsonl").exists()
    assert evaluate.main([*command, *more]) == 0
    assert capsys.readouterr().out.count("1 row of the same settings kept") == 2
    assert len(json.loads((out / "tasks.json").read_text())) == 2
    assert evaluate.main(["--model=a", *more[1:], f"--out={out}"]) == 2
    assert "tasks.json has rows of the model b; choose another" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model=nowhere/it", "--tasks=all"], "--model=nowhere/it: must be given once"),
        ([], "--data .held-out loss., --tasks .use of the context. or --lm_eval"),
        (["--tasks", "none", "--lengths", "500"], "--tasks=none: must be all or one of passkey, n"),
        (["--tasks", "all"], "--tasks and --lengths: must be given together"),
        (["--lengths", "500"], "--data .held-out loss., --tasks .*must be given"),
        (["--passkey-lengths", "500"], "evaluate has --tasks passkey --lengths N --samples N"),
        (["--tasks=all", "--lengths=500", "--haystack", "/nowhere"], "/nowhere"),
        (["--data", "/nowhere"], "/nowhere"),
        (
            ["--data", "python-stdlib", "--perplexity", "4", "--buckets", "4"],
            "--buckets=4: must be less than --perplexity=4",
        ),
        (
            ["--data", "python-stdlib", "--perplexity", "40", "--short_context", "40"],
            "--short_context=40: requires a larger --perplexity",
        ),
        # These ended in numpy's "Maximum allowed dimension exceeded".
        (
            ["--data", "python-stdlib", "--perplexity", "9" * 30],
            r"--perplexity=9+: must be in \[2, 16777216",
        ),
        (["--tasks=all", "--lengths", "9" * 30], r"--lengths=9+: must be in \[1, 16777216"),
        (["--lm_eval=x", "--num_fewshot=-1"], "--num_fewshot=-1: must not be negative"),
        (["--data", "python-stdlib", "--samples", "0"], r"--samples=0: must be in \[1, 16777216"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, options, message):
    out = tmp_path / "out"
    assert evaluate.main(["--model", "nowhere/it", *options, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1 and not out.exists()


def test_a_file_in_place_of_the_output_is_refused_first(tmp_path, capsys):
    """It was found after the evaluation."""
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "more"):
        command = ["--model=nowhere/it", "--tasks=all", "--lengths=500", f"--out={out}"]
        assert evaluate.main(command) == 2
        error = f"error: --out={out}: must be a directory, but {tmp_path / 'file'} is a file\n"
        assert capsys.readouterr().err == error


def named(rows, name="it"):
    return [row | dict(model=name) for row in rows]


def scores(lengths, names):
    return [
        dict(model="it", task=name, length=n, samples=8, score=(i + j) % 9 / 8, low=0.0, high=1.0)
        for i, n in enumerate(lengths)
        for j, name in enumerate(names)
    ]


def printed(table):
    console = Console(width=80, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_tables_fit_in_80_columns():
    lengths, names = [2**i for i in range(15, 19)], ["passkey", "variable_tracking", "record"]
    text = printed(context.context_table(scores(lengths, names)))
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    (line,) = (line for line in text.splitlines() if "variable_tracking" in line)
    assert re.findall(r"\d\.\d\d", line) == ["0.12", "0.25", "0.38", "0.50"]
    row = dict(start=1, end=524_288, documents=16, loss=12.3456, perplexity=230_000.0)
    assert "1 to 524,288" in printed(perplexity.perplexity_table(named([row])))


def test_tables_and_plots_of_two_models(tmp_path, monkeypatch):
    """They fit in 80 columns, with short names."""
    from matplotlib.figure import Figure

    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: saved.append(self.axes))
    lengths, models = [2**i for i in range(13, 17)], ["hub/SmolLM2-135M-Instruct", "runs/extended"]
    tasks = ["passkey", "variable_tracking"]
    rows = [row for name in models for row in named(scores(lengths, tasks), name)]
    text = printed(context.context_table(rows))
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text and "hub/" not in text
    assert [line.split("│")[1].strip() for line in text.splitlines() if " 0.12 " in line] == [
        *("passkey", "passkey", "variable_tracking", "variable_tracking")
    ]
    context.plot_context(rows, tmp_path, dict(zip(models, (2**13, 2**15), strict=True)))
    first, second = saved[-1][:2]
    assert second.get_title() == "Scores by task, extended"
    assert [list(axes.lines[0].get_xdata()) for axes in (first, second)] == [[0.5] * 2, [2.5] * 2]
    ranges = [dict(start=1, end=50, documents=1), dict(start=51, end=99, documents=1)]
    values = dict(loss=2.0, short_loss=2.0, short_perplexity=8.0, short_context=9, long_tokens=0)
    rows = [
        dict(model=name, perplexity=value, **at, **values)
        for name, value in zip(models, (900.0, 5.0), strict=True)
        for at in ranges
    ]
    text = printed(perplexity.perplexity_table(rows))
    assert re.findall(r"1 to 50 |51 to 99 ", text) == ["1 to 50 ", "1 to 50 ", *["51 to 99 "] * 2]
    assert "extended: LongPPL, of 0 tokens" in text and max(map(len, text.splitlines())) <= 80
    perplexity.plot_perplexity(rows, tmp_path, dict(zip(models, (40, 80), strict=True)))
    (axes,) = saved[-1]
    assert axes.get_yscale() == "log" and len(axes.patches) == 4
    assert [(line.get_color(), line.get_xdata()[0]) for line in axes.lines] == [
        ("C0", 40),
        ("C1", 80),
    ]
    axes.figure.canvas.draw()
    legend = axes.get_legend()
    assert legend.get_window_extent().y1 < axes.get_window_extent().y0, "it covers no curve"
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels[3:] == [
        "extended, full context",
        "extended, last 9 tokens only",
        "extended, trained length, 80",
    ]


def test_plots_mark_the_trained_length(tmp_path, monkeypatch):
    """As a line; scores as numbers."""
    from matplotlib.figure import Figure

    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: saved.append(self.axes[0]))
    rows = named([dict(start=1, end=50, documents=1, perplexity=3.0)])
    for trained in ({}, dict(it=40), dict(it=4000)):
        perplexity.plot_perplexity(rows, tmp_path, trained)
    none, marked, beyond = saved
    assert [len(axes.lines) for axes in (none, beyond)] == [0, 0]
    assert list(marked.lines[0].get_xdata()) == [40, 40]
    assert marked.get_legend().get_texts()[0].get_text() == "trained length, 40"
    assert none.get_legend() is None
    context.plot_context(scores([32, 64, 128], ["passkey", "record"]), tmp_path, dict(it=64))
    axes = saved[-1]
    assert list(axes.lines[0].get_xdata()) == [1.5, 1.5]
    assert [text.get_text() for text in axes.texts] == [
        *("0.00", "0.12", "0.12", "0.25", "0.25", "0.38")
    ]
    # Of one task, curves.
    rows = scores([128, 64, 32], ["passkey"])
    rows[0] |= dict(score=1.0, high=1 - 1e-16)
    context.plot_context(rows, tmp_path, dict(it=64))
    curve, *_, marked = saved[-1].lines
    assert list(curve.get_xdata()) == [32, 64, 128] and list(marked.get_xdata()) == [64, 64]
    assert list(curve.get_ydata()) == [row["score"] for row in reversed(rows)]


def test_the_trained_length_is_that_of_the_run_or_the_checkpoint(tmp_path, model):
    assert evaluate.trained_length("some/hub-id", model) is None
    (tmp_path / "config.yaml").write_text("train: {seq_len: 77}")
    assert evaluate.trained_length(str(tmp_path), model) == 77


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A directory with a llama of four heads, and a file of text."""
    folder, raw = tmp_path_factory.mktemp("mesh"), hf_config("llama")
    raw.vocab_size = ByteTokenizer.vocab_size
    BYTES.save(random_base(folder / "model", raw))
    (folder / "text.txt").write_text(
        "".join(f"{i} plus {i % 7} is {i + i % 7}. " for i in range(40))
    )
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("flags", ["--tp=2", "--sp=2", "--tp=2 --sp=2"])
def test_a_mesh_of_devices_gives_the_rows_of_one(flags, checkpoint, tmp_path):
    def rows(*flags):
        out, found = tmp_path / "_".join(["out", *flags]), {}
        data = f"--data={checkpoint / 'text.txt'}"
        for kind, own in {
            "held_out": [data, "--seq_len=63"],
            "perplexity": [data, "--perplexity=200", "--short_context=32"],
            "tasks": ["--tasks", "passkey", "--lengths", "600", "--samples=3"],
        }.items():
            command = [f"--model={checkpoint / 'model'}", "--device=cpu", f"--out={out}"]
            assert evaluate.main([*command, *own, *flags]) == 0
            found[kind] = json.loads((out / f"{kind}.json").read_text())
        return found

    alone, together = rows(), rows(*flags.split())
    for kind, own in alone.items():
        for one, other in zip(own, together[kind], strict=True):
            numbers = {name: x for name, x in one.items() if isinstance(x, float)}
            assert {name: other[name] for name in numbers} == pytest.approx(numbers, rel=1e-5)
            assert one.keys() == other.keys()


@pytest.mark.thorough
def test_log_likelihoods_on_a_mesh_are_those_of_one_device(checkpoint):
    texts, found = [("1 plus", " 3"), ("x", "yz")], []
    pairs = [(list(BYTES.encode(a)), list(BYTES.encode(b))) for a, b in texts]
    for tp in (1, 2):
        decoder, *_ = load(str(checkpoint / "model"), tp=tp, device="cpu")
        with mesh_setter(decoder)():
            found.append(np.array(log_likelihoods(decoder, pairs, dtype=jnp.float32)))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
