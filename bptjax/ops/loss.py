"""Linear + cross-entropy that never holds a [T, V] array."""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from bptjax.ops.rows import ROWS, WHOLE, each_device


class _Options(NamedTuple):
    ignore: int
    z_loss: float
    softcap: float | None
    chunk: int
    axes: tuple[str, ...]


def linear_cross_entropy(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"] | None = None,
    *,
    ignore: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk: int = 2048,
    axes: tuple[str, ...] = (),
    reduction: Literal["sum", "none"] = "sum",
) -> Float[Array, ""] | Float[Array, "B T"]:
    """Cross-entropy of softmax(hidden · headᵀ) against `labels`, in nats, times `weights`; float32.

    Logits exist for one chunk of tokens. The sum's gradients are computed together with it, in one
    pass over each chunk of logits, the head's accumulated in float32; per-token losses have their
    logits computed again in the backward pass.

    Args:
      head: output embedding, `[V, D]` as Hugging Face stores it, so the input embedding itself
        where they are tied. Multiplied in `hidden`'s dtype; its gradient comes in its own.
      labels: class of each token; where it equals `ignore` the loss and its gradients are 0.
      weights: factor on each token's loss; it gets no gradient.
      z_loss: adds z_loss · lse² a token (PaLM, arXiv 2204.02311, Section 5).
      softcap: logits become softcap · tanh(logits / softcap).
      chunk: tokens, over the whole batch of a device, whose logits exist at once.
      axes: mesh axes over which the rows are cut: each device has its own chunks, and adds the
        gradient that the sum has of the head up by itself.
      reduction: "sum" gives the sum over tokens, "none" each token's.

    The sum is over tokens, not a mean: divide by the count of weighted tokens once, over all
      micro-batches and devices.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk}; a chunk is at least 1 token")
    if weights is None:
        weights = jnp.ones_like(labels, jnp.float32)
    options = _Options(ignore, z_loss, softcap, chunk, axes)
    weights = jax.lax.stop_gradient(weights)
    if reduction == "sum":
        return _sum(options, hidden, head, labels, weights)
    if reduction == "none":
        return _each(options, hidden, head, labels, weights)
    raise ValueError(f"reduction={reduction!r}; there are sum, none")


def _chunks(options: _Options, hidden: Array, labels: Array, weights: Array):
    """`[B, T, ...]` to `[n, B, chunk, ...]`, with ignored tokens past the end."""
    chunk = min(max(1, options.chunk // hidden.shape[0]), hidden.shape[1])

    def cut(x, fill):
        width = [(0, 0), (0, -x.shape[1] % chunk)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, width, constant_values=fill)
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    return cut(hidden, 0.0), cut(labels, options.ignore), cut(weights, 0.0)


def _join(x: Array, T: int) -> Array:
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :T]


def _losses(options: _Options, hidden, head, labels, weights):
    """One chunk: weighted losses `[B, c]`, and what their gradient needs."""
    live = labels != options.ignore
    weights = jnp.where(live, weights.astype(jnp.float32), 0.0)
    # A token of weight 0 must be silent even where its hidden state is not finite.
    hidden = jnp.where(weights[..., None] == 0.0, 0.0, hidden)
    logits = jnp.einsum("btd,vd->btv", hidden, head, preferred_element_type=jnp.float32)
    slope = 1.0
    if options.softcap is not None:
        bent = jnp.tanh(logits / options.softcap)
        logits, slope = options.softcap * bent, 1.0 - bent * bent
    index = jnp.where(live, labels, 0)[..., None]
    lse = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, index, axis=-1)[..., 0]
    losses = weights * (lse - picked + options.z_loss * lse * lse)
    return losses, (hidden, logits, slope, lse, index, weights)


def _gradients(options: _Options, head, saved, scale, frozen=False):
    """One chunk's gradients of Σ scale · losses: hidden's in its dtype, the head's in float32, or,
    where that is `frozen`, None."""
    hidden, logits, slope, lse, index, weights = saved
    factor = (weights * scale)[..., None]
    softmax = jnp.exp(logits - lse[..., None]) * (1.0 + 2.0 * options.z_loss * lse)[..., None]
    chosen = jnp.arange(logits.shape[-1]).reshape(1, 1, -1) == index
    dlogits = ((softmax - chosen) * slope * factor).astype(hidden.dtype)
    dhidden = jnp.einsum("btv,vd->btd", dlogits, head, preferred_element_type=jnp.float32)
    if frozen:
        return dhidden.astype(hidden.dtype), None
    dhead = jnp.einsum("btv,btd->vd", dlogits, hidden, preferred_element_type=jnp.float32)
    return dhidden.astype(hidden.dtype), dhead


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(options, hidden, head, labels, weights):
    return _each(options, hidden, head, labels, weights).sum()


def _sum_forward(options, *operands):
    frozen = not operands[1].perturbed
    hidden, head, labels, weights = (x.value for x in operands)

    def local(hidden, narrow, labels, weights, axes):
        def one(carry, xs):
            total, dhead = carry
            losses, saved = _losses(options, xs[0], narrow, *xs[1:])
            dhidden, d = _gradients(options, narrow, saved, 1.0, frozen)
            return (total + losses.sum(), jax.tree.map(jnp.add, dhead, d)), dhidden

        dhead = None if frozen else jnp.zeros_like(narrow, jnp.float32)
        start = jnp.zeros((), jnp.float32), dhead
        sums, dhidden = jax.lax.scan(one, start, _chunks(options, hidden, labels, weights))
        return jax.lax.psum(sums, axes), _join(dhidden, hidden.shape[1])

    run = each_device(local, options.axes, (ROWS, WHOLE, ROWS, ROWS), (WHOLE, ROWS))
    (total, dhead), dhidden = run(hidden, head.astype(hidden.dtype), labels, weights)
    # The head's stays in float32 until it is scaled: a sum over many tokens overflows float16. The
    # empty array carries its dtype.
    return total, (dhidden, dhead, jnp.zeros((0,), head.dtype))


def _sum_backward(options, saved, dtotal):
    dhidden, dhead, narrow = saved
    scaled = (dtotal * dhidden.astype(jnp.float32)).astype(dhidden.dtype)
    if dhead is not None:
        dhead = (dtotal * dhead).astype(narrow.dtype)
    return scaled, dhead, None, None


_sum.defvjp(_sum_forward, _sum_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _each(options, hidden, head, labels, weights):
    def local(hidden, narrow, labels, weights, axes):
        _, losses = jax.lax.scan(
            lambda _, xs: (None, _losses(options, xs[0], narrow, *xs[1:])[0]),
            None,
            _chunks(options, hidden, labels, weights),
        )
        return _join(losses, hidden.shape[1])

    run = each_device(local, options.axes, (ROWS, WHOLE, ROWS, ROWS), ROWS)
    return run(hidden, head.astype(hidden.dtype), labels, weights)


def _each_forward(options, *operands):
    return _each(options, *operands), operands


def _each_backward(options, operands, dlosses):
    hidden, head, labels, weights = operands
    narrow = head.astype(hidden.dtype)

    def one(dhead, xs):
        (hidden, labels, weights), scale = xs
        _, saved = _losses(options, hidden, narrow, labels, weights)
        dhidden, d = _gradients(options, narrow, saved, scale)
        return dhead + d, dhidden

    chunks = _chunks(options, hidden, labels, weights)
    scales = _chunks(options, dlosses, labels, weights)[0]
    dhead, dhidden = jax.lax.scan(one, jnp.zeros_like(head, jnp.float32), (chunks, scales))
    return _join(dhidden, hidden.shape[1]), dhead.astype(head.dtype), None, None


_each.defvjp(_each_forward, _each_backward)
