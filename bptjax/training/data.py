"""The data of a run, opened and checked against its tokenizer; no device and no weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import jax

from bptjax.config import Config
from bptjax.data.files import Document
from bptjax.data.records import readable
from bptjax.data.sources import Mixture, Training, open_split
from bptjax.data.survey import survey
from bptjax.data.tokenizer import Tokenizer, add_tokens, make_tokenizer, vocabulary_warning
from bptjax.models.config import EncoderConfig
from bptjax.pretrained import Pretrained, open_pretrained


@dataclass(frozen=True)
class RunData:
    """
    Attributes:
      train, held_out: documents.
      pretrained: the checkpoint to start from, its weights unread; None for a new model.
      tokenizer: with added tokens, and the template and stop tokens of the chats.
      added: tokens of model.add_tokens that the tokenizer did not have.
      notes: what a user should know of the tokenizer and the chats, a line each.
    """

    train: Training
    held_out: Sequence[Document]
    pretrained: Pretrained | None
    tokenizer: Tokenizer
    added: Sequence[str]
    notes: list[str]


def open_data(config: Config) -> RunData:
    """Opens the documents, the checkpoint's config and the tokenizer.

    Raises:
      ValueError: what is wrong with them, in one line.
    """
    say("reading data")
    train, held_out = open_split(config.data)
    pretrained = None
    if config.model.name_or_path:
        say(f"reading the checkpoint {config.model.name_or_path}")
        pretrained = open_pretrained(config.model)
        if isinstance(pretrained.config, EncoderConfig):
            raise ValueError(
                f"model.name_or_path={config.model.name_or_path} is an encoder; these are not "
                "trained"
            )
    sidecars = pretrained.sidecars if pretrained else None
    name = config.data.tokenizer or str(sidecars or "byte")
    own = pretrained is not None and name == str(sidecars)
    bad = config.data.bad_records
    tokenizer = make_tokenizer(
        name,
        chain(readable(train, bad), readable(held_out, bad)),
        pretrained.config.V if pretrained and own else None,
    )
    model = pretrained.config if pretrained else config.model
    added = add_tokens(tokenizer, model.add_tokens)
    chats = survey(train.files if isinstance(train, Mixture) else [train], tokenizer)
    tokenizer = chats.adapt(tokenizer)
    warning = vocabulary_warning(tokenizer, sidecars) if sidecars and not own else None
    notes = [*([warning] if warning else []), *chats.notes(tokenizer)]
    return RunData(train, held_out, pretrained, tokenizer, added, notes)


def say(line: str) -> None:
    """Prints a line at once, in the first process: the log does not exist before all is checked."""
    if jax.process_index() == 0:
        print(line, flush=True)
