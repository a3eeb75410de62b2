"""The gated delta rule and its convolution over a mesh equal those on one device."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from ops.comparing import close, normal, quick
from tiers import fast

from bptjax.ops.causal_convolution import causal_convolution as convolution_on_one
from bptjax.ops.delta_rule import gated_delta_rule as rule_on_one
from bptjax.ops.norm import l2_norm
from bptjax.parallel.causal_convolution import causal_convolution
from bptjax.parallel.delta_rule import gated_delta_rule
from bptjax.parallel.mesh import ParallelConfig, axis_sizes, make_mesh
from bptjax.parallel.pieces import Pieces
from bptjax.parallel.ring import zigzag

B, T, K, N, H, W, C = 2, 48, 2, 4, 8, 6, 12
# Documents that span several devices, end inside and at the ends of pieces, and of one token.
SEGMENTS = np.array(
    [[1] * 20 + [2] + [3] * 17 + [0] * 10, [4] * 6 + [5] * 27 + [0] * 2 + [6] * 13], np.int32
)
PREVIOUS = jnp.array([1, 3], jnp.int32)
MESHES = {
    "sp 8": ParallelConfig(1, 1, 1, 8),
    "sp 3": ParallelConfig(1, 1, 1, 3),
    "dp 2, tp 2, sp 2": ParallelConfig(2, 1, 2, 2),
    "fsdp 2, tp 4": ParallelConfig(1, 2, 4, 1),
}
# Groups of devices of a ring, whose order is zigzag.
CASES = [
    ("sp 8", None),
    ("sp 8", 8),
    ("sp 8", 2),
    ("sp 3", 3),
    ("dp 2, tp 2, sp 2", 2),
    ("fsdp 2, tp 4", None),
]


def mesh_of(config):
    return make_mesh(config, jax.devices()[: math.prod(axis_sizes(config).values())])


def rule():
    """Arguments, and the cotangents of the results."""
    shapes = (B, T, K, H), (B, T, K, H), (B, T, N, W), (B, T, N), (B, T, N), (B, N, H, W)
    q, k, v, g, beta, state = (normal(i, *shape) for i, shape in enumerate(shapes))
    g, beta = -jnp.exp(g - 2.0), jax.nn.sigmoid(beta)
    x = dict(q=l2_norm(q), k=l2_norm(k), v=v, g=g, beta=beta, state=state)
    return x, (normal(6, *shapes[2]), normal(7, *shapes[5]))


def convolution():
    shapes = dict(x=(B, T, C), kernel=(4, C), history=(B, 3, C))
    x = {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    return x, (normal(3, B, T, C), normal(4, B, 3, C))


def results(f, x, cotangents, order=None, **options):
    """Results and gradients, of tokens in this order, put back in their own."""
    given = np.arange(T) if order is None else order
    of_tokens = {name for name, y in x.items() if y.shape[:2] == (B, T)}
    x = {name: y[:, given] if name in of_tokens else y for name, y in x.items()}
    if options.get("segments") is not None:
        options["segments"] = options["segments"][:, given]

    def both(x, dout, dend):
        results, pull = jax.vjp(lambda x: f(**x, **options), x)
        return results, pull((dout, dend))[0]

    (out, end), gradients = quick(both)(x, cotangents[0][:, given], cotangents[1])
    back = np.argsort(given)
    gradients = {n: y[:, back] if n in of_tokens else y for n, y in gradients.items()}
    return (out[:, back], end), gradients


OPTIONS = dict(segments=SEGMENTS, previous=PREVIOUS)


@pytest.fixture(scope="module")
def wanted():
    return {
        f: results(one, *make(), **OPTIONS)
        for f, one, make in (
            (gated_delta_rule, rule_on_one, rule),
            (causal_convolution, convolution_on_one, convolution),
        )
    }


@pytest.mark.parametrize("mesh, ring", fast(CASES, [("sp 8", 2)]))
@pytest.mark.parametrize("f, make", [(gated_delta_rule, rule), (causal_convolution, convolution)])
def test_equals_one_device(f, make, mesh, ring, wanted):
    order = None if ring is None else zigzag(T, ring)
    with jax.set_mesh(mesh_of(MESHES[mesh])):
        got = results(partial(f, order=order), *make(), order=order, **OPTIONS)
    close(got, wanted[f], scale=2.0)


@pytest.mark.thorough
def test_one_document():
    """Without segments; the state and the history are handed on all the way."""
    order = zigzag(T, 2)
    for f, one, make in (
        (gated_delta_rule, rule_on_one, rule),
        (causal_convolution, convolution_on_one, convolution),
    ):
        x, cotangents = make()
        with jax.set_mesh(mesh_of(ParallelConfig(1, 1, 1, 2))):
            got = results(partial(f, order=order), x, cotangents, order=order)
        close(got, results(one, x, cotangents), scale=2.0)


def test_pieces_shorter_than_the_history():
    x, (dout, dend) = convolution()
    x, options = x | dict(x=x["x"][:, :8]), dict(OPTIONS, segments=SEGMENTS[:, 14:22])
    with jax.set_mesh(mesh_of(MESHES["sp 8"])):
        got = jax.jit(partial(causal_convolution, **options))(**x)
    close(got, convolution_on_one(**x, **options))


def test_a_convolution_of_one_token_has_no_history():
    x, (dout, dend) = convolution()
    x, cotangents = (
        x | dict(kernel=x["kernel"][:1], history=x["history"][:, :0]),
        (dout, dend[:, :0]),
    )
    with jax.set_mesh(mesh_of(MESHES["sp 3"])):
        got = results(causal_convolution, x, cotangents, **OPTIONS)
    close(got, results(convolution_on_one, x, cotangents, **OPTIONS))


def test_padding_leaves_no_history():
    """In a prompt that starts later, before which there is no document."""
    x, cotangents = convolution()
    options = dict(segments=np.zeros_like(SEGMENTS), previous=jnp.zeros(B, jnp.int32))
    with jax.set_mesh(mesh_of(MESHES["sp 3"])):
        got = results(causal_convolution, x, cotangents, **options)
    assert not np.any(got[0][1]) and not np.any(got[1]["x"])
    close(got, results(convolution_on_one, x, cotangents, **options))


def test_other_documents_do_not_move_a_bit():
    """Documents 2 and 3 over the devices that document 1 ends on."""
    x, (dout, dend) = rule()
    inside = jnp.asarray(SEGMENTS == 1)
    moved = x | {
        name: jnp.where(inside.reshape(B, T, *(1,) * (x[name].ndim - 2)), -y[:, ::-1], y)
        for name, y in x.items()
        if name in "qkv"
    }
    order = zigzag(T, 3)
    f = partial(gated_delta_rule, order=order)
    with jax.set_mesh(mesh_of(MESHES["sp 3"])):
        (out, end), gradients = results(f, x, (dout, dend), order=order, **OPTIONS)
        (out2, end2), gradients2 = results(f, moved, (dout, dend), order=order, **OPTIONS)
    rest = np.asarray(~inside)
    assert not np.array_equal(out[~rest], out2[~rest])
    np.testing.assert_array_equal(end, end2)
    for a, b in [(out, out2), *((gradients[n], gradients2[n]) for n in gradients if n != "state")]:
        np.testing.assert_array_equal(np.asarray(a)[rest], np.asarray(b)[rest])


def test_states_alone_travel():
    """Devices gather the map of each piece, and a segment; no array of tokens."""
    x, _ = rule()
    f = partial(gated_delta_rule, order=zigzag(T, 8), segments=SEGMENTS, previous=PREVIOUS)
    where = NamedSharding(mesh_of(MESHES["sp 8"]), PartitionSpec(None, "sp"))
    shapes = {n: jax.ShapeDtypeStruct(y.shape, y.dtype) for n, y in x.items() if n != "state"}
    shapes |= {n: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where) for n, s in shapes.items()}
    shapes |= dict(state=x["state"])
    with jax.set_mesh(where.mesh):
        gradients = jax.grad(lambda x: f(**x)[0].sum())
        text = quick(gradients, out_shardings=dict.fromkeys(shapes, where) | dict(state=None))
        text = text.lower(shapes).compile().as_text()
    kinds = "all-gather|all-to-all|reduce-scatter|collective-permute"
    found = re.findall(rf"= \w+\[([\d,]*)\]\S* (?:{kinds})\(", text)
    assert {*found} == {f"8,2,{B}", f"8,2,{B},{N},{H},{H + W}", f"1,2,{B},{N},{H},{H + W}"}


def test_pieces():
    assert Pieces.of(np.arange(12), 3).ranks.tolist() == [[0], [1], [2]]
    assert Pieces.of(zigzag(12, 3), 3).ranks.tolist() == [[0, 5], [1, 4], [2, 3]]
    # Three devices share each shard of a ring; the second of them has the ends of two pieces.
    ranks = Pieces.of(zigzag(12, 2), 6).ranks.tolist()
    assert ranks == [[0, 1], [2, 9], [10, 11], [3, 4], [5, 6], [7, 8]]
    for order, shards in ((np.arange(12)[::-1], 3), (zigzag(12, 2), 1)):
        with pytest.raises(ValueError, match="order: must put one or two runs"):
            Pieces.of(order, shards)


def test_sizes_that_the_mesh_does_not_divide():
    """A token of a decoding step, and three value heads."""
    x, options = rule()[0], dict(OPTIONS, segments=SEGMENTS[:, 20:21])
    x = {n: y if n == "state" else y[:, :1] for n, y in x.items()}
    x |= {n: x[n][:, :, :3] for n in ("v", "g", "beta")} | {n: x[n][:, :, :1] for n in "qk"}
    x |= dict(state=x["state"][:, :3])
    with jax.set_mesh(mesh_of(MESHES["dp 2, tp 2, sp 2"])):
        got = quick(partial(gated_delta_rule, **options))(**x)
    close(got, rule_on_one(**x, **options))
