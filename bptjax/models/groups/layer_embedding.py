"""Config group of per-layer token embeddings."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from bptjax.models.groups.group import Group, check_sandwich, integer


@dataclass(frozen=True)
class LayerEmbeddingConfig(Group):
    """Per-layer token embeddings.

    Attributes:
      size: size of the embedding of a token; 0 for none.
    """

    SWITCH: ClassVar[str] = "size"

    size: int = integer(0, 0)

    def check(self, model: Any) -> None:
        check_sandwich(model, f"layer_embedding.size={self.size}")
        if model.add_tokens:
            raise ValueError(
                "model.add_tokens: must be empty with model.layer_embedding.size, the layers' own "
                "embeddings of the tokens"
            )

    def entry(self, model: Any) -> int:
        return model.num_layers * self.size

    def share(self, path: str) -> Fraction:
        return Fraction(path != "layers.embedding.table")
