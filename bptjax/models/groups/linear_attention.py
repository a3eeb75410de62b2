"""Config group of linear attention."""

from dataclasses import dataclass
from typing import Any, ClassVar

from bptjax.models.groups.group import MOST_HEAD, MixerGroup, integer
from bptjax.ops import delta_rule


@dataclass(frozen=True)
class LinearAttentionConfig(MixerGroup):
    """Linear attention: the gated delta rule after a short convolution.

    Attributes:
      key_heads: number of query and key heads.
      value_heads: number of value heads, a multiple of key_heads.
      key_size: size of a query or key head.
      value_size: size of a value head.
      conv_size: tokens that the convolution covers.
    """

    PART: ClassVar[str] = "linear"

    key_heads: int = integer(0, 0)
    value_heads: int = integer(0, 0)
    key_size: int = integer(0, 0, MOST_HEAD)
    value_size: int = integer(0, 0, MOST_HEAD)
    conv_size: int = integer(4, most=MOST_HEAD)

    @property
    def on(self) -> bool:
        return min(self.key_heads, self.value_heads, self.key_size, self.value_size) > 0

    @property
    def heads(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Number and size of the key heads, then of the value heads."""
        return (self.key_heads, self.key_size), (self.value_heads, self.value_size)

    def check(self, model: Any) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"model.linear_attention.value_heads={self.value_heads}: must be a multiple of "
                f"key_heads={self.key_heads}"
            )

    def widths(self, model: Any, tp: int = 1) -> dict[str, int]:
        (K, H), (N, W) = self.heads
        keys, values = max(K * H // tp, H), N * W // tp
        widths = keys, keys, values, values, values + 2 * N // tp
        return dict(zip(("query", "key", "value", "attended", "gates"), widths, strict=True))

    def flops(self, model: Any) -> float:
        """Counts reading the state by key, adding a product, and reading the state by query."""
        (_, H), (N, W) = self.heads
        return 6.0 * N * H * W

    def saved(self, model: Any, size: int) -> dict[str, float]:
        (_, H), (N, W) = self.heads
        # One float32 state per group of chunks.
        tokens = delta_rule.GROUP * delta_rule.CHUNK
        widths = 1.0 * N * W * size, 4.0 * N * H * W / tokens
        return dict(zip(delta_rule.RESIDUAL_NAMES, widths, strict=True))
