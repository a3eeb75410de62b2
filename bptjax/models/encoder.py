"""An encoder of text or images: a transformer with bidirectional attention, and its heads."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from bptjax.models.config import ModelConfig
from bptjax.models.feed_forward import activate
from bptjax.models.linear import Linear, new_param, spread
from bptjax.models.norm import Norm
from bptjax.models.transformer import Transformer
from bptjax.ops.patches import cut_patches
from bptjax.ops.position import document_means
from bptjax.parallel.mesh import lookup


class MaskedHead(nnx.Module):
    """A linear layer, activation and norm before the product with the output embedding."""

    def __init__(self, config: ModelConfig, key: Array, dtype: DTypeLike):
        D, std, bias = (config.hidden_size,), config.init_std, config.encoder.masked_head_bias
        self.activation = config.activation
        self.linear = Linear(key, D, D, ("embed", None), std=std, bias=bias, dtype=dtype)
        self.norm = Norm(config, dtype)

    def __call__(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.norm(activate(self.activation, self.linear(hidden)))


class Encoder(Transformer):
    """An encoder, with the heads that its config names."""

    AFTER_LAYERS = (*Transformer.AFTER_LAYERS, "pooler", "masked", "classes")

    def __init__(self, config: ModelConfig, key: Array, dtype: DTypeLike = jnp.float32):
        super().__init__(config, key, dtype)
        D, std, own = config.hidden_size, config.init_std, config.encoder
        keys = jax.random.split(jax.random.fold_in(key, 0), 6)

        def table(key, entries):
            return new_param(key, (entries, D), (None, "embed"), std, dtype)

        def linear(key, inputs, outputs):
            axes = (None, "embed") if outputs == D else ("embed", None)
            return Linear(key, (inputs,), (outputs,), axes, std=std, bias=True, dtype=dtype)

        h, w = own.patch_size or (0, 0)
        self.patches = linear(keys[0], own.channels * h * w, D) if own.image_size else None
        self.first = table(keys[1], 1) if own.image_size else None
        self.types = table(keys[2], own.token_types) if own.token_types else None
        self.pooler = linear(keys[3], D, own.pooler) if own.pooler else None
        self.masked = MaskedHead(config, keys[4], dtype) if own.masked_head else None
        self.classes = linear(keys[5], own.pooler or D, own.classes) if own.classes else None
        if self.classes is not None:
            # muon leaves output embeddings to AdamW.
            self.classes.kernel.set_metadata(matrix=None)

    @property
    def head_matrix(self) -> Float[Array, "V E"]:
        return super().head_matrix if self.classes is None else self.classes.kernel[...].T

    @property
    def logits_bias(self) -> Float[Array, "V"] | None:
        if self.classes is None or self.classes.bias is None:
            return super().logits_bias
        return self.classes.bias[...]

    def pool(
        self, hidden: Float[Array, "B T D"], segments: Int[Array | np.ndarray, "B T"] | None
    ) -> Float[Array, "B T D"]:
        if self.config.encoder.class_pooling == "first":
            return hidden
        return document_means(hidden, segments)

    def for_head(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T P"]:
        if self.masked is not None:
            hidden = self.masked(hidden)
        elif self.pooler is not None:
            hidden = activate(self.config.encoder.pooler_activation, self.pooler(hidden))
        return super().for_head(hidden)

    def pooled(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B P"]:
        """Computes one vector per sequence.

        Raises:
          ValueError: the model has no pooler.
        """
        if self.pooler is None:
            raise ValueError("model.encoder.pooler=0: must be set for a pooled output")
        return self.for_head(hidden[:, :1])[:, 0]

    def logits(
        self,
        hidden: Float[Array, "B T D"],
        segments: Int[Array | np.ndarray, "B T"] | None = None,
    ) -> Array:
        """Computes float32 logits: `[B, T, V]` with a masked-language head, `[B, classes]` with a
        classifier.

        Args:
          segments: document numbers, if there is padding; a classifier that pools by mean reads the
            first document.

        Raises:
          ValueError: the model has no head.
        """
        if self.classes is not None:
            return super().logits(self.pool(hidden, segments)[:, :1])[:, 0]
        if self.masked is None:
            raise ValueError("model.encoder: masked_head or classes must be set for logits")
        return super().logits(hidden)

    def _look_up(
        self,
        tokens: Array | np.ndarray,
        dtype: DTypeLike,
        positions: Int[Array | np.ndarray, "_ T"] | None = None,
    ) -> Float[Array, "B T D"]:
        if self.patches is None or self.first is None:
            return super()._look_up(tokens, dtype, positions)
        x = jnp.asarray(tokens, dtype)
        if x.ndim == 4:
            _check_size(x, self.config)
            patches = cut_patches(x, self.config.encoder.patch_size or (1, 1))
            x = jnp.pad(patches, ((0, 0), (1, 0), (0, 0)))
        if positions is None:
            positions = jnp.arange(x.shape[1])[None]
        x = self.patches(x)
        first = spread(self.first[...], x.shape, x.dtype)
        return jnp.where(jnp.asarray(positions)[..., None] == 0, first, x)

    def _add_types(
        self, x: Float[Array, "B T D"], token_types: Int[Array | np.ndarray, "B T"] | None
    ) -> Float[Array, "B T D"]:
        if self.types is None:
            return super()._add_types(x, token_types)
        if token_types is None:
            return x + spread(self.types[0], x.shape, x.dtype)
        return x + lookup(self.types[...], jnp.asarray(token_types)).astype(x.dtype)


def _check_size(images: Float[Array, "B C height width"], config: ModelConfig) -> None:
    shape = config.encoder.channels, *(config.encoder.image_size or ())
    if images.shape[1:] != shape:
        raise ValueError(
            f"images: must be [batch, {', '.join(map(str, shape))}], not {images.shape}"
        )
