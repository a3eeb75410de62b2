"""Static choices in which the layers of one model differ."""

from typing import Any, NamedTuple

from bptjax.models.attention_pattern import AttentionPattern

# Parts of `Layer` that a layer of linear attention lacks.
ATTENTION_PARTS = ("query", "key", "value", "query_norm", "key_norm", "gate", "sinks", "out")


class LayerKind(NamedTuple):
    """Static choices in which the layers of a model differ.

    Attributes:
      window: tokens that a token attends to, itself included; None for all.
      rope: rotary parameters; None if the layer rotates nothing.
      pattern: sparse pattern in place of full attention.
      absent: names of the parts of `Layer` that this layer lacks, though other layers have them.
      linear: the layer has linear attention.
    """

    window: int | None
    rope: dict[str, Any] | None
    pattern: AttentionPattern | None = None
    absent: tuple[str, ...] = ()
    linear: bool = False
