"""Linear layer and cross-entropy in one function that never holds a [T, V] array."""

import math
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from bptjax.ops.arguments import check_chunk, check_labels, check_softcap
from bptjax.ops.chunks import join_chunks, split_chunks
from bptjax.ops.labels import IGNORED
from bptjax.ops.per_device import REPLICATED, SHARDED, per_device
from bptjax.ops.softmax import logsumexp, soft_cap


class _Head(NamedTuple):
    """Output embedding `[V, D]` and logits' bias `[V]`, or None."""

    matrix: Any
    bias: Any


class _Options(NamedTuple):
    ignore: int
    z_loss: float
    softcap: float | None
    chunk: int
    axes: tuple[str, ...]


def linear_cross_entropy(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    labels: Int[Array | np.ndarray, "B T"],
    weights: Float[Array, "B T"] | None = None,
    *,
    bias: Float[Array, "V"] | None = None,
    ignore: int = IGNORED,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk: int = 2048,
    axes: tuple[str, ...] = (),
    reduction: Literal["sum", "none"] = "sum",
) -> Float[Array, ""] | Float[Array, "B T"]:
    """Cross-entropy of softmax(hidden · headᵀ + bias) against `labels`, in nats, times
    `weights`; float32.

    Logits exist for one chunk of tokens at a time. With reduction="sum", the forward pass also
    computes the gradients, so each chunk's logits are computed once; the gradients of head and bias
    accumulate in float32. With reduction="none", the backward pass recomputes the logits, unless
    the head is frozen.

    Args:
      head: output embedding, `[V, D]` as Hugging Face stores it, so a tied head is the input
        embedding itself. Cast to `hidden`'s dtype for the product; its gradient has its own dtype.
      labels: class of each token; tokens labeled `ignore` have loss and gradients 0. Any other
        label outside [0, V) raises if `labels` is a NumPy array, and gives a loss of NaN if it is a
        JAX array, whose values are not known at trace time.
      weights: factor on each token's loss; has no gradient.
      bias: added to the logits in float32, before the soft cap.
      z_loss: adds z_loss · lse² per token (PaLM, arXiv 2204.02311, Section 5); not negative.
      softcap: logits become softcap · tanh(logits / softcap).
      chunk: tokens per device whose logits exist at once, counted over the device's batch.
      axes: mesh axes that shard the batch dimension: each device loops over its own chunks, and
        sums the gradients of head and bias over its own sequences.
      reduction: "sum" returns the sum over tokens, "none" the loss of each token.

    Raises:
      ValueError: mismatched shapes, or an empty array; labels that are not integers; a chunk below
        1, a soft cap that is not positive, a negative z_loss; an unknown reduction.

    The result is a sum over tokens, not a mean: divide it once, by the number of weighted tokens of
    all micro-batches and devices.
    """
    options = dict(ignore=ignore, z_loss=z_loss, softcap=softcap, chunk=chunk, axes=axes)
    operands = _checked(hidden, head, labels, weights, bias=bias, **options)
    if reduction == "sum":
        return _sum(*operands)[0]
    if reduction == "none":
        return _each(*operands)[0]
    raise ValueError(f"reduction={reduction!r}: must be sum or none")


def cross_entropy_and_z_loss(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    labels: Int[Array | np.ndarray, "B T"],
    weights: Float[Array, "B T"] | None = None,
    **options: Any,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the sum of `linear_cross_entropy`, and the part of the sum that `z_loss` adds,
    without a gradient. Takes the same arguments except `reduction`.
    """
    total, z = _sum(*_checked(hidden, head, labels, weights, **options))
    return total, jax.lax.stop_gradient(z)


def _checked(
    hidden: Array,
    head: Array,
    labels: Array | np.ndarray,
    weights: Array | None,
    *,
    bias: Array | None = None,
    ignore: int = IGNORED,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk: int = 2048,
    axes: tuple[str, ...] = (),
) -> tuple[_Options, Array, _Head, Array, Array]:
    """Checks the arguments of `linear_cross_entropy` and fills in the weights."""
    check_chunk(chunk=chunk)
    check_softcap(softcap)
    if not 0.0 <= z_loss < math.inf:
        raise ValueError(f"z_loss={z_loss}: must be finite and not negative; 0 turns it off")
    if hidden.ndim != 3 or 0 in hidden.shape:
        raise ValueError(f"hidden: must be [batch, tokens, features], not {hidden.shape}")
    if head.ndim != 2 or head.shape[1:] != hidden.shape[2:]:
        raise ValueError(f"head: must be [classes, {hidden.shape[2]}], not {head.shape}")
    if bias is not None and bias.shape != head.shape[:1]:
        raise ValueError(f"bias: must be [{head.shape[0]}], one per class, not {bias.shape}")
    for name, x in ("labels", labels), ("weights", weights):
        if x is not None and x.shape != hidden.shape[:2]:
            raise ValueError(f"{name}: must be {hidden.shape[:2]}, one per token, not {x.shape}")
    check_labels(labels, head.shape[0], ignore)
    labels = jnp.asarray(labels)
    weights = jnp.ones_like(labels, jnp.float32) if weights is None else weights
    options = _Options(ignore, z_loss, softcap, chunk, axes)
    return options, hidden, _Head(head, bias), labels, jax.lax.stop_gradient(weights)


def _cast(head: _Head, dtype: Any) -> _Head:
    """Casts the matrix to the dtype of the product."""
    return head._replace(matrix=head.matrix.astype(dtype))


def _chunks(options: _Options, hidden: Array, labels: Array, weights: Array):
    """Splits the tokens into chunks; padding gets the label `ignore`."""
    chunk = max(1, options.chunk // hidden.shape[0])
    operands = (hidden, 0.0), (labels, options.ignore), (weights, 0.0)
    return tuple(split_chunks(x, chunk, constant_values=fill) for x, fill in operands)


def _losses(options: _Options, hidden, head, labels, weights):
    """Returns a chunk's weighted losses `[B, c]`, their z-loss part, and residuals."""
    weights = jnp.where(labels == options.ignore, 0.0, weights.astype(jnp.float32))
    # Tokens of weight 0 must not count even if their hidden states are not finite.
    hidden = jnp.where(weights[..., None] == 0.0, 0.0, hidden)
    logits = jnp.einsum("btd,vd->btv", hidden, head.matrix, preferred_element_type=jnp.float32)
    if head.bias is not None:
        logits += head.bias.astype(jnp.float32)[None, None]
    logits, derivative = soft_cap(logits, options.softcap)
    # take_along_axis gives NaN past the last class, but counts from the end below 0.
    index = jnp.where(labels < 0, logits.shape[-1], labels)
    index = jnp.where(weights == 0.0, 0, index)[..., None]
    lse = logsumexp(logits)
    picked = jnp.take_along_axis(logits, index, axis=-1)[..., 0]
    z = options.z_loss * lse * lse
    return (
        weights * (lse - picked + z),
        weights * z,
        (hidden, logits, derivative, lse, index, weights),
    )


def _gradients(options: _Options, head, residuals, scale, frozen=False):
    """Returns one chunk's gradients of Σ scale · losses: for `hidden` in its dtype, for the head in
    float32, without the matrix if it is frozen."""
    hidden, logits, derivative, lse, index, weights = residuals
    factor = (weights * scale)[..., None]
    softmax = jnp.exp(logits - lse[..., None]) * (1.0 + 2.0 * options.z_loss * lse)[..., None]
    chosen = jnp.arange(logits.shape[-1]).reshape(1, 1, -1) == index
    chosen = chosen.astype(jnp.float32)
    dlogits = (softmax - chosen) * derivative * factor
    dbias = None if head.bias is None else dlogits.sum((0, 1))
    dlogits = dlogits.astype(hidden.dtype)
    dhidden = jnp.einsum("btv,vd->btd", dlogits, head.matrix, preferred_element_type=jnp.float32)
    if frozen:
        return dhidden.astype(hidden.dtype), _Head(None, dbias)
    dmatrix = jnp.einsum("btv,btd->vd", dlogits, hidden, preferred_element_type=jnp.float32)
    return dhidden.astype(hidden.dtype), _Head(dmatrix, dbias)


def _zeros(head: _Head, frozen: bool = False) -> _Head:
    head = head._replace(matrix=None) if frozen else head
    return jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), head)


def _values(operands: Any) -> Any:
    """Returns the arrays of a forward pass with symbolic zeros."""
    return jax.tree.map(lambda x: x.value, operands, is_leaf=lambda x: hasattr(x, "perturbed"))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(options, hidden, head, labels, weights):
    losses, z = _each(options, hidden, head, labels, weights)
    return losses.sum(), z.sum()


def _sum_forward(options, *operands):
    frozen = not operands[1].matrix.perturbed
    hidden, head, labels, weights = _values(operands)

    def local(hidden, head, labels, weights, axes):
        def add(sums, chunk):
            losses, z, residuals = _losses(options, chunk[0], head, *chunk[1:])
            dhidden, d = _gradients(options, head, residuals, 1.0, frozen)
            return jax.tree.map(jnp.add, sums, (losses.sum(), z.sum(), d)), dhidden

        start = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32), _zeros(head, frozen)
        sums, dhidden = jax.lax.scan(add, start, _chunks(options, hidden, labels, weights))
        return jax.lax.psum(sums, axes), join_chunks(dhidden, hidden.shape[1])

    inputs = SHARDED, REPLICATED, SHARDED, SHARDED
    run = per_device(local, options.axes, inputs, (REPLICATED, SHARDED))
    (total, z, dhead), dhidden = run(hidden, _cast(head, hidden.dtype), labels, weights)
    if not frozen and head.matrix.dtype != jnp.float16:
        # Without the barrier, XLA would cast the sums where the gradient is read, and hold them in
        # float32 until then. float16 stays float32: its sums overflow before they are scaled.
        dmatrix = jax.lax.optimization_barrier(dhead.matrix.astype(head.matrix.dtype))
        dhead = dhead._replace(matrix=dmatrix)
    # Empty arrays carry the head's dtypes.
    like = jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), head)
    return (total, z), (dhidden, dhead, like)


def _sum_backward(options, residuals, cotangents):
    (dhidden, dhead, like), (dtotal, _) = residuals, cotangents

    def scaled(x, like):
        return None if x is None else (dtotal * x.astype(jnp.float32)).astype(like.dtype)

    return scaled(dhidden, dhidden), _Head(*map(scaled, dhead, like)), None, None


_sum.defvjp(_sum_forward, _sum_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _each(options, hidden, head, labels, weights):
    def local(hidden, head, labels, weights, axes):
        def chunk_losses(_, chunk):
            return None, _losses(options, chunk[0], head, *chunk[1:])[:2]

        _, (losses, z) = jax.lax.scan(chunk_losses, None, _chunks(options, hidden, labels, weights))
        return join_chunks(losses, hidden.shape[1]), join_chunks(z, hidden.shape[1])

    inputs = SHARDED, REPLICATED, SHARDED, SHARDED
    run = per_device(local, options.axes, inputs, (SHARDED, SHARDED))
    return run(hidden, _cast(head, hidden.dtype), labels, weights)


def _each_forward(options, *operands):
    frozen = not any(x.perturbed for x in operands[1] if x is not None)
    operands = _values(operands)
    if not frozen:
        return _each(options, *operands), (operands, None)
    hidden, head, labels, weights = operands

    def local(hidden, head, labels, weights, axes):
        def chunk_losses(_, chunk):
            losses, z, residuals = _losses(options, chunk[0], head, *chunk[1:])
            return None, (losses, z, _gradients(options, head, residuals, 1.0, True)[0])

        _, each = jax.lax.scan(chunk_losses, None, _chunks(options, hidden, labels, weights))
        return tuple(join_chunks(x, hidden.shape[1]) for x in each)

    inputs = SHARDED, REPLICATED, SHARDED, SHARDED
    run = per_device(local, options.axes, inputs, (SHARDED, SHARDED, SHARDED))
    losses, z, dhidden = run(hidden, _cast(head, hidden.dtype), labels, weights)
    return (losses, z), (None, dhidden)


def _each_backward(options, residuals, cotangents):
    (operands, dhidden), (dlosses, _) = residuals, cotangents
    if operands is None:
        scaled = dhidden.astype(jnp.float32) * dlosses[..., None]
        return scaled.astype(dhidden.dtype), _Head(None, None), None, None
    hidden, head, labels, weights = operands

    def local(hidden, head, labels, weights, dlosses, axes):
        def add(dhead, chunk):
            (hidden, labels, weights), scale = chunk
            *_, residuals = _losses(options, hidden, head, labels, weights)
            dhidden, d = _gradients(options, head, residuals, scale)
            return jax.tree.map(jnp.add, dhead, d), dhidden

        chunks = _chunks(options, hidden, labels, weights)
        scales = _chunks(options, dlosses, labels, weights)[0]
        dhead, dhidden = jax.lax.scan(add, _zeros(head), (chunks, scales))
        return join_chunks(dhidden, hidden.shape[1]), jax.lax.psum(dhead, axes)

    inputs = SHARDED, REPLICATED, SHARDED, SHARDED, SHARDED
    run = per_device(local, options.axes, inputs, (SHARDED, REPLICATED))
    dhidden, dhead = run(hidden, _cast(head, hidden.dtype), labels, weights, dlosses)
    dhead = jax.tree.map(lambda x, like: x.astype(like.dtype), dhead, head)
    return dhidden, dhead, None, None


_each.defvjp(_each_forward, _each_backward, symbolic_zeros=True)
