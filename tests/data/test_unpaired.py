"""Answers with a label: their formats, the records beside them, and their examples."""

from dataclasses import replace

import numpy as np
import pytest
from chats import CHATML

from bptjax.data.chat import Chat
from bptjax.data.config import DataConfig
from bptjax.data.encoding import Encoding
from bptjax.data.examples import documents, sequence
from bptjax.data.loader import train_loader
from bptjax.data.marked import next_tokens
from bptjax.data.preferences import described_parts
from bptjax.data.rows import RowReader, UnfitData
from bptjax.data.stream import SIZES, Stream
from bptjax.data.tokenizer import ByteTokenizer
from bptjax.data.unpaired import KINDS, encode_unpaired, read_unpaired, with_another

BYTE = ByteTokenizer()
ROWS = [
    {"prompt": "1+1=", "completion": "2", "label": True},
    {"prompt": "Color: ", "completion": "ten", "label": False},
    {"prompt": "Hi", "completion": "Hello!", "label": True},
]


def read(rows=ROWS):
    return [read_unpaired(row, "text", f"record {i}") for i, row in enumerate(rows)]


def texts(example, tokenizer=BYTE):
    """Kind, prompt and answer of each document, as the model reads them."""
    found = []
    for what, own in described_parts(example, KINDS):
        ids, in_loss = next_tokens(own)
        first = int(in_loss.argmax())
        found.append((what.partition(" after")[0], *map(tokenizer.decode, np.split(ids, [first]))))
    return found


@pytest.mark.parametrize("shared", [False, True])
def test_each_prompt_has_two_answers(shared):
    """Its own, and the one of another record; so it stays in a packed sequence."""
    read_all = read()
    wanted = [[(KINDS[not row["label"]], row["prompt"], row["completion"])] for row in ROWS]
    examples = []
    for index in range(3):
        document = with_another(0, read_all, index)
        wanted[index].append(
            (KINDS[2], ROWS[index]["prompt"], document.other.chat.messages[-1]["content"])
        )
        examples += encode_unpaired(document, BYTE, DataConfig(), shared=shared)
    assert [texts(example) for example in examples] == wanted
    assert [set(example["answers"].tolist()) for example in examples] == [
        {0, 1 + (not row["label"]), 3} for row in ROWS
    ]
    packed = sequence(examples, 128)
    assert sum((texts(own) for own in documents(packed)), []) == sum(wanted, [])
    assert set(packed["answers"].tolist()) == {0, 1, 3, 5, 6, 7, 9}


@pytest.mark.parametrize("n", [2, 3, 10])
def test_the_others_are_the_same_records(n):
    """None has its own answer beside it, and each answer is beside one prompt."""
    read_all = read([{"prompt": str(i), "completion": "x", "label": True} for i in range(n)])
    drawn = set()
    for seed in range(8):
        others = [with_another(seed, read_all, i).other for i in range(n)]
        places = [read_all.index(other) for other in others]
        assert sorted(places) == [*range(n)]
        assert all(place != i for i, place in enumerate(places))
        drawn.add(places[0])
    assert len(drawn) == min(n - 1, len(drawn)) and (n == 2 or len(drawn) > 1)


def test_bad_records_are_not_beside_others():
    class Some(list):
        def __getitem__(self, index):
            if index % 2:
                raise ValueError("bad")
            return super().__getitem__(index)

    some = Some(read([*ROWS, *ROWS]))
    for seed in range(6):
        assert with_another(seed, some, 2).other in (some[0], some[4])
    with pytest.raises(UnfitData, match="must not be the only valid record"):
        with_another(0, Some(read(ROWS[:2])), 0)


def test_messages_go_through_the_template(tokenizers):
    _, tokenizer = tokenizers("bytes", CHATML)
    chats = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["completion"]}],
            "label": row["label"],
        }
        for row in ROWS
    ]
    (example,) = encode_unpaired(with_another(0, read(chats), 0), tokenizer, DataConfig())
    (_, prompt, own), (_, crossed, other) = texts(example, tokenizer)
    assert prompt == crossed == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    assert own.startswith("2<|im_end|>") and other.startswith(("ten<|im_end|>", "Hello!<|im_end|>"))


@pytest.mark.parametrize(
    "row, message",
    [
        ({"label": None}, "'label' must be true .* or false"),
        ({"label": "yes"}, "'label' must be true"),
        ({"completion": ""}, "'completion' must be text or a list of messages, and not empty"),
        ({"completion": [{"role": "user", "content": "x"}]}, "'completion' must have an answer"),
        ({"prompt": None}, "'prompt' must be text or a list"),
        (
            {"question": "a", "completion": "b", "good": True},
            "'prompt' and 'label' must be set; the record has question, completion, good; data",
        ),
    ],
)
def test_refusals(row, message):
    row = row if "question" in row else ROWS[0] | row
    with pytest.raises(ValueError, match=f"^here: {message}"):
        read_unpaired(row, "text", "here")


def test_other_objectives_read_them_by_the_name_of_their_format_alone():
    """Else they would train on bad answers."""
    row = {"q": "Color: ", "completion": "ten", "good": False}
    reader = RowReader(format="auto", fields={"prompt": "q", "label": "good"})
    with pytest.raises(UnfitData, match="here: 'label' .data.fields: good. marks .*type=kto"):
        reader(row, "here")
    chat = replace(reader, format="self_instruct")(row, "here")
    assert isinstance(chat, Chat) and chat.messages[-1]["content"] == "ten"


def test_streams_are_refused():
    """They have no random access."""
    encoding, config = Encoding(encode=encode_unpaired, pick=with_another), DataConfig()
    with pytest.raises(ValueError, match="data.path: must be files that fit into memory"):
        how = dict(seq_len=64, batch_size=1, encoding=encoding)
        train_loader(Stream((read(),), SIZES), BYTE, config, **how)
