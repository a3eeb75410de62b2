"""Predicts tokens that were replaced at random: masked language models."""

from dataclasses import dataclass, replace

import numpy as np

from bptjax.data.chat import Chat
from bptjax.data.config import DataConfig
from bptjax.data.encode import token_ids
from bptjax.data.encoding import Encoding
from bptjax.data.examples import Example
from bptjax.data.marked import own_tokens
from bptjax.data.rows import Document
from bptjax.data.tokenizer import Tokenizer
from bptjax.models.config import ModelConfig
from bptjax.objectives.objective import Objective
from bptjax.ops.labels import IGNORED


@dataclass(frozen=True)
class MaskedTokens(Objective):
    """The objective of encoders with a masked-language head."""

    name = "masked_tokens"
    needs = "an encoder that has model.encoder.masked_head"
    keys = ("data.mlm_probability",)

    def fits(self, model: ModelConfig) -> bool:
        return model.encoder.masked_head and not (model.causal or model.encoder.classes)

    def encoding(self, model: ModelConfig) -> Encoding:
        return replace(
            super().encoding(model),
            encode=self.encode,
            text=own_tokens,
            masking=lambda tokenizer, config: TokenMasking(tokenizer, config.mlm_probability),
        )

    def encode(self, document: Document, tokenizer: Tokenizer, config: DataConfig) -> list[Example]:
        """Returns the example of a text or of token ids; the labels are the tokens before masking.
        A text ends with EOS, or with SEP if there is no EOS.

        Raises:
          ValueError: a chat, or ids outside the tokenizer's vocabulary.
        """
        if isinstance(document, Chat):
            raise ValueError(
                f"{document.where}: must have text or token ids, not a chat, to train an encoder; "
                "see data.format"
            )
        record = token_ids(document, tokenizer, sep=True)
        return [{"tokens": record.ids, "labels": record.labels}]


@dataclass(frozen=True)
class TokenMasking:
    """Chooses random tokens, whose originals the model predicts.

    Each token is chosen with `probability`, except special tokens and tokens without a label. Of
    the chosen tokens, 80 % become the mask token, 10 % become a random token of the vocabulary, and
    10 % stay unchanged, as in transformers' DataCollatorForLanguageModeling.

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
        """Returns the sequence with masked tokens, and with labels for these tokens only."""
        tokens, labels, tokenizer = sequence["tokens"], sequence["labels"], self.tokenizer
        chosen = rng.random(tokens.shape) < self.probability
        chosen &= (labels != IGNORED) & ~np.isin(tokens, tokenizer.special_ids)
        kind = rng.random(tokens.shape)
        random = rng.integers(0, tokenizer.vocab_size, tokens.shape, np.int32)
        new = np.where(
            kind < 0.8, np.int32(tokenizer.mask_id or 0), np.where(kind < 0.9, random, tokens)
        )
        return sequence | {
            "tokens": np.where(chosen, new, tokens),
            "labels": np.where(chosen, labels, np.int32(IGNORED)),
        }
