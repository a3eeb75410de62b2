"""Instruction data: the formats of its records, and which of their tokens are learnt."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bptjax.data.tokenizer import Tokenizer

# Taori et al. 2023, github.com/tatsu-lab/stanford_alpaca.
ALPACA = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
ANSWER = "assistant"

# (role, text), in order.
Turns = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Chat:
    """A record of instruction data.

    Attributes:
      turns: those of the assistant are learnt.
      written: the texts are as the model reads them; else a chat template writes them.
      where: file and record, for errors.
    """

    turns: Turns
    written: bool
    where: str


def _text(row: Mapping[str, Any], field: str) -> str:
    if not isinstance(row.get(field), str):
        raise ValueError(f"{field!r} is no text")
    return row[field]


def _pair(row: Mapping[str, Any], source: str, target: str) -> Turns:
    return ("user", _text(row, source)), (ANSWER, _text(row, target))


def _alpaca(row: Mapping[str, Any]) -> Turns:
    more = row.get("input") and _text(row, "input")
    source = (ALPACA_INPUT if more else ALPACA).format(
        instruction=_text(row, "instruction"), input=more
    )
    return ("user", source), (ANSWER, _text(row, "output"))


def _hh_rlhf(row: Mapping[str, Any]) -> Turns:
    before, *pieces = re.split(r"\n\n(Human|Assistant):", _text(row, "chosen"))
    if before.strip() or "Assistant" not in pieces:
        raise ValueError("'chosen' is not made of '\\n\\nHuman: …' and '\\n\\nAssistant: …'")
    turns, source = [], ""
    for name, text in zip(pieces[::2], pieces[1::2], strict=True):
        source += f"\n\n{name}:"
        if name == "Human":
            source += text
        else:
            turns += [("user", source), (ANSWER, text)]
            source = ""
    return tuple(turns)


def _messages(row: Mapping[str, Any]) -> Turns:
    messages = row["messages"] if isinstance(row.get("messages"), list) else []
    turns = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is no record with 'role' and 'content'")
        try:
            turns.append((_text(message, "role"), _text(message, "content")))
        except ValueError as error:
            raise ValueError(f"message {number}: {error}") from error
    if ANSWER not in dict(turns):
        raise ValueError(f"no message of 'messages' has the role {ANSWER!r}")
    return tuple(turns)


@dataclass(frozen=True)
class Format:
    """
    Attributes:
      fields: that a record has, by which it is recognised.
      optional: that are read too.
      turns: of a record; ValueError where it holds none.
    """

    fields: tuple[str, ...]
    turns: Callable[[Mapping[str, Any]], Turns]
    optional: tuple[str, ...] = ()


# A record is of the first that it has the fields of.
FORMATS = {
    "messages": Format(("messages",), _messages),
    "alpaca": Format(("instruction", "output"), _alpaca, ("input",)),
    "self_instruct": Format(
        ("prompt", "completion"), partial(_pair, source="prompt", target="completion")
    ),
    "prompt_answer": Format(("prompt", "answer"), partial(_pair, source="prompt", target="answer")),
    "hh_rlhf": Format(("chosen",), _hh_rlhf),
}


def recognise(fields: Iterable[str], format: str) -> Format | None:
    """The format of records with these fields: the named one, or with `auto` the first that fits;
    None for text.
    """
    if format != "auto":
        return FORMATS.get(format)
    return next((f for f in FORMATS.values() if set(f.fields) <= set(fields)), None)


def read_chat(row: Mapping[str, Any], format: Format, where: str) -> Chat:
    """
    Raises:
      ValueError: the row is not of the format; names the field.
    """
    missing = [field for field in format.fields if field not in row]
    if missing:
        raise ValueError(f"{where}: no {missing[0]!r}, only {sorted(row)}; see data.format")
    try:
        return Chat(format.turns(row), format is not FORMATS["messages"], where)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def encode(
    chat: Chat,
    tokenizer: Tokenizer,
    *,
    source_max_len: int | None = None,
    target_max_len: int | None = None,
    train_on_source: bool = False,
) -> dict[str, np.ndarray]:
    """`tokens` and their `labels`, the next tokens or -100; each int32, one shorter than the chat.

    What is learnt, each answer and the end-of-text token after it (or what ends it in the chat
    template), and what is between is tokenised by itself: no token is half of each. BOS comes
    once, and not where there is a template, which has its own. The source is what comes before the
    first answer, the target is the rest; each keeps its first tokens, BOS and EOS counted, as in
    the code of Dettmers et al. 2023, github.com/artidoro/qlora.
    """
    parts = _parts(chat, tokenizer)
    ids = np.concatenate([part for part, _ in parts], dtype=np.int32)
    learnt = np.repeat([answer for _, answer in parts], [len(part) for part, _ in parts])
    first = int(learnt.argmax()) if learnt.any() else len(ids)
    kept = np.r_[: len(ids)]
    kept = np.r_[kept[:first][:source_max_len], kept[first:][:target_max_len]]
    labels = np.where(learnt | train_on_source, ids, np.int32(-100))
    return {"tokens": ids[kept][:-1], "labels": labels[kept][1:]}


def question(
    chat: Chat, tokenizer: Tokenizer, source_max_len: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """(prompt, answer): token ids up to the first answer, and of that.

    Raises:
      ValueError: there is none.
    """
    whole = encode(chat, tokenizer, source_max_len=source_max_len)
    learnt = np.r_[whole["labels"] != -100, False]
    start = int(learnt.argmax())
    stop = start + int(learnt[start:].argmin())
    if start == stop:
        raise ValueError(f"{chat.where}: no token is an answer")
    return whole["tokens"][: start + 1], whole["labels"][start:stop]


def _parts(chat: Chat, tokenizer: Tokenizer) -> list[tuple[np.ndarray, bool]]:
    """Token ids, and whether they are an answer."""
    if not chat.written and tokenizer.has_template:
        texts = _templated(chat, tokenizer)
        return [(tokenizer.encode(text), answer) for text, answer in texts]
    parts = []
    for role, text in chat.turns if chat.written else _plain(chat.turns):
        ids, answer = tokenizer.encode(text), role == ANSWER
        if answer and tokenizer.eos_id is not None:
            ids = np.append(ids, np.int32(tokenizer.eos_id))
        parts.append((ids, answer))
    if tokenizer.bos_id is not None:
        parts.insert(0, (np.array([tokenizer.bos_id], np.int32), False))
    return parts


def _plain(turns: Turns) -> Iterator[tuple[str, str]]:
    """`### Human: …`, `### Assistant: …` and other roles likewise, a line each."""
    source = ""
    for number, (role, text) in enumerate(turns):
        source += "\n" * (number > 0) + f"### {'Human' if role == 'user' else role.title()}:"
        if role == ANSWER:
            yield "user", source
            yield role, f" {text}"
            source = ""
        else:
            source += f" {text}"


def _templated(chat: Chat, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """The whole conversation in the tokenizer's chat template, cut where answers begin and end.

    An answer begins after the template's generation prompt, and ends with what the template has
    after a last answer. It is sought in the whole: some templates leave thoughts out of earlier
    answers.
    """

    def render(count, answer=False):
        try:
            return tokenizer.render(chat.turns[:count], answer)
        except ValueError as error:
            raise ValueError(f"{chat.where}: {error}") from error

    whole, at = render(len(chat.turns)), 0
    for number, (role, text) in enumerate(chat.turns):
        if role != ANSWER:
            continue
        before, alone, text = render(number, True), render(number + 1), text.strip()
        start, own = (x.find(text, len(before)) for x in (whole, alone))
        end = alone[own + len(text) :]
        if min(start, own) < 0 or not all(x.startswith(before) for x in (whole, alone)):
            raise ValueError(
                f"{chat.where}: in the chat template, message {number + 1} does not stand as it is "
                "after its generation prompt"
            )
        if not whole.startswith(end, start + len(text)):
            raise ValueError(
                f"{chat.where}: in the chat template, message {number + 1} does not end as a last "
                "one does"
            )
        stop = start + len(text) + len(end)
        yield whole[at : len(before)], False
        yield whole[len(before) : stop], True
        at = stop
