"""An encoder of text or images: embedding, layers, heads."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from bptjax.models.config import Execution
from bptjax.models.encoder_config import EncoderConfig
from bptjax.models.feed_forward import ACTIVATIONS
from bptjax.models.layers import Norm, TokenContext
from bptjax.models.linear import Linear, new_param
from bptjax.models.stack import new_layers, run
from bptjax.ops.dropout import dropout
from bptjax.ops.mask import Mask
from bptjax.parallel.mesh import constrain, lookup
from bptjax.parallel.sequence import sequence_shards


class MaskedHead(nnx.Module):
    """A linear layer, activation and norm before the product with the input embedding."""

    def __init__(self, config: EncoderConfig, key: Array, dtype: DTypeLike):
        D = (config.hidden_size,)
        self.activation = config.activation
        self.linear = Linear(
            key, D, D, ("embed", None), std=config.init_std, bias=True, dtype=dtype
        )
        self.norm = Norm(config, dtype)
        self.bias = nnx.Param(jnp.zeros(config.V, dtype), axes=("vocab",))

    def __call__(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.norm(ACTIVATIONS[self.activation](self.linear(hidden)))


class Encoder(nnx.Module):
    """An encoder. Calls are pure. The parameters of the layers are stacked on axis 0.

    Args:
      key: for new parameters; `jax.eval_shape` makes none.
      dtype: dtype of the parameters.
    """

    def __init__(self, config: EncoderConfig, key: Array, dtype: DTypeLike = jnp.float32):
        D, std = config.hidden_size, config.init_std
        keys = jax.random.split(key, 9)
        images = config.image_size is not None

        def table(key, entries, axis=None):
            return new_param(key, (entries, D), (axis, "embed"), std, dtype)

        def linear(key, inputs, outputs):
            axes = (None, "embed") if outputs == D else ("embed", None)
            return Linear(key, (inputs,), (outputs,), axes, std=std, bias=True, dtype=dtype)

        h, w = config.patch_size or (0, 0)
        self.config = config
        self.embedding = None if images else table(keys[0], config.V, "vocab")
        self.patches = linear(keys[1], config.channels * h * w, D) if images else None
        self.first = table(keys[2], 1) if images else None
        entries = config.patches + 1 if images else config.max_position_embeddings
        self.positions = table(keys[3], entries)
        self.types = table(keys[4], config.token_types) if config.token_types else None
        self.embedding_norm = Norm(config, dtype) if config.embedding_norm else None
        self.layers = new_layers(config, keys[5], dtype)
        self.norm = Norm(config, dtype) if config.final_norm else None
        self.pooler = linear(keys[6], D, config.pooler) if config.pooler else None
        self.masked = MaskedHead(config, keys[7], dtype) if config.masked_head else None
        self.classes = linear(keys[8], D, config.classes) if config.classes else None

    def __call__(
        self,
        inputs: Int[Array, "B T"] | Float[Array, "B C height width"],
        *,
        token_types: Int[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        dropout_key: Array | None = None,
        dtype: DTypeLike = jnp.float32,
        execution: Execution = Execution(),  # noqa: B008 (frozen)
    ) -> Float[Array, "B tokens D"]:
        """Computes the hidden states after the final norm, in `dtype`: of the tokens, or of the
        first token and the patches of the image, from left to right and top to bottom.

        Args:
          token_types: 0 if left out.
          segments: document numbers, 0 for padding. If left out, a sequence is one document.
        """
        x, T, context, mask = self._embed(inputs, token_types, segments, dropout_key, dtype)
        output = run(
            self.layers,
            self.config,
            x,
            context,
            mask=mask,
            dropout_key=dropout_key,
            execution=execution,
        )
        x = output.x[:, :T]
        return x if self.norm is None else self.norm(x)

    def hidden_states(
        self,
        inputs: Int[Array, "B T"] | Float[Array, "B C height width"],
        *,
        execution: Execution = Execution(),  # noqa: B008 (frozen)
    ) -> list[Float[Array, "B tokens D"]]:
        """Computes the embeddings, the residual stream after each layer, and the hidden states
        after the final norm, in float32."""
        x, T, context, mask = self._embed(inputs, None, None, None, jnp.float32)
        output = run(
            self.layers,
            self.config,
            x,
            context,
            mask=mask,
            execution=execution,
            hidden_states=True,
        )
        assert output.states is not None
        last = output.x if self.norm is None else self.norm(output.x)
        return [x[:, :T] for x in (x, *output.states, last)]

    def pooled(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B P"]:
        """Computes one vector a sequence.

        Raises:
          ValueError: the model has no pooler.
        """
        if self.pooler is None:
            raise ValueError("model.pooler=0: must be set for a pooled output")
        return ACTIVATIONS[self.config.pooler_activation](self.pooler(hidden[:, 0]))

    def logits(self, hidden: Float[Array, "B T D"]) -> Array:
        """Computes float32 logits: `[B, T, V]` of a masked-language head, `[B, classes]` of a
        classifier.

        Raises:
          ValueError: the model has no head.
        """
        if self.classes is not None:
            return self.classes(hidden[:, 0]).astype(jnp.float32)
        if self.masked is None or self.embedding is None:
            raise ValueError("model.masked_head, model.classes: one must be set for logits")
        hidden, bias = self.masked(hidden), self.masked.bias[...].astype(jnp.float32)
        table = self.embedding[...].astype(hidden.dtype)
        logits = jnp.einsum("btd,vd->btv", hidden, table, preferred_element_type=jnp.float32)
        return logits + bias[None, None]

    @jax.named_scope("embedding")
    def _embed(
        self,
        inputs: Array,
        token_types: Int[Array, "B T"] | None,
        segments: Int[Array, "B T"] | None,
        dropout_key: Array | None,
        dtype: DTypeLike,
    ) -> tuple[Float[Array, "B padded D"], int, TokenContext, Mask]:
        """Returns the embedded tokens, padded to a multiple of the shards of a sequence, their
        number without the padding, their context, and the mask."""
        config = self.config
        if self.embedding is not None:
            x = lookup(self.embedding[...], inputs, "vocab").astype(dtype)
        else:
            assert self.patches is not None and self.first is not None
            x = self.patches(_patches(inputs.astype(dtype), config))
            first = jnp.broadcast_to(self.first[...].astype(dtype), (x.shape[0], 1, x.shape[2]))
            x = jnp.concatenate([first, x], 1)
        B, T, _ = x.shape
        if T > self.positions.shape[0]:
            raise ValueError(
                f"{T} tokens: must be at most {self.positions.shape[0]}, the number of learned "
                "positions"
            )
        x = x + self.positions[...][None, :T].astype(dtype)
        if self.types is not None:
            types = jnp.zeros((B, T), jnp.int32) if token_types is None else token_types
            x = x + lookup(self.types[...], types).astype(dtype)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        ids = jnp.arange(B * T).reshape(B, T)
        if dropout_key is not None:
            key = jax.random.key_data(jax.random.fold_in(dropout_key, 0))
            x = dropout(x, key, config.embedding_dropout or 0.0, ids)
        positions = jnp.broadcast_to(jnp.arange(T), (B, T))
        if short := -T % sequence_shards():
            segments = jnp.ones((B, T), jnp.int32) if segments is None else segments
            x = jnp.pad(x, ((0, 0), (0, short), (0, 0)))
            positions, ids, segments = (
                jnp.pad(y, ((0, 0), (0, short))) for y in (positions, ids, segments)
            )
        x = constrain(x, "batch", "sequence", None)
        return x, T, TokenContext(positions, ids), Mask(segments=segments)


def _patches(images: Float[Array, "B C height width"], config: EncoderConfig) -> Array:
    """Cuts images into n patches, from left to right and top to bottom: `[B, n, C · h · w]`."""
    (height, width), (h, w) = config.image_size or (0, 0), config.patch_size or (1, 1)
    B, C = images.shape[:2]
    if images.shape[1:] != (config.channels, height, width):
        raise ValueError(
            f"images: must be [batch, {config.channels}, {height}, {width}], not {images.shape}"
        )
    cut = images.reshape(B, C, height // h, h, width // w, w)
    return cut.transpose(0, 2, 4, 1, 3, 5).reshape(B, -1, C * h * w)
