"""Config group of attention."""

from dataclasses import dataclass
from typing import Any

from bptjax.models.groups.group import UNLIMITED, Group, integer, number
from bptjax.ops.arguments import check_softcap
from bptjax.ops.attention import RESIDUAL_NAMES


@dataclass(frozen=True)
class AttentionConfig(Group):
    """Attention.

    Attributes:
      scale: factor on the dot product of query and key. If not set, 1 / √head_dim.
      softcap: replaces attention logits x by cap · tanh(x / cap).
      gate: multiplies the output of each head by the sigmoid of a linear map of the layer's input.
      sinks: a learned logit per query head, for an extra key whose value is 0. A query that finds
        nothing may attend to it.
      qk_norm: normalizes the queries and keys of each head before rotary positions.
      qk_norm_joint: qk_norm normalizes all heads of a token together.
      value_norm: normalizes the values of each head, without a scale.
      clip: clips queries, keys and values to ± this value.
      qkv_bias: query, key and value projections have a bias.
      out_bias: the output projection has a bias.
      query_growth: multiplies queries at position p by
        1 + query_growth · log(1 + ⌊p / query_growth_length⌋).
      query_growth_length: number of tokens between growth steps of the queries.
    """

    scale: float | None = number(None, "positive")
    softcap: float | None = None
    gate: bool = False
    sinks: bool = False
    qk_norm: bool = False
    qk_norm_joint: bool = False
    value_norm: bool = False
    clip: float | None = number(None, "positive")
    qkv_bias: bool = False
    out_bias: bool = False
    query_growth: float = number(0.0, "")
    query_growth_length: int = integer(1, most=UNLIMITED)

    def check(self, model: Any) -> None:
        check_softcap(self.softcap, "model.attention.softcap")
        if self.qk_norm_joint and not self.qk_norm:
            raise ValueError("model.attention.qk_norm_joint=true: requires qk_norm=true")

    def widths(self, model: Any, tp: int = 1) -> dict[str, float]:
        """Returns the mean over the attention layers."""
        heads, keys, layers = (
            model.num_heads * model.mean_head_dim / tp,
            0.0,
            model.attention_layers,
        )
        for full in (False, True):
            K, H = model.heads(full)
            keys += len(model.kv_layers(full)) / len(layers) * max(K * H // tp, H)
        widths = {"query": heads, "key": keys, "value": keys, "attended": heads}
        return widths | ({"gates": heads} if self.gate else {})

    def saved(self, model: Any, size: int) -> dict[str, float]:
        N, H = model.num_heads, model.mean_head_dim
        return dict(zip(RESIDUAL_NAMES, (N * H * size, 4.0 * N), strict=True))
