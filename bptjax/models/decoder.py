"""A causal language model: a transformer that decodes with a cache."""

from dataclasses import replace

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from bptjax.models.cache import Cache
from bptjax.models.execution import Execution
from bptjax.models.stack import run
from bptjax.models.transformer import Transformer
from bptjax.ops.mask import Mask
from bptjax.parallel.cached import cache_positions, cache_slots
from bptjax.parallel.mesh import constrain


class Decoder(Transformer):
    """A causal language model."""

    def decode(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache,
        *,
        length: Int[Array, "B"] | None = None,
        dtype: DTypeLike = jnp.float32,
        execution: Execution = Execution(),  # noqa: B008 (frozen)
    ) -> tuple[Float[Array, "B T E"], Cache]:
        """Computes the hidden states of T tokens that follow the cached ones. Returns the states
        and the extended cache. Tokens before `cache.start` are padding.

        Args:
          length: length of each complete prompt in tokens, for rotary scalings that depend on it,
            when a prompt is read in chunks. Defaults to the last position of these tokens plus one.
        """
        B, T = tokens.shape
        here = cache.length + jnp.arange(T)[None]
        there = jnp.asarray(cache_positions(cache.k.shape[2]))[None]
        start = cache.start[:, None]
        positions = jnp.maximum(here - start, 0)
        x, context = self._embed(tokens, positions, None, dtype)
        if cache.marked is not None:
            slots = cache_slots(here[0], cache.k.shape[2])
            marked = cache.marked.at[:, slots].set(context.marked)
            cache = replace(cache, marked=constrain(marked, None, None))
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
            k_marked=cache.marked,
            embedding_norm=self.layer_embedding_norm,
        )
        assert output.cache is not None
        return self._final(output.x), output.cache
