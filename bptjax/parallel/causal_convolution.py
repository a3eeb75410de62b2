"""The short causal convolution on a mesh that shards batch, channels and tokens: each piece of a
sequence gets the last tokens before it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from bptjax.ops import causal_convolution as on_one_device
from bptjax.ops.documents import check_previous
from bptjax.parallel.mesh import sharding
from bptjax.parallel.pieces import Pieces, axis_devices


def causal_convolution(
    x: Float[Array, "B T C"],
    kernel: Float[Array, "J C"],
    *,
    silu: bool = True,
    segments: Int[Array | np.ndarray, "B T"] | None = None,
    history: Float[Array, "B J-1 C"] | None = None,
    previous: Int[Array, "B"] | None = None,
    order: Int[np.ndarray, "T"] | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B J-1 C"]]:
    """Computes `ops.causal_convolution` on the mesh set by `jax.set_mesh`, or directly on one
    device or without a mesh. Batch, tokens and channels that the mesh does not divide, as in
    decoding, are replicated.

    Args:
      order: position of each token in its sequence, if the tokens are permuted.
      silu, segments, history, previous: as in `ops.causal_convolution`.

    Raises:
      ValueError: as in `ops.causal_convolution`; an order that does not leave each device one or
        two pieces.
    """
    on_one_device.check_convolution(x, kernel, history)
    check_previous(segments, previous, history)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return on_one_device.causal_convolution(
            x, kernel, silu=silu, segments=segments, history=history, previous=previous
        )
    batch, tokens, channels = sharding(mesh, ("batch", "sequence", "heads"), x.shape).spec
    # float32, so that devices sum its gradient in float32.
    arrays: dict[str, Array] = dict(x=x, kernel=kernel.astype(jnp.float32))
    specs = dict(x=PartitionSpec(batch, tokens, channels), kernel=PartitionSpec(None, channels))
    histories = PartitionSpec(batch, None, channels)
    for name, y, spec in (
        ("segments", segments, PartitionSpec(batch, tokens)),
        ("history", history, histories),
        ("previous", previous, PartitionSpec(batch)),
    ):
        if y is not None:
            arrays[name], specs[name] = jnp.asarray(y), spec
    order = np.arange(x.shape[1]) if order is None else order
    pieces = Pieces.of(order, axis_devices(tokens))
    # A kernel of one token reads no other tokens.
    alone = pieces.ranks.size == 1 or kernel.shape[0] == 1
    run = on_one_device.causal_convolution if alone else partial(_run, pieces)
    mapped = jax.shard_map(
        lambda arrays: run(silu=silu, **arrays),
        in_specs=(specs,),
        out_specs=(specs["x"], histories),
        check_vma=False,
    )
    return mapped(arrays)


def _run(
    pieces: Pieces,
    x: Float[Array, "B T C"],
    kernel: Float[Array, "J C"],
    *,
    silu: bool,
    segments: Int[Array, "B T"] | None = None,
    history: Float[Array, "B J-1 C"] | None = None,
    previous: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B J-1 C"]]:
    """Convolves this device's tokens."""
    (B, T, C), J = x.shape, kernel.shape[0]
    if history is None:
        history = jnp.zeros((B, J - 1, C), x.dtype)
    if segments is None:
        segments, previous = jnp.ones((B, T), jnp.int32), jnp.ones(B, jnp.int32)
    elif previous is None:
        previous = jnp.zeros(B, segments.dtype)
    # Padding may count as the document `previous=0`, whose tokens the histories keep.
    x = jnp.where((segments == 0)[..., None], jnp.zeros((), x.dtype), x)
    x, segments = pieces.fold(x), pieces.fold(segments)
    before, after = pieces.owners(segments, previous)
    # The last tokens of all pieces, in order. A piece may be shorter than the history.
    count = min(J - 1, x.shape[1])
    start = x.shape[1] - count

    def tails(first, x):
        """Concatenates `first` and all pieces' last tokens: `[B, J - 1 + all * count, ...]`."""
        x = jnp.moveaxis(pieces.gather(x[:, start:]), 0, 1)
        return jnp.concatenate([first, x.reshape(B, -1, *x.shape[3:])], 1)

    tokens = tails(history.astype(x.dtype), x)
    owners = tails(jnp.repeat(previous[:, None], J - 1, axis=1), segments)

    def history_of(owner, start):
        """Returns the J - 1 tokens from `start`, without tokens of other documents."""
        own, last = (
            jax.lax.dynamic_slice_in_dim(y, start, J - 1, axis=1) for y in (owners, tokens)
        )
        return jnp.where((own == owner[:, None])[..., None], last, jnp.zeros((), x.dtype))

    starts = count * jnp.arange(len(before) + 1)
    histories = jax.vmap(history_of)(jnp.concatenate([before, after[None]]), starts)
    out, _ = on_one_device.causal_convolution(
        x,
        kernel,
        silu=silu,
        segments=segments,
        history=pieces.own(histories[:-1]),
        previous=pieces.own(before),
    )
    return pieces.unfold(out), histories[-1]
