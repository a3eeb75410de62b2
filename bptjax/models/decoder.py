"""A causal language model: embedding, layers, final norm, output embedding."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from bptjax.models.cache import Cache
from bptjax.models.config import Execution, ModelConfig
from bptjax.models.feed_forward import Auxiliary
from bptjax.models.layers import Norm, TokenContext
from bptjax.models.linear import Linear, new_param
from bptjax.models.stack import new_layers, run
from bptjax.ops.dropout import dropout
from bptjax.ops.mask import Mask
from bptjax.ops.softmax import soft_cap
from bptjax.parallel.mesh import constrain, lookup


class Decoder(nnx.Module):
    """A causal language model. Calls are pure, so `jax.jit`, `grad` and `scan` take the module
    itself. The parameters of the layers are stacked on axis 0.

    Args:
      key: for new parameters; `jax.eval_shape` makes none.
      dtype: dtype of the parameters.
    """

    def __init__(self, config: ModelConfig, key: Array, dtype: DTypeLike = jnp.float32):
        keys, std = jax.random.split(key, 6), config.init_std
        D, E, learned = config.hidden_size, config.E, config.position_embedding == "learned"

        def project(key, inputs, outputs):
            if D == E:
                return None
            axes = ("embed", None) if inputs == D else (None, "embed")
            return Linear(key, (inputs,), (outputs,), axes, std=std, bias=False, dtype=dtype)

        def table(key, entries, width, axis):
            return new_param(key, (entries, width), (axis, "embed"), std, dtype)

        self.config = config
        self.embedding = table(keys[0], config.V, E, "vocab")
        self.project_in = project(keys[4], E, D)
        entries = (config.max_position_embeddings or 0) + config.position_offset
        self.positions = table(keys[1], entries, D, None) if learned else None
        self.embedding_norm = Norm(config, dtype) if config.embedding_norm else None
        self.layers = new_layers(config, keys[2], dtype)
        self.norm = Norm(config, dtype) if config.final_norm else None
        self.project_out = project(keys[5], D, E)
        self.head = None if config.tied_head else table(keys[3], config.V, E, "vocab")

    @property
    def head_matrix(self) -> Float[Array, "V E"]:
        """The output embedding; the input embedding if they are tied."""
        return (self.embedding if self.head is None else self.head)[...]

    def for_head(self, hidden: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Returns vectors whose products with `head_matrix` are the logits, before a soft cap."""
        scale = self.config.logits_scale
        return hidden if scale == 1 else (scale * hidden.astype(jnp.float32)).astype(hidden.dtype)

    def logits(self, hidden: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        """Computes float32 logits of a few tokens. Training uses `linear_cross_entropy`."""
        logits = jnp.einsum(
            "btd,vd->btv",
            self.for_head(hidden),
            self.head_matrix.astype(hidden.dtype),
            preferred_element_type=jnp.float32,
        )
        return soft_cap(logits, self.config.logits_softcap)[0]

    def __call__(
        self,
        tokens: Int[Array | np.ndarray, "B T"],
        *,
        positions: Int[Array | np.ndarray, "B T"] | None = None,
        segments: Int[Array | np.ndarray, "B T"] | None = None,
        order: Int[np.ndarray, "T"] | None = None,
        dropout_key: Array | None = None,
        dtype: DTypeLike = jnp.float32,
        execution: Execution = Execution(),  # noqa: B008 (frozen)
        sequence_strategy: str = "auto",
    ) -> tuple[Float[Array, "B T E"], Auxiliary]:
        """Computes the hidden states after the final norm, in `dtype`, and sums for the
        auxiliary loss, as `FeedForward` says.

        Args:
          positions: position of each token in its document, for rotary and learned embeddings. If
            left out, 0..T-1.
          segments: document numbers, 0 for padding. If left out, a sequence is one document.
          order: position of each token in its sequence, if the tokens are in another order.
          dropout_key: None for no dropout.
          dtype: dtype of the computation. Parameters are cast when they are used.
          execution: kernels, chunks and remat.
          sequence_strategy: how attention communicates along the mesh axis sp; see STRATEGIES.

        Raises:
          ValueError: more tokens than learned positions, and no `positions`.
        """
        if positions is not None and segments is not None:
            # Positions of padding may lie beyond the learned ones.
            positions = jnp.where(segments == 0, 0, positions)
        x, context = self._embed(tokens, positions, dropout_key, dtype, order)
        if segments is not None:
            context = context._replace(padding=segments == 0)
        output = run(
            self.layers,
            self.config,
            x,
            context,
            mask=Mask(causal=True, segments=segments, positions=order),
            dropout_key=dropout_key,
            execution=execution,
            sequence_strategy=sequence_strategy,
        )
        return self._final(output.x), output.aux

    def hidden_states(
        self,
        tokens: Int[Array | np.ndarray, "B T"],
        *,
        execution: Execution = Execution(),  # noqa: B008 (frozen)
    ) -> list[Float[Array, "B T _"]]:
        """Computes the embeddings, the residual stream after each layer, and the hidden states
        after the final norm, in float32."""
        x, context = self._embed(tokens, None, None, jnp.float32)
        output = run(
            self.layers,
            self.config,
            x,
            context,
            mask=Mask(causal=True),
            execution=execution,
            hidden_states=True,
        )
        assert output.states is not None
        return [x, *output.states, self._final(output.x)]

    def decode(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache,
        *,
        length: Int[Array, "B"] | None = None,
        dtype: DTypeLike = jnp.float32,
        execution: Execution = Execution(),  # noqa: B008 (frozen)
    ) -> tuple[Float[Array, "B T E"], Cache]:
        """Computes the hidden states of T tokens that follow the tokens in the cache. Returns them
        and the cache with the T tokens in it. Tokens before `cache.start` are padding.

        Args:
          length: number of tokens of each whole prompt, for rotary scalings that depend on it, when
            a prompt is read in chunks. If left out, the last position of these tokens, plus one.
        """
        B, T = tokens.shape
        here, there = cache.length + jnp.arange(T)[None], jnp.arange(cache.k.shape[2])[None]
        start = cache.start[:, None]
        positions = jnp.maximum(here - start, 0)
        x, context = self._embed(tokens, positions, None, dtype)
        mask = Mask(
            causal=True,
            positions=here,
            k_positions=there,
            segments=(here >= start).astype(jnp.int32),
            k_segments=(there >= start).astype(jnp.int32),
        )
        output = run(
            self.layers,
            self.config,
            x,
            context,
            mask=mask,
            length=length,
            execution=execution,
            cache=cache,
            k_positions=jnp.maximum(there - start, 0),
        )
        assert output.cache is not None
        return self._final(output.x), output.cache

    @jax.named_scope("embedding")
    def _embed(
        self,
        tokens: Int[Array | np.ndarray, "B T"],
        positions: Int[Array | np.ndarray, "B T"] | None,
        dropout_key: Array | None,
        dtype: DTypeLike,
        order: Int[np.ndarray, "T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], TokenContext]:
        config, tokens, (B, T) = self.config, jnp.asarray(tokens), tokens.shape
        counted = positions is None
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(T) if order is None else order, (B, T))
        positions = jnp.asarray(positions)
        x = lookup(self.embedding[...], tokens, "vocab").astype(dtype)
        if config.embedding_scale is not None:
            # Checkpoints with a scale were trained with it rounded to the compute dtype.
            x = x * jnp.asarray(config.embedding_scale, dtype)
        if self.project_in is not None:
            x = self.project_in(x)
        if self.positions is not None:
            # Caller-supplied positions restart per document, so T says nothing about the largest
            # position.
            if counted and (config.max_position_embeddings or 0) < T:
                raise ValueError(
                    f"{T} tokens: must be at most model.max_position_embeddings="
                    f"{config.max_position_embeddings}, the number of learned positions"
                )
            at = positions + config.position_offset
            x = x + lookup(self.positions[...], at).astype(dtype)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        # Ids do not depend on T: a mesh may need more padding than one device.
        ids = jnp.arange(B)[:, None] + B * (jnp.arange(T) if order is None else order)[None]
        if dropout_key is not None:
            key = jax.random.key_data(jax.random.fold_in(dropout_key, 0))
            x = dropout(x, key, config.embedding_dropout or 0.0, ids)
        return constrain(x, "batch", "sequence", None), TokenContext(positions, ids)

    def _final(self, x: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        """Applies the final norm and the projection to the width of the embedding."""
        if self.norm is not None:
            x = self.norm(x)
        return x if self.project_out is None else self.project_out(x)
