"""Conversations with several continuations: their records, and their examples."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bptjax.data.chat import ANSWER, Chat, listed_messages, template_variables
from bptjax.data.config import DataConfig
from bptjax.data.encode import encode
from bptjax.data.examples import WEIGHTS, Example
from bptjax.data.rows import OTHERS, Compound, Document, RecordFormat
from bptjax.data.tokenizer import Tokenizer
from bptjax.data.trees import tree

MESSAGES, BRANCHES = "messages", "branches"


@dataclass(frozen=True)
class Branches(Compound):
    """A conversation with each of its continuations."""

    branches: tuple[Chat, ...]

    @property
    def chats(self) -> Sequence[Chat]:
        return self.branches

    @property
    def good(self) -> Chat:
        return self.branches[0]

    def parts(self) -> Iterator[tuple[str, str]]:
        for number, chat in enumerate(self.branches, 1):
            lines = (f"[{each['role']}] {each.get('content') or each}" for each in chat.messages)
            yield f"branch {number}", "\n".join(lines)


def read_branches(fields: Mapping[str, Any], text_key: str, where: str) -> Branches:
    """Reads the messages of a record, and the messages of each branch that continues them.

    Raises:
      ValueError: the record is not of this kind; the error names the field.
    """
    try:
        start, branches = listed_messages(fields, MESSAGES), fields.get(BRANCHES)
        if not isinstance(branches, list) or not branches:
            raise ValueError(f"{BRANCHES!r} must be a list with a list of messages for each branch")
        variables = template_variables(fields, where, OTHERS)
        chats = []
        for branch in branches:
            messages = (*start, *listed_messages({BRANCHES: branch}, BRANCHES))
            if ANSWER not in (each["role"] for each in messages[len(start) :]):
                raise ValueError(f"{BRANCHES!r} must each have a message with the role {ANSWER!r}")
            chats.append(Chat(messages, where, variables=variables, format=BRANCHES))
        return Branches(where, tuple(chats))
    except ValueError as error:
        raise ValueError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from error


BRANCHED = RecordFormat(BRANCHES, read_branches, fields=(BRANCHES,), optional=(MESSAGES, *OTHERS))


def encode_branches(document: Document, tokenizer: Tokenizer, config: DataConfig) -> list[Example]:
    """Returns the example of a record, a tree of tokens. `weights` are the share of the branches
    that continue a token, so that sums over the tree are means over the branches.

    Raises:
      ValueError: the document is not a `Branches`, or its template refuses it.
    """
    if not isinstance(document, Branches):
        raise ValueError(f"data.format: must be {BRANCHES} for conversations with branches")
    options = dict(source_max_len=config.source_max_len, target_max_len=config.target_max_len)
    rows = [
        row
        for chat in document.branches
        for row in encode(chat, tokenizer, train_on_source=config.train_on_source, **options)
    ]
    example = tree(rows)
    leaves = example.pop("leaves")
    return [example | {WEIGHTS: (leaves / len(document.branches)).astype(np.float32)}]
