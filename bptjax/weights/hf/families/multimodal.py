"""Multimodal models. Only the text model is read; it has a separate config and prefix."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bptjax.models.config import ModelConfig
from bptjax.models.groups.attention import AttentionConfig
from bptjax.weights.hf.families.family import Family, Layout
from bptjax.weights.hf.families.gated import rmsnorm_glu_decoder
from bptjax.weights.hf.tensor_rules import TensorRule

# Layouts of files, most specific first: transformers' modules; earlier modules, as in most files on
# the hub; a model saved without its head; Qwen 2.5, whose vision model is next to `model`.
LAYOUTS = (
    Layout("model.language_model."),
    Layout("language_model.model.", "language_model."),
    Layout("language_model."),
    Layout("model."),
)
# Keys of rope_parameters that split a head between time, height and width. For text all three equal
# the token's position, so rotary positions are plain.
MROPE = ("mrope_section", "mrope_interleaved")
# Keys of rope_parameters unrelated to rotation: the growth of queries, and a key that nothing
# reads.
GROWTH = ("llama_4_scaling_beta", "max_position_embeddings")


def text_model(family: Family) -> Family:
    """Returns the family of a text model inside a multimodal model."""
    prefix = LAYOUTS[0].body

    def tensor_rules(config: ModelConfig) -> Iterator[TensorRule]:
        for rule in family.tensor_rules(config):
            own = rule.hf.startswith(family.prefix)
            name = prefix + rule.hf.removeprefix(family.prefix) if own else rule.hf
            yield replace(rule, hf=name)

    return replace(family, tensor_rules=tensor_rules, prefix=prefix, wrapped=LAYOUTS)


def read_ministral3(c: Any) -> dict[str, Any]:
    """Reads Ministral3ForCausalLM. Queries grow with the logarithm of their position."""
    rope = c.rope_parameters
    return rmsnorm_glu_decoder(
        c,
        sliding_window=c.sliding_window,
        attention=AttentionConfig(
            query_growth=rope[GROWTH[0]],
            query_growth_length=rope["original_max_position_embeddings"],
        ),
    )
