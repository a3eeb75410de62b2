"""An encoder as a list of orthogonal choices."""

from dataclasses import dataclass
from typing import Literal

from bptjax.models.config import ModelConfig


@dataclass(frozen=True)
class EncoderConfig(ModelConfig):
    """An encoder: every token sees every other.

    Attributes:
      token_types: kinds of token with an embedding of their own, which is added; 0 for none.
      image_size, patch_size: (height, width) in pixels, of an encoder of images; its tokens are the
        patches, after one that stands for the whole.
      channels: of an image.
      pooler: size of the pooled output, an activation of a linear layer of the first token; 0 for
        none.
      pooler_activation: that activation.
      masked_head: logits of each token over the vocabulary, through a layer of their own and the
        input embedding.
      classes: logits of the first token over so many classes; 0 for none.
    """

    token_types: int = 0
    image_size: tuple[int, int] | None = None
    patch_size: tuple[int, int] | None = None
    channels: int = 3
    pooler: int = 0
    pooler_activation: Literal["tanh", "gelu", "relu", "silu"] = "tanh"
    masked_head: bool = False
    classes: int = 0

    # A dataclass of its own would lose it.
    __hash__ = ModelConfig.__hash__

    @property
    def patches(self) -> int:
        (height, width), (h, w) = self.image_size or (0, 0), self.patch_size or (1, 1)
        return (height // h) * (width // w)
