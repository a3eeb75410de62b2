"""A transformer layer: a module that holds parameters; its calls are pure."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, UInt32

from bptjax.models.config import ModelConfig
from bptjax.models.feed_forward import Auxiliary, Mlp
from bptjax.models.feed_forwards import new_feed_forward
from bptjax.models.layer_embedding import LayerEmbedding
from bptjax.models.layer_kinds import PROJECTIONS
from bptjax.models.linear import AdapterDropout, Linear
from bptjax.models.mixer import Mixer
from bptjax.models.mixers import MIXERS
from bptjax.models.norm import Norm
from bptjax.ops.checkpoint_names import checkpoint_named
from bptjax.ops.dropout import dropout
from bptjax.ops.norm import rms_norm
from bptjax.ops.position import rope, rope_frequencies, rotated_features


class TokenContext(NamedTuple):
    """Inputs of a layer per token, in addition to the residual stream.

    Attributes:
      positions: positions in the document, for rotary embeddings; in a tree, depths.
      ids: index of the token in the batch, which seeds its dropout.
      padding: true for padding; None if there is none.
      ends: ends of trees, as in `Mask`; None if each document is a chain of tokens.
      lengths: document length in tokens; None if no rotary scaling depends on it.
      marked: true for markers of the attention pattern; None if it has none.
      tokens: token ids; None if the model has no per-layer embeddings.
      embedded: features of the layer's token embedding; None without one.
    """

    positions: Int[Array, "B T"]
    ids: Int[Array, "B T"]
    padding: Bool[Array, "B T"] | None = None
    ends: Int[Array, "B T"] | None = None
    lengths: Int[Array, "B T"] | None = None
    marked: Bool[Array, "B T"] | None = None
    tokens: Int[Array, "B T"] | None = None
    embedded: Float[Array, "B T P"] | None = None


class DropoutKeys(NamedTuple):
    """Key data of a layer: for attention weights, the outputs of attention and of the feed-forward
    network, and adapter inputs."""

    attention: UInt32[Array, "2"]
    attended: UInt32[Array, "2"]
    feed_forward: UInt32[Array, "2"]
    adapters: UInt32[Array, "2"]


def adapter_dropout(keys: DropoutKeys | None, tokens: TokenContext) -> AdapterDropout | None:
    """Returns the dropout seeds of a layer's adapters; None without dropout."""
    return None if keys is None else AdapterDropout(keys.adapters, tokens.ids)


class LayerScale(nnx.Variable):
    """Constant `[L, 1]` that multiplies the output of each layer. Saved, but not trained."""


class Layer(nnx.Module):
    """A transformer layer of three position-wise functions: attention runs between `queries` and
    `keys_values`, which come before it, and `finish`.
    """

    def __init__(self, config: ModelConfig, key: Array, dtype: DTypeLike):
        keys, norm = jax.random.split(key, 5), lambda: Norm(config, dtype)
        gate_key, full_key, wide_key, own_key = (jax.random.fold_in(key, i) for i in (0, 2, 3, 4))
        before = config.norms.position != "output"
        after = config.norms.position in ("output", "sandwich")
        self.config = config
        self.attention_norm = norm() if before else None
        own: Any = _projections(config, keys, dtype, full=False)
        self.query, self.key, self.value, self.query_norm, self.key_norm, self.out = own
        # Full-attention layers use these six instead.
        own = (None,) * len(PROJECTIONS)
        if config.full_layers:
            own = _projections(config, jax.random.split(full_key, 4), dtype, full=True)
        self.full_query, self.full_key, self.full_value = own[:3]
        self.full_query_norm, self.full_key_norm, self.full_out = own[3:]
        sinks = nnx.Param(jnp.zeros(config.num_heads, dtype), axes=("heads",))
        gated = config.attention.gate
        self.gate = _heads(config, gate_key, dtype, config.num_heads, config.H) if gated else None
        self.sinks = sinks if config.attention.sinks else None
        self.attention_post_norm = norm() if after else None
        self.mlp_norm = norm() if before and config.residual != "shared" else None
        self.mlp_post_norm = norm() if after else None
        self.mlp = new_feed_forward(config, keys[4], dtype)
        # Attention-free layers use these instead of attention.
        for kind, mixer in MIXERS.items():
            stream = jax.random.fold_in(key, mixer.STREAM)
            part = mixer(config, stream, dtype) if kind in config.mixers else None
            setattr(self, getattr(config, kind).PART, part)
        # Some layers use this MLP instead of `mlp`.
        wide = config.shared_kv.intermediate_size
        dense_key = wide_key if wide else keys[4]
        self.dense = Mlp(config, dense_key, dtype, wide) if config.dense_layers else None
        has_own = config.layer_embedding.size > 0
        self.embedding = LayerEmbedding(config, own_key, dtype) if has_own else None
        self.scale = LayerScale(jnp.ones(1, dtype), axes=(None,)) if config.layer_scale else None

    @property
    def mixer(self) -> Mixer | None:
        """The part that replaces attention, if any, in a layer whose absent parts are None."""
        parts = (getattr(self, group.PART) for group in self.config.mixers.values())
        return next((part for part in parts if part is not None), None)

    @jax.named_scope("attention")
    def queries(
        self,
        x: Float[Array, "B T D"],
        tokens: TokenContext,
        rope_parameters: dict[str, Any] | None,
        keys: DropoutKeys | None = None,
    ) -> Float[Array, "B T N H"]:
        """Computes queries of the stream, rotated unless `rope_parameters` is None."""
        q = self.query(self.read(x), adapter_dropout(keys, tokens))
        q = self._rotate(self._clip(q), self.query_norm, tokens, rope_parameters)
        if not self.config.attention.query_growth:
            return q
        steps = tokens.positions // self.config.attention.query_growth_length
        growth = 1 + self.config.attention.query_growth * jnp.log1p(steps.astype(jnp.float32))
        return q * growth[..., None, None].astype(q.dtype)

    @jax.named_scope("attention")
    def keys_values(
        self,
        x: Float[Array, "B T D"],
        tokens: TokenContext,
        rope_parameters: dict[str, Any] | None,
        keys: DropoutKeys | None = None,
    ) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Computes keys, rotated unless `rope_parameters` is None, and values of the stream."""
        x, seeds = self.read(x), adapter_dropout(keys, tokens)
        k = self._clip(self.key(x, seeds))
        v = k if self.value is None else self._clip(self.value(x, seeds))
        if self.config.attention.value_norm:
            v = rms_norm(v, jnp.ones(v.shape[-1]), eps=self.config.norms.eps)
        return self._rotate(k, self.key_norm, tokens, rope_parameters), v

    def finish(
        self,
        x: Float[Array, "B T D"],
        out: Float[Array, "B T *heads"],
        tokens: TokenContext,
        inside: Bool[Array, "T"],
        keys: DropoutKeys | None = None,
        offload: float = 0.0,
    ) -> tuple[Float[Array, "B T D"], Auxiliary]:
        """Computes everything after attention: output projection, residuals, norms, feed-forward
        network.

        Args:
          out: output of attention, or of the output projection if this layer lacks one.
          inside: false for copies of tokens that pad a chunk.
          offload: share of the tokens whose saved activations go to host memory.

        Returns:
          the residual stream; the auxiliary sums over all tokens except padding and copies.
        """
        config, seeds = self.config, adapter_dropout(keys, tokens)
        rate = config.residual_dropout or 0.0
        counted = jnp.broadcast_to(inside, x.shape[:2])
        if tokens.padding is not None:
            counted &= ~tokens.padding

        def feed_forward(x, post_norm=None, **more):
            with jax.named_scope("feed_forward"):
                y, aux = self.mlp(x, counted=counted, seeds=seeds, offload=offload, **more)
            y = self._scale(y if post_norm is None else post_norm(y))
            return dropout(y, keys.feed_forward if keys else None, rate, tokens.ids), aux

        with jax.named_scope("attention"):
            projects = self.out is not None or self.mixer is not None
            attended = self.project(x, out, seeds) if projects else out
            if self.attention_post_norm is not None:
                attended = self.attention_post_norm(attended)
            attended = self._scale(attended)
            attended = dropout(attended, keys.attended if keys else None, rate, tokens.ids)
        norm = self.attention_norm if self.mlp_norm is None else self.mlp_norm
        if config.residual != "sequential":
            y, aux = feed_forward(_normalized(x, norm))
            return x + attended + y, aux
        x = (self.read(x) if config.residual_normed else x) + attended
        x = checkpoint_named(x, "attended", offload)
        if config.norms.position == "post":
            x = _normalized(x, self.attention_norm)
            y, aux = feed_forward(x)
            return _normalized(x + y, norm), aux
        normed = _normalized(x, norm)
        more = {"residual": x} if config.experts.norms else {}
        y, aux = feed_forward(normed, self.mlp_post_norm, **more)
        x = (normed if config.residual_normed else x) + y
        if self.embedding is not None and tokens.embedded is not None:
            x = x + self.embedding(x, tokens.embedded, seeds)
        if self.scale is not None:
            x = x * jax.lax.stop_gradient(self.scale[0]).astype(x.dtype)
        return x, aux

    def project(
        self,
        x: Float[Array, "B T D"] | None,
        out: Float[Array, "B T *heads"],
        seeds: AdapterDropout | None,
        head_numbers: Int[Array, "N"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Computes the gate and the output projection of the heads. `head_numbers` are their
        indices among the heads of the layer, if they are only some of them. Only a gate or a mixer
        reads `x`."""
        if (mixer := self.mixer) is not None:
            assert x is not None
            return mixer.finish(self.read(x), out, seeds)
        if self.gate is not None:
            assert x is not None
            gate = jax.nn.sigmoid(self.gate(self.read(x), seeds).astype(jnp.float32))
            out = (gate * out.astype(jnp.float32)).astype(out.dtype)
        if seeds is not None and head_numbers is not None:
            size = out.shape[-1]
            columns = (head_numbers[:, None] * size + jnp.arange(size)[None]).reshape(-1)
            seeds = seeds._replace(first=columns - jnp.arange(len(columns)))
        return self.out(out, seeds)

    def read(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Computes the input of attention from the residual stream."""
        post = self.config.norms.position == "post"
        return _normalized(x, None if post else self.attention_norm)

    def _scale(self, y: Array) -> Array:
        factor = self.config.residual_scale
        return y if factor == 1 else (factor * y.astype(jnp.float32)).astype(y.dtype)

    def _clip(self, x: Array) -> Array:
        limit = self.config.attention.clip
        return x if limit is None else jnp.clip(x, -limit, limit)

    def _rotate(
        self, x: Array, norm: Norm | None, tokens: TokenContext, parameters: dict[str, Any] | None
    ) -> Array:
        if norm is not None:
            joint = self.config.attention.qk_norm_joint
            x = norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape) if joint else norm(x)
        if self.config.position_embedding != "rope" or parameters is None:
            return x
        frequencies, factor = rotary(self.config, parameters, tokens.lengths, x.shape[-1])
        return rope(x, tokens.positions, frequencies, factor)


def _normalized(x: Array, norm: Norm | None) -> Array:
    return x if norm is None else norm(x)


def _heads(
    config: ModelConfig, key: Array, dtype: DTypeLike, heads: int, size: int, axis: str = "heads"
) -> Linear:
    """Makes a projection from the residual stream to heads of this size."""
    shape, axes = ((config.hidden_size,), (heads, size)), ("embed", axis, None)
    bias = config.attention.qkv_bias
    return Linear(key, *shape, axes, std=config.init_std, bias=bias, dtype=dtype)


def _projections(
    config: ModelConfig, keys: Array, dtype: DTypeLike, *, full: bool
) -> tuple[nnx.Module | None, ...]:
    """Makes the `PROJECTIONS` of layers with heads of `full_attention`, or of the other layers."""
    N, (K, H) = config.num_heads, config.heads(full)
    query_heads, key_heads = (N, K) if config.attention.qk_norm_joint else (1, 1)
    has_value = not (full and config.full_attention.keys_as_values)
    return (
        _heads(config, keys[0], dtype, N, H),
        _heads(config, keys[1], dtype, K, H, "kv_heads"),
        _heads(config, keys[2], dtype, K, H, "kv_heads") if has_value else None,
        Norm(config, dtype, query_heads * H, None) if config.attention.qk_norm else None,
        Norm(config, dtype, key_heads * H, None) if config.attention.qk_norm else None,
        Linear(
            keys[3],
            (N, H),
            (config.hidden_size,),
            ("heads", None, "embed"),
            std=config.init_std / (2 * config.num_layers) ** 0.5,
            bias=config.attention.out_bias,
            dtype=dtype,
        ),
    )


def rotary(
    config: ModelConfig,
    parameters: dict[str, Any],
    length: Int[Array, "B T"] | None,
    size: int | None = None,
) -> tuple[Float[Array | np.ndarray, "... R"], float]:
    """Returns the rotary frequencies of heads of this size (head_dim by default), and the factor on
    cos and sin."""
    return rope_frequencies(
        rotated_features(size or config.H, parameters),
        parameters,
        max_position_embeddings=config.max_position_embeddings,
        length=length,
    )
