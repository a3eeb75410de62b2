"""The class of a model family, and checks that several families share."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from bptjax.models.config import ModelConfig
from bptjax.models.params import Index
from bptjax.weights.hf.tensor_rules import TensorRule

# Class of transformers that loads a decoder.
CAUSAL = "AutoModelForCausalLM"
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu_squared",
}


class Layout(NamedTuple):
    """Names in a file: prefixes that replace `Family.prefix`, and that precede all other names."""

    body: str
    head: str = ""


def field_values(config: ModelConfig) -> dict[str, Sequence[int]]:
    """Returns the layer or expert indices that each field of a rule stands for, in axis order.

    `{expert_layer}` stands for the layers with experts, `{mlp_layer}` for the layers with an MLP
    instead, `{normed_layer}` for the layers with a norm before attention, `{attention_layer}` for
    the attention layers, and `{PART_layer}` for an attention-free kind of layers; see `MixerGroup`.
    `{full_layer}` stands for the layers with heads of `full_attention`, `{windowed_layer}` for the
    other layers, and `{full_kv_layer}` and `{windowed_kv_layer}` for the subsets that compute keys
    and values.
    """
    return dict(
        layer=range(config.num_layers),
        normed_layer=range(0 if config.norms.first else 1, config.num_layers),
        attention_layer=config.attention_layers,
        expert_layer=config.expert_layers,
        mlp_layer=config.dense_layers,
        full_layer=config.full_layers,
        windowed_layer=[i for i in range(config.num_layers) if i not in config.full_layers],
        full_kv_layer=config.kv_layers(True),
        windowed_kv_layer=config.kv_layers(False),
        expert=range(config.experts.count),
        **{f"{x.PART}_layer": config.layers_of(kind) for kind, x in config.mixers.items()},
    )


@dataclass(frozen=True)
class Family:
    """A model family: the reader of its config, and the rules of its tensors.

    Attributes:
      read: converts the HF config to keywords of `ModelConfig`; raises ValueError for unsupported
        values.
      tensor_rules: yields the rules of all tensors.
      prefix: prefix of names, which files of the bare model (without a head) leave out.
      wrapped: layouts of files that hold the model as a multimodal model's text model, the layout
        of transformers' modules first; empty if the model is not wrapped.
      neutral: config keys that change no result.
      ignored: name patterns of tensors that are not read, in addition to `IGNORED`.
      kept: name patterns of tensors that are not read but kept for exports.
      renamed: (old, new) endings of names in old files.
      positions: config key of the number of positions.
      rope_names: config keys of rope_theta and partial_rotary_factor in transformers 4; empty for
        families that transformers 4 lacks.
      local_theta: config key of rope_theta in layers with a window, in transformers 4.
      scaled: transformers 4 scales the rotary positions of the family.
      rope_kept: keys of rope_parameters that rotate no text. Exports keep them.
      unused: returns further name patterns of tensors that a model of this config does not read;
        None for none.
      experts_module: name of transformers' module of all experts within a layer.
      experts: order of the outputs of gate and up in transformers' parameter of all experts; None
        for families without experts.
      peft_keeps_mlps: PEFT supports adapters on dense MLPs next to experts.
      mxfp4: files may hold the experts in MXFP4.
      vllm_lora: vLLM serves adapters of the family.
      vllm_stacked: vLLM holds the experts of a layer in one parameter, and reads its adapter as
        PEFT writes it.
    """

    read: Callable[[Any], dict[str, Any]]
    tensor_rules: Callable[[Any], Iterator[TensorRule]]
    prefix: str = "model."
    wrapped: tuple[Layout, ...] = ()
    neutral: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    positions: str = "max_position_embeddings"
    rope_names: tuple[str, str] | tuple[()] = ("rope_theta", "partial_rotary_factor")
    local_theta: str = "rope_local_base_freq"
    scaled: bool = True
    rope_kept: tuple[str, ...] = ()
    unused: Callable[[ModelConfig], tuple[str, ...]] | None = None
    experts_module: str = "mlp.experts"
    experts: Literal["concatenated", "interleaved"] | None = None
    peft_keeps_mlps: bool = False
    mxfp4: bool = False
    vllm_lora: bool = True
    vllm_stacked: bool = False

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Layouts of files; the first uses the names in the rules."""
        return self.wrapped or (Layout(self.prefix), Layout(""))

    @property
    def auto_class(self) -> str:
        """Name of the transformers class that loads the decoder."""
        return "AutoModelForImageTextToText" if self.wrapped else CAUSAL

    def find_layout(self, names: Iterable[str]) -> Layout:
        """Returns the layout of a file with these tensor names."""
        names = list(names)
        layouts = (x for x in self.layouts if any(name.startswith(x.body) for name in names))
        return next(layouts, self.layouts[0])

    def rename(self, name: str, layout: Layout) -> str:
        """Converts a name in the rules to the name in a file of this layout."""
        body = name.startswith(self.prefix)
        return layout.body + name.removeprefix(self.prefix) if body else layout.head + name

    def names(
        self, config: ModelConfig, layout: Layout | None = None
    ) -> dict[TensorRule, dict[Index, str]]:
        """Returns each rule's names in a file of this layout, by index into the stacked axes."""
        values, layout = field_values(config), layout or self.layouts[0]
        return {
            rule: {i: self.rename(name, layout) for i, name in rule.names(values).items()}
            for rule in self.tensor_rules(config)
        }


def require(c: Any, **supported: Any) -> None:
    """Checks keys of the HF config.

    Raises:
      ValueError: a key does not have the supported value.
    """
    for key, value in supported.items():
        if getattr(c, key) != value:
            raise ValueError(
                f"{key}={getattr(c, key)!r}: must be {value!r}; no other value is supported"
            )


def activation(name: str) -> str:
    """Returns bptjax's name for a transformers activation."""
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"activation {name!r}: must be one of {known}")
    return ACTIVATIONS[name]


def rotary(c: Any, *, partial: bool = False) -> dict[str, Any]:
    """Returns the keywords of rotary positions.

    Args:
      partial: whether the family supports partial_rotary_factor. In other families, transformers
        applies it for some scalings only, so it is refused.
    """
    each = [p for p in c.rope_parameters.values() if isinstance(p, dict)] or [c.rope_parameters]
    # The frequencies of `proportional` include the partial factor.
    others = (p for p in each if p.get("rope_type") != "proportional")
    if not partial and any(p.get("partial_rotary_factor", 1.0) != 1.0 for p in others):
        raise ValueError("partial_rotary_factor: must be 1 in this family")
    return dict(
        position_embedding="rope",
        rope_parameters=dict(c.rope_parameters),
        max_position_embeddings=c.max_position_embeddings,
    )
