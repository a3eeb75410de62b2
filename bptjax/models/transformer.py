"""Base class of decoders and encoders: layers between an input and an output embedding."""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from bptjax.models.config import ModelConfig
from bptjax.models.execution import Execution
from bptjax.models.feed_forward import Auxiliary
from bptjax.models.layers import TokenContext
from bptjax.models.linear import Linear, new_param
from bptjax.models.norm import Norm
from bptjax.models.stack import new_layers, run
from bptjax.ops.dropout import dropout
from bptjax.ops.mask import Mask
from bptjax.ops.softmax import soft_cap
from bptjax.parallel.mesh import constrain, lookup
from bptjax.parallel.sequence import sequence_shards

# Token ids, images, or images cut into patches.
Tokens = (
    Int[Array | np.ndarray, "B T"]
    | Float[Array | np.ndarray, "B C height width"]
    | Float[Array | np.ndarray, "B T P"]
)


class LayerInputs(NamedTuple):
    """Inputs of the layers.

    Attributes:
      x: the residual stream, padded to a multiple of the number of shards of a sequence.
      length: number of tokens without this padding.
    """

    x: Float[Array, "B T D"]
    context: TokenContext
    mask: Mask
    length: int


class Transformer(nnx.Module):
    """Input embedding, layers, final norm and output embedding. Calls are pure, so `jax.jit`,
    `grad` and `scan` take the module itself. The parameters of the layers are stacked on axis 0.

    Args:
      key: for new parameters; under `jax.eval_shape` none are computed.
      dtype: dtype of the parameters.

    Attributes:
      AFTER_LAYERS: names of the parts that `begin` does not read.
    """

    AFTER_LAYERS: ClassVar[tuple[str, ...]] = ("norm", "project_out", "head", "head_bias")

    def __init__(self, config: ModelConfig, key: Array, dtype: DTypeLike = jnp.float32):
        keys, std = jax.random.split(key, 6), config.init_std
        D, E, learned = config.hidden_size, config.E, config.position_embedding == "learned"
        images = config.encoder.image_size is not None

        def project(key, inputs, outputs):
            if D == E:
                return None
            axes = ("embed", None) if inputs == D else (None, "embed")
            return Linear(key, (inputs,), (outputs,), axes, std=std, bias=False, dtype=dtype)

        def table(key, entries, width, axis):
            return new_param(key, (entries, width), (axis, "embed"), std, dtype)

        self.config = config
        self.embedding = None if images else table(keys[0], config.V, E, "vocab")
        self.project_in = project(keys[4], E, D)
        entries = config.encoder.patches + 1 if images else config.max_position_embeddings or 0
        entries += config.position_offset
        self.positions = table(keys[1], entries, D, None) if learned else None
        self.embedding_norm = Norm(config, dtype) if config.norms.embedding else None
        self.layers = new_layers(config, keys[2], dtype)
        own = config.layer_embedding.size
        self.layer_embedding_norm = Norm(config, dtype, own, None) if own else None
        self.norm = Norm(config, dtype) if config.norms.final else None
        self.project_out = project(keys[5], D, E)
        self.head = None if config.tied_head else table(keys[3], config.V, E, "vocab")
        bias = config.head_bias
        self.head_bias = nnx.Param(jnp.zeros(config.V, dtype), axes=("vocab",)) if bias else None

    @property
    def head_matrix(self) -> Float[Array, "V E"]:
        """The output embedding, which may be tied to the input embedding."""
        matrix = self.embedding if self.head is None else self.head
        if matrix is None:
            raise ValueError("the model has no output embedding")
        return matrix[...]

    @property
    def logits_bias(self) -> Float[Array, "V"] | None:
        """The bias of the logits; None without one."""
        return None if self.head_bias is None else self.head_bias[...]

    def pool(
        self, hidden: Float[Array, "B T E"], segments: Int[Array | np.ndarray, "B T"] | None
    ) -> Float[Array, "B T E"]:
        """Returns vectors for the head, which reads each document's first vector, or all."""
        return hidden

    def for_head(self, hidden: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Scales vectors for the head: their products with `head_matrix`, plus `logits_bias`, are
        the logits before a soft cap."""
        scale = self.config.logits_scale
        return hidden if scale == 1 else (scale * hidden.astype(jnp.float32)).astype(hidden.dtype)

    def logits(self, hidden: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        """Computes float32 logits. For few tokens: training uses `linear_cross_entropy`."""
        return self.product(self.for_head(hidden))

    def product(self, vectors: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        """Computes float32 logits from the results of `for_head`."""
        logits = jnp.einsum(
            "btd,vd->btv",
            vectors,
            self.head_matrix.astype(vectors.dtype),
            preferred_element_type=jnp.float32,
        )
        if (bias := self.logits_bias) is not None:
            logits += bias.astype(jnp.float32)[None, None]
        return soft_cap(logits, self.config.logits_softcap)[0]

    def __call__(
        self,
        tokens: Tokens,
        *,
        positions: Int[Array | np.ndarray, "B T"] | None = None,
        segments: Int[Array | np.ndarray, "B T"] | None = None,
        ends: Int[Array | np.ndarray, "B T"] | None = None,
        order: Int[np.ndarray, "T"] | None = None,
        token_types: Int[Array | np.ndarray, "B T"] | None = None,
        dropout_key: Array | None = None,
        dtype: DTypeLike = jnp.float32,
        execution: Execution = Execution(),  # noqa: B008 (frozen)
        sequence_strategy: str = "auto",
    ) -> tuple[Float[Array, "B tokens E"], Auxiliary]:
        """Computes the hidden states after the final norm, in `dtype`, and sums for the auxiliary
        loss; see `FeedForward`.

        Args:
          tokens: token ids; or images, whose tokens are the first token and then the patches, from
            left to right and top to bottom; or these tokens as returned by `cut_patches`, with any
            values for the first token, which is the one at position 0.
          positions: position of each token in its document, for rotary and learned embeddings. If
            left out, 0..T-1.
          segments: document numbers, 0 for padding. If left out, a sequence is one document.
          ends: for documents that are trees, with `segments`: see `Mask.ends`. Counts tokens of the
            sequence; `positions` then are depths.
          order: position of each token in its sequence, if the tokens are permuted.
          token_types: type of each token, in a model with token types; 0 if left out.
          dropout_key: None for no dropout.
          dtype: dtype of the computation. Parameters are cast on use.
          execution: kernels, chunks and remat.
          sequence_strategy: how attention communicates along the mesh axis sp; see STRATEGIES.

        Raises:
          ValueError: more tokens than learned positions, and no `positions`; `ends` without
            `positions` or `segments`.
          NotImplementedError: `ends`, and a layer that reads no trees.
        """
        inputs = self.begin(
            tokens,
            positions=positions,
            segments=segments,
            ends=ends,
            order=order,
            token_types=token_types,
            dropout_key=dropout_key,
            dtype=dtype,
        )
        output = run(
            self.layers,
            self.config,
            inputs.x,
            inputs.context,
            mask=inputs.mask,
            embedding_norm=self.layer_embedding_norm,
            dropout_key=dropout_key,
            execution=execution,
            sequence_strategy=sequence_strategy,
        )
        return self.end(output.x, inputs.length), output.aux

    def begin(
        self,
        tokens: Tokens,
        *,
        positions: Int[Array | np.ndarray, "B T"] | None = None,
        segments: Int[Array | np.ndarray, "B T"] | None = None,
        ends: Int[Array | np.ndarray, "B T"] | None = None,
        order: Int[np.ndarray, "T"] | None = None,
        token_types: Int[Array | np.ndarray, "B T"] | None = None,
        dropout_key: Array | None = None,
        dtype: DTypeLike = jnp.float32,
    ) -> "LayerInputs":
        """Computes the inputs of the layers from the arguments of a call."""
        if ends is not None and (positions is None or segments is None):
            raise ValueError("ends: requires positions, the depths of the tokens, and segments")
        if positions is not None and segments is not None:
            # Positions of padding may lie beyond the learned ones.
            positions = jnp.where(segments == 0, 0, positions)
        x, context = self._embed(tokens, positions, dropout_key, dtype, order, token_types)
        if ends is not None:
            context = context._replace(ends=jnp.asarray(ends))
        return self._padded(x, context, segments, order)

    def end(self, x: Float[Array, "B T D"], length: int) -> Float[Array, "B length E"]:
        """Computes the hidden states of the first `length` tokens, given the residual stream after
        the last layer."""
        return self._final(x[:, :length])

    def hidden_states(
        self,
        tokens: Tokens,
        *,
        execution: Execution = Execution(),  # noqa: B008 (frozen)
    ) -> list[Float[Array, "B tokens _"]]:
        """Computes the embeddings, the residual stream after each layer, and the hidden states
        after the final norm, in float32."""
        x, context = self._embed(tokens, None, None, jnp.float32)
        inputs = self._padded(x, context, None, None)
        output = run(
            self.layers,
            self.config,
            inputs.x,
            inputs.context,
            mask=inputs.mask,
            embedding_norm=self.layer_embedding_norm,
            execution=execution,
            hidden_states=True,
        )
        assert output.states is not None
        states = [state[:, : x.shape[1]] for state in output.states]
        return [x, *states, self._final(states[-1])]

    def _padded(
        self,
        x: Float[Array, "B T D"],
        context: TokenContext,
        segments: Int[Array | np.ndarray, "B T"] | None,
        order: Int[np.ndarray, "T"] | None,
    ) -> "LayerInputs":
        """Pads the inputs of the layers to a multiple of the number of shards of a sequence, and
        adds the mask."""
        length = x.shape[1]
        if short := -x.shape[1] % sequence_shards():
            shape = x.shape[:2]
            segments = jnp.ones(shape, jnp.int32) if segments is None else jnp.asarray(segments)
            x = jnp.pad(x, ((0, 0), (0, short), (0, 0)))
            context, segments = jax.tree.map(
                lambda y: jnp.pad(y, ((0, 0), (0, short))), (context, segments)
            )
        if segments is not None:
            context = context._replace(padding=segments == 0)
        mask = Mask(causal=self.config.causal, segments=segments, positions=order)
        return LayerInputs(constrain(x, "batch", "sequence", None), context, mask, length)

    def _look_up(
        self,
        tokens: Array | np.ndarray,
        dtype: DTypeLike,
        positions: Int[Array | np.ndarray, "_ T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Returns the embedding of each token. `positions` default to 0..T-1."""
        assert self.embedding is not None
        x = lookup(self.embedding[...], jnp.asarray(tokens), "vocab").astype(dtype)
        if self.config.embedding_scale is not None:
            # Checkpoints were trained with the scale rounded to the compute dtype.
            x = x * jnp.asarray(self.config.embedding_scale, dtype)
        return x if self.project_in is None else self.project_in(x)

    @jax.named_scope("embedding")
    def _embed(
        self,
        tokens: Array | np.ndarray,
        positions: Int[Array | np.ndarray, "B T"] | None,
        dropout_key: Array | None,
        dtype: DTypeLike,
        order: Int[np.ndarray, "T"] | None = None,
        token_types: Int[Array | np.ndarray, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], TokenContext]:
        counted, config = positions is None, self.config
        ordered = positions if order is None or not counted else order[None]
        x = self._look_up(tokens, dtype, ordered)
        B, T, _ = x.shape
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(T) if order is None else order, (B, T))
        positions = jnp.asarray(positions)
        if self.positions is not None:
            # Caller-supplied positions restart per document, so T says nothing about the largest
            # position.
            learned = self.positions.shape[0] - config.position_offset
            if counted and learned < T:
                raise ValueError(
                    f"{T} tokens: must be at most model.max_position_embeddings={learned}, the "
                    "number of learned positions"
                )
            at = positions + config.position_offset
            x = x + lookup(self.positions[...], at).astype(dtype)
        x = self._add_types(x, token_types)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        # Ids do not depend on T, because a mesh may need more padding than one device.
        ids = jnp.arange(B)[:, None] + B * (jnp.arange(T) if order is None else order)[None]
        if dropout_key is not None:
            key = jax.random.key_data(jax.random.fold_in(dropout_key, 0))
            x = dropout(x, key, config.embedding_dropout or 0.0, ids)
        marked = None if config.pattern is None else config.pattern.marked(tokens)
        own = jnp.asarray(tokens) if config.layer_embedding.size else None
        context = TokenContext(positions, ids, marked=marked, tokens=own)
        return constrain(x, "batch", "sequence", None), context

    def _add_types(
        self, x: Float[Array, "B T D"], token_types: Int[Array | np.ndarray, "B T"] | None
    ) -> Float[Array, "B T D"]:
        """Adds the embeddings of the token types."""
        if token_types is not None:
            raise ValueError("token_types: must be left out; the model has no types of tokens")
        return x

    def _final(self, x: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        """Applies the final norm and the projection to the width of the embedding."""
        if self.norm is not None:
            x = self.norm(x)
        return x if self.project_out is None else self.project_out(x)
