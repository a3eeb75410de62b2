"""Fields of records: their formats, and the names that `data.fields` maps."""

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import CHATML_MARKED, raw_tokenizer

from bptjax.config import Config
from bptjax.config_parser import parse
from bptjax.data.config import DataConfig, SourceConfig
from bptjax.data.encode import encode
from bptjax.data.marked import next_tokens
from bptjax.data.sources import open_split
from bptjax.data.text import open_documents
from bptjax.data.tokenizer import ByteTokenizer, load_tokenizer

BYTE = ByteTokenizer()
TURNS = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "Two"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "Four"},
]
NESTED = {"id": 7, "meta": {"q": "Who?", "more": {"a": "Me"}}, "list": [{"a": "You"}]}


def write(tmp_path, *rows, name="a.jsonl"):
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(list(rows)), tmp_path / name)
    else:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / name


def in_loss(document, tokenizer=BYTE):
    """The text before the loss and the text in the loss, alternately, without EOS."""
    (example,) = encode(document, tokenizer)
    ids, predicted = next_tokens(example)
    texts, before = [""], False
    for i, now in zip(ids.tolist(), predicted.tolist(), strict=True):
        texts += [""] * (now != before)
        texts[-1], before = texts[-1] + tokenizer.decode([i]), now
    return [text.removesuffix("</s>") for text in texts]


@pytest.mark.parametrize(
    "row, format, texts",
    [
        (
            {"instruction": "Add", "context": "1 2", "response": "3", "category": "math"},
            "dolly (instruction, response, context)",
            ["### Instruction:\nAdd\n\n### Input:\n1 2\n\n### Response:", "3"],
        ),
        (
            {"instruction": "Add", "context": "", "response": "3"},
            "dolly (instruction, response, context)",
            ["completes the request.\n\n### Instruction:\nAdd\n\n### Response:", "3"],
        ),
        (
            {"question": "Why?", "answer": "So", "context": "A text", "system": "Be brief"},
            "question_answer (question, answer, context, system)",
            ["### System: Be brief\n### Human: A text\n\nWhy?\n### Assistant:", " So"],
        ),
        (
            {"prompt": TURNS[:3], "completion": TURNS[3:]},
            "prompt_completion (prompt, completion)",
            ["### Assistant: Two\n### Human: 2+2?\n### Assistant:", " Four"],
        ),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_formats_are_known_by_themselves(tmp_path, row, format, texts, name):
    (chat,) = open_documents(write(tmp_path, row, name=name), format="auto")
    assert chat.format == format
    before, answer = in_loss(chat)
    # A template without marks ends the answer of the prompt with EOS, which is not in the loss.
    assert before.replace("</s>", "").endswith(texts[0]) and answer == texts[1]


def test_marks_in_a_prompt_are_left_out(tmp_path):
    raw_tokenizer("bytes", CHATML_MARKED).save_pretrained(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    rows = {"messages": TURNS}, {"prompt": TURNS[:3], "completion": TURNS[3:]}
    every, last = (
        in_loss(document, tokenizer)
        for document in open_documents(write(tmp_path, *rows), format="auto")
    )
    assert "".join(every) == "".join(last)
    assert "Two" in every[1] and "Two" in last[0]
    assert every[3] == last[1] and "Four" in last[1]


def test_text_and_token_ids_come_before_later_formats(tmp_path):
    """Data sets keep the fields that their text was made from."""
    row = {"question": "a", "answer": "b", "instruction": "a", "response": "b"}
    rows = {**row, "text": "a text"}, {**row, "input_ids": [1, 2]}
    text, ids = open_documents(write(tmp_path, *rows), format="auto")
    assert text == "a text" and ids.tolist() == [1, 2]
    path = write(tmp_path, rows[0])
    (chat,) = open_documents(path, format="auto", fields={"answer": "response"})
    assert chat.format == "question_answer (question, answer from response)"


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize(
    "fields, format, texts",
    [
        (
            {"prompt": "meta.q", "answer": "meta.more.a"},
            "prompt_answer (prompt from meta.q, answer from meta.more.a)",
            ["Who?", "Me"],
        ),
        (
            {"instruction": "meta.q", "output": "list.0.a", "input": "meta.q"},
            "alpaca (instruction from meta.q, output from list.0.a, input from meta.q)",
            ["### Input:\nWho?\n\n### Response:", "You"],
        ),
    ],
)
def test_nested_fields(tmp_path, fields, format, texts, name):
    path = write(tmp_path, NESTED, name=name)
    (chat,) = open_documents(path, format="auto", fields=fields)
    before, answer = in_loss(chat)
    assert chat.format == format and before.endswith(texts[0]) and answer == texts[1]
    assert list(open_documents(path, format="auto", fields={"text": "meta.q"})) == ["Who?"]


def test_a_name_with_a_dot_and_fields_that_change_places(tmp_path):
    path = write(tmp_path, {"a.b": "Q", "prompt": "A", "answer": "no", "a": {"b": "no"}})
    fields = {"prompt": "a.b", "answer": "prompt"}
    (chat,) = open_documents(path, format="auto", fields=fields)
    assert in_loss(chat) == ["Q", "A"] and chat.variables == {"a": {"b": "no"}}


def test_optional_fields_may_be_missing(tmp_path):
    rows = {"i": "Add", "o": "3"}, {"i": "Add", "o": "3", "c": "1 2"}
    fields = {"instruction": "i", "output": "o", "input": "c"}
    chats = open_documents(write(tmp_path, *rows), format="auto", fields=fields)
    assert ["1 2" in in_loss(chat)[0] for chat in chats] == [False, True]


@pytest.mark.parametrize(
    "row, fields, message",
    [
        (
            {"a": 1},
            {"prompt": "meta.q", "answer": "id"},
            "record 2: data.fields.prompt=meta.q: must be a field of the record, which has a$",
        ),
        (
            NESTED,
            {"prompt": "meta.p", "answer": "id"},
            "must be a field of the record, which has id, meta.q, meta.more.a, list$",
        ),
        (NESTED, {"prompt": "list.1.a", "answer": "id"}, "data.fields.prompt=list.1.a: must be a"),
        (NESTED, {"prompt": "id.a.b", "answer": "id"}, "data.fields.prompt=id.a.b: must be a"),
        (NESTED, {"prompt": "meta.q", "answer": "id"}, r"'answer' \(data.fields: id\) must be tex"),
        (NESTED, {"prompt": "meta.q"}, "data.fields: must also map completion or answer; the rec"),
        (NESTED, {"text": "meta"}, r"'text' \(data.fields: meta\) must be text"),
        ({f"f{i}": i for i in range(99)}, {"prompt": "a", "answer": "b"}, "f23, …$"),
    ],
)
def test_wrong_fields_are_one_line(tmp_path, row, fields, message):
    path = write(tmp_path, {"prompt": "a", "answer": "b"}, row)
    documents = open_documents(path, format="auto", fields=fields, check_first=False)
    with pytest.raises(ValueError, match=message) as error:
        documents[1]
    assert "\n" not in str(error.value)


def test_wrong_columns_and_files(tmp_path):
    path = write(tmp_path, NESTED, name="a.parquet")
    for name in ("prompt", "input"):
        with pytest.raises(ValueError, match=f"a.parquet: data.fields.{name}=metta.q: must be a"):
            open_documents(path, format="auto", fields={name: "metta.q"})
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="a.txt: with data.fields, must be .jsonl"):
        open_documents(tmp_path / "a.txt", fields={"text": "body"})


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--data.fields.promt=q"], "data.fields: promt: must be a field's name in .*nearest: pro"),
        (["--data.format=dolly", "--data.fields={output: a}"], ": instruction, response, context"),
        (["--data.fields=q"], "data.fields=q: must be keys and values"),
        (["--data.sources=[{path: a, fields: {q: b}}]"], "data.sources: fields: q: must be a fie"),
    ],
)
def test_wrong_names_are_one_line(flags, message):
    with pytest.raises(ValueError, match=message):
        parse(flags)


def test_fields_of_a_config_and_of_sources(tmp_path):
    """From YAML and from flags."""
    first = write(tmp_path, *[{"q": f"{i}?", "a": f"{i}"} for i in range(4)])
    second = write(tmp_path, *[{"prompt": "p", "answer": "b"}] * 4, name="b.jsonl")
    third = write(tmp_path, *[NESTED] * 4, name="c.parquet")
    file = tmp_path / "c.yaml"
    file.write_text("data:\n  fields: {prompt: q, answer: x}\n")
    config = parse([f"--config={file}", "--data.fields.answer=a"]).data
    assert config.fields == {"prompt": "q", "answer": "a"}
    sources = [
        SourceConfig(str(first)),
        SourceConfig(str(second), fields={}),
        SourceConfig(str(third), fields={"prompt": "meta.q", "answer": "meta.more.a"}),
    ]
    train, held_out = open_split(
        replace(config, sources=sources, eval_fraction=0.25, eval_split="spaced")
    )
    found = [in_loss(own[0]) for own in train.files]
    assert found == [["0?", "0"], ["p", "b"], ["Who?", "Me"]] and len(held_out) == 3
    Config(data=DataConfig(fields={"text": "a", "label": "b"}))
