"""A causal language model: embedding, layers, final norm, output embedding."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from bptjax.models.cache import Cache
from bptjax.models.config import Execution, ModelConfig
from bptjax.models.layers import Linear, Norm, new_param
from bptjax.models.stack import new_layers, run
from bptjax.ops.dropout import dropout
from bptjax.ops.mask import Mask
from bptjax.ops.softmax import soft_cap
from bptjax.parallel.mesh import constrain, lookup


class Decoder(nnx.Module):
    """Parameters and config; calls are pure, so `jax.jit`, `grad` and `scan` take the module
    itself. Layers are stacked on axis 0.

    Args:
      key: for new parameters; under `jax.eval_shape` none are made.
      dtype: of the parameters.
    """

    def __init__(self, config: ModelConfig, key: Array, dtype: jnp.dtype = jnp.float32):
        keys, std = jax.random.split(key, 6), config.init_std
        D, E, learned = config.hidden_size, config.E, config.position_embedding == "learned"

        def project(key, inputs, outputs):
            if D == E:
                return None
            axes = ("embed", None) if inputs == D else (None, "embed")
            return Linear(key, (inputs,), (outputs,), axes, std=std, bias=False, dtype=dtype)

        def table(key, rows, width, axis):
            return new_param(key, (rows, width), (axis, "embed"), std, dtype)

        self.config = config
        self.embedding = table(keys[0], config.V, E, "vocab")
        self.project_in = project(keys[4], E, D)
        rows = (config.max_position_embeddings or 0) + config.position_offset
        self.positions = table(keys[1], rows, D, None) if learned else None
        self.embedding_norm = Norm(config, dtype) if config.embedding_norm else None
        self.layers = new_layers(config, keys[2], dtype)
        self.norm = Norm(config, dtype) if config.final_norm else None
        self.project_out = project(keys[5], D, E)
        self.head = None if config.tied_head else table(keys[3], config.V, E, "vocab")

    @property
    def head_matrix(self) -> Float[Array, "V E"]:
        """The output embedding: the input embedding itself where they are tied."""
        return (self.embedding if self.head is None else self.head)[...]

    def logits(self, hidden: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        """Float32 logits of a few tokens; training uses `linear_cross_entropy`."""
        logits = jnp.einsum(
            "btd,vd->btv",
            hidden,
            self.head_matrix.astype(hidden.dtype),
            preferred_element_type=jnp.float32,
        )
        return soft_cap(logits, self.config.logits_softcap)[0]

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        order: Int[np.ndarray, "T"] | None = None,
        dropout_key: Array | None = None,
        dtype: jnp.dtype = jnp.float32,
        execution: Execution = Execution(),  # noqa: B008 (frozen)
        sequence_strategy: str = "auto",
    ) -> Float[Array, "B T E"]:
        """Hidden states after the final norm, in `dtype`.

        Args:
          positions: of each token in its document, for rotary and learned embeddings; 0..T-1 if
            left out.
          segments: document numbers, 0 for padding; without them a row is one document.
          order: of each token its place in the row, where they stand in another order.
          dropout_key: None for no dropout.
          dtype: of the computation; parameters are cast as they are used.
          execution: how to compute it.
          sequence_strategy: how attention communicates along the mesh axis sp; see STRATEGIES.

        Raises:
          ValueError: more tokens than learned positions, where `positions` are left out.
        """
        if positions is not None and segments is not None:
            # Those of padding may lie beyond what is learned.
            positions = jnp.where(segments == 0, 0, positions)
        x, place = self._embed(tokens, positions, dropout_key, dtype, order)
        x, _ = run(
            self.layers,
            self.config,
            x,
            mask=Mask(causal=True, segments=segments, positions=order),
            dropout_key=dropout_key,
            execution=execution,
            sequence_strategy=sequence_strategy,
            **place,
        )
        return self._leave(x)

    def hidden_states(
        self,
        tokens: Int[Array, "B T"],
        *,
        execution: Execution = Execution(),  # noqa: B008 (frozen)
    ) -> list[Float[Array, "B T D"]]:
        """The embeddings, the stream after each layer, and the final hidden states, in float32."""
        x, place = self._embed(tokens, None, None, jnp.float32)
        last, each = run(
            self.layers,
            self.config,
            x,
            mask=Mask(causal=True),
            execution=execution,
            hidden_states=True,
            **place,
        )
        return [x, *each, self._leave(last)]

    def decode(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache,
        *,
        length: Int[Array, "B"] | None = None,
        dtype: jnp.dtype = jnp.float32,
        execution: Execution = Execution(),  # noqa: B008 (frozen)
    ) -> tuple[Float[Array, "B T E"], Cache]:
        """Hidden states of the next T tokens after those in the cache, and the cache with them in
        it. A row's tokens before its `cache.start` are padding.

        Args:
          length: tokens of each whole prompt, for rotary scalings that depend on it, where a
            long prompt is read in chunks; these tokens' last position + 1 if left out.
        """
        B, T = tokens.shape
        here, there = cache.length + jnp.arange(T)[None], jnp.arange(cache.k.shape[2])[None]
        start = cache.start[:, None]
        positions = jnp.maximum(here - start, 0)
        x, place = self._embed(tokens, positions, None, dtype)
        mask = Mask(
            causal=True,
            positions=here,
            k_positions=there,
            segments=(here >= start).astype(jnp.int32),
            k_segments=(there >= start).astype(jnp.int32),
        )
        x, (k, v) = run(
            self.layers,
            self.config,
            x,
            mask=mask,
            length=length,
            execution=execution,
            past=(cache.k, cache.v, cache.length),
            **place,
        )
        return self._leave(x), replace(cache, k=k, v=v, length=cache.length + T)

    def _embed(self, tokens, positions, dropout_key, dtype, order=None):
        """Embedded tokens `[B, T, D]`; and of each its position, and its number in the batch."""
        config, (B, T) = self.config, tokens.shape
        counted = positions is None
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(T) if order is None else order, (B, T))
        x = lookup(self.embedding[...], tokens, "vocab").astype(dtype)
        if config.embedding_scale is not None:
            # Rounded as the checkpoints that have it were trained with it.
            x = x * jnp.asarray(config.embedding_scale, dtype)
        if self.project_in is not None:
            x = self.project_in(x)
        if self.positions is not None:
            # Given ones are of documents: no length of a row tells.
            if counted and config.max_position_embeddings < T:
                raise ValueError(
                    f"{T} tokens, but model.max_position_embeddings="
                    f"{config.max_position_embeddings} learned positions"
                )
            at = positions + config.position_offset
            x = x + lookup(self.positions[...], at).astype(dtype)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        # Whatever the padding behind: a mesh may need more of it than one device.
        rows = jnp.arange(B)[:, None] + B * (jnp.arange(T) if order is None else order)[None]
        if dropout_key is not None:
            key = jax.random.key_data(jax.random.fold_in(dropout_key, 0))
            x = dropout(x, key, config.embedding_dropout or 0.0, rows)
        return constrain(x, "batch", "sequence", None), {"positions": positions, "rows": rows}

    def _leave(self, x: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        """What the output embedding reads."""
        if self.norm is not None:
            x = self.norm(x)
        return x if self.project_out is None else self.project_out(x)
