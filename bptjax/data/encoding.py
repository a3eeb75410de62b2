"""How documents become the examples of an objective: all that the data need to know of a model."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from bptjax.data.config import TOO_LONG, DataConfig
from bptjax.data.encode import encode
from bptjax.data.examples import FIELDS, Example
from bptjax.data.images import ImageProcessor
from bptjax.data.landmarks import Landmarks
from bptjax.data.marked import next_tokens
from bptjax.data.records import RecordReader
from bptjax.data.references import REFERENCE, References
from bptjax.data.rows import Document
from bptjax.data.tokenizer import Tokenizer

# Converts documents to examples.
Processor = Tokenizer | ImageProcessor


class Masking(Protocol):
    """Randomly changes the tokens and labels of a sequence."""

    @property
    def probability(self) -> float:
        """Share of the tokens, except special tokens, that are predicted."""
        ...

    def __call__(self, sequence: Example, rng: np.random.Generator) -> Example: ...


def _encode(document: Document, tokenizer: Tokenizer, config: DataConfig) -> list[Example]:
    return encode(
        document,
        tokenizer,
        source_max_len=config.source_max_len,
        target_max_len=config.target_max_len,
        train_on_source=config.train_on_source,
    )


@dataclass(frozen=True)
class Encoding:
    """How documents become examples; by default for a model that predicts next tokens.

    A packer never splits an example that has a label of -100, and may split any other.

    Attributes:
      encode: returns the examples of a document, given the tokenizer and the config of the data;
        raises ValueError if the document is bad.
      truncates: `encode` takes the keyword `limit`, a number of tokens, and truncates the document
        to it. Otherwise examples are truncated at one end; see data.too_long.
      too_long: values that data.too_long may have.
      fields: names of the arrays of an example of text.
      text: returns the text of an example as tokens, and whether each token is in the loss.
      masking: makes the masking of sequences; None without masking.
      landmarks: landmarks of the documents, in a model with landmark attention.
      parts: returns the parts of an example, or of a document in a packed sequence, each with a
        line about it, for previews; by default one part, and no line.
      pick: reads a document, given a seed, all documents of a source and an index, if examples
        depend on several documents; by default they do not. It needs random access.
      references: log-probabilities of the answers, which each example gets if `fields` name them.
    """

    encode: Callable[..., list[Example]] = _encode
    truncates: bool = False
    too_long: tuple[str, ...] = TOO_LONG
    fields: tuple[str, ...] = FIELDS
    text: Callable[[Example], tuple[np.ndarray, np.ndarray]] = next_tokens
    masking: Callable[[Tokenizer, DataConfig], Masking] | None = None
    landmarks: Landmarks | None = None
    parts: Callable[[Example], list[tuple[str, Example]]] = lambda example: [("", example)]
    pick: Callable[[int, Sequence[Document], int], Document] | None = None
    references: References = field(default_factory=References)

    def __post_init__(self):
        if self.landmarks is not None and self.fields != FIELDS:
            raise ValueError(
                "model.attention_pattern.type=landmark: requires an objective whose examples "
                f"have no fields other than {' and '.join(FIELDS)}"
            )

    def examples(
        self, document: Document, *, tokenizer: Tokenizer, config: DataConfig, **limit: int
    ) -> list[Example]:
        """Returns the examples of a document, with landmarks; see `truncates` for `limit`."""
        examples = self.encode(document, tokenizer, config, **limit)
        if REFERENCE in self.fields:
            examples = [self.references.attach(example) for example in examples]
        return (
            examples
            if self.landmarks is None
            else [self.landmarks.insert(example) for example in examples]
        )

    def masks(self, processor: Processor, config: DataConfig) -> Masking | None:
        """Returns the masking of sequences; None if no tokens are masked.

        Raises:
          ValueError: the tokenizer has no mask token.
        """
        if self.masking is None or isinstance(processor, ImageProcessor):
            return None
        return self.masking(processor, config)

    def reader(self, processor: Processor, config: DataConfig, seq_len: int) -> RecordReader:
        """Returns the reader that converts documents to examples of up to `seq_len` tokens."""
        if isinstance(processor, ImageProcessor):
            return RecordReader(processor, seq_len, bad_records=config.bad_records, images=True)
        return RecordReader(
            partial(self.examples, tokenizer=processor, config=config),
            seq_len,
            config.too_long,
            config.bad_records,
            truncates=self.truncates,
            choices=self.too_long,
            unit=1 if self.landmarks is None else self.landmarks.block_size,
            pick=partial(self.pick, config.seed) if self.pick else operator.getitem,
        )
