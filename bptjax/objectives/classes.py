"""Predicts the class of a text, a pair of texts or an image."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bptjax.data.chat import check_text_alone
from bptjax.data.config import DataConfig
from bptjax.data.encode import end_of_text
from bptjax.data.encoding import Encoding
from bptjax.data.examples import FIELDS, Example
from bptjax.data.marked import own_tokens
from bptjax.data.rows import PAIR, Compound, Document, RecordFormat
from bptjax.data.tokenizer import Tokenizer
from bptjax.models.config import ModelConfig
from bptjax.objectives.cross_entropy import ForwardPass, Losses, cross_entropy, head_inputs
from bptjax.objectives.objective import Objective
from bptjax.ops.labels import IGNORED

# GLUE's names for the two fields of a pair.
PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
)


@dataclass(frozen=True)
class Labeled(Compound):
    """A text, or a pair of texts, and its class."""

    text: str
    label: int
    pair: str | None = None

    def parts(self) -> Iterator[tuple[str, str]]:
        yield f"label {self.label}", self.text
        if self.pair is not None:
            yield "second text", self.pair


def read_labeled(fields: Mapping[str, Any], text_key: str, where: str) -> Labeled:
    """Reads a text or a pair of texts, with its class.

    Raises:
      ValueError: the record is not of this kind; the error names the field.
    """
    check_text_alone(fields, where)
    first, second = text_key, PAIR
    if text_key not in fields:
        names_of_pair = (names for names in PAIRS if fields.keys() >= set(names))
        first, second = next(names_of_pair, (first, second))
    text, pair, label = fields.get(first), fields.get(second), fields.get("label")
    if not isinstance(text, str) or not isinstance(label, int) or isinstance(label, bool):
        raise ValueError(
            f"{where}: must have text in {first!r} and the number of a class in 'label'; see "
            "data.text_key"
        )
    if not isinstance(pair, str | None) or (pair is None and first != text_key):
        raise ValueError(f"{where}: {second!r} must be the second text of a pair")
    # As in transformers, an empty second text counts as none.
    return Labeled(where, text, label, pair or None)


LABELED = RecordFormat(
    "label",
    read_labeled,
    fields=tuple(first for first, _ in PAIRS),
    optional=("label", PAIR, *(second for _, second in PAIRS)),
)


@dataclass(frozen=True)
class Classes(Objective):
    """The objective of classifiers of texts or images."""

    name = "class"
    needs = "an encoder that has model.encoder.classes"
    record = LABELED
    too_long = "drop", "truncate_right", "error"  # A classifier reads the first token.
    unit = "document"
    metrics = ("accuracy",)

    def fits(self, model: ModelConfig) -> bool:
        return bool(model.encoder.classes) and not model.causal

    def encoding(self, model: ModelConfig) -> Encoding:
        return replace(
            super().encoding(model),
            encode=functools.partial(encode_labeled, classes=model.encoder.classes),
            truncates=True,
            fields=(*FIELDS, "token_types") if model.encoder.image_size is None else FIELDS,
            text=own_tokens,
        )

    def loss(self, forward: ForwardPass) -> Losses:
        vectors, labels = head_inputs(forward)
        loss, z_loss = cross_entropy(forward, vectors, labels)
        with jax.named_scope("loss"):
            chosen = forward.model.product(jax.lax.stop_gradient(vectors)).argmax(-1)
            correct = (chosen == labels).sum().astype(jnp.float32)
        return Losses(loss, z_loss, {"accuracy": correct})


def encode_labeled(
    document: Document,
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    classes: int,
    limit: int | None = None,
) -> list[Example]:
    """Returns the example of a text or a pair of texts. The class is the label of the first token;
    `token_types` are the tokenizer's.

    A text starts with the tokenizer's `prefix` and ends with EOS, or with SEP if there is no EOS. A
    pair has the special tokens that the tokenizer puts around pairs.

    Args:
      classes: number of classes.
      limit: maximum number of tokens. The longer text of a pair is truncated first, at its end, and
        special tokens stay, as in transformers.

    Raises:
      ValueError: the document has no class of the model, or `limit` is below the number of special
        tokens.
    """
    if not isinstance(document, Labeled):
        raise ValueError("data.format: must be label for a classifier")
    if not 0 <= document.label < classes:
        raise ValueError(
            f"{document.where}: label={document.label}: must be in [0, {classes}), the model's "
            "classes"
        )
    if document.pair is not None:
        ids, types, texts = tokenizer.encode_pair(document.text, document.pair)
    else:
        end = np.array(end_of_text(tokenizer, sep=True), np.int32)
        parts = tokenizer.prefix, tokenizer.encode(document.text), end
        ids, types = np.concatenate(parts), np.zeros(sum(map(len, parts)), np.int32)
        texts = np.repeat([-1, 0, -1], [len(part) for part in parts])
    labels = np.full(len(ids), IGNORED, np.int32)
    example = {"tokens": ids, "labels": labels, "token_types": types}
    if limit is not None and len(ids) > limit:
        remaining = _remaining_tokens(texts, limit)
        example = {name: value[remaining] for name, value in example.items()}
    example["labels"][:1] = document.label
    return [example]


def _remaining_tokens(texts: np.ndarray, limit: int) -> np.ndarray:
    """Returns the indices of the tokens that remain after truncation.

    Args:
      texts: 0 or 1, the text of each token; -1 for special tokens.

    Raises:
      ValueError: there are more special tokens than `limit`.
    """
    special = int((texts < 0).sum())
    if special > limit:
        raise ValueError(
            f"train.seq_len={limit}: must be at least {special}, the number of special tokens of a "
            "document"
        )
    indices = [np.flatnonzero(texts == text) for text in (0, 1)]
    shorter, longer = sorted(indices, key=len)
    text_limit = limit - special
    from_shorter = min(len(shorter), text_limit // 2)
    parts = np.flatnonzero(texts < 0), shorter[:from_shorter], longer[: text_limit - from_shorter]
    return np.sort(np.concatenate(parts))
