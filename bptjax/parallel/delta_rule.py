"""The gated delta rule on a mesh that shards batch, heads and tokens.

A piece of a sequence changes the state S by an affine map, S ← A S + b, and its output is affine in
S too. The rule itself computes both: A is the final state if it starts at the unit matrix and
nothing is written, and b is the final state if it starts at 0. So each device runs its pieces once,
with the columns of the unit matrix next to the columns of the values; then the devices gather the
maps of all pieces, and each applies the maps of the earlier pieces in order. After the start of a
document A is 0.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import Precision
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from bptjax.ops import delta_rule
from bptjax.ops.documents import check_previous
from bptjax.parallel.mesh import sharding
from bptjax.parallel.pieces import Pieces, axis_devices


def gated_delta_rule(
    q: Float[Array, "B T K H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T N W"],
    g: Float[Array, "B T N"],
    beta: Float[Array, "B T N"],
    *,
    segments: Int[Array | np.ndarray, "B T"] | None = None,
    state: Float[Array, "B N H W"] | None = None,
    previous: Int[Array, "B"] | None = None,
    order: Int[np.ndarray, "T"] | None = None,
    scale: float | None = None,
    chunk: int = delta_rule.CHUNK,
    impl: str = "auto",
) -> tuple[Float[Array, "B T N W"], Float[Array, "B N H W"]]:
    """Computes `ops.gated_delta_rule` on the mesh set by `jax.set_mesh`, or directly on one device
    or without a mesh.

    Batch, tokens and value heads that the mesh does not divide, as in decoding, are replicated.
    With sp > 1, a device exchanges `[N, H, H + W]` float32 numbers per piece of a sequence, and
    needs about twice the memory and the products with the state.

    Args:
      order: position of each token in its sequence, if the tokens are permuted.
      segments, state, previous, scale, chunk, impl: as in `ops.gated_delta_rule`.

    Raises:
      NotImplementedError: as in `ops.gated_delta_rule`.
      ValueError: as in `ops.gated_delta_rule`; an order that does not leave each device one or two
        pieces.
    """
    delta_rule.check_delta_rule(q, k, v, g, beta, state)
    check_previous(segments, previous, state)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        carried: dict[str, Any] = dict(segments=segments, state=state, previous=previous)
        carried |= dict(scale=scale, chunk=chunk, impl=impl)
        return delta_rule.gated_delta_rule(q, k, v, g, beta, **carried)
    (B, T, K, _), N = q.shape, v.shape[2]
    tokens = sharding(mesh, ("batch", "sequence", "heads"), (B, T, N)).spec
    states, shards = PartitionSpec(tokens[0], tokens[2]), axis_devices(tokens[1])
    if K % axis_devices(tokens[2]):
        q, k = (jnp.repeat(x, N // K, axis=2) for x in (q, k))
    arrays = dict(q=q, k=k, v=v, g=g, beta=beta)
    specs = dict.fromkeys(arrays, tokens)
    for name, x, spec in (
        ("segments", segments, PartitionSpec(*tokens[:2])),
        ("state", state, states),
        ("previous", previous, PartitionSpec(tokens[0])),
    ):
        if x is not None:
            arrays[name], specs[name] = jnp.asarray(x), spec
    pieces = Pieces.of(order if order is not None else np.arange(T), shards)
    run = delta_rule.gated_delta_rule if pieces.ranks.size == 1 else partial(_run, pieces)
    mapped = jax.shard_map(
        lambda arrays: run(**arrays, scale=scale, chunk=chunk, impl=impl),
        in_specs=(specs,),
        out_specs=(tokens, states),
        check_vma=False,
    )
    return mapped(arrays)


def _run(
    pieces: Pieces,
    q: Float[Array, "B T K H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T N W"],
    g: Float[Array, "B T N"],
    beta: Float[Array, "B T N"],
    *,
    segments: Int[Array, "B T"] | None = None,
    state: Float[Array, "B N H W"] | None = None,
    previous: Int[Array, "B"] | None = None,
    **options,
) -> tuple[Float[Array, "B T N W"], Float[Array, "B N H W"]]:
    """Runs the rule on this device's tokens."""
    (B, _, _, H), (N, W) = q.shape, v.shape[2:]
    if segments is not None:
        segments = pieces.fold(segments)
        first = jnp.zeros(B, segments.dtype) if previous is None else previous
        owners, _ = pieces.owners(segments, first)
        options |= dict(segments=segments, previous=pieces.own(owners))
    if state is None:
        state = jnp.zeros((B, N, H, W))
    columns = ((0, 0),) * 3 + ((0, H),)
    q, k, wide, g, beta = map(pieces.fold, (q, k, jnp.pad(v.astype(jnp.float32), columns), g, beta))
    unit = jnp.broadcast_to(jnp.eye(H, W + H, W), (len(q), N, H, W + H))
    out, maps = delta_rule.gated_delta_rule(q, k, wide, g, beta, state=unit, **options)

    def apply(state, affine):
        change = jnp.matmul(affine[..., W:], state, precision=Precision.HIGHEST)
        return affine[..., :W] + change, state

    end, starts = jax.lax.scan(apply, state.astype(jnp.float32), pieces.gather(maps))
    read = jnp.einsum(
        "btnh,bnhw->btnw",
        out[..., W:],
        pieces.own(starts),
        precision=delta_rule.precision_of(q.dtype),
    )
    return pieces.unfold((out[..., :W] + read).astype(v.dtype)), end
