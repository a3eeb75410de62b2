"""Attention to a cache of keys and values, on one device or on a mesh.

The mesh axis tp shards the heads of the cache, and sp its tokens: token p is in slot p // sp of
shard p % sp. So every window of tokens has equally many keys on each shard, and a new token is
written by one device. Each device attends from all queries to its own keys, and the states are
merged over sp.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from bptjax.ops.arguments import check_sinks
from bptjax.ops.attention import add_sinks, make_spec
from bptjax.ops.attention.contract import QKV, AttentionSpec, AttentionState
from bptjax.ops.mask import KEY_FIELDS
from bptjax.ops.softmax import empty_state, merge_states
from bptjax.ops.target import platform
from bptjax.parallel.mesh import num_shards, sharding
from bptjax.parallel.sequence import (
    HEADS,
    SEQUENCE_AXIS,
    AutoKernel,
    own_key_heads,
    sequence_shards,
)
from bptjax.parallel.ulysses import TOKEN_FIELDS

# Logical axes of a cache.
AXES = None, "batch", "sequence", "kv_heads", None
# Key blocks that a kernel gets at a time on a CPU, where copying a layer's complete cache takes
# longer than attention to its filled slots. On a GPU, a kernel gets all blocks: a loop would launch
# many kernels per token.
BLOCKS_AT_A_TIME = 4
# With up to FEW_QUERIES queries, a GPU kernel has too few programs to read a long cache fast, and
# gets PARTS parts of the cache at once, as if they were sequences. Dao et al. 2023, "Flash-Decoding
# for long-context inference".
FEW_QUERIES, PARTS = 16, 64


def cache_size(tokens: int, block: int = 1) -> int:
    """Returns the slots of a cache for `tokens` tokens, a multiple of sp and of `block`."""
    parts = PARTS if platform() == "gpu" and block == 1 else 1
    unit = sequence_shards() * block * parts
    return -(-tokens // unit) * unit


def cache_positions(size: int) -> Int[np.ndarray, "{size}"]:
    """Returns the position of the token in each slot of a cache, shard by shard."""
    return np.arange(size, dtype=np.int32).reshape(-1, sequence_shards()).T.reshape(-1)


def cache_slots(positions: Int[Array, "T"], size: int) -> Int[Array, "T"]:
    """Returns the cache slots of the tokens at these positions; see `cache_positions`."""
    shards = sequence_shards()
    return positions % shards * (size // shards) + positions // shards


def append(
    past: tuple[Array, Array], new: tuple[Array, Array], index: Int[Array, ""], held: Int[Array, ""]
) -> tuple[Array, Array]:
    """Writes keys and values `[B, T, K, H]` after the `held` tokens in the cache of layer `index`.
    Returns the caches `[L, B, S, K, H]` of all layers, which are updated in place."""
    shards = sequence_shards()
    zero = jnp.zeros_like(held)

    def write(old, new, index, held):
        new = new[None].astype(old.dtype)
        return jax.lax.dynamic_update_slice(old, new, (index, zero, held, zero, zero))

    def write_own(old, new, index, held):
        """Writes the new tokens whose slots are on this device. All devices write equally many
        slots; slots of other tokens keep their values."""
        T, size = new.shape[1], old.shape[2]
        count = min((T + shards - 2) // shards + 1, size)
        first = jnp.minimum(held // shards, size - count)
        token = (first + jnp.arange(count)) * shards + jax.lax.axis_index(SEQUENCE_AXIS) - held
        at = index, zero, first, zero, zero
        current = jax.lax.dynamic_slice(old, at, (1, old.shape[1], count, *old.shape[3:]))
        own = jnp.take(new, jnp.clip(token, 0, T - 1), axis=1)[None].astype(old.dtype)
        inside = ((token >= 0) & (token < T))[None, None, :, None, None]
        return jax.lax.dynamic_update_slice(old, jnp.where(inside, own, current), at)

    if shards > 1:
        mesh = jax.sharding.get_abstract_mesh()
        of_cache = sharding(mesh, AXES, past[0].shape).spec
        of_new, scalar = PartitionSpec(of_cache[1], None, of_cache[3]), PartitionSpec()
        write = jax.shard_map(
            write_own,
            in_specs=(of_cache, of_new, scalar, scalar),
            out_specs=of_cache,
            check_vma=False,
        )
    k, v = (write(old, x, index, held) for old, x in zip(past, new, strict=True))
    return k, v


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "L B S K H"],
    v: Float[Array, "L B S K H"],
    *,
    index: Int[Array, ""],
    held: Int[Array, ""],
    impl: str = "auto",
    sinks: Float[Array | np.ndarray, "N"] | None = None,
    **options: Any,
) -> Float[Array, "B T N H"]:
    """Computes `ops.attention` to the cache of layer `index`, on the mesh set by `jax.set_mesh`.
    Has no gradient.

    Args:
      held: tokens in the cache before the first query.
      impl, sinks, options: as in `ops.attention`; the mask has segments, and positions in the cache
        unless it has blocks. `auto` chooses for the arrays of one device.

    Raises:
      NotImplementedError, ValueError: as in `ops.attention`; the mesh does not divide the heads.
    """
    spec = make_spec(QKV(q, k[0].astype(q.dtype), v[0].astype(q.dtype)), **options)
    check_sinks(sinks, q.shape[2])
    with jax.named_scope("attention_kernel"):
        state = _attend(AutoKernel(impl), q, k, v, index, held, spec)
        if sinks is not None:
            state = add_sinks(q, state, jnp.asarray(sinks, jnp.float32))
    return state.out.astype(q.dtype)


def _attend(
    kernel: AutoKernel, q: Array, k: Array, v: Array, index: Array, held: Array, spec: AttentionSpec
) -> AttentionState:
    """Attends from the queries to the keys of all devices."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return _attend_locally(kernel, q, k, v, index, held, spec, 1)
    tp, shards = num_shards(mesh, "heads"), sequence_shards()
    N, K = q.shape[2], k.shape[3]
    if N % tp:
        raise ValueError(f"{N} query heads: must be a multiple of {tp} devices")
    of_cache = sharding(mesh, AXES, k.shape).spec
    queries: Any = PartitionSpec(of_cache[1], None, HEADS)
    arrays, specs = {}, {}
    for name in TOKEN_FIELDS:
        x = getattr(spec.mask, name)
        if x is not None:
            batch = [of_cache[1] if x.shape[0] > 1 else None] if x.ndim > 1 else []
            arrays[name] = jnp.asarray(x)
            specs[name] = PartitionSpec(*batch, of_cache[2] if name in KEY_FIELDS else None)

    def local(q, k, v, index, held, arrays, alibi):
        own = replace(spec, mask=replace(spec.mask, **arrays), alibi=alibi)
        heads = own_key_heads(N, K, tp) if K % tp else None
        state = _attend_locally(kernel, q, k, v, index, held, own, shards, heads)
        return _merge_shards(state) if shards > 1 else state

    scalar = PartitionSpec()
    mapped = jax.shard_map(
        local,
        in_specs=(queries, of_cache, of_cache, scalar, scalar, specs, PartitionSpec(HEADS)),
        out_specs=AttentionState(queries, queries),
        check_vma=False,
    )
    return mapped(q, k, v, index, held, arrays, spec.alibi)


def _attend_locally(
    kernel: AutoKernel,
    q: Array,
    k: Array,
    v: Array,
    index: Array,
    held: Array,
    spec: AttentionSpec,
    shards: int,
    heads: Array | None = None,
) -> AttentionState:
    """Attends from the queries to this device's filled slots, a few key blocks at a time.

    Args:
      heads: key heads to read; None for all.
    """
    size, T, mask = k.shape[2], q.shape[1], spec.mask
    if platform() == "gpu" and T <= FEW_QUERIES and spec.landmark_block is None:
        return _attend_in_parts(kernel, q, k, v, index, spec, heads)
    chunk = size if platform() == "gpu" else min(BLOCKS_AT_A_TIME * spec.k_chunk, size)

    def attend(i):
        start = jnp.minimum(i * chunk, size - chunk)

        def read(cache):
            zero = jnp.zeros_like(start)
            at, shape = (index, zero, start, zero, zero), (1, cache.shape[1], chunk)
            x = jax.lax.dynamic_slice(cache, at, (*shape, *cache.shape[3:]))[0].astype(q.dtype)
            return x if heads is None else jnp.take(x, heads, axis=2)

        fields: dict[str, Any] = {
            name: jax.lax.dynamic_slice_in_dim(jnp.asarray(field), start, chunk, axis=-1)
            for name in KEY_FIELDS
            if (field := getattr(mask, name)) is not None
        }
        # The last chunk may overlap the one before it.
        overlap = start + jnp.arange(chunk) < i * chunk
        fields["k_segments"] = jnp.where(overlap[None], 0, fields["k_segments"])
        chunk_spec = replace(spec, mask=replace(mask, **fields))
        return kernel.forward(QKV(q, read(k), read(v)), chunk_spec)

    def visit(i, state):
        return merge_states(state, attend(i))

    if chunk == size:
        return attend(jnp.zeros_like(held))

    first = jnp.zeros_like(held)
    if mask.window is not None and mask.global_tokens is None and mask.causal:
        first = jnp.maximum(held - mask.window + 2 - shards, 0) // shards // chunk
    end = -(-(held + T) // shards)
    return jax.lax.fori_loop(first, -(-end // chunk), visit, empty_state(q))


def _attend_in_parts(
    kernel: AutoKernel,
    q: Array,
    k: Array,
    v: Array,
    index: Array,
    spec: AttentionSpec,
    heads: Array | None,
) -> AttentionState:
    """Attends from a few queries to parts of this device's slots at once, and merges the states."""
    B, size = q.shape[0], k.shape[2]
    parts = math.gcd(size, PARTS)

    def read(cache):
        x = jax.lax.dynamic_index_in_dim(cache, index, keepdims=False).astype(q.dtype)
        x = x if heads is None else jnp.take(x, heads, axis=2)
        return x.reshape(B * parts, size // parts, *x.shape[2:])

    fields: dict[str, Any] = {}
    for name in TOKEN_FIELDS:
        if (field := getattr(spec.mask, name)) is not None:
            rows = jnp.broadcast_to(jnp.asarray(field), (B, field.shape[-1]))
            of_keys = name in KEY_FIELDS
            fields[name] = rows.reshape(B * parts, -1) if of_keys else jnp.repeat(rows, parts, 0)
    part_spec = replace(spec, mask=replace(spec.mask, **fields))
    queries = jnp.repeat(q, parts, 0)
    if heads is None and k.dtype == q.dtype:
        # Kernels that can read the cache of all layers need no copy of this layer's.
        k, v = (y.reshape(-1, size // parts, *y.shape[3:]) for y in (k, v))
        state = kernel.forward_from(QKV(queries, k, v), part_spec, index * (B * parts))
    else:
        state = kernel.forward(QKV(queries, read(k), read(v)), part_spec)
    out, lse = (y.reshape(B, parts, *y.shape[1:]) for y in state)
    merged = _merge(
        AttentionState(out, lse),
        lambda y: y.max(1, keepdims=True),
        lambda y: y.sum(1, keepdims=True),
    )
    return AttentionState(*(y[:, 0] for y in merged))


def _merge_shards(state: AttentionState) -> AttentionState:
    """Merges the states over all shards of the keys."""
    return _merge(
        state,
        lambda y: jax.lax.pmax(y, SEQUENCE_AXIS),
        lambda y: jax.lax.psum(y, SEQUENCE_AXIS),
    )


def _merge(
    state: AttentionState, greatest: Callable[[Array], Array], total: Callable[[Array], Array]
) -> AttentionState:
    """Merges states of disjoint sets of keys, which `greatest` and `total` reduce over; see
    `merge_states`."""
    largest = greatest(state.lse)
    shift = jnp.where(largest == -jnp.inf, 0.0, largest)
    weight = jnp.exp(state.lse - shift)
    weights = total(weight)
    out = total(weight[..., None] * state.out.astype(jnp.float32))
    out /= jnp.where(weights == 0.0, 1.0, weights)[..., None]
    return AttentionState(out, shift + jnp.log(weights))
