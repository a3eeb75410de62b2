"""Pairs of a better and a worse answer to a prompt: their records, and their examples."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bptjax.data.chat import (
    ANSWER,
    Chat,
    Message,
    hh_rlhf_messages,
    listed_messages,
    template_variables,
)
from bptjax.data.config import DataConfig
from bptjax.data.encode import encode
from bptjax.data.examples import ANSWERS, FIELDS, Example, documents
from bptjax.data.rows import (
    OTHERS,
    Compound,
    Document,
    RecordFormat,
    check_has,
    describe_fields,
)
from bptjax.data.tokenizer import Tokenizer
from bptjax.data.trees import tree
from bptjax.ops.labels import IGNORED

# The fields of a pair, the better answer first.
CHOSEN, REJECTED = "chosen", "rejected"
PROMPT = "prompt"


@dataclass(frozen=True)
class Preference(Compound):
    """A prompt with a better and a worse answer.

    Attributes:
      chosen, rejected: the prompt with each answer.
      joined: the texts have no separate prompt, so tokens count in the loss from the first one in
        which the texts differ.
    """

    chosen: Chat
    rejected: Chat
    joined: bool = False

    @property
    def chats(self) -> Sequence[Chat]:
        return self.chosen, self.rejected

    @property
    def good(self) -> Chat:
        return self.chosen

    def parts(self) -> Iterator[tuple[str, str]]:
        prompt = self.chosen.prompt
        if prompt:
            yield PROMPT, formatted(self.chosen.messages[:prompt])
        for name, chat in ((CHOSEN, self.chosen), (REJECTED, self.rejected)):
            yield name, formatted(chat.messages[prompt:])


def read_preference(fields: Mapping[str, Any], text_key: str, where: str) -> Preference:
    """Reads a pair. Each field is a text or a list of messages.

    Texts are used without a chat template, and end with the tokenizer's EOS. Answers that are lists
    and start with another role than the assistant's hold the prompt: the messages in which they
    agree. Texts without a prompt are split where their tokens differ; texts of hh-rlhf, which start
    with `\\n\\nHuman:`, are split into messages.

    Raises:
      ValueError: the record is not of this kind, or an answer is empty, or both are equal; the
        error names the field.
    """
    try:
        messages, prompt, form = _messages(fields)
        sides = {CHOSEN: messages[0], REJECTED: messages[1]}
        for name, own in sides.items():
            check_answer(own[prompt:], name)
        if messages[0] == messages[1]:
            raise ValueError(f"{CHOSEN!r} and {REJECTED!r} must differ")
        variables = template_variables(fields, where, OTHERS)
        chats = [Chat(tuple(own), where, form, variables, prompt) for own in messages]
        return Preference(where, *chats, joined=not prompt)
    except ValueError as error:
        text = str(error).removeprefix(f"{where}: ")
        raise ValueError(f"{where}: {text}") from error


PREFERENCE = RecordFormat(
    "preference", read_preference, fields=(CHOSEN, REJECTED), optional=(PROMPT, *OTHERS)
)


def _messages(
    fields: Mapping[str, Any],
) -> tuple[tuple[list[Message], list[Message]], int, str | None]:
    """Returns the messages of the two conversations, the number of messages in their prompt, and
    the form of their template; see `Chat.form`."""
    check_has(fields, CHOSEN, REJECTED)
    prompt, answers = fields.get(PROMPT), [fields[name] for name in (CHOSEN, REJECTED)]
    if not all(isinstance(x, str | list) for x in answers):
        raise ValueError(f"{CHOSEN!r} and {REJECTED!r} must be texts or lists of messages")
    if prompt is not None and not isinstance(prompt, str | list):
        raise ValueError(f"{PROMPT!r} must be text or a list of messages")
    texts, form = all(isinstance(x, str) for x in answers), None
    if texts and prompt is None and str(answers[0]).startswith("\n\nHuman:"):
        form = "hh_rlhf"
        first, second = (hh_rlhf_messages(fields, name) for name in (CHOSEN, REJECTED))
    else:
        if texts and not isinstance(prompt, list):
            form = "bare"
        first, second = (messages_in(fields, name) for name in (CHOSEN, REJECTED))
    start = messages_in(fields, PROMPT, "user") if prompt is not None else []
    inside = all(own and own[0]["role"] != ANSWER for own in (first, second))
    if not inside:
        if not start and form is None:
            raise ValueError(
                f"{PROMPT!r} must be set, or be the first messages of both answers; "
                f"{describe_fields(fields)}"
            )
        return ([*start, *first], [*start, *second]), len(start), form
    common = 0
    for a, b in zip(first[:-1], second[:-1], strict=False):
        if a != b:
            break
        common += 1
    if not common:
        raise ValueError(f"{CHOSEN!r} and {REJECTED!r} must start with the same message")
    return (first, second), common, form


def check_answer(messages: Sequence[Message], name: str) -> None:
    """Checks the messages after a prompt, from the field `name`.

    Raises:
      ValueError: none of them is an answer that is not empty.
    """
    answers = [each for each in messages if each["role"] == ANSWER]
    if not any(each.get("content") or each.get("tool_calls") for each in answers):
        raise ValueError(f"{name!r} must have an answer of the {ANSWER} that is not empty")


def encode_answer(chat: Chat, name: str, tokenizer: Tokenizer, config: DataConfig) -> list[Example]:
    """Returns `encode` of a prompt and its answer, from the field `name`.

    Raises:
      ValueError: the template refuses the chat, or writes nothing of an answer of tool calls only.
    """
    options = dict(source_max_len=config.source_max_len, target_max_len=config.target_max_len)
    examples = encode(chat, tokenizer, **options)
    prompt, answer = chat.messages[: chat.prompt], chat.messages[chat.prompt :]
    if any(each.get("content") for each in answer if each["role"] == ANSWER):
        return examples
    empty = ({"role": each["role"], "content": ""} for each in answer)
    try:
        others = encode(replace(chat, messages=(*prompt, *empty)), tokenizer, **options)
    except ValueError:  # The template refuses an empty answer, so it has read this one.
        return examples
    tokens, without = ([x["tokens"].tolist() for x in own] for own in (examples, others))
    if tokens == without:
        raise ValueError(
            f"{chat.where}: {name!r} has tool_calls only, which the chat template does not read"
        )
    return examples


def messages_in(fields: Mapping[str, Any], name: str, role: str = ANSWER) -> list[Message]:
    """Returns the messages in a field; a text is one message of this role."""
    if isinstance(fields[name], str):
        return [{"role": role, "content": fields[name]}]
    return listed_messages(fields, name)


def formatted(messages: Sequence[Message]) -> str:
    """Formats messages for previews."""
    if len(messages) == 1:
        return str(messages[0].get("content") or messages[0])
    return "\n".join(f"[{each['role']}] {each.get('content') or each}" for each in messages)


def encode_preference(
    document: Document, tokenizer: Tokenizer, config: DataConfig, *, shared: bool = False
) -> list[Example]:
    """Returns the example of a pair; see `side_by_side`. In each conversation, the messages of the
    assistant after the prompt count in the loss.

    Args:
      shared: lay the answers out as a `tree`, in which their prompt is there once.

    Raises:
      ValueError: the document is not a pair, or an answer has no token, or the tokens of both are
        equal.
    """
    if not isinstance(document, Preference):
        raise ValueError("data.format: must be preference for pairs of answers")
    both = zip(document.chats, (CHOSEN, REJECTED), strict=True)
    answers = [encode_answer(chat, name, tokenizer, config) for chat, name in both]
    if document.joined:
        (first,), (second,) = answers
        alike = shared_tokens(first["tokens"], second["tokens"])
        for own in (first, second):
            # Token i predicts token i + 1, the first in which the texts may differ.
            own["labels"] = own["labels"].copy()
            own["labels"][: alike - 1] = IGNORED
    for name, own in zip((CHOSEN, REJECTED), answers, strict=True):
        if not any((each["labels"] != IGNORED).any() for each in own):
            raise ValueError(f"{document.where}: {name!r} must have a token that is not a prompt's")
    pair = side_by_side(answers)
    numbers = pair[ANSWERS]
    if np.array_equal(pair["labels"][numbers == 1], pair["labels"][numbers == 2]):
        raise ValueError(f"{document.where}: {CHOSEN!r} and {REJECTED!r} must differ in a token")
    return [with_shared_prompt(pair) if shared else pair]


def with_shared_prompt(example: Example) -> Example:
    """Lays out the documents of an example by `side_by_side` as a `tree`."""
    names = *FIELDS, ANSWERS
    laid_out = tree([{name: own[name] for name in names} for own in documents(example)])
    del laid_out["leaves"]
    return laid_out


def shared_tokens(first: np.ndarray, second: np.ndarray) -> int:
    """Returns the number of tokens with which both start."""
    n = min(len(first), len(second))
    differ = np.flatnonzero(first[:n] != second[:n])
    return int(differ[0]) if differ.size else n


def side_by_side(answers: Sequence[Sequence[Example]]) -> Example:
    """Lays out answers, each with its prompt, as documents one after the other.

    Args:
      answers: `tokens` and `labels` of the documents of each answer. An answer has several
        documents if its chat template changes earlier turns, and none if it only takes a number.

    Returns:
      An example with the documents' `segments` and `positions`, and with `answers`: the number of
      the answer, from 1, at each token whose label counts for it; else 0. Sums over the tokens with
      one number are sums over an answer, in any layout.
    """
    numbered = [(number, example) for number, own in enumerate(answers, 1) for example in own]
    parts = [
        example
        | {
            "segments": np.full_like(example["labels"], segment),
            "positions": np.arange(len(example["labels"]), dtype=np.int32),
            ANSWERS: np.where(example["labels"] == IGNORED, 0, number).astype(np.int32),
        }
        for segment, (number, example) in enumerate(numbered, 1)
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def described_parts(
    example: Example, names: Sequence[str] = (CHOSEN, REJECTED)
) -> list[tuple[str, Example]]:
    """Returns each answer of an example, or of a document in a packed sequence, after its prompt,
    with a line about it: which answer it is, how long its prompt is, and how much is shared.

    Args:
      names: names of the answers to a prompt, in the order of their numbers.
    """
    if "ends" not in example:
        return [(_describe(own, names), own) for own in documents(example)]
    numbers, place = example[ANSWERS], np.arange(len(example["tokens"]))
    # In a packed sequence, ends count from its first token.
    ends = example["ends"] - (example["ends"].max() - len(place))
    parts, shared = [], np.ones(len(place), bool)
    for number in np.unique(numbers[numbers != 0]):
        last = np.flatnonzero(numbers == number)[-1]
        visible = (place <= last) & (last < ends)
        parts.append({name: x[visible] for name, x in example.items()})
        shared &= visible
    text = f", {int(shared.sum()):,} of them shared"
    return [(_describe(own, names) + text, own) for own in parts]


def _describe(document: Example, names: Sequence[str]) -> str:
    numbers, in_loss = document[ANSWERS], document["labels"] != IGNORED
    name = names[(int(numbers.max()) - 1) % len(names)]
    # Token i predicts token i + 1.
    return f"{name} after a prompt of {int(in_loss.argmax()) + 1:,} tokens"
