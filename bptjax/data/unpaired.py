"""Answers that are good or bad, one to a prompt: their records, and their examples."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bptjax.data.chat import Chat, template_variables
from bptjax.data.config import DataConfig
from bptjax.data.examples import Example
from bptjax.data.preferences import (
    PROMPT,
    check_answer,
    encode_answer,
    formatted,
    messages_in,
    side_by_side,
    with_shared_prompt,
)
from bptjax.data.rows import (
    COMPLETION,
    LABEL,
    OTHERS,
    Compound,
    Document,
    RecordFormat,
    UnfitData,
    check_has,
)
from bptjax.data.tokenizer import Tokenizer
from bptjax.ops.labels import IGNORED

# Answers in the example of a record, by number. Of the first two, it has one.
KINDS = "desirable", "undesirable", "completion of another record, for KL alone,"


@dataclass(frozen=True)
class Unpaired(Compound):
    """A prompt with an answer.

    Attributes:
      chat: the prompt and the answer.
      desirable: whether the answer is good.
      other: another record, whose answer is compared with this prompt; None before `with_another`.
    """

    chat: Chat
    desirable: bool
    other: "Unpaired | None" = None

    @property
    def chats(self) -> Sequence[Chat]:
        return (self.chat,)

    @property
    def good(self) -> Chat | None:
        return self.chat if self.desirable else None

    def parts(self) -> Iterator[tuple[str, str]]:
        yield PROMPT, formatted(self.chat.messages[: self.chat.prompt])
        label = str(self.desirable).lower()
        yield f"{COMPLETION}, {LABEL} {label}", formatted(self.chat.messages[self.chat.prompt :])


def read_unpaired(fields: Mapping[str, Any], text_key: str, where: str) -> Unpaired:
    """Reads a prompt and an answer, each a text or a list of messages, and the answer's label.

    Two texts are used without a chat template, and end with the tokenizer's EOS.

    Raises:
      ValueError: the record is not of this kind, or the answer is empty; the error names the field.
    """
    try:
        check_has(fields, PROMPT, COMPLETION, LABEL)
        sides = [fields[name] for name in (PROMPT, COMPLETION)]
        for name, value in zip((PROMPT, COMPLETION), sides, strict=True):
            if not isinstance(value, str | list) or not value:
                raise ValueError(f"{name!r} must be text or a list of messages, and not empty")
        if not isinstance(fields[LABEL], bool):
            raise ValueError(f"{LABEL!r} must be true (a good answer) or false")
        prompt, answer = messages_in(fields, PROMPT, "user"), messages_in(fields, COMPLETION)
        check_answer(answer, COMPLETION)
        form = "bare" if all(isinstance(x, str) for x in sides) else None
        variables = template_variables(fields, where, OTHERS)
        chat = Chat((*prompt, *answer), where, form, variables, len(prompt))
        return Unpaired(where, chat, fields[LABEL])
    except ValueError as error:
        text = str(error).removeprefix(f"{where}: ")
        raise ValueError(f"{where}: {text}") from error


UNPAIRED = RecordFormat(
    "unpaired_preference", read_unpaired, fields=(COMPLETION,), optional=(PROMPT, LABEL, *OTHERS)
)


def with_another(seed: int, documents: Sequence[Document], index: int) -> Document:
    """Reads a record with another one beside it. The records beside all others are the same records
    in another order, which depends on the seed; bad records are left out.

    Raises:
      ValueError: the record is bad.
      UnfitData: there is no other valid record.
    """
    document, n = documents[index], len(documents)
    if not isinstance(document, Unpaired):
        return document
    first = int(np.random.default_rng(seed % 2**32).integers(max(n - 1, 1)))
    for step in range(n - 1):
        # A distance from 1 to n - 1 never leads back to the record.
        place = (index + 1 + (first + step) % (n - 1)) % n
        try:
            other = documents[place]
        except ValueError:
            continue
        if isinstance(other, Unpaired):
            return replace(document, other=other)
    raise UnfitData(
        "must not be the only valid record of its training or held-out data, because the loss "
        "compares records; add others"
    )


def encode_unpaired(
    document: Document, tokenizer: Tokenizer, config: DataConfig, *, shared: bool = False
) -> list[Example]:
    """Returns the example of a record: its prompt with its answer, numbered 1 if the answer is good
    and else 2, and its prompt with the answer of another record, numbered 3.

    Args:
      shared: lay the answers out as a `tree`, in which their prompt is there once.

    Raises:
      ValueError: the document is not such a record, or an answer has no token.
    """
    if not isinstance(document, Unpaired) or document.other is None:
        raise ValueError(f"data.format: must be {UNPAIRED} for answers with a label")
    own, others = (
        encode_answer(each.chat, COMPLETION, tokenizer, config)
        for each in (document, document.other)
    )
    crossed = _crossed(_with_answer(own), _with_answer(others))
    example = side_by_side([own, [], [crossed]] if document.desirable else [[], own, [crossed]])
    if shared:
        example = with_shared_prompt(example)
    if len(example["tokens"]) < len(KINDS):
        # A sequence has room for as many numbers as tokens.
        raise ValueError(f"a record must have at least {len(KINDS)} tokens with its two answers")
    return [example]


def _with_answer(examples: Sequence[Example]) -> Example:
    """Returns the first document of a conversation with a token in the loss."""
    for example in examples:
        if (example["labels"] != IGNORED).any():
            return example
    raise ValueError(f"{COMPLETION!r} must have a token that is not a prompt's")


def _crossed(own: Example, other: Example) -> Example:
    """Returns the prompt of one example with the answer of another."""
    start, others = (int((each["labels"] != IGNORED).argmax()) for each in (own, other))
    # Token i predicts token i + 1, so the last token of the prompt is the first in the loss.
    return {
        "tokens": np.concatenate([own["tokens"][: start + 1], other["tokens"][others + 1 :]]),
        "labels": np.concatenate([own["labels"][:start], other["labels"][others:]]),
    }
