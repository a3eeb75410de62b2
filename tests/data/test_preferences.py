"""Pairs of answers: their formats, and their examples in packed sequences."""

import json
from dataclasses import replace

import numpy as np
import pytest
from chats import CALLS, CHATML, THINKING

from bptjax.config import Config
from bptjax.data.config import DataConfig
from bptjax.data.examples import documents, sequence
from bptjax.data.loader import data_check, train_loader
from bptjax.data.marked import next_tokens
from bptjax.data.packing import Packer
from bptjax.data.preferences import (
    PREFERENCE,
    described_parts,
    encode_preference,
    read_preference,
)
from bptjax.data.text import open_documents
from bptjax.data.tokenizer import ByteTokenizer
from bptjax.data.unpaired import encode_unpaired, read_unpaired
from bptjax.models.config import ModelConfig
from bptjax.objectives import ObjectiveConfig, check, choose
from bptjax.ops.labels import IGNORED
from bptjax.parsing.keys import flatten

BYTE = ByteTokenizer()
QUESTION = {"role": "user", "content": "Q"}
EARLIER = [QUESTION, {"role": "assistant", "content": "E"}, {"role": "user", "content": "More"}]
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("good", "bad one"))
SHORT = {"prompt": "1+1=", "chosen": "2", "rejected": "33"}


def texts(row, tokenizer=BYTE):
    """The prompt and the answer of each document, as the model reads them."""
    document = read_preference(row, "text", "here")
    (example,) = encode_preference(document, tokenizer, DataConfig())
    found = []
    for what, own in described_parts(example):
        ids, in_loss = next_tokens(own)
        first = int(in_loss.argmax())
        assert in_loss[first:].all()
        found.append(tuple(map(tokenizer.decode, (ids[:first], ids[first:]))))
        assert what.endswith(f"after a prompt of {first} tokens")
    assert [what.split()[0] for what, _ in described_parts(example)] == ["chosen", "rejected"]
    return found


HUMAN = "\n\nHuman: Q\n\nAssistant:"
PLAIN = "### Human: Q\n### Assistant:"


@pytest.mark.parametrize(
    "row, wanted",
    [
        (SHORT, [("1+1=", "2"), ("1+1=", "33")]),
        (
            {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
            [(PLAIN, " good"), (PLAIN, " bad one")],
        ),
        (
            {"prompt": [QUESTION], "chosen": "good", "rejected": "bad one"},
            [(PLAIN, " good"), (PLAIN, " bad one")],
        ),
        (
            {"prompt": "ignored", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
            [(PLAIN, " good"), (PLAIN, " bad one")],
        ),
        (
            {"chosen": [*EARLIER, GOOD], "rejected": [*EARLIER, BAD]},
            [
                ("### Human: Q\n### Assistant: E\n### Human: More\n### Assistant:", f" {x}")
                for x in ("good", "bad one")
            ],
        ),
        (
            {"chosen": f"{HUMAN} good", "rejected": f"{HUMAN} bad one"},
            [(HUMAN, " good"), (HUMAN, " bad one")],
        ),
        (
            {"chosen": "The answer is 4", "rejected": "The answer is 55"},
            [("The answer is ", "4"), ("The answer is ", "55")],
        ),
    ],
    ids=["texts", "messages", "mixed", "inside", "several turns", "hh-rlhf", "joined"],
)
def test_formats(row, wanted):
    found = texts(row)
    end = BYTE.decode([BYTE.eos_id])
    assert [(a.removeprefix(end), b.removesuffix(end)) for a, b in found] == wanted


def test_a_chat_template_and_its_variables(tokenizers):
    row = {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]}
    row |= {"chat_template_kwargs": {"extra": "!"}, "score": 3}
    document = read_preference(row, "text", "here")
    assert document.chosen.variables == {"extra": "!"}
    start = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    row.pop("chat_template_kwargs")
    found = texts(row, tokenizers("bytes", CHATML)[1])
    assert found == [(start, "good<|im_end|>\n"), (start, "bad one<|im_end|>\n")]


def test_an_answer_of_calls_needs_a_template_that_writes_them(tokenizers):
    """Else the preferred answer would be empty."""
    row = {"prompt": CALLS[:1], "chosen": CALLS[1:2], "rejected": [BAD]}
    without = [{k: v for k, v in CALLS[1].items() if k != "reasoning_content"}]
    document = read_preference(row | {"chosen": without}, "text", "here")
    labeled = {"completion": without, "label": True, "prompt": CALLS[:1]}
    unpaired = read_unpaired(labeled, "text", "there")
    unpaired = replace(unpaired, other=unpaired)
    _, ignoring = tokenizers("bytes", CHATML)
    with pytest.raises(ValueError, match="^here: 'chosen' has tool_calls only, which the chat"):
        encode_preference(document, ignoring, DataConfig())
    with pytest.raises(ValueError, match="^there: 'completion' has tool_calls only, which the"):
        encode_unpaired(unpaired, ignoring, DataConfig())
    _, reading = tokenizers("bytes", THINKING)
    for chosen in (row["chosen"], without):
        document = read_preference(row | {"chosen": chosen}, "text", "here")
        (example,) = encode_preference(document, reading, DataConfig())
        assert "<tool_call>" in reading.decode(example["tokens"].tolist())
    encode_unpaired(unpaired, reading, DataConfig())


def test_a_token_across_the_end_of_the_prompt_counts():
    """Prompt and answer are tokenized as one text, so that no prompt is cut from its answer."""

    class Merging(ByteTokenizer):
        """Makes one token of '=2'."""

        def encode_parts(self, parts):
            ids, ranges = super().encode_parts(parts)
            where = [i for i in range(len(ids) - 1) if bytes(ids[i : i + 2].astype("u1")) == b"=2"]
            if not where:
                return ids, ranges
            (i,) = where
            ids = np.concatenate([ids[:i], [200], ids[i + 2 :]]).astype(np.int32)
            return ids, [(a - (a > i), b - (b > i + 1)) for a, b in ranges]

    document = read_preference(SHORT, "text", "here")
    (example,) = encode_preference(document, Merging(), DataConfig())
    first, second = documents(example)
    assert first["labels"][first["labels"] != IGNORED].tolist() == [200, BYTE.eos_id]
    assert second["labels"][second["labels"] != IGNORED].tolist() == [51, 51, BYTE.eos_id]
    whats = [what for what, _ in described_parts(example)]
    assert [what.split()[-2] for what in whats] == ["4", "5"]


@pytest.mark.parametrize(
    "row, message",
    [
        (
            {"prompt": "a", "choosen": "x", "rejected": "y"},
            "'chosen' must be set; the record has prompt, choosen, rejected; data.fields maps",
        ),
        (SHORT | {"rejected": 3}, "'chosen' and 'rejected' must be texts or lists"),
        ({"prompt": 3, "chosen": "x", "rejected": "y"}, "'prompt' must be text or a list"),
        ({"prompt": "a", "chosen": "x", "rejected": "x"}, "'chosen' and 'rejected' must differ"),
        ({"prompt": "a", "chosen": "", "rejected": "x"}, "'chosen' must have an answer of the"),
        (
            {"chosen": [QUESTION, GOOD], "rejected": [QUESTION]},
            "'chosen' and 'rejected' must start with the same message",
        ),
        (
            {"question": "a", "chosen": [GOOD], "rejected": [BAD]},
            "'prompt' must be set, or be the first messages of both answers; "
            "the record has question, chosen, rejected; data.fields maps other names",
        ),
        ({"chosen": f"{HUMAN} x", "rejected": "y"}, "'rejected' must consist of"),
        (SHORT | {"images": ["x"]}, "'images' must be empty"),
    ],
)
def test_bad_records(row, message):
    with pytest.raises(ValueError, match=f"^here: {message}"):
        read_preference(row, "text", "here")


def opened(tmp_path, rows):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_documents(path, format=PREFERENCE)


def encoding():
    objective = choose(ObjectiveConfig("dpo", share_prompt=False), ModelConfig())
    return objective.encoding(ModelConfig())


def test_packing_keeps_pairs_together(tmp_path):
    """Positions restart in each answer; numbers of answers and documents go on."""
    rows = [SHORT | {"prompt": "x" * n, "rejected": "r" * (n % 5 + 1)} for n in range(1, 12)]
    rows.append(SHORT | {"prompt": "y" * 40})
    data = opened(tmp_path, rows)
    lengths = [
        len(encode_preference(document, BYTE, DataConfig())[0]["tokens"]) for document in data
    ]
    for packing in ("concat", "best_fit", "none"):
        config = DataConfig(packing=packing, shuffle=False)
        how = dict(seq_len=64, encoding=encoding())
        check = data_check(data, [], BYTE, config, **how)
        check.run()
        (account,) = check.accounts
        assert (account.too_long, account.too_long_tokens) == (1, lengths[-1])
        batches = train_loader(data, BYTE, config, batch_size=12, **how)
        batch = next(batches)
        batches.close()
        pairs, first = set(), []
        for i in range(12):
            row = {name: x[i] for name, x in batch.items()}
            assert row["segments"].max() == row["answers"].max()
            for own in documents(row):
                assert own["positions"].tolist() == list(range(len(own["tokens"])))
                (number,) = {*own["answers"].tolist()} - {0}
                assert number == own["segments"][0]
                if number % 2:
                    first = own["tokens"].tolist()
                else:
                    pairs.add((tuple(first), tuple(own["tokens"].tolist())))
        assert len(pairs) == len(rows) - 1


def test_answers_without_a_prompt_stay_together():
    """All of their tokens may count in the loss, but no packing splits them."""
    row = {"tokens": np.zeros(6, np.int32), "labels": np.ones(6, np.int32)}
    row |= {"segments": np.array([1, 1, 1, 2, 2, 2]), "answers": np.array([1, 1, 1, 2, 2, 2])}
    packer = Packer("concat", 8, 4)
    for record in range(2):
        packer.add(record, [row], None)
    closed = packer.close(True)
    assert [len(each.pieces) for each in closed] == [1, 1]


def test_numbers_go_on_within_a_sequence():
    document = read_preference(SHORT, "text", "here")
    (example,) = encode_preference(document, BYTE, DataConfig())
    row = sequence([example, example], 64)
    assert [*dict.fromkeys(row["segments"].tolist())] == [1, 2, 3, 4, 0]
    assert [*dict.fromkeys(row["answers"].tolist())] == [0, 1, 2, 3, 4]


def test_answers_share_their_prompt():
    """Of a row of two pairs, the parts are the answers after their prompts."""
    document = read_preference(SHORT, "text", "here")
    apart, together = (
        encode_preference(document, BYTE, DataConfig(), shared=shared)[0]
        for shared in (False, True)
    )
    # The last token of the prompt begins each answer.
    assert len(apart["tokens"]) - len(together["tokens"]) == len("</s>1+1=") - len("</s>") + 1 - 1
    row = sequence([together, together], 64)
    wanted = [
        {name: own[name].tolist() for name in ("tokens", "labels")} for own in documents(apart)
    ]
    for own in documents(row):
        parts = described_parts(own)
        assert [{name: x[name].tolist() for name in wanted[0]} for _, x in parts] == wanted
        assert all(what.endswith("of 5 tokens, 4 of them shared") for what, _ in parts)


def test_truncation_is_refused():
    for key, value in (("too_long", "truncate_left"), ("train_on_source", True)):
        config = Config(objective=ObjectiveConfig("dpo"), data=DataConfig(**{key: value}))
        objective = choose(config.objective, ModelConfig())
        with pytest.raises(ValueError, match=f"data.{key}=.*with objective.type=dpo"):
            check(objective, ModelConfig(), flatten(config), flatten(Config()))


def test_advice_on_long_records_leaves_out_what_is_refused(tmp_path):
    data = opened(tmp_path, [SHORT | {"prompt": "x" * 90}] * 3)
    how = dict(seq_len=64, encoding=encoding())
    for too_long, advice in (
        ("drop", "raise it"),
        ("error", "raise it, or set .*too_long to drop"),
    ):
        with pytest.raises(ValueError, match=f"train.seq_len=64; {advice}$"):
            train_loader(data, BYTE, DataConfig(too_long=too_long), batch_size=1, **how)
    checked = data_check(data, [], BYTE, DataConfig(), **how)
    checked.run()
    assert "data.too_long: drop or error" in " ".join(" ".join(checked.summary()).split())


def test_tokens_must_differ(tokenizers):
    """Records may differ in fields that a template does not read."""
    _, tokenizer = tokenizers("bytes", CHATML)
    row = {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [GOOD | {"name": "x"}]}
    with pytest.raises(ValueError, match="'chosen' and 'rejected' must differ in a token"):
        encode_preference(read_preference(row, "text", "here"), tokenizer, DataConfig())
