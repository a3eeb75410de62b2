"""Masked tokens, the labels of masked language models."""

from dataclasses import dataclass

import numpy as np

from bptjax.data.encode import IGNORED
from bptjax.data.examples import Example
from bptjax.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenMasking:
    """Chooses tokens at random, whose originals the model predicts.

    Each token is chosen with `probability`, except special tokens and tokens without a label. Of
    the chosen tokens, 80 % become the mask token, 10 % a random token of the vocabulary, and 10 %
    stay as they are: the distribution of transformers' DataCollatorForLanguageModeling.

    Devlin et al. 2018, arXiv 1810.04805, Section 3.1.

    Raises:
      ValueError: the tokenizer has no mask token.
    """

    tokenizer: Tokenizer
    probability: float

    def __post_init__(self):
        if self.tokenizer.mask_id is None:
            raise ValueError(
                "data.tokenizer: must have a mask token for a model that predicts masked tokens; "
                "use byte, or a Hugging Face tokenizer with a mask token"
            )

    def __call__(self, sequence: Example, rng: np.random.Generator) -> Example:
        """Returns the sequence with masked tokens, and with labels for these alone."""
        tokens, labels, own = sequence["tokens"], sequence["labels"], self.tokenizer
        chosen = rng.random(tokens.shape) < self.probability
        chosen &= (labels != IGNORED) & ~np.isin(tokens, own.special_ids)
        kind = rng.random(tokens.shape)
        random = rng.integers(0, own.vocab_size, tokens.shape, np.int32)
        new = np.where(kind < 0.8, np.int32(own.mask_id or 0), np.where(kind < 0.9, random, tokens))
        return sequence | {
            "tokens": np.where(chosen, new, tokens),
            "labels": np.where(chosen, labels, np.int32(IGNORED)),
        }
