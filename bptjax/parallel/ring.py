"""Ring attention: keys and values travel around the shards; each shard attends to one block of keys
at a time and merges the results. Liu, Zaharia & Abbeel 2023, arXiv 2310.01889.

A device holds up to two blocks of keys. It passes on blocks that the mask rules out without
computing. In `zigzag` order every device has the same amount of work; otherwise causal attention
would leave half of the devices idle.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from bptjax.ops.attention.contract import (
    QKV,
    AttentionSpec,
    AttentionState,
    Kernel,
    SequenceSplit,
    Shards,
)
from bptjax.ops.mask import KEY_FIELDS, Tiles
from bptjax.ops.softmax import empty_state
from bptjax.parallel.full_tiles import (
    Attend,
    Sums,
    backward_pass,
    forward_pass,
    hides_keys,
    make_schedule,
)


def unsupported(heads: int, shards: int) -> str | None:
    """Returns None: a ring shards any number of heads."""
    return None


def split(heads: int, shards: int) -> SequenceSplit:
    """Returns the split in which all devices divide the tokens."""
    return SequenceSplit(heads=1, tokens=shards)


def zigzag(T: int, shards: int) -> Int[np.ndarray, "{T}"]:
    """Returns the positions in shard order. Shard i of n gets chunks i and 2n - 1 - i of 2n chunks,
    so each shard computes the same number of query-key pairs under a causal mask. T must be a
    multiple of 2 · shards.
    """
    pieces = np.arange(T).reshape(2 * shards, -1)
    pairs = [(i, 2 * shards - 1 - i) for i in range(shards)]
    return pieces[np.asarray(pairs).reshape(-1)].reshape(-1)


def forward(kernel: Kernel, x: QKV, spec: AttentionSpec, shards: Shards) -> AttentionState:
    """Attends from this shard's queries to the keys of all shards."""
    start = Sums(empty_state(x.q), ())
    (out, lse), _ = _traverse(*forward_pass(kernel, x), start, x, spec, shards)
    return AttentionState(out.astype(x.q.dtype), lse)


def backward(
    kernel: Kernel,
    x: QKV,
    state: AttentionState,
    dout: Float[Array, "B T N H"],
    spec: AttentionSpec,
    shards: Shards,
) -> QKV:
    """Returns the gradients of this shard's queries, keys and values. Gradients of keys and values
    travel with them, and return to their shard after a full turn."""
    dq, dk, dv = (jnp.zeros_like(y, jnp.float32) for y in x)
    start = Sums(dq, (dk, dv))
    dq, (dk, dv) = _traverse(*backward_pass(kernel, x, state, dout), start, x, spec, shards)
    return QKV(dq.astype(x.q.dtype), dk.astype(x.k.dtype), dv.astype(x.v.dtype))


def _traverse(
    attend: Attend, queries: Any, sums: Sums, x: QKV, spec: AttentionSpec, shards: Shards
) -> Sums:
    """Passes keys and values once around the ring, together with the keys' sums."""
    schedule = make_schedule(spec, shards.positions, shards.size)
    block = x.k, x.v, {name: getattr(spec.mask, name) for name in KEY_FIELDS}
    for step in range(shards.size):
        # Send the block while computing attention to it.
        following = _pass_on(block, shards) if step + 1 < shards.size else block
        block_spec = replace(spec, mask=replace(spec.mask, **block[2]))

        def masked(sums, k, v, block_spec=block_spec):
            return attend(queries, sums, k, v, block_spec)

        def full_tiles(sums, k, v, step=step):
            assert schedule is not None
            if step == 0:
                return schedule.attend_local(attend, queries, k, v, spec)
            shard, other = shards.index, (shards.index - step) % shards.size
            return schedule.attend_other(attend, queries, sums, k, v, spec, shard, other)

        # Start from zeros, so that this computation does not wait for the sums in transit.
        current = Sums(sums.queries, jax.tree.map(jnp.zeros_like, sums.keys)), *block[:2]
        if schedule is None:
            new = jax.lax.cond(_nonempty(block_spec, x), masked, lambda sums, k, v: sums, *current)
        elif (hides := hides_keys(block_spec)) is None:
            new = full_tiles(*current)
        else:
            new = jax.lax.cond(hides, masked, full_tiles, *current)
        travelling = _pass_on(jax.tree.map(jnp.add, sums.keys, new.keys), shards)
        sums, block = Sums(new.queries, travelling), following
    return sums


def _pass_on(block: Any, shards: Shards) -> Any:
    """Sends a block to the next shard of the ring, and returns the previous shard's block."""
    turns = [list(zip(group, group[1:] + group[:1], strict=True)) for group in shards.groups]
    return jax.lax.ppermute(block, shards.axis, sum(turns, []))


def _nonempty(spec: AttentionSpec, x: QKV) -> Bool[Array, ""]:
    """Returns whether the mask may allow a query of this shard to attend to a key of the block."""
    T, S = x.q.shape[1], x.k.shape[1]
    # A few tiles, because a zigzag block has two ends.
    return jnp.asarray(Tiles(spec.mask, T, S, -(-T // 4), -(-S // 4)).nonempty()[1] > 0)
