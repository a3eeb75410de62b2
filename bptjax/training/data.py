"""Opens the data and the tokenizer of a run, without devices or weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import jax

from bptjax.config import Config
from bptjax.data.changes import paths
from bptjax.data.config import DataConfig, SourceConfig
from bptjax.data.encoding import Encoding, Processor
from bptjax.data.files import RECORDS, extension
from bptjax.data.images import ImageProcessor, open_images
from bptjax.data.records import readable
from bptjax.data.rows import Document
from bptjax.data.sources import Mixture, Training, open_split
from bptjax.data.survey import TEXT, Survey, survey
from bptjax.data.tokenizer import (
    Tokenizer,
    add_tokens,
    make_tokenizer,
    token_id,
    vocabulary_warning,
)
from bptjax.models.attention_pattern import find_tokens
from bptjax.parsing.keys import replace_keys
from bptjax.run.heartbeat import beat
from bptjax.run.json_files import read_json
from bptjax.training.checks import check_objective
from bptjax.weights.hf.checkpoint import SIDECARS
from bptjax.weights.hf.families.encoders import class_names
from bptjax.weights.pretrained import Pretrained, open_pretrained

# Maximum number of image classes named in a line.
SHOWN_CLASSES = 10


@dataclass(frozen=True)
class RunData:
    """Documents or images, and the processor for them.

    Attributes:
      train, held_out: documents.
      pretrained: the checkpoint to start from, without weights so far; None for a new model.
      processor: for text, the tokenizer with added tokens and with the template and stop tokens of
        the chats; for images, their processor.
      encoding: how documents become examples of the model's objective.
      added: tokens of model.add_tokens that the tokenizer did not have.
      notes: lines for the log about the tokenizer and the chats, or the classes.
    """

    train: Training
    held_out: Sequence[Document]
    pretrained: Pretrained | None
    processor: Processor
    encoding: Encoding
    added: Sequence[str]
    notes: list[str]

    @property
    def tokenizer(self) -> Tokenizer:
        """The processor of a run on text."""
        assert not isinstance(self.processor, ImageProcessor)
        return self.processor


def open_data(config: Config, now: str | None = None) -> RunData:
    """Opens the documents, the checkpoint's config and the tokenizer.

    Args:
      now: `Tokenizer.now`.

    Raises:
      ValueError: one line about the wrong key or file.
    """
    pretrained = None
    if config.model.name_or_path:
        say(f"reading the checkpoint {config.model.name_or_path}")
        pretrained = open_pretrained(config.model, config.seed)
        if pretrained.config.encoder.image_size is not None:
            return _open_images(config, pretrained)
    objective = check_objective(pretrained.config if pretrained else config.model, config)
    say("reading data")
    train, held_out = open_split(config.data, objective.record)
    sidecars = pretrained.sidecars if pretrained else None
    name = config.data.tokenizer or str(sidecars or "byte")
    own = pretrained is not None and name == str(sidecars)
    bad = config.data.bad_records
    tokenizer = make_tokenizer(
        name,
        chain(readable(train, bad), readable(held_out, bad)),
        pretrained.config.V if pretrained and own else None,
    )
    tokenizer.now = now
    model = pretrained.config if pretrained else config.model
    added = add_tokens(tokenizer, model.add_tokens)
    pattern = find_tokens(model.attention_pattern, partial(token_id, tokenizer))
    # The vocabulary lacks added tokens until `setup` enlarges it.
    encoding = objective.encoding(replace(model, attention_pattern=pattern, vocab_size=None))
    chats = survey(train.files if isinstance(train, Mixture) else [train], tokenizer)
    tokenizer = chats.adapt(tokenizer)
    warning = vocabulary_warning(tokenizer, sidecars) if sidecars and not own else None
    notes = [*([warning] if warning else []), *_describe_formats(config.data, train, chats)]
    notes += chats.notes(tokenizer)
    return RunData(train, held_out, pretrained, tokenizer, encoding, added, notes)


def _describe_formats(config: DataConfig, train: Training, chats: Survey) -> Iterator[str]:
    """Yields the format of the records of each source, and the fields that it was read from."""
    sources = config.sources or [SourceConfig(config.path or "")]
    opened = train.files if isinstance(train, Mixture) else [train]
    for source, documents, formats in zip(sources, opened, chats.formats, strict=True):
        if any(extension(Path(path)) in RECORDS for path in paths(documents)):
            key = source.text_key or config.text_key
            fields = config.fields if source.fields is None else source.fields
            text = f"text ({key} from {fields[key]})" if key in fields else f"text ({key})"
            counts = [(text if x == TEXT else x, n) for x, n in formats.most_common() if x]
            share = len(counts) > 1
            names = [f"{n:,} of {formats.total():,} records {x}" if share else x for x, n in counts]
            if names:
                yield f"format of {source.name}: {', '.join(names)}"


def _open_images(config: Config, pretrained: Pretrained) -> RunData:
    """Opens the images. Without classes in the model, their directories are the classes."""
    model = pretrained.config
    # The number of new classes does not affect any check.
    some = replace_keys(model, {"encoder.classes": model.encoder.classes or 2})
    objective = check_objective(some, config)
    say("reading data")
    classes, train, held_out = open_images(config.data)
    if pretrained.new or not pretrained.config.encoder.classes:
        names = classes.names
        if config.model.encoder.classes not in (0, len(names)):
            raise ValueError(
                f"model.encoder.classes={config.model.encoder.classes}: must be {len(names)}, the "
                f"number of classes in data.path={config.data.path}; leave it out"
            )
        wanted = replace_keys(config.model, {"encoder.classes": len(names)})
        pretrained = open_pretrained(wanted, config.seed)
    else:
        names = _class_names(pretrained, classes.names, config)
    saved = Path(config.run_dir).expanduser() / SIDECARS / "config.json"
    if saved.exists() and read_json(saved).get("id2label") != class_names(names)["id2label"]:
        raise ValueError(
            f"data.path={config.data.path}: must have the classes of the run in {config.run_dir}; "
            "restore the directories, or choose another run_dir"
        )
    model, sidecars = pretrained.config, pretrained.sidecars
    own = model.encoder
    assert own.image_size and own.patch_size and sidecars
    size = own.channels, *own.image_size
    processor = ImageProcessor(sidecars, size, own.patch_size, names)
    processor.check()
    counts = [f"{name} ({n:,})" for name, n in zip(classes.names, classes.counts, strict=True)]
    shown = ", ".join(counts[:SHOWN_CLASSES]) + ", …" * (len(counts) > SHOWN_CLASSES)
    notes = [f"classes: {shown}"]
    encoding = objective.encoding(model)
    return RunData(train, held_out, pretrained, processor, encoding, (), notes)


def _class_names(pretrained: Pretrained, names_of_data: list[str], config: Config) -> list[str]:
    """Returns the names of a classifier's classes by number, from the directories if the model does
    not name its classes.

    Raises:
      ValueError: a directory is not one of the classes.
    """
    assert pretrained.sidecars is not None
    labels = read_json(pretrained.sidecars / "config.json").get("id2label") or {}
    plain = [f"LABEL_{i}" for i in range(pretrained.config.encoder.classes)]
    names = [str(labels.get(str(i), name)) for i, name in enumerate(plain)]
    if names == plain and len(names_of_data) == len(plain):
        return names_of_data
    if unknown := [name for name in names_of_data if name not in names]:
        known = ", ".join(names[:SHOWN_CLASSES]) + ", …" * (len(names) > SHOWN_CLASSES)
        raise ValueError(
            f"data.path={config.data.path}: class {unknown[0]!r}: must be one of the {len(names)} "
            f"classes of {config.model.name_or_path} ({known}); rename the directories, or start "
            "from a model without a classifier, which gets new classes"
        )
    return names


def say(line: str) -> None:
    """Prints a line in the first process, before the log is open."""
    beat(line)
    if jax.process_index() == 0:
        print(line, flush=True)
