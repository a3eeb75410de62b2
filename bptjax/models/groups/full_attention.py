"""Config groups of full-attention layers with different heads, and of layers that share keys."""

from dataclasses import dataclass
from typing import Any, ClassVar

from bptjax.models.groups.group import MOST_HEAD, Group, integer


@dataclass(frozen=True)
class FullAttentionConfig(Group):
    """Heads of full-attention layers, if they differ from the heads of layers with a window.

    Attributes:
      head_dim: size of a head; 0 for the size in the other layers.
      kv_heads: number of key and value heads; 0 for num_kv_heads.
      keys_as_values: values are the keys before norm and rotary positions.
    """

    SWITCH: ClassVar[str] = "head_dim"

    head_dim: int = integer(0, 0, MOST_HEAD)
    kv_heads: int = integer(0, 0)
    keys_as_values: bool = False

    def check(self, model: Any) -> None:
        shared, (K, size) = model.shared_kv.layers, model.heads(True)
        own = (model.layer_types or [])[: model.num_layers - shared]
        if {*own} != {"full_attention", "sliding_attention"}:
            raise ValueError(
                f"model.full_attention.head_dim={size}: requires full_attention and "
                "sliding_attention in layer_types, both before the last model.shared_kv.layers="
                f"{shared} layers"
            )
        if model.num_heads % K:
            raise ValueError(
                f"model.full_attention.kv_heads={K}: must divide num_heads={model.num_heads}"
            )
        if size % 2:
            raise ValueError(f"model.full_attention.head_dim={size}: must be even")
        if model.attention.gate:
            raise ValueError(
                "model.attention.gate=true: must not be set with model.full_attention.head_dim"
            )


@dataclass(frozen=True)
class SharedKvConfig(Group):
    """Last layers that compute no keys and values. They attend to the keys and values of the last
    earlier layer of the same type.

    Attributes:
      layers: number of these layers.
      intermediate_size: feed-forward width of these layers; 0 for the width of the other layers.
    """

    SWITCH: ClassVar[str] = "layers"

    layers: int = integer(0, 0)
    intermediate_size: int = integer(0, 0)

    def check(self, model: Any) -> None:
        if not model.full_attention.on:
            raise ValueError(
                f"model.shared_kv.layers={self.layers}: requires model.full_attention.head_dim"
            )
        if self.intermediate_size and model.experts.mlp_only_layers:
            raise ValueError(
                f"model.shared_kv.intermediate_size={self.intermediate_size}: must not be set with "
                "model.experts.mlp_only_layers"
            )
