"""Static differences between the layers of a model."""

from typing import Any, NamedTuple

from bptjax.models.attention_pattern import AttentionPattern

# Parts of `Layer` that depend on the number and size of its heads. In full-attention layers these
# parts may differ; their names then begin with FULL.
PROJECTIONS = ("query", "key", "value", "query_norm", "key_norm", "out")
FULL = "full_"
# Parts that a layer lacks if it attends to the keys and values of another layer.
KEY_PARTS = ("key", "value", "key_norm")
# Parts that attention-free layers lack.
ATTENTION_PARTS = (*PROJECTIONS, "gate", "sinks")


class LayerKind(NamedTuple):
    """Static choices of one layer.

    Attributes:
      window: tokens that a token attends to, including itself; None for all.
      rope: rotary parameters; None if the layer rotates nothing.
      pattern: sparse pattern of a full-attention layer.
      absent: names of the parts of `Layer` that this layer lacks but other layers have.
      mixer: kind of an attention-free layer; see `MIXERS`.
      full: the layer has heads of `full_attention`.
      shares: the layer attends to the keys and values of an earlier layer.
    """

    window: int | None
    rope: dict[str, Any] | None
    pattern: AttentionPattern | None = None
    absent: tuple[str, ...] = ()
    mixer: str | None = None
    full: bool = False
    shares: bool = False


def layer_kinds(config: Any) -> list[LayerKind]:
    """Returns the kind of each layer of a `ModelConfig`."""
    types = config.layer_types or [None] * config.num_layers
    rotates = config.rope_layers or [True] * config.num_layers
    full, dense = ({*numbers} for numbers in (config.full_layers, config.dense_layers))
    own, mixers = config.num_layers - config.later_layers, config.mixers

    def kind(i: int) -> LayerKind:
        window = None if types[i] == "full_attention" else config.sliding_window
        absent: tuple[str, ...] = () if i or config.norms.first else ("attention_norm",)
        mixer = types[i] if types[i] in mixers else None
        absent += ATTENTION_PARTS if mixer else ()
        absent += tuple(group.PART for kind, group in mixers.items() if kind != mixer)
        if full:
            absent += tuple(name if i in full else FULL + name for name in PROJECTIONS)
        if i >= own:
            absent += tuple(FULL + name if i in full else name for name in KEY_PARTS)
        if dense:
            absent += ("mlp" if i in dense else "dense",)
        return LayerKind(
            window,
            config.rope(types[i]) if rotates[i] else None,
            None if window else config.pattern,
            absent,
            mixer=mixer,
            full=i in full,
            shares=i >= own,
        )

    return [kind(i) for i in range(config.num_layers)]
