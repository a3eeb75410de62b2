"""Chats through their templates: the loss mask of transformers, tools, reasoning, lengths."""

import json

import numpy as np
import pytest
from chats import (
    CALLS,
    CHATML,
    CHATML_MARKED,
    HEADERS,
    INST,
    TALK,
    THINKING,
    THINKING_MARKED,
    TOOLS,
    read_records,
)

from bptjax.data.encode import encode, prompt_and_answer
from bptjax.data.survey import survey
from bptjax.data.templates import chat_prompt, conversations, form_template, opening
from bptjax.data.tokenizer import ByteTokenizer

KINDS = ["bytes", "metaspace", "prepend"]


def expected(raw, messages, template=None, **variables):
    """transformers' token ids and assistant mask, as tokens and labels."""
    found = raw.apply_chat_template(
        messages,
        chat_template=template,
        return_assistant_tokens_mask=True,
        return_dict=True,
        **variables,
    )
    ids, mask = np.array(found["input_ids"]), np.array(found["assistant_masks"])
    assert mask.any() and not mask.all()
    return ids[:-1], np.where(mask, ids, -100)[1:]


def check(example, wanted):
    for name, values in zip(("tokens", "labels"), wanted, strict=True):
        np.testing.assert_array_equal(example[name], values)


def texts_in_loss(tokenizer, examples):
    return [tokenizer.decode(e["labels"][e["labels"] != -100]) for e in examples]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("template", "row"),
    [
        (CHATML_MARKED, {"messages": TALK}),
        (HEADERS, {"messages": TALK}),
        (THINKING_MARKED, {"messages": CALLS, "tools": TOOLS}),
        (THINKING_MARKED, {"messages": TALK[1:], "enable_thinking": False}),
    ],
    ids=["chatml", "headers", "tools", "thinking"],
)
def test_marks_decide_as_in_transformers(tmp_path, tokenizers, kind, template, row):
    raw, ours = tokenizers(kind, template)
    (chat,) = read_records(tmp_path, row)
    (got,) = encode(chat, ours)
    check(got, expected(raw, **row))


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_found_with_and_without_marks(tmp_path, tokenizers, kind):
    raw, ours = tokenizers(kind, CHATML)
    (chat,) = read_records(tmp_path, {"messages": TALK})
    (got,) = encode(chat, ours)
    check(got, expected(raw, TALK, CHATML_MARKED))


@pytest.mark.parametrize("kind", KINDS)
def test_all_tokens_of_a_part_are_in_its_range(tokenizers, kind):
    """Also if its last character has several: the bytes of an emoji, a space before a line end."""
    _, ours = tokenizers(kind)
    parts = ["Hi<|im_end|>", "\n", "🙂"]
    ids, ranges = ours.encode_parts(parts)
    assert ranges[0][0] == 0 and ranges[-1][1] == len(ids)
    assert [a for a, _ in ranges[1:]] == [b for _, b in ranges[:-1]]
    counts = {"bytes": [3, 1, 4], "metaspace": [4, 1, 1], "prepend": [4, 2, 1]}
    assert [b - a for a, b in ranges] == counts[kind]


FORMATS = {
    "alpaca": {"instruction": "Name a bird", "output": "Hello there"},
    "bare": {"prompt": "One, ", "completion": "two"},
    "hh_rlhf": {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: One\n\nAssistant: two"},
    "plain": {"messages": TALK},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMATS)
def test_written_formats_as_in_transformers(tmp_path, tokenizers, kind, form):
    """No space is added before an answer, and the exported template is the training prompt."""
    raw, ours = tokenizers(kind)
    (chat,) = read_records(tmp_path, FORMATS[form])
    (got,) = encode(chat, ours)
    template = form_template(form, ours)
    check(got, expected(raw, chat.messages, template))
    ids = [*got["tokens"], got["labels"][-1]]
    text = "".join(one.text for one in conversations(chat, ours))
    assert ids[-1] == ours.eos_id and ids[0] == ours.prefix[0] and ids.count(1) == 1
    # The text starts as the tokenizer starts a text, and has no space that was not written.
    assert ids == raw(text.removeprefix(ours.start_text))["input_ids"]


@pytest.mark.parametrize("kind", [*KINDS, "byte"])
@pytest.mark.parametrize("form", FORMATS)
def test_chat_feeds_the_training_prompt(tmp_path, tokenizers, kind, form):
    """From the saved tokenizer, which transformers reads too."""
    raw, ours = (None, ByteTokenizer()) if kind == "byte" else tokenizers(kind)
    row = {
        "plain": {"messages": TALK[1:3]},
        "bare": {"prompt": "One,", "completion": " two"},
    }.get(form, FORMATS[form])
    chats = read_records(tmp_path, row)
    adapted = survey([chats], ours).adapt(ours)
    adapted.save(tmp_path / "run")
    from bptjax.data.tokenizer import load_tokenizer

    again = load_tokenizer(tmp_path / "run")
    prompt, _ = prompt_and_answer(chats[0], ours, None)
    asked = chats[0].messages[0]["content"]
    got = chat_prompt(opening(asked), again).tolist()
    assert got == prompt.tolist()
    if raw is not None:
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(tmp_path / "run")
        message = {"role": "user", "content": asked}
        found = theirs.apply_chat_template([message], add_generation_prompt=True)
        assert found["input_ids"] == got


def test_templates_that_rewrite_earlier_turns(tmp_path, tokenizers):
    """Each answer follows what the model reads when it writes that answer."""
    raw, ours = tokenizers("bytes", THINKING)
    (chat,) = read_records(tmp_path, {"messages": CALLS, "tools": TOOLS})
    examples = encode(chat, ours)
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    assert texts_in_loss(ours, examples) == [
        f"<think>\nI add.\n</think>\n\n{call}<|im_end|>\n",
        "<think>\nSo it is.\n</think>\n\nIt is 3.<|im_end|>\n",
        "<think>\nHm.\n</think>\n\nYes<|im_end|>\n",
    ]
    for example, count in zip(examples, (2, 4, 6), strict=True):
        wanted = raw.apply_chat_template(CALLS[:count], tools=TOOLS)["input_ids"]
        assert example["tokens"].tolist() == wanted[:-1]
    prompt, answer = prompt_and_answer(chat, ours, None)
    asked = raw.apply_chat_template(CALLS[:1], tools=TOOLS, add_generation_prompt=True)
    assert prompt.tolist() == asked["input_ids"]
    assert "I add." in ours.decode(answer)


def test_a_system_prompt_that_moves(tmp_path, tokenizers):
    _, ours = tokenizers("metaspace", INST)
    (chat,) = read_records(tmp_path, {"messages": TALK})
    assert [one.text for one in conversations(chat, ours)] == [
        "<s>[INST] Be brief. Hi [/INST] Hello there</s>",
        "<s>[INST] Hi [/INST] Hello there</s>[INST] Be brief. One, two? [/INST] π 🙂</s>",
    ]
    (chat,) = read_records(tmp_path, {"messages": TALK[1:]})
    (one,) = conversations(chat, ours)
    assert [one.text[a:b] for a, b in one.answers] == [" Hello there</s>", " π 🙂</s>"]


def test_every_field_reaches_the_template(tmp_path, tokenizers):
    template = "{{ documents }}|{{ lang }}|{{ deep }}|{{ tools }}|" + CHATML_MARKED.replace(
        "{{ m.content }}", "{{ m.name }}{{ m.content }}{{ m.tool_calls }}"
    )
    raw, ours = tokenizers("bytes", template)
    messages = [
        {"role": "user", "content": "a", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
    ]
    variables = {"documents": [{"title": "t", "text": "x"}], "lang": "en", "tools": TOOLS}
    row = {"messages": messages, **variables, "chat_template_kwargs": {"deep": True}}
    (chat,) = read_records(tmp_path, row)
    check(encode(chat, ours)[0], expected(raw, messages, deep=True, **variables))
    # Parquet fills missing fields with nulls; TRL stores tools and arguments as JSON.
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"] |= {"arguments": json.dumps({"a": 1})}
    stored = [row | {"tools": json.dumps(TOOLS)}, {"messages": TALK}]
    found = read_records(tmp_path, *stored, name="a.parquet")
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    assert found[0].messages == (messages[0], {"role": "assistant", "tool_calls": calls})
    assert found[0].variables == variables | {"deep": True}
    assert list(found[1].messages) == TALK and not found[1].variables


def test_content_in_parts(tmp_path):
    part = {"type": "text", "text": "a"}
    parts = [{"role": "user", "content": [part, {"type": "text", "text": "b"}]}, TALK[2]]
    (chat,) = read_records(tmp_path, {"messages": parts})
    assert chat.messages[0]["content"] == "ab"
    parts[0]["content"].append({"type": "image", "url": "x"})
    with pytest.raises(ValueError, match="record 1: message 1: .* type 'image': must be text"):
        read_records(tmp_path, {"messages": parts})
    with pytest.raises(ValueError, match="record 1: 'tools' must be JSON"):
        read_records(tmp_path, {"messages": TALK, "tools": "{"})


def test_sharegpt(tmp_path):
    call = json.dumps({"name": "add", "arguments": {"a": 1}})
    turns = [
        ("system", "Be brief."),
        ("human", "1 + 2?"),
        ("function_call", call),
        ("observation", "3"),
        ("gpt", "It is 3."),
    ]
    conversations = [{"from": name, "value": value} for name, value in turns]
    row = {"conversations": conversations, "tools": json.dumps(TOOLS)}
    for name in ("a.jsonl", "a.parquet"):
        for format in ("auto", "sharegpt"):
            (chat,) = read_records(tmp_path, row, name=name, format=format)
            assert [m["role"] for m in chat.messages] == [
                "system",
                "user",
                "assistant",
                "tool",
                "assistant",
            ]
            assert chat.messages[2]["tool_calls"][0]["function"] == json.loads(call)
            assert chat.messages[4]["content"] == "It is 3." and chat.variables["tools"] == TOOLS
    row = {"system": "S", "conversations": row["conversations"][1:2] + row["conversations"][4:]}
    (chat,) = read_records(tmp_path, row)
    assert chat.messages[0] == {"role": "system", "content": "S"} and not chat.variables
    for turn, message in (
        ({"from": "robot", "value": "x"}, "message 1: from='robot': must be one of"),
        ({"from": "function_call", "value": "f(x)"}, "message 1: 'value' of a function_call"),
        ({"from": "human"}, "message 1: 'value' must be text"),
    ):
        with pytest.raises(ValueError, match=message):
            read_records(tmp_path, {"conversations": [turn]})


@pytest.mark.parametrize("kind", KINDS)
def test_truncation_keeps_the_text_of_the_template(tmp_path, tokenizers, kind):
    raw, ours = tokenizers(kind, CHATML)
    messages = [
        {"role": "user", "content": "one two three four five"},
        {"role": "assistant", "content": "six seven eight nine ten"},
        {"role": "user", "content": "and"},
        {"role": "assistant", "content": "eleven"},
    ]
    (chat,) = read_records(tmp_path, {"messages": messages})
    prompt, answer = prompt_and_answer(chat, ours, None)
    frame, end = (
        raw(text, add_special_tokens=False)["input_ids"]
        for text in ("<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n")
    )
    empty = [messages[0] | {"content": ""}]
    least = len(raw.apply_chat_template(empty, add_generation_prompt=True)["input_ids"])
    for limit in range(least - 2, len(prompt) + 2):
        (got,) = encode(chat, ours, source_max_len=limit)
        first = int((got["labels"] != -100).argmax()) + 1
        source = got["tokens"][:first].tolist()
        assert source[-len(frame) :] == frame and source[0] == prompt[0]
        assert first <= max(limit, least) and (first > limit - 4 or limit > len(prompt))
        assert source == prompt_and_answer(chat, ours, limit)[0].tolist()
    (whole,) = encode(chat, ours)
    target = len(whole["tokens"]) + 1 - len(prompt)
    ids = []
    for limit in range(4, target + 2):
        (got,) = encode(chat, ours, target_max_len=limit)
        ids = [*got["tokens"].tolist(), end[-1]]
        assert len(ids) - len(prompt) <= limit and ids[-len(end) :] == end
        assert limit > len(answer) or ids.count(frame[0]) == 2
    assert len(ids) == len(whole["tokens"]) + 1
    with pytest.raises(ValueError, match="data.target_max_len=1: must be at least"):
        encode(chat, ours, target_max_len=1)


def test_one_rule_for_the_start_of_a_text(tokenizers):
    for kind in KINDS:
        for bos in (True, False):
            raw, ours = tokenizers(kind, bos=bos)
            wanted = raw("Hello there")["input_ids"]
            assert ours.encode_prompt("Hello there").tolist() == wanted
            (got,) = encode("Hello there", ours)
            assert [*got["tokens"], got["labels"][-1]] == [*wanted, raw.eos_token_id]
            assert (wanted[0] == raw.bos_token_id) == bos


def test_slow_tokenizers_are_refused_for_chats(tmp_path, tokenizers, monkeypatch):
    _, ours = tokenizers("bytes", CHATML)
    (chat,) = read_records(tmp_path, {"messages": TALK})
    monkeypatch.setattr(type(ours._tokenizer), "is_fast", False)
    with pytest.raises(ValueError, match="must be a fast tokenizer"):
        encode(chat, ours)


def test_labels_of_token_ids(tmp_path):
    tokenizer = ByteTokenizer()
    rows = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 9]},
        {"input_ids": [5, 6], "labels": None},
    ]
    for name in ("a.jsonl", "a.parquet"):
        documents = read_records(tmp_path, *rows, name=name, format="text")
        (got,) = encode(documents[0], tokenizer)
        np.testing.assert_array_equal(got["tokens"], np.array([5, 6], np.int32), strict=True)
        np.testing.assert_array_equal(got["labels"], np.array([6, 9], np.int32), strict=True)
        assert encode(documents[1], tokenizer)[0]["labels"].tolist() == [6]
        for labels, message in (
            ([1, 2], "a list of 3 integers"),
            ([1, 2, -3], "labels=-3: must be token ids, or -100"),
        ):
            with pytest.raises(ValueError, match=f"{name}.*{message}"):
                read_records(
                    tmp_path, {"input_ids": [1, 2, 3], "labels": labels}, name=name, format="text"
                )
        (far,) = read_records(
            tmp_path, {"input_ids": [1], "labels": [300]}, name=name, format="text"
        )
        with pytest.raises(ValueError, match=r"labels from 300 to 300: must be in \[0, 257\)"):
            encode(far, tokenizer)
