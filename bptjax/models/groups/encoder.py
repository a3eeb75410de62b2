"""Config group of encoders."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from bptjax.models.groups.group import Group, integer

MOST_CLASSES = 2**20


@dataclass(frozen=True)
class EncoderConfig(Group):
    """Inputs and heads of encoders, for causal=false.

    Attributes:
      token_types: number of token types, whose learned embedding is added; 0 for none.
      image_size: height and width in pixels, for an encoder of images. Its tokens are a learned
        first token and then the patches. bptjax train needs a checkpoint of such an encoder.
      patch_size: height and width of a patch in pixels.
      channels: number of channels of an image.
      pooler: size of the pooled output, an activated linear map of the first token; 0 for none.
      pooler_activation: activation of the pooler.
      masked_head: a linear layer, activation and norm before the output embedding. An encoder with
        this head is trained to predict masked tokens; see data.mlm_probability.
      masked_head_bias: the linear layer of masked_head has a bias.
      classes: number of classes of a classifier; 0 for none. An encoder checkpoint without classes
        gets new ones. For images, the directories of data.path determine the number.
      class_pooling: input of a classifier: the hidden state of the first token, or the mean over
        the tokens of a document.
    """

    token_types: int = integer(0, 0)
    image_size: tuple[int, int] | None = None
    patch_size: tuple[int, int] | None = None
    channels: int = integer(3)
    pooler: int = integer(0, 0)
    pooler_activation: Literal["tanh", "gelu", "relu", "silu"] = "tanh"
    masked_head: bool = False
    masked_head_bias: bool = True
    classes: int = 0
    class_pooling: Literal["first", "mean"] = "first"

    @property
    def patches(self) -> int:
        """Number of patches of an image."""
        (height, width), (h, w) = self.image_size or (0, 0), self.patch_size or (1, 1)
        return (height // h) * (width // w)

    def check(self, model: Any) -> None:
        if self.classes == 1 or self.classes > MOST_CLASSES:
            raise ValueError(
                f"model.encoder.classes={self.classes}: must be from 2 to {MOST_CLASSES:,}, or 0 "
                "for none"
            )
        if self.class_pooling != "first" and not self.classes:
            raise ValueError(
                f"model.encoder.class_pooling={self.class_pooling}: requires "
                "model.encoder.classes, a classifier"
            )
        image, patch = self.image_size, self.patch_size
        if (image is None) != (patch is None):
            raise ValueError(
                f"model.encoder.image_size={image}, patch_size={patch}: must be set together"
            )
        sizes = zip(image or (), patch or (), strict=True)
        if any(min(pixels, size) < 1 or pixels % size for pixels, size in sizes):
            raise ValueError(
                f"model.encoder.patch_size={patch}: must divide image_size={image}, both of at "
                "least 1"
            )
        for key, value in self.changed.items() if model.causal else ():
            # With a checkpoint, the config may give the number of new classes.
            if key != "classes" or model.name_or_path is None:
                raise ValueError(
                    f"model.encoder.{key}={value}: requires model.causal=false, an encoder"
                )
        if model.E != model.hidden_size and (self.masked_head or self.pooler or self.classes):
            raise ValueError(
                f"model.embedding_size={model.embedding_size}: must be hidden_size="
                f"{model.hidden_size} with model.encoder.masked_head, pooler or classes"
            )

    def share(self, path: str) -> Fraction:
        # The head of a classifier replaces the output embedding.
        return Fraction(path != "types" and not (path == "embedding" and self.classes))
