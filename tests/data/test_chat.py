"""Chats: their formats, what is learnt of them to the token, cutting, packing, grouping."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiers import fast

from bptjax.data.config import DataConfig
from bptjax.data.encode import encode, prompt_and_answer
from bptjax.data.loader import eval_loader, train_loader
from bptjax.data.packing import PACKINGS
from bptjax.data.sources import open_split
from bptjax.data.survey import survey
from bptjax.data.text import open_documents
from bptjax.data.tokenizer import ByteTokenizer, CharTokenizer, load_tokenizer

BYTE = ByteTokenizer()
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Thoughts before the last answer only; none but users and assistants.
THINKING = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<|{{ m.role }}|>{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
    "{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long"},
]
HH = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Bye\n\nAssistant: So long"
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\nName a bird\n\n### Response:"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nAdd\n\n### Input:\n1 {2}\n\n### Response:"
)
# A record, and its texts in turn: read, learnt, read, learnt…
CASES = {
    "alpaca": ({"instruction": "Name a bird", "input": "", "output": "Robin"}, [ALPACA, "Robin"]),
    "alpaca with input": (
        {"instruction": "Add", "input": "1 {2}", "output": "3", "text": "all of it"},
        [ALPACA_INPUT, "3"],
    ),
    "self_instruct": ({"prompt": "One, ", "completion": "two"}, ["One, ", "two"]),
    "prompt_answer": ({"prompt": "π?", "answer": "3"}, ["π?", "3"]),
    "hh_rlhf": (
        {"chosen": HH, "rejected": "\n\nHuman: Hi\n\nAssistant: No"},
        ["\n\nHuman: Hi\n\nAssistant:", " Hello", "\n\nHuman: Bye\n\nAssistant:", " So long"],
    ),
    "messages": (
        {"messages": TALK},
        [
            "### System: Be brief.\n### Human: Hi\n### Assistant:",
            " Hello",
            "\n### Human: Bye\n### Assistant:",
            " So long",
        ],
    ),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A function from a chat template to a byte-pair tokenizer with it."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    special = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    model.train_from_iterator([text for _, texts in CASES.values() for text in texts], trainer)

    def make(template):
        fast = PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>")
        fast.chat_template = template
        directory = tmp_path_factory.mktemp("tokenizer")
        fast.save_pretrained(directory)
        return load_tokenizer(directory)

    return make


def opened(tmp_path, rows, name="a.jsonl", **kwargs):
    text = (
        json.dumps(rows) if name.endswith(".json") else "".join(json.dumps(r) + "\n" for r in rows)
    )
    (tmp_path / name).write_text(text)
    return open_documents(tmp_path / name, **{"format": "auto"} | kwargs)


def worked(tokenizer, texts, eos=True, source=False):
    """(tokens, labels) of texts that are read and in the loss by turns."""
    ids, learned = tokenizer.prefix.tolist(), [source] * len(tokenizer.prefix)
    if tokenizer.vocab_size == 257:
        for number, text in enumerate(texts):
            answer = bool(number % 2)
            part = [*tokenizer.encode(text), *[tokenizer.eos_id] * (answer and eos)]
            ids, learned = [*ids, *part], [*learned, *[answer or source] * len(part)]
    else:
        texts = [text + "</s>" * (eos and number % 2) for number, text in enumerate(texts)]
        found = tokenizer._tokenizer("".join(texts), add_special_tokens=False)
        learned += [source] * len(found.input_ids)
        ids, end = ids + found.input_ids, 0
        for number, text in enumerate(texts):
            start, end = end, end + len(text)
            if number % 2:
                first, last = found.char_to_token(start), found.char_to_token(end - 1)
                learned[first : last + 1] = [True] * (last + 1 - first)
    labels = [i if on else -100 for i, on in zip(ids, learned, strict=True)]
    return ids[:-1], labels[1:]


def same(got, wanted):
    (got,) = got
    for name, values in zip(("tokens", "labels"), wanted, strict=True):
        np.testing.assert_array_equal(got[name], np.array(values, np.int32), strict=True)


def test_by_hand(tmp_path):
    """Every byte of it: 256 begins the text and ends an answer."""
    (chat,) = opened(tmp_path, [{"prompt": "ab", "answer": "cd"}])
    same(encode(chat, BYTE), ([256, 97, 98, 99, 100], [-100, -100, 99, 100, 256]))
    both = [97, 98, 99, 100, 256]
    same(encode(chat, BYTE, train_on_source=True), ([256, *both[:-1]], both))
    # BOS and EOS count.
    same(encode(chat, BYTE, source_max_len=2), ([256, 97, 99, 100], [-100, 99, 100, 256]))
    same(encode(chat, BYTE, target_max_len=2), ([256, 97, 98, 99], [-100, -100, 99, 256]))
    prompt, answer = prompt_and_answer(chat, BYTE, None)
    assert (prompt.tolist(), answer.tolist()) == ([256, 97, 98], [99, 100, 256])


@pytest.mark.parametrize("kind", ["byte", "bpe"])
@pytest.mark.parametrize("name", CASES)
def test_formats(tmp_path, small, name, kind):
    row, texts = CASES[name]
    tokenizer = BYTE if kind == "byte" else small(None)
    (chat,) = opened(tmp_path, [row])
    same(encode(chat, tokenizer), worked(tokenizer, texts))
    everything = worked(tokenizer, texts, source=True)
    same(encode(chat, tokenizer, train_on_source=True), everything)
    named = opened(tmp_path, [row], "a.json", format=name.split()[0])
    assert named[0].messages == chat.messages
    pq.write_table(pa.Table.from_pylist([row, row]), tmp_path / "a.parquet")
    assert [c.messages for c in open_documents(tmp_path / "a.parquet", format="auto")] == [
        chat.messages
    ] * 2
    prompt, answer = prompt_and_answer(chat, tokenizer, None)
    tokens, labels = worked(tokenizer, texts)
    first = int(np.argmax(np.array(labels) != -100))
    assert prompt.tolist() == tokens[: first + 1]
    assert answer[0] == labels[first] and answer[-1] == tokenizer.eos_id


def test_chat_template(tmp_path, small):
    tokenizer = small(CHATML)
    (chat,) = opened(tmp_path, [{"messages": TALK}])
    texts = [
        "<|system|>Be brief.<|end|>\n<|user|>Hi<|end|>\n<|assistant|>",
        "Hello<|end|>\n",
        "<|user|>Bye<|end|>\n<|assistant|>",
        "So long<|end|>\n",
    ]
    (got,) = encode(chat, tokenizer)
    same([got], worked(tokenizer, texts, eos=False))
    assert tokenizer.decode([*got["tokens"], got["labels"][-1]]) == "".join(texts)


def test_unknown_roles_are_bad_records_for_built_in_prompts(tmp_path, small):
    talk = [{"role": "usr", "content": "Hi"}, *TALK[1:]]
    (chat, good) = opened(tmp_path, [{"messages": talk}, {"messages": TALK}])
    adapted = survey([[good]], BYTE).adapt(BYTE)
    assert adapted.chat_template
    message = (
        "a.jsonl, record 1: message 1: role='usr': must be one of system, user, assistant, tool"
    )
    for tokenizer in (BYTE, adapted, small(None)):
        for more in ({}, {"train_on_source": True}):
            with pytest.raises(ValueError, match=message):
                encode(chat, tokenizer, **more)
            assert encode(good, tokenizer, **more)
    assert encode(chat, small(CHATML))


def test_bad_templates_are_named(tmp_path, small):
    (chat,) = opened(tmp_path, [{"messages": TALK}])
    changed = CHATML.replace("<|assistant|>{% endif %}", "<|assistant|>!{% endif %}")
    for template, message in (
        (THINKING, "a.jsonl, record 1: the chat template refuses the messages: no system role"),
        (changed, "record 1: message 3: the chat template does not write .*train_on_source=true"),
    ):
        with pytest.raises(ValueError, match=message):
            encode(chat, small(template))
    # As the message says.
    assert len(encode(chat, small(changed), train_on_source=True)) == 1


@pytest.mark.parametrize(
    ("row", "format", "message"),
    [
        (
            {"instruction": "a"},
            "alpaca",
            "a.jsonl, record 2: must have 'output', not only .'instruction'",
        ),
        ({"instruction": "a", "output": 3}, "auto", "record 2: 'output' must be text"),
        ({"prompt": None, "answer": "b"}, "auto", "record 2: 'prompt' must be text"),
        (
            {"chosen": "Human: Hi"},
            "auto",
            "record 2: 'chosen' must consist of .*; objective.type=dpo reads other pairs",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            "auto",
            "must have a message .* 'assistant'",
        ),
        ({"messages": [{"role": "user"}]}, "auto", "record 2: message 1: 'content' must be text"),
        ({"messages": ["a"]}, "auto", "record 2: message 1: must be a record, not str"),
        ([], "messages", "record 2: must have 'messages'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "a"}]}]},
            "auto",
            "record 2: message 1: 'content' has a part of type 'image': must be text",
        ),
        ({"prompt": "a", "answer": "b", "images": ["c"]}, "auto", "record 2: 'images' must be em"),
        ({"text": "a", "images": ["c"]}, "auto", "record 2: 'images' must be empty, because"),
        ({"other": 1}, "auto", "record 2: must have text in .text.*data.format"),
    ],
)
def test_bad_records_are_named(tmp_path, row, format, message):
    good = CASES[format if format in CASES else "prompt_answer"][0]
    documents = opened(tmp_path, [good, row], format=format)
    with pytest.raises(ValueError, match=message):
        documents[1]


def test_bad_files_and_keys(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="a.txt: with data.format=alpaca, must be .jsonl"):
        open_documents(tmp_path / "a.txt", format="alpaca")
    for content, message in (("{}", "must be a list of records"), ("[", "a.json: ")):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            open_documents(tmp_path / "a.json")
    row = CASES["prompt_answer"][0]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(ValueError, match="a.jsonl, record 1: must not be the only record"):
        open_split(DataConfig(str(path)))
    with pytest.raises(ValueError, match="data.source_max_len=0"):
        DataConfig(source_max_len=0)
    with pytest.raises(
        ValueError, match="data.packing=concat: must be none with data.group_by_length=true"
    ):
        DataConfig(group_by_length=True)
    chats = list(opened(tmp_path, [{"prompt": "abcdef", "answer": ""}] * 3))
    endless = CharTokenizer("abcdef")
    with pytest.raises(
        ValueError, match="must have a token that counts in the loss; all texts and answers"
    ):
        train_loader(chats, endless, DataConfig(), seq_len=8, batch_size=1)
    with pytest.raises(
        ValueError, match="a.jsonl, record 1: must have an answer of at least one token"
    ):
        prompt_and_answer(chats[0], endless, None)


def test_lone_surrogates(tmp_path, small):
    (chat, other) = opened(tmp_path, [{"prompt": f"a{x}b", "answer": "c"} for x in "\ud800\ufffd"])
    tokenizer = small(None)
    same(encode(chat, tokenizer), encode(other, tokenizer)[0].values())
    assert tokenizer.encode_prompt("\udfff").tolist() == tokenizer.encode_prompt("\ufffd").tolist()


def talks(count, seed=0):
    rng = np.random.default_rng(seed)
    texts = ["".join(rng.choice(list("abcdef"), n)) for n in rng.integers(1, 20, 2 * count)]
    return [{"prompt": a, "answer": b} for a, b in zip(texts[::2], texts[1::2], strict=True)]


@pytest.mark.parametrize("packing", fast(PACKINGS, ["best_fit"]))
def test_packed_is_separate(tmp_path, packing):
    """Whatever shares a row, each chat has its own labels and segment, and the losses add up."""
    import jax
    import jax.numpy as jnp

    from bptjax.models.config import ModelConfig
    from bptjax.models.decoder import Decoder
    from bptjax.ops.loss import linear_cross_entropy

    chats = list(opened(tmp_path, talks(9)))
    model = Decoder(
        ModelConfig(hidden_size=16, num_layers=1, num_heads=2, vocab_size=257), jax.random.key(0)
    )

    @jax.jit
    def loss(batch):
        hidden, _ = model(batch["tokens"], positions=batch["positions"], segments=batch["segments"])
        return linear_cross_entropy(hidden, model.head_matrix, batch["labels"])

    def total(chats, config, T):
        batches = list(eval_loader(chats, BYTE, config, seq_len=T, batch_size=2))
        counts = sum(int((b["labels"] != -100).sum()) for b in batches)
        return sum(float(loss(jax.tree.map(jnp.asarray, b))) for b in batches), counts

    config = DataConfig(packing=packing)
    together, counted = total(chats, config, 400)
    pieces = [total([chat], config, 64) for chat in chats]
    assert counted == sum(len(BYTE.encode(chat.messages[1]["content"])) + 1 for chat in chats)
    assert counted == sum(count for _, count in pieces)
    assert together == pytest.approx(sum(loss for loss, _ in pieces), rel=1e-5)


def test_grouped_by_length(tmp_path):
    chats = list(opened(tmp_path, talks(203)))
    config = DataConfig(packing="none", group_by_length=True, seed=3)
    T, rows = 40, 4
    loader = train_loader(chats, BYTE, config, seq_len=T, batch_size=rows)
    states, batches = [], []
    for _ in range(120):
        states.append(json.dumps(loader.get_state()))
        batches.append(next(loader))
    loader.close()
    lengths = np.concatenate([batch["segments"].sum(1) for batch in batches])
    whole = [len(encode(chat, BYTE)[0]["tokens"]) for chat in chats]
    assert lengths[:rows].max() == max(whole)
    # Each epoch has every row once, in another order.
    epochs = [lengths[:203], lengths[203:406]]
    for epoch in epochs:
        assert sorted(epoch) == sorted(whole)
    assert list(epochs[0]) != list(epochs[1])
    # A batch is as wide as an eighth of T more than its longest row, at most.
    for batch in batches:
        longest = batch["segments"].sum(1).max()
        assert longest <= batch["tokens"].shape[1] < longest + T // 8
        assert all(v.shape == batch["tokens"].shape and v.dtype == np.int32 for v in batch.values())
    held = sum(batch["segments"].size for batch in batches)
    assert lengths.sum() > 0.8 * held > 1.3 * lengths.sum() * held / (120 * rows * T)
    # It goes on where it stopped.
    for stop in (0, 1, 50, 51, 103):
        again = train_loader(chats, BYTE, config, seq_len=T, batch_size=rows)
        again.set_state(json.loads(states[stop]))
        for wanted in batches[stop : stop + 3]:
            got = next(again)
            assert all(np.array_equal(got[key], wanted[key]) for key in wanted)
        again.close()
    # Records longer than a sequence are left out; the others are all there.
    fitting = [n for n in whole[:20] if n <= 16]
    loader = train_loader(chats[:20], BYTE, config, seq_len=16, batch_size=2)
    found = [next(loader) for _ in range(-(-len(fitting) // 2))]
    loader.close()
    assert sorted(np.concatenate([b["segments"].sum(1) for b in found]))[-len(fitting) :] == (
        sorted(fitting)
    )
