"""Opens the data and the tokenizer of a run, without devices or weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import jax

from bptjax.config import Config
from bptjax.data.files import LABELED, Document
from bptjax.data.records import readable
from bptjax.data.sources import Mixture, Training, open_split
from bptjax.data.survey import survey
from bptjax.data.tokenizer import Tokenizer, add_tokens, make_tokenizer, vocabulary_warning
from bptjax.heartbeat import beat
from bptjax.pretrained import Pretrained, open_pretrained
from bptjax.training.checks import check_objective


@dataclass(frozen=True)
class RunData:
    """Documents, and the tokenizer for them.

    Attributes:
      train, held_out: documents.
      pretrained: the checkpoint to start from, whose weights are not read yet; None for a new
        model.
      tokenizer: the tokenizer with added tokens and with the template and stop tokens of the chats.
      objective, classes: objective and number of classes of the model.
      added: tokens of model.add_tokens that the tokenizer did not have.
      notes: lines about the tokenizer and the chats, for the log.
    """

    train: Training
    held_out: Sequence[Document]
    pretrained: Pretrained | None
    tokenizer: Tokenizer
    objective: str
    added: Sequence[str]
    classes: int
    notes: list[str]


def open_data(config: Config) -> RunData:
    """Opens the documents, the checkpoint's config and the tokenizer.

    Raises:
      ValueError: one line about the wrong key or file.
    """
    pretrained = None
    if config.model.name_or_path:
        say(f"reading the checkpoint {config.model.name_or_path}")
        pretrained = open_pretrained(config.model, config.seed)
    objective = check_objective(pretrained.config if pretrained else config.model, config)
    say("reading data")
    data = replace(config.data, format=LABELED) if objective == "class" else config.data
    train, held_out = open_split(data)
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
    return RunData(train, held_out, pretrained, tokenizer, objective, added, model.classes, notes)


def say(line: str) -> None:
    """Prints a line in the first process, before the log is open."""
    beat(line)
    if jax.process_index() == 0:
        print(line, flush=True)
