"""A survey of the data: fields that the template does not read, and endings of answers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from chats import CALLS, CHATML, CHATML_MARKED, TALK, THINKING, TOOLS, read_records

from bptjax.data.chat import Chat
from bptjax.data.hf_tokenizer import GENERATION, HFTokenizer
from bptjax.data.rows import Compound
from bptjax.data.survey import survey
from bptjax.data.templates import conversations, render


def test_unread_fields_are_counted(tmp_path, tokenizers):
    rows = [{"messages": CALLS, "tools": TOOLS, "id": 1}] * 2 + [{"messages": TALK, "id": 0}]
    rows[0] = rows[0] | {"documents": []}
    chats = read_records(tmp_path, *rows)
    _, chatml = tokenizers("bytes", CHATML)
    found = survey([chats], chatml)
    assert found.records == 3 and found.unread == {
        "id": 3,
        "tools": 2,
        "tool_calls of assistant messages": 2,
        "reasoning_content of assistant messages": 2,
    }
    (note, *_) = found.notes(chatml)
    assert "does not read" in note and "tools (2)" in note and "of 3 records" in note
    # Reasoning is read, though only of the last answers.
    assert survey([chats], tokenizers("bytes", THINKING)[1]).unread == {"id": 3}
    assert survey([["text"]], chatml).notes(chatml) == []


@dataclass(frozen=True)
class Chats(Compound):
    """A record of several chats."""

    chats: Sequence[Chat] = ()


def test_chats_of_a_compound_record_count(tmp_path, tokenizers):
    chats = read_records(tmp_path, {"messages": CALLS, "id": 1}, {"messages": TALK[:3]})
    _, ours = tokenizers("bytes", CHATML)
    found = survey([[Chats("here", list(chats))]], ours)
    assert found == replace(survey([chats], ours), formats=found.formats) and found.records == 2


class UpTo(list):
    """A list whose items from `stop` on must not be read."""

    def __init__(self, items, stop):
        super().__init__(items)
        self.stop = stop

    def __getitem__(self, index):
        assert isinstance(index, slice) or index < self.stop
        return super().__getitem__(index)


def test_endings_stop_generation(tmp_path, tokenizers):
    raw, ours = tokenizers("bytes", THINKING)
    chats = read_records(tmp_path, {"messages": CALLS}, {"messages": TALK[:3]})
    end = raw.convert_tokens_to_ids("<|im_end|>")
    # `</tool_call>` before it is no end, and the line's end after it neither.
    assert set(survey([chats], ours).endings) == {end}
    adapted = survey([chats], ours).adapt(ours)
    assert adapted.stop_ids == [2, end] and ours.stop_ids == [2]
    adapted.save(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [2, end]
    # In a long chat, no token after the one that ends the answer is looked at.
    ids = [20, end, *[20] * 9]
    assert ours.ending(UpTo(ids, 2), 0, 2) == ours.ending(UpTo(ids, 2), 0, 1) == end
    # Marks that leave out the end, and answers without one.
    unmarked = CHATML_MARKED.replace("<|im_end|>\n{% endgen", "{% endgen").replace(
        "{% endgeneration %}", "{% endgeneration %}<|im_end|>\n"
    )
    assert set(survey([chats], tokenizers("bytes", unmarked)[1]).endings) == {end}
    bare = CHATML.replace("<|im_end|>", "").replace("<|im_start|>", "")
    found = survey([chats], tokenizers("bytes", bare)[1])
    assert set(found.endings) == {None} and "no special token ends 4 of 4" in found.notes(ours)[-1]


def test_a_tokenizer_keeps_sampling_without_an_end_of_text(tmp_path, tokenizers):
    _, ours = tokenizers("bytes", "{{ messages }}")
    ours.save(tmp_path / "one")
    (tmp_path / "one" / GENERATION).write_text(json.dumps({"temperature": 0.5}))
    HFTokenizer(tmp_path / "one").save(tmp_path / "two")
    saved = json.loads((tmp_path / "two" / GENERATION).read_text())
    assert saved["temperature"] == 0.5 and saved["eos_token_id"] == ours.stop_ids[0]


def test_chats_keep_their_template_beside_other_records(tmp_path, tokenizers):
    """Whether the chats are few, or come after the records inspected."""
    rows = [
        {"instruction": "Say", "input": "", "output": "Hm"},
        {"prompt": "Hi", "completion": "Ho"},
    ]
    *others, chat = read_records(tmp_path, *rows * 2, rows[1], {"messages": TALK})
    _, bare = tokenizers("bytes", None)
    _, ours = tokenizers("bytes", CHATML)
    for tokenizer, wanted in ((bare, "plain"), (ours, None)):
        (alone,) = conversations(chat, tokenizer)
        found = survey([[*others, chat]], tokenizer)
        assert found.form == wanted and found.notes(ours)[-1].endswith(wanted or "keeps its own")
        for records in ([*others, chat], others):
            adapted = survey([records], tokenizer).adapt(tokenizer)
            assert conversations(chat, adapted) == [alone]
        # The template that the run saves.
        template = found.adapt(tokenizer).chat_template
        assert render(chat.messages, template or "", tokenizer)[0] == alone.text
    assert survey([others], ours).form == "bare"
