"""Tasks of `bptjax evaluate --tasks`: samples in any length, scores, rows."""

import json
import re
import tempfile
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from chats import loaded, raw_tokenizer

from bptjax.cli import evaluate
from bptjax.data.tokenizer import ByteTokenizer
from bptjax.models.config import ModelConfig
from bptjax.models.decoder import Decoder
from bptjax.models.sampling import Sampling
from bptjax.tasks import TASKS, scores
from bptjax.tasks.needles import KEY, hide
from bptjax.tasks.questions import Questions, pieces
from bptjax.tasks.sample import Sampler, any_reference, encoder, first_number, recall
from bptjax.tasks.scores import bootstrap, interval
from bptjax.tasks.words import Haystack, coined_words, essay, names

BYTES = ByteTokenizer()
CHAT = BYTES.with_chat(
    "{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    [],
)


def asked_about(number):
    """A record about a document of about 400 characters."""
    rng = np.random.default_rng(number)
    text = "".join(essay(rng, 4)).strip()
    fact = f" The hall of house {number} has {1000 + number} seats. "
    document = text + fact + "".join(essay(rng, 4))
    question = f"How many seats has the hall of house {number}?"
    return dict(document=document, question=question, answer=str(1000 + number))


@cache
def questions_file():
    path = Path(tempfile.mkdtemp()) / "questions.jsonl"
    path.write_text("".join(json.dumps(asked_about(i)) + "\n" for i in range(20)))
    return str(path)


def sampler(name, length, tokenizer=BYTES, seed=0, filler=None):
    if TASKS[name].files:
        filler = Questions([questions_file()], 0, filler)
    how = dict(tokenizer=tokenizer, encode=encoder(tokenizer, tokenizer is CHAT))
    return Sampler(name, TASKS[name], length, seed=seed, filler=filler, **how)


@pytest.mark.parametrize("name", TASKS)
def test_samples_fill_the_length_and_hold_their_answers(name):
    for tokenizer, length in ((BYTES, 2048), (CHAT, 4099), (BYTES, 16_384)):
        samples = sampler(name, length, tokenizer)
        for index in range(4):
            sample = samples[index]
            size = len(sample.ids) + sample.new_tokens
            assert 0.97 * length <= size <= length
            text = tokenizer.decode(sample.ids.tolist())
            assert text.endswith(sample.start) and ("<user>" in text) == (tokenizer is CHAT)
            drawn = sample.drawn
            assert all(each in drawn.context for each in drawn.references)
            assert drawn.query in sample.prompt and sample.prompt in text
            # Room for the correct answer, which scores 1; a wrong one scores 0.
            answer, score = " " + ", ".join(drawn.references), TASKS[name].score
            assert len(tokenizer.encode(answer)) < sample.new_tokens
            assert score(answer, drawn.references) == 1
            assert score(" 1 none of them", drawn.references) == 0


@pytest.mark.parametrize("name", TASKS)
def test_seed_and_index_determine_a_sample(name):
    """Whichever samples were made before."""
    first, again, other = (sampler(name, 2500, seed=seed) for seed in (1, 1, 2))
    sample = first[3]
    assert [first[i].prompt for i in range(2)] == [again[i].prompt for i in range(2)]
    assert again[3].prompt == sample.prompt and again[3].drawn == sample.drawn
    assert len({sample.prompt, first[4].prompt, other[3].prompt}) == 3


def test_samples_fill_the_length_of_a_tokenizer_with_merges():
    tokenizer = loaded(raw_tokenizer("prepend"))
    for name in ("niah_single", "common_words", "record"):
        sample = sampler(name, 3000, tokenizer)[0]
        assert 0.97 * 3000 <= len(sample.ids) + sample.new_tokens <= 3000, name


def test_too_short_lengths_are_refused():
    for name in TASKS:
        with pytest.raises(ValueError, match=rf"--lengths=60: must be at least \d+ .* {name}$"):
            sampler(name, 60)


def test_facts_stand_at_their_depths():
    assert hide(list("abcd"), ["0", "1", "2"], [0.0, 0.5, 1.0]) == "0ab1cd2"
    assert hide(list("abcd"), ["0", "1"], [0.5, 0.5]) == "ab01cd"
    depths = []
    for index in range(8):
        drawn = sampler("passkey", 3000)[index].drawn
        before, after = drawn.context.split(KEY.format(*drawn.references))
        assert len(before) / len(before + after) == pytest.approx(drawn.depth, abs=0.02)
        depths.append(drawn.depth)
    # Any number of samples covers the text evenly: no gap is as long as a third.
    assert max(np.diff(np.sort(np.array([*depths, 1.0])))) < 1 / 3 and depths[0] == 0
    assert len(np.unique(np.array(depths) // 0.2)) == 5


def test_each_task_asks_for_what_its_references_say():
    """Answers are found again in the context, by other means."""
    facts = r"The secret \w+ of (\S+) is (\S+)\. "
    for name in TASKS:
        drawn = sampler(name, 6000)[1].drawn
        text, found = drawn.context, set(drawn.references)
        if name.startswith("niah"):
            asked = drawn.query.split(" and ")
            assert {b for a, b in re.findall(facts, text) if a in asked} == found
            counts = dict(niah_single=1, niah_uuid=1, niah_multikey=4, niah_needles=100)
            assert len(re.findall(facts, text)) >= counts.get(name, 4)
        elif name == "variable_tracking":
            values = {}
            for variable, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text):
                values[variable] = values.get(value, value)
            assert {key for key in values if values[key] == drawn.query} == found
        elif name in ("common_words", "frequent_words"):
            words, counts = np.unique(re.findall(r"[a-z]+", text), return_counts=True)
            order = np.argsort(-counts)
            assert {str(words[i]) for i in order[: len(found)]} == found
            assert counts[order[len(found) - 1]] > counts[order[len(found)]]
        elif name == "record":
            assert f"Record {drawn.query}: {drawn.references[0]}\n" in text
        elif name == "questions":
            house = re.search(r"house (\d+)", drawn.query)[1]
            assert f"house {house} has {drawn.references[0]} seats" in text
            assert len(re.findall(" seats", text)) > 10
        else:
            assert re.findall(r"\d+", text) == [*found] * 2


def test_scores():
    assert recall("Ab and cd.", ("AB", "cd", "ef", "gh")) == 0.5
    keys = [" 54321. 1", " 1 54321", " none", "543210"]
    assert [first_number(text, ("54321",)) for text in keys] == [1, 0, 0, 0]


def test_words_differ_in_any_number():
    rng = np.random.default_rng(0)
    for words in (names(rng, 6000), coined_words(rng, 5000)):
        assert len(set(words)) == len(words)
    assert max(map(len, essay(rng, 5000))) <= 63


def test_documents_of_the_user_are_the_filler(tmp_path):
    (tmp_path / "a.txt").write_text("One sentence of mine. Another one!\n\nA line\n" + "x" * 500)
    (tmp_path / "b.jsonl").write_text('{"body": "文字。漢字。 end"}\n')
    paths = [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]
    haystack = Haystack(paths[:1], "text", 0)
    assert haystack.pieces[:3] == ["One sentence of mine. ", "Another one!\n\n", "A line\n"]
    assert max(map(len, haystack.pieces)) < 250 and haystack.pieces[-1][-1] == "\n"
    assert "".join(haystack.pieces) == (tmp_path / "a.txt").read_text() + "\n"
    assert Haystack(paths[1:], "body", 0).pieces == ["文字。", "漢字。 ", "end\n"]
    few = Haystack(paths[:1], "text", 0, characters=30)
    assert sum(map(len, few.pieces)) <= 31
    for name in TASKS:
        filled = sampler(name, 3000, filler=haystack)[0].drawn.context
        own = {"niah_needles", "common_words", "frequent_words", "record", "questions"}
        assert ("Another one!" in filled) == (name not in own), name


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_questions_are_read_in_the_form_of_squad(tmp_path):
    """One record has answers of three people."""
    answers = dict(text=["old", "very old", "old"], answer_start=[15, 15, 15])
    squad = dict(id="7", context="A house. It is old.", question="How old?", answers=answers)
    single = dict(document="A garden.", question="What? ", answer="A garden")
    source = Questions([write(tmp_path / "a.jsonl", squad, single)], 0)
    found = {each.question: each.answers for each in source.questions}
    assert found == {"How old?": ("old", "very old"), "What?": ("A garden",)}
    assert any_reference("It is Very OLD", ("new", "old")) == 1
    assert any_reference("It is new", ("old", "very old")) == 0


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("document", None, "'document' must be text"),
        ("question", " ", "'question' must be text"),
        ("answer", [], "'answer' must be text"),
        ("answer", [3], "'answer' must be text"),
        ("answer", 3, "'answer' must be text"),
    ],
)
def test_records_without_an_answer_are_refused(field, value, says, tmp_path):
    path = write(tmp_path / "a.jsonl", asked_about(1), asked_about(2) | {field: value})
    with pytest.raises(ValueError, match=f"a.jsonl, record 2: {says}"):
        Questions([path], 0)


def test_a_document_stands_among_whole_others_and_is_there_once(tmp_path):
    """Two questions about each. After the last document comes other text."""
    records = [asked_about(i) for i in range(4)]
    path = write(tmp_path / "a.jsonl", *records, *({**r, "question": "?"} for r in records))
    source = Questions([path], 0)
    assert len(source.questions) == 8 and len(source.documents) == 4
    places = set()
    for index in range(8):
        for units in (20, 200):
            rng = np.random.default_rng(index)
            drawn = TASKS["questions"].draw(rng, units, index, source)
            own = next(r for r in records if r["answer"] == drawn.references[0])["document"]
            before, _ = drawn.context.split(own.strip() + "\n\n")
            assert not before or before.endswith("\n\n")
            places.add(len(before))
        for record in records:
            assert drawn.context.count(record["document"].strip()) == 1
        assert len(pieces(drawn.context)) > 200
    assert len(places) > 4


def test_intervals():
    """Wilson's of 8 in 10 is 0.490 to 0.943 (Newcombe 1998's formula by hand)."""
    scores = np.array([1.0] * 8 + [0.0] * 2)
    assert interval(scores, 0) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert interval(np.ones(10), 0) == pytest.approx((0.7225, 1.0), abs=1e-4)
    low, high = interval(np.tile([0.25, 0.75], 50), 0)
    assert (low, high) == pytest.approx((0.45, 0.55), abs=0.01)
    # A ratio of two means has the variance of its residuals: 1.96 · √(0.6 · 0.4 · 0.75² / 100).
    low, high = bootstrap(np.repeat([0.0, 1.0], [60, 40]), 0, np.repeat([1.0, 1.5], [60, 40]))
    assert (low, high) == pytest.approx((0.4, 0.6), abs=0.01)


@pytest.fixture(scope="module")
def model():
    config = ModelConfig(vocab_size=257, hidden_size=32, num_layers=1, num_heads=2, init_std=0.3)
    return Decoder(config, jax.random.key(0))


@pytest.fixture
def command(tmp_path, model, monkeypatch):
    """Runs the command with a model that knows every second answer. Prompts that were asked."""
    asked = []

    def answers(model, tokenizer, prompts, *, new_tokens, **_):
        texts = []
        for prompt in prompts:
            asked.append(text := tokenizer.decode(prompt.tolist()))
            found = re.findall(r"is (\d{7})\b|key is (\d{5})|has (\d{4}) seats", text)
            references = ["".join(found[0])]
            texts.append("" if len(asked) % 2 else f" {references[0]}.")
        yield texts

    monkeypatch.setattr(scores, "continuations", answers)
    monkeypatch.setattr(evaluate, "open_decoder", lambda *a, **k: (model, CHAT))
    monkeypatch.setattr(evaluate, "load_opened", lambda found, *a, **k: found)

    def run(*flags):
        asked.clear()
        command = ["--model=it", "--samples=4", f"--out={tmp_path / 'out'}", *flags]
        return evaluate.main(command), asked, tmp_path / "out"

    return run


def test_rows_are_kept_under_the_same_settings(command, capsys):
    flags = "--tasks", "niah_single", "passkey", "--lengths"
    code, asked, out = command(*flags, "700", "--save_prompts")
    assert code == 0 and len(asked) == 8 and all("<user>" in text for text in asked)
    rows = json.loads((out / "tasks.json").read_text())
    assert [(r["task"], r["length"], r["samples"], r["score"]) for r in rows] == [
        ("passkey", 700, 4, 0.5),
        ("niah_single", 700, 4, 0.5),
    ]
    assert rows[0]["low"] == pytest.approx(0.150, abs=1e-3) and rows[0]["chat"]
    assert rows[0]["by_depth"] == {"0": 0, "0.2": 0, "0.6": 1, "0.8": 1}
    text = (out / "prompts" / "niah_single_700.jsonl").read_text()
    saved = [json.loads(line) for line in text.splitlines()]
    assert [line["score"] for line in saved] == [0, 1, 0, 1]
    assert all(line["prompt"] in text for line, text in zip(saved, asked[4:], strict=True))
    assert saved[1]["answer"] == f" {saved[1]['references'][0]}."
    said = capsys.readouterr().out
    assert "niah_single" in said and "0.15–0.85" in said and (out / "tasks.png").exists()
    # Other lengths are added, and nothing is measured twice.
    code, asked, _ = command(*flags, "700", "900")
    assert (
        code == 0
        and len(asked) == 8
        and "2 rows of the same settings kept" in (capsys.readouterr().out)
    )
    assert [row["length"] for row in json.loads((out / "tasks.json").read_text())] == [
        *(700, 700, 900, 900)
    ]
    code, asked, _ = command(*flags, "700", "--seed=1")
    assert code == 2 and not asked
    assert "tasks.json has rows with seed=0, not seed=1; choose" in capsys.readouterr().err
    rows[0]["by_depth"] = {"0": 0, "0.25": 1, "0.5": 0, "0.75": 1}
    (out / "tasks.json").write_text(json.dumps(rows))
    code, asked, _ = command(*flags, "900")
    assert code == 2 and not asked
    assert "rows of passkey from an earlier version" in capsys.readouterr().err
    (out / "tasks.json").write_text("{")
    assert command(*flags, "700")[0] == 2
    assert "tasks.json: must hold the rows of an evaluation" in capsys.readouterr().err


def test_questions_need_their_files(command, capsys):
    flags = "--tasks", "questions", "--lengths", "1400"
    assert command(*flags)[0] == 2
    assert capsys.readouterr().err == "error: --tasks=questions: requires --questions FILES\n"
    code, asked, out = command(*flags, f"--questions={questions_file()}")
    assert code == 0 and len(set(asked)) == 4
    (row,) = json.loads((out / "tasks.json").read_text())
    assert row["task"] == "questions" and row["questions"][0] == questions_file()
    few = write(out / "few.jsonl", asked_about(1), asked_about(2))
    assert command(*flags, f"--questions={few}")[0] == 2
    says = "error: --samples=4: must be at most 2, the number of --questions\n"
    assert capsys.readouterr().err == says
    assert command("--tasks=passkey", "--lengths=700", f"--questions={questions_file()}")[0] == 2
    assert capsys.readouterr().err == "error: --questions: requires --tasks questions\n"


def test_rows_of_other_weights_are_refused(command, model, monkeypatch, capsys):
    """The newest checkpoint of a run has the name of the one before."""
    flags = "--tasks", "passkey", "--lengths", "700", "--no_chat"
    _, asked, out = command(*flags)
    assert not any("<user>" in text for text in asked)
    assert not (out / "prompts").exists()
    other = Decoder(model.config, jax.random.key(1))
    monkeypatch.setattr(evaluate, "open_decoder", lambda *a, **k: (other, CHAT))
    assert command(*flags)[0] == 2
    assert "tasks.json has rows with weights=" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_batch_gives_the_answers_of_single_samples(model):
    """Prompts of unequal lengths, and a last batch that is not full."""
    task, count = sampler("niah_multiquery", 1200, CHAT), 5
    assert scores.batch_size(model.config, task.length, count, "float32") == 4
    together = list(scores.answers(model, CHAT, task, count, "float32"))
    assert len({len(each.sample.ids) for each in together}) > 1
    for index, answer in enumerate(together):
        assert np.array_equal(answer.sample.ids, task[index].ids)
        *_, (text,) = scores.continuations(
            model,
            CHAT,
            [answer.sample.ids],
            new_tokens=answer.sample.new_tokens,
            sampling=Sampling(temperature=0.0),
            dtype="float32",
        )
        assert answer.text == text


def test_batches_fit_into_their_bytes():
    """Caches of 2 layers, keys and values of 4 heads of 64 in 2 bytes: 2 KiB a token."""
    config = ModelConfig(vocab_size=257, hidden_size=256, num_layers=2, num_heads=4)
    sizes = [scores.batch_size(config, n, 100, "bfloat16") for n in (1000, 120_000, 240_000, 2**21)]
    assert sizes == [16, 8, 4, 1]
    assert scores.batch_size(config, 1000, 5, "bfloat16") == 4


def test_a_small_model_answers(tmp_path, model, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "open_decoder", lambda *a, **k: (model, BYTES))
    monkeypatch.setattr(evaluate, "load_opened", lambda found, *a, **k: found)
    flags = ["--tasks", "passkey", "--lengths", "500", "--samples=2", f"--out={tmp_path}"]
    assert evaluate.main(["--model=it", *flags]) == 0
    (row,) = json.loads((tmp_path / "tasks.json").read_text())
    assert row["score"] == 0 and row["high"] > 0.5 and not row["chat"]


def test_a_template_without_the_answer_is_refused():
    tokenizer = BYTES.with_chat("{{ messages[0].content }}", [])
    with pytest.raises(ValueError, match="must write a prompt and its answer"):
        encoder(tokenizer, True)
