"""Model architecture as orthogonal choices. `weights.hf.families` maps families to them."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from bptjax.data.landmarks import Landmarks
from bptjax.models.attention_pattern import AttentionPattern
from bptjax.models.config_checks import check_choices
from bptjax.models.groups.alibi import AlibiConfig
from bptjax.models.groups.attention import AttentionConfig
from bptjax.models.groups.encoder import EncoderConfig
from bptjax.models.groups.experts import ExpertsConfig
from bptjax.models.groups.full_attention import FullAttentionConfig, SharedKvConfig
from bptjax.models.groups.group import MOST_HEAD, UNLIMITED, Group, MixerGroup, integer, number
from bptjax.models.groups.layer_embedding import LayerEmbeddingConfig
from bptjax.models.groups.linear_attention import LinearAttentionConfig
from bptjax.models.groups.norms import NormsConfig
from bptjax.models.groups.short_convolution import ShortConvolutionConfig
from bptjax.models.layer_kinds import LayerKind, layer_kinds

LayerType = Literal["full_attention", "sliding_attention", "linear_attention", "short_convolution"]


@dataclass(frozen=True)
class ModelConfig:
    """Model architecture.

    Attributes:
      name_or_path: directory (or hub id) of a checkpoint to start from. The checkpoint decides all
        other keys here except rope_parameters, max_position_embeddings, extend_to,
        attention_pattern, the dropouts, the losses of experts, init_std and new classes.
      causal: tokens attend to themselves and to earlier tokens only. false makes an encoder.
      vocab_size: vocabulary size V. If not set, the tokenizer's vocabulary size.
      hidden_size: width D of the residual stream.
      intermediate_size: width of the feed-forward network. If not set, 4·D.
      num_layers: number of layers L.
      num_heads: number of query heads N.
      num_kv_heads: number of key and value heads, a divisor of N. If not set, N.
      head_dim: size of a head. If not set, D / N.
      residual: sequential feeds the sum with attention to the feed-forward network; parallel feeds
        the layer's input to both, each through a separate norm; shared through one norm.
      residual_scale: factor on the output of each sublayer.
      residual_normed: sublayers add to their normalized input instead of their input.
      position_embedding: rotary positions, ALiBi, a learned embedding of
        max_position_embeddings, or none.
      rope_parameters: rotary parameters in the schema of Hugging Face (rope_theta, rope_type and
        its parameters, partial_rotary_factor), or one such dict per layer type. Those that are not
        set are the checkpoint's; rope_theta of a new model is 10,000.
      rope_layers: for each layer, whether it rotates queries and keys. If not set, all do.
      max_position_embeddings: number of positions that the model supports. Learned positions end
        there.
      extend_to: number of positions to extend the checkpoint to. Sets max_position_embeddings, and
        multiplies the rope_theta of full attention by the power 4/3 of the ratio to the
        checkpoint's positions, to at least extend_theta times that power of the ratio to 65,536.
      extend_theta: least rope_theta of extend_to for 65,536 positions. If not set, 25.6 million; a
        resumed run keeps its own.
      position_offset: unused entries of the learned embedding before position 0.
      sliding_window: number of tokens that a token attends to, including itself. If not set, all.
      layer_types: type of each layer: full_attention, sliding_attention, which applies
        sliding_window, or another kind, configured by the group of its name.
      attention_pattern: sparse pattern of the full-attention layers: its type and the type's keys;
        see AttentionPattern.
      activation: activation of the feed-forward network. gelu_tanh is the tanh approximation.
      feed_forward: name of the feed-forward network; see FEED_FORWARDS.
      gated: the feed-forward network is down(activation(gate(x)) · up(x)).
      mlp_bias: the linear layers of the feed-forward network have a bias.
      embedding_size: width of the embeddings. If not set, D. Another width is projected to D.
      embedding_scale: factor on the token embeddings.
      layer_scale: the output of each layer is multiplied by a constant. It is not trained.
      tied_head: the output embedding is the input embedding.
      head_bias: the output logits have a learned bias.
      logits_scale: factor on the output logits.
      logits_softcap: replaces output logits x by cap · tanh(x / cap).
      embedding_dropout: dropout of the embeddings in training. If not set, the checkpoint's rate,
        or 0 without a checkpoint.
      attention_dropout: dropout of the attention weights in training, with the same default.
      residual_dropout: dropout of the output of each sublayer in training, with the same default.
      init_std: standard deviation of new weights. Weights that write to the residual stream get
        init_std / √(2·L).
      add_tokens: tokens to add to the tokenizer's vocabulary. The embedding of a new token starts
        at the mean of the existing embeddings. With new tokens, an adapter run trains the
        embeddings too.
      encoder: inputs and heads of encoders.
      norms: norms.
      attention: attention.
      full_attention: heads of full-attention layers.
      shared_kv: last layers that reuse the keys and values of earlier layers.
      alibi: slopes of ALiBi.
      layer_embedding: per-layer token embeddings.
      linear_attention: linear attention, a kind of layer.
      short_convolution: short convolution, a kind of layer.
      experts: mixture of experts.
    """

    name_or_path: str | None = None
    causal: bool = True
    vocab_size: int | None = integer(None)
    hidden_size: int = integer(256)
    intermediate_size: int | None = integer(None)
    num_layers: int = integer(4, most=2**11)
    num_heads: int = integer(4)
    num_kv_heads: int | None = integer(None)
    head_dim: int | None = integer(None, most=MOST_HEAD)
    residual: Literal["sequential", "parallel", "shared"] = "sequential"
    residual_scale: float = number(1.0, "positive")
    residual_normed: bool = False
    position_embedding: Literal["rope", "alibi", "learned", "none"] = "rope"
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    rope_layers: list[bool] | None = None
    max_position_embeddings: int | None = integer(None, most=UNLIMITED)
    extend_to: int | None = integer(None, most=UNLIMITED)
    extend_theta: float | None = number(None, "positive")
    position_offset: int = integer(0, 0)
    sliding_window: int | None = integer(None, most=UNLIMITED)
    layer_types: list[LayerType] | None = None
    attention_pattern: dict[str, Any] | None = None
    activation: Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared"] = "silu"
    feed_forward: str = "mlp"
    gated: bool = True
    mlp_bias: bool = False
    embedding_size: int | None = integer(None)
    embedding_scale: float | None = number(None, "positive")
    layer_scale: bool = False
    tied_head: bool = True
    head_bias: bool = False
    logits_scale: float = number(1.0, "positive")
    logits_softcap: float | None = None
    embedding_dropout: float | None = None
    attention_dropout: float | None = None
    residual_dropout: float | None = None
    init_std: float = number(0.02)
    add_tokens: list[str] = field(default_factory=list)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    norms: NormsConfig = field(default_factory=NormsConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    full_attention: FullAttentionConfig = field(default_factory=FullAttentionConfig)
    shared_kv: SharedKvConfig = field(default_factory=SharedKvConfig)
    alibi: AlibiConfig = field(default_factory=AlibiConfig)
    layer_embedding: LayerEmbeddingConfig = field(default_factory=LayerEmbeddingConfig)
    linear_attention: LinearAttentionConfig = field(default_factory=LinearAttentionConfig)
    short_convolution: ShortConvolutionConfig = field(default_factory=ShortConvolutionConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)

    def __post_init__(self):
        rope = self.rope_parameters
        if self.name_or_path is None and not any(isinstance(x, dict) for x in rope.values()):
            object.__setattr__(self, "rope_parameters", {"rope_theta": 10_000.0} | rope)
        check_choices(self)

    def __hash__(self):
        # Modules hold their config as static data, which must be hashable; dicts and lists are not.
        return hash(json.dumps(asdict(self), sort_keys=True))

    @property
    def groups(self) -> dict[str, Group]:
        """The config groups of the model's parts, by name."""
        each = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in each.items() if isinstance(value, Group)}

    @property
    def V(self) -> int:
        if self.vocab_size is None:
            raise ValueError("model.vocab_size: must be set")
        return self.vocab_size

    @property
    def E(self) -> int:
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    @property
    def F(self) -> int:
        return 4 * self.hidden_size if self.intermediate_size is None else self.intermediate_size

    @property
    def expert_F(self) -> int:
        """Feed-forward width of one expert, or of the network in a model without experts."""
        return self.experts.size or self.F

    @property
    def stored_F(self) -> int:
        """Feed-forward width of all experts of a layer, or of the network without experts."""
        return (self.experts.count or 1) * self.expert_F

    @property
    def active_F(self) -> int:
        """Feed-forward width that a token passes through, averaged over the layers. Counts layers
        in `experts.mlp_only_layers` as expert layers."""
        own, later = self.experts, self.shared_kv
        width = self.expert_F * own.per_token + own.shared_size if own.on else self.F
        wider = (later.intermediate_size or self.F) - self.F
        return width + wider * later.layers // self.num_layers

    @property
    def K(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def H(self) -> int:
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def layer_kinds(self) -> list[LayerKind]:
        """The kind of each layer."""
        return layer_kinds(self)

    @property
    def expert_layers(self) -> list[int]:
        """Indices of the layers with the network `feed_forward`."""
        return [i for i in range(self.num_layers) if i not in self.dense_layers]

    @property
    def dense_layers(self) -> list[int]:
        """Indices of the layers whose MLP `dense` replaces the network `feed_forward`."""
        if not self.shared_kv.intermediate_size:
            return sorted(self.experts.mlp_only_layers)
        return list(range(self.num_layers - self.later_layers, self.num_layers))

    @property
    def pattern(self) -> AttentionPattern | None:
        """Sparse pattern of the full-attention layers; None for plain attention."""
        values = self.attention_pattern
        return None if values is None else AttentionPattern.parse(values)

    @property
    def landmarks(self) -> Landmarks | None:
        """The landmark token and its block size; None without landmark attention."""
        return None if self.pattern is None else self.pattern.landmarks

    @property
    def mixers(self) -> dict[str, MixerGroup]:
        """The groups of the attention-free kinds of layers that the model has, by kind."""
        groups = self.groups.items()
        return {kind: x for kind, x in groups if isinstance(x, MixerGroup) and x.on}

    def layers_of(self, kind: str) -> list[int]:
        """Returns the indices of the layers of this kind in `layer_types`."""
        types: Sequence[str] = self.layer_types or ()
        return [i for i, own in enumerate(types) if own == kind]

    @property
    def attention_layers(self) -> list[int]:
        """Indices of the attention layers."""
        mixing = {i for kind in self.mixers for i in self.layers_of(kind)}
        return [i for i in range(self.num_layers) if i not in mixing]

    @property
    def mixing(self) -> list[tuple[list[int], Group]]:
        """Groups of attention and of each attention-free kind, with the indices of its layers."""
        others = [(self.layers_of(kind), group) for kind, group in self.mixers.items()]
        return [(self.attention_layers, self.attention), *others]

    @property
    def attended(self) -> dict[tuple[int | None, AttentionPattern | None], float]:
        """Attention layers per window and pattern, each weighted by its head size / head_dim."""
        attended: dict = defaultdict(float)
        for kind in self.layer_kinds:
            if kind.mixer is None:
                attended[kind.window, kind.pattern] += self.heads(kind.full)[1] / self.H
        return attended

    @property
    def later_layers(self) -> int:
        """Number of last layers that reuse earlier keys and values; they run in separate loops."""
        return self.shared_kv.layers

    @property
    def full_layers(self) -> list[int]:
        """Indices of the layers with heads of `full_attention`."""
        return self.layers_of("full_attention") if self.full_attention.on else []

    def kv_layers(self, full: bool) -> list[int]:
        """Returns the indices of the layers that compute keys and values, in full_layers or not."""
        own = self.num_layers - self.later_layers
        return [i for i in self.attention_layers[:own] if (i in self.full_layers) == full]

    def heads(self, full: bool) -> tuple[int, int]:
        """Returns the number and size of the key heads in full_layers, or in the other layers."""
        own = self.full_attention
        return (own.kv_heads or self.K, own.head_dim) if full and own.on else (self.K, self.H)

    @property
    def mean_head_dim(self) -> float:
        """Head size averaged over the attention layers."""
        full = len(self.full_layers) / len(self.attention_layers)
        return full * self.heads(True)[1] + (1 - full) * self.H

    @property
    def ropes(self) -> tuple[dict[str, Any], ...]:
        """Rotary parameters of each layer type, in order of first occurrence."""
        types: Sequence[str | None] = self.layer_types or [None]
        return tuple(self.rope(t) for t in dict.fromkeys(types))

    @property
    def rope_types(self) -> list[str]:
        """Rotary scaling of each layer type; empty without rotary positions."""
        if self.position_embedding != "rope":
            return []
        return [p.get("rope_type", p.get("type", "default")) for p in self.ropes]

    def exceeds_positions(self, length: int) -> bool:
        """Returns whether `length` tokens exceed the rotary positions that the model supports.
        `dynamic` adapts to any length."""
        unlimited = self.position_embedding != "rope" or "dynamic" in self.rope_types
        return not unlimited and length > (self.max_position_embeddings or length)

    def rope(self, layer_type: str | None) -> dict[str, Any]:
        """Returns the rotary parameters of layers of this type."""
        return self.rope_parameters.get(layer_type or "", self.rope_parameters)
