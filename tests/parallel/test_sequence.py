"""Attention cut over a mesh equals attention on one device."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from ops.comparing import close, normal, quick
from tiers import fast

from bptjax.ops.attention import attention as on_one
from bptjax.ops.attention.contract import AttentionSpec
from bptjax.ops.mask import Mask
from bptjax.parallel.full_tiles import make_schedule
from bptjax.parallel.mesh import ParallelConfig, axis_sizes, make_mesh
from bptjax.parallel.ring import zigzag
from bptjax.parallel.sequence import (
    STRATEGIES,
    attention,
    choose_strategy,
    fold_sequence_shards,
    unfold_sequence_shards,
)

B, T, N, K, H = 2, 48, 8, 2, 8
DOCUMENTS = np.array([[1] * 20 + [2] * 18 + [0] * 10, [1] * 5 + [2] * 30 + [3] * 13], np.int32)
# A prompt with two answers, a document, and padding; a prompt whose answers begin in later shards.
ENDS = np.stack(
    [
        np.repeat([32, 22, 32, 40, 0], [14, 8, 10, 8, 8]),
        np.repeat([48, 41, 48], [36, 5, 7]),
    ]
).astype(np.int32)
DEPTHS = np.stack(
    [
        np.concatenate([np.arange(22), np.arange(14, 24), np.arange(8), np.arange(8)]),
        np.concatenate([np.arange(41), np.arange(36, 43)]),
    ]
).astype(np.int32)
SINKS = np.linspace(-2.0, 3.0, N, dtype=np.float32)
SLOPES = 2.0 ** -np.arange(1, N + 1)
CASES = {
    "everything": dict(
        mask=Mask(causal=True, window=17, segments=DOCUMENTS),
        alibi=SLOPES,
        softcap=3.0,
        dropout=0.2,
        dropout_key=jax.random.key(3),
    ),
    "sinks": dict(mask=Mask(causal=True, segments=DOCUMENTS), sinks=SINKS),
    "tree": dict(mask=Mask(causal=True, window=17, ends=ENDS, depths=DEPTHS), alibi=SLOPES),
    "all keys": dict(mask=Mask(segments=DOCUMENTS)),
    "sparse": dict(
        mask=Mask(
            causal=True,
            window=5,
            global_tokens=np.arange(T) % 11 == 0,
            block_mask=np.tri(6, dtype=bool),
            block_size=8,
        )
    ),
}
MESHES = {
    "sp 4": ParallelConfig(1, 1, 1, 4),
    "sp 3": ParallelConfig(1, 1, 1, 3),
    "sp 6": ParallelConfig(1, 1, 1, 6),
    "sp 8": ParallelConfig(1, 1, 1, 8),
    "dp 2, tp 2, sp 2": ParallelConfig(2, 1, 2, 2),
    "tp 4": ParallelConfig(1, 2, 4, 1),
}


def mesh_of(config):
    return make_mesh(config, jax.devices()[: math.prod(axis_sizes(config).values())])


def operands(heads=N, kv_heads=K):
    shapes = (B, T, heads, H), (B, T, kv_heads, H), (B, T, kv_heads, H), (B, T, heads, H)
    return [normal(i, *shape) for i, shape in enumerate(shapes)]


def results(f, *arrays, **options):
    """(out, dq, dk, dv), and dsinks if there are sinks."""
    options = dict(impl="scan", q_chunk=8, k_chunk=8) | options
    sinks = options.pop("sinks", None)

    def both(q, k, v, dout, sinks):
        out, pull = jax.vjp(lambda *x: f(*x[:3], sinks=x[3], **options), q, k, v, sinks)
        return out, *(x for x in pull(dout) if x is not None)

    return quick(both)(*arrays, sinks)


@functools.cache
def wanted(case):
    return results(on_one, *operands(), **CASES[case])


@pytest.mark.parametrize(
    "mesh, strategy, case",
    fast(
        [
            # Of eight heads on four devices, ulysses_ring is ulysses.
            *(
                ("sp 4", strategy, case)
                for strategy in ("ulysses", "ring", "gather")
                for case in CASES
            ),
            *(("dp 2, tp 2, sp 2", strategy, "everything") for strategy in STRATEGIES),
            ("dp 2, tp 2, sp 2", "ulysses", "sinks"),
            ("dp 2, tp 2, sp 2", "ulysses", "tree"),
            ("sp 8", "ring", "tree"),
            ("sp 3", "ring", "everything"),
            ("tp 4", "auto", "everything"),
        ],
        lambda mesh, strategy, case: (
            mesh == "sp 4" and case == "everything" and strategy in ("ring", "ulysses")
        ),
    ),
)
def test_equals_one_device(mesh, strategy, case):
    with jax.set_mesh(mesh_of(MESHES[mesh])):
        got = results(attention, *operands(), strategy=strategy, **CASES[case])
    close(got, wanted(case), scale=2.0)


def test_heads_that_tp_does_not_divide():
    """Six query heads of three key heads over two devices."""
    arrays = operands(6, 3)
    with jax.set_mesh(mesh_of(ParallelConfig(1, 1, 2, 2))):
        got = results(attention, *arrays)
    close(got, results(on_one, *arrays), scale=2.0)


@pytest.mark.parametrize(
    "sp, heads", fast([(4, (2, 1)), (4, (6, 3)), (6, (2, 2)), (8, (6, 2))], [(4, (6, 3))])
)
def test_heads_exchanged_by_some_devices(sp, heads):
    """In zigzag order of the groups; a window, documents and padding."""
    assert choose_strategy("auto", heads[0], sp)[0] == "ulysses_ring"
    order = zigzag(T, STRATEGIES["ulysses_ring"].split(heads[0], sp).tokens).astype(np.int32)
    arrays = operands(*heads)
    plain = results(on_one, *arrays, mask=Mask(causal=True, window=17, segments=DOCUMENTS))
    mask = Mask(causal=True, window=17, segments=DOCUMENTS[:, order], positions=order)
    with jax.set_mesh(mesh_of(MESHES[f"sp {sp}"])):
        got = results(attention, *(x[:, order] for x in arrays), mask=mask)
    close(got, tuple(x[:, order] for x in plain), scale=2.0)


@pytest.mark.thorough
def test_zigzag_is_an_order_like_any_other():
    order = zigzag(T, 4)
    assert sorted(order) == list(range(T)) and order[:6].tolist() == [*range(6)]
    assert order[6:12].tolist() == [*range(42, 48)]
    arrays = operands()
    mask = Mask(causal=True, segments=DOCUMENTS[:, order], positions=order.astype(np.int32))
    with jax.set_mesh(mesh_of(MESHES["sp 4"])):
        turned = [x[:, order] for x in arrays]
        got = results(attention, *turned, strategy="ring", mask=mask)
    plain = results(on_one, *arrays, mask=Mask(causal=True, segments=DOCUMENTS))
    close(got, tuple(x[:, order] for x in plain), scale=2.0)


FIELDS = {
    "causal": {},
    "one document": dict(segments=np.ones((B, T), np.int32)),
    "documents": dict(segments=DOCUMENTS),
    "trees": dict(ends=ENDS),
}


@pytest.mark.parametrize(
    "strategy, order, name",
    fast(
        [
            ("ring", None, "causal"),
            ("ring", zigzag(T, 4), "one document"),
            ("ring", zigzag(T, 4), "documents"),
            ("ring", zigzag(T, 4), "trees"),
            ("gather", zigzag(T, 4), "causal"),
            ("gather", zigzag(T, 4), "documents"),
            ("gather", zigzag(T, 4), "trees"),
        ],
        lambda strategy, order, name: strategy == "ring" and name == "trees",
    ),
)
def test_full_tiles(strategy, order, name):
    """The schedule of full tiles; documents that end inside a shard; answers that hide each other
    from some shards only."""
    places = np.arange(T) if order is None else order
    placed = {field: jnp.asarray(x[:, places]) for field, x in FIELDS[name].items()}
    mask = Mask(causal=True, positions=places.astype(np.int32), **placed)
    arrays = operands()
    with jax.set_mesh(mesh_of(MESHES["sp 4"])):
        got = results(attention, *(x[:, places] for x in arrays), strategy=strategy, mask=mask)
    plain = results(on_one, *arrays, mask=Mask(causal=True, **FIELDS[name]))
    close(got, tuple(x[:, places] for x in plain), scale=2.0)


@pytest.mark.parametrize("strategy", fast(["ring", "gather"], ["ring"]))
def test_parts_are_not_kept(strategy):
    """Of eight devices each has four times the parts that it has of two, and of as many tokens
    hardly needs more memory, but for the keys that `gather` has whole."""

    def temporary(sp):
        order = zigzag(64 * sp, sp).astype(np.int32)
        mesh, mask = mesh_of(ParallelConfig(1, 1, 1, sp)), Mask(causal=True, positions=order)
        where = NamedSharding(mesh, PartitionSpec(None, "sp"))
        q, k = (
            jax.ShapeDtypeStruct((1, len(order), heads, 16), jnp.float32, sharding=where)
            for heads in (16, 1)
        )
        options = dict(strategy=strategy, mask=mask, impl="scan", q_chunk=16, k_chunk=16)
        with jax.set_mesh(mesh):
            f = jax.jit(lambda q, k, v: attention(q, k, v, **options), out_shardings=where)
            return f.lower(q, k, k).compile().memory_analysis().temp_size_in_bytes

    assert temporary(8) < 1.6 * temporary(2)


def test_full_tile_schedule():
    """In zigzag order each shard attends to the same amount of every other; in other orders there
    is no schedule."""
    spec = AttentionSpec(Mask(causal=True), 1.0)
    order = zigzag(T, 4)
    schedule = make_schedule(spec, (order, order), 4)
    assert schedule is not None and schedule.causal and schedule.pieces == 2
    # Both pieces attend to the first piece of an earlier shard; the second one attends to both
    # pieces of a later shard.
    assert schedule.pairs[1, 0].tolist() == [[0, 0], [1, 0]]
    assert schedule.pairs[1, 2].tolist() == [[1, 0], [1, 1]]
    everything = make_schedule(AttentionSpec(Mask(), 1.0), (np.arange(T), np.arange(T)), 4)
    assert everything is not None and everything.pairs.shape == (4, 4, 1, 2)
    assert make_schedule(spec, (np.arange(T), np.arange(T)), 4) is None
    for change in (
        dict(mask=Mask(causal=True, window=3)),
        dict(mask=Mask(causal=True, global_tokens=np.ones(T, bool))),
        dict(alibi=jnp.ones(N)),
        dict(dropout=0.1),
    ):
        assert make_schedule(replace(spec, **change), (order, order), 4) is None
    assert make_schedule(spec, (order, jnp.asarray(order)), 4) is None
    assert make_schedule(spec, (order[::-1], order[::-1]), 4) is None


def test_each_device_has_rows_of_its_own():
    """And, where tp cuts heads, its own of these."""
    x = normal(0, 4, T, N, 3)
    mesh = mesh_of(ParallelConfig(2, 1, 2, 2))
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec(("dp", "fsdp"), "sp", "tp")))
    with jax.set_mesh(mesh):
        there = jax.jit(fold_sequence_shards)(x)
        back = jax.jit(unfold_sequence_shards)(there)
    assert there.shape == (8, T // 2, N, 3)
    np.testing.assert_array_equal(there[4:8], x[:, T // 2 :])
    np.testing.assert_array_equal(back, x)


def test_choice_and_refusals():
    assert choose_strategy("auto", 8, 4)[0] == "ulysses"
    assert choose_strategy("auto", 6, 4)[0] == "ulysses_ring"
    assert "6 query heads do not divide" in choose_strategy("auto", 6, 4)[1]
    assert choose_strategy("auto", 7, 4)[0] == "ring"
    assert "not ulysses_ring: 7 query heads and sp=4" in choose_strategy("auto", 7, 4)[1]
    splits = [STRATEGIES[name].split(6, 4) for name in ("ulysses_ring", "ring", "gather")]
    assert splits == [(2, 2), (1, 4), (1, 4)]
    assert all(choose_strategy(name, 6, 1)[0] == name for name in STRATEGIES)
    with pytest.raises(NotImplementedError, match="'ulysses': 6 query heads"):
        choose_strategy("ulysses", 6, 4)
    with pytest.raises(ValueError, match="'rings': must be one of auto, ulysses, ulysses_ring"):
        choose_strategy("rings", 6, 4)
    q = normal(0, 1, 10, 4, 8)
    with jax.set_mesh(mesh_of(MESHES["sp 4"])):
        with pytest.raises(ValueError, match="10 query tokens: must be a multiple of 4"):
            attention(q, q, q)
