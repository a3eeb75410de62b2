"""Configuration of the data: files, sources, packing."""

from dataclasses import dataclass, field
from typing import Literal, get_args

SampleBy = Literal["line", "paragraph", "document"]
TooLong = Literal["drop", "truncate_left", "truncate_right", "error"]
TOO_LONG: tuple[str, ...] = get_args(TooLong)


@dataclass(frozen=True)
class SourceConfig:
    """One source of a weighted mixture.

    Attributes:
      path: as data.path.
      weight: share of the tokens of training, relative to the other sources' weights.
      format: data.format of this source, if it differs.
      text_key: data.text_key of this source, if it differs.
      fields: data.fields of this source, if they differ.
      sample_by: data.sample_by of this source, if it differs.
    """

    path: str | list[str]
    weight: float = 1.0
    format: str | None = None
    text_key: str | None = None
    fields: dict[str, str] | None = None
    sample_by: SampleBy | None = None

    def __post_init__(self):
        # jsonargparse accepts null for a number here.
        if self.weight is None or not 0 < self.weight < float("inf"):
            raise ValueError(f"data.sources: weight={self.weight}: must be finite and positive")

    @property
    def name(self) -> str:
        """The paths of the source, for messages."""
        return self.path if isinstance(self.path, str) else ", ".join(self.path)


@dataclass(frozen=True)
class DataConfig:
    """Training data: files, formats, packing.

    Attributes:
      path: file, directory, glob, or python-stdlib (the source files of this Python), or
        hf://owner/name (parquet files of the hub); or a list of them: one pool of documents. For a
        model of images, a directory with one directory of images per class.
      sources: several sources instead of path, each with a weight. Each sequence comes from the
        source that is furthest behind its share of tokens, and holds documents of that source only.
      eval_path: held-out data. If not set, eval_fraction of path is held out.
      eval_fraction: share of the documents to hold out. If there is only one, its tail is held out.
      eval_split: how eval_fraction chooses documents. random takes one random document of every
        1 / eval_fraction, by seed; spaced takes every n-th, as runs did before this key existed.
      sample_by: unit of a plain-text file that becomes one document.
      text_key: field of a record that holds its text.
      format: record format: text; messages, sharegpt, alpaca, prompt_completion, self_instruct,
        prompt_answer, hh_rlhf, dolly or question_answer for chats; for a classifier label: text
        with a class number in the field label and, for pairs, a second text in the field text_pair;
        for preferences preference: prompt, chosen and rejected; for objective.type=kto
        unpaired_preference: prompt, completion and label; for objective.type=branched branches:
        messages, and branches, a list with the messages of each continuation. auto takes the first
        format whose fields a record has, else text; or the format of the objective.
      fields: fields of the records, with dots for nested fields, by the format's names for them,
        such as {prompt: question, answer: meta.response}. Other fields have the format's names.
      train_on_source: include prompts in the loss. By default only answers are.
      source_max_len: maximum tokens of a record's prompt, which is everything before its first
        answer. Only contents are truncated, never the chat template's own text.
      target_max_len: maximum tokens of a record from its first answer on. The answer at the limit
        is truncated before its end token, and no message follows it.
      tokenizer: byte, char, or a directory with a Hugging Face tokenizer. If not set, the tokenizer
        of the checkpoint, or byte without a checkpoint.
      packing: how documents fill sequences. concat joins texts and splits them at seq_len; best_fit
        packs complete documents tightly; none puts one document in each sequence. Packed documents
        do not attend to each other. No packing splits a record with a loss mask.
      mlm_probability: share of the tokens that a masked language model predicts. Of them, 80 % are
        replaced with the mask token and 10 % with a random token. Special tokens are never chosen.
      too_long: treatment of records with a loss mask that are longer than train.seq_len.
        truncate_left keeps the end of a record; truncate_right keeps its start and, for
        classifiers, all special tokens. Text without a loss mask is split instead.
      bad_records: treatment of records that cannot be read or tokenized. error refuses the run, or
        saves and ends it if a bad record is found later; skip lists them in bad_records.jsonl.
      group_by_length: batch sequences of similar length, padded to the longest of each batch; needs
        packing=none.
      num_shards: number of equal shards of the documents, read by different processes. Each shard
        provides the same number of sequences per step; with train.epochs, blank ones after its last
        record.
      shuffle: reshuffle documents and sequences in each epoch.
      seed: seed of the order and of the held-out documents.
    """

    path: str | list[str] | None = None
    sources: list[SourceConfig] = field(default_factory=list)
    eval_path: str | list[str] | None = None
    eval_fraction: float = 0.1
    eval_split: Literal["random", "spaced"] = "random"
    sample_by: SampleBy = "document"
    text_key: str = "text"
    format: str = "auto"
    fields: dict[str, str] = field(default_factory=dict)
    train_on_source: bool = False
    source_max_len: int | None = None
    target_max_len: int | None = None
    tokenizer: str | None = None
    packing: Literal["none", "concat", "best_fit"] = "concat"
    mlm_probability: float = 0.15
    too_long: TooLong = "drop"
    bad_records: Literal["error", "skip"] = "error"
    group_by_length: bool = False
    num_shards: int = 1
    shuffle: bool = True
    seed: int = 0

    @property
    def split_seed(self) -> int | None:
        """The seed of the held-out documents; None if they are evenly spaced."""
        return self.seed if self.eval_split == "random" else None

    def __post_init__(self):
        for name in ("source_max_len", "target_max_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"data.{name}={value}: must be at least 1 token")
        if not 0.0 < self.mlm_probability <= 1.0:
            raise ValueError(f"data.mlm_probability={self.mlm_probability}: must be in (0, 1]")
        if self.group_by_length and self.packing != "none":
            raise ValueError(
                f"data.packing={self.packing}: must be none with data.group_by_length=true"
            )
        if self.num_shards < 1:
            raise ValueError(f"data.num_shards={self.num_shards}: must be at least 1")
        if self.path is not None and self.sources:
            raise ValueError("data.path and data.sources: must not both be set; set one of them")
        if self.group_by_length and self.sources:
            raise ValueError("data.sources: must not be set with data.group_by_length=true")
        if self.group_by_length and self.num_shards > 1:
            raise ValueError(
                f"data.num_shards={self.num_shards}: must be 1 with data.group_by_length=true"
            )
