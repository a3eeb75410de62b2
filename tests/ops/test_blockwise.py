import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiers import fast

from bptjax.ops.blockwise import blockwise
from bptjax.ops.dropout import dropout
from bptjax.ops.norm import rms_norm
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from ops.comparing import TOLERANCE, close, error, normal, quick, temp_bytes

D, F = 8, 24
PARAMS = {"scale": 1 + normal(3, D) / 4, "up": normal(1, D, F) / 4, "down": normal(2, F, D) / 4}


def mlp(p, x):
    """Norm, feed-forward, residual."""
    return x + jax.nn.silu(rms_norm(x, p["scale"]) @ p["up"]) @ p["down"]


def value_and_gradients(apply, params, x, dy):
    y, pull = jax.vjp(apply, params, x)
    return y, *pull(dy)


@pytest.mark.parametrize(
    "T, chunk", fast([(12, 4), (13, 4), (13, 5), (3, 8), (1, 1), (7, 7)], [(13, 5), (3, 8)])
)
def test_equals_plain(T, chunk):
    x, dy = normal(0, 2, T, D), normal(4, 2, T, D)
    plain = quick(functools.partial(value_and_gradients, mlp))(PARAMS, x, dy)
    chunked = functools.partial(blockwise, mlp, chunk=chunk)
    close(quick(functools.partial(value_and_gradients, chunked))(PARAMS, x, dy), plain)


def test_cotangents_of_several_arrays():
    """Some have the shape of a result, in another order or of another dtype, and two are equal."""
    x, y, z = normal(0, 2, 13, D), normal(1, 2, 13, D), normal(2, 2, 13, F)

    def f(p, x):
        x, y, z = x
        return z, x * y, jnp.sin(y).astype(jnp.bfloat16), mlp(p, x + y), z.sum(-1)

    cotangents = jax.tree.map(jnp.cos, f(PARAMS, (x, y, z)))
    plain = quick(functools.partial(value_and_gradients, f))(PARAMS, (x, y, z), cotangents)
    chunked = functools.partial(value_and_gradients, functools.partial(blockwise, f, chunk=4))
    close(quick(chunked)(PARAMS, (x, y, z), cotangents), plain)


@pytest.mark.parametrize("inputs", [1, 2])
def test_the_backward_pass_overwrites_the_cotangent(inputs):
    """Beside the result, the inputs' sum and a float32 copy of one array, there is no array for the
    gradients of equal inputs."""
    x = [normal(i, 1, 4096, D) for i in range(inputs)]

    def step(params, *x):
        f = functools.partial(blockwise, lambda p, x: mlp(p, sum(x)), chunk=64)
        y, pull = jax.vjp(f, params, list(x))
        dparams, dx = pull(jnp.sin(y))
        return dparams, jnp.tanh(sum(dx)).sum()

    assert temp_bytes(step, PARAMS, *x) < (2.5 + inputs) * x[0].nbytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weight_gradients_accumulate_in_float32(dtype):
    """1,024 chunks of one token: sums in the parameters' dtype would be 5 times as far off."""
    T = 1024
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    # Gradients that all point one way lose the most when they are added in few bits.
    x = (1 + normal(0, 1, T, D) / 4).astype(dtype)
    dy = jnp.ones_like(x)
    run = functools.partial(value_and_gradients, functools.partial(blockwise, mlp, chunk=1))
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), (params, x, dy))
    truth = quick(functools.partial(value_and_gradients, mlp))(*wide)[1]
    ours = quick(run)(params, x, dy)[1]

    def naive(total, x):
        one = jax.grad(lambda p: mlp(p, x[None, None]).astype(jnp.float32).sum())(params)
        return jax.tree.map(jnp.add, total, one), None

    narrow, _ = quick(lambda x: jax.lax.scan(naive, jax.tree.map(jnp.zeros_like, params), x))(x[0])
    for name in params:
        assert ours[name].dtype == dtype
        assert error(ours[name], truth[name]) <= TOLERANCE[dtype]
        assert error(ours[name], truth[name]) < 0.2 * error(narrow[name], truth[name]), name


def test_pytrees_with_integers():
    """Integers among the parameters, the inputs and the results; a leaf that is not used."""
    x = {"h": normal(0, 2, 7, D), "token": jnp.arange(14).reshape(2, 7), "idle": normal(1, 2, 7)}
    params = {"w": PARAMS["up"], "shift": jnp.array(3), "idle": jnp.ones(2)}

    def f(p, x):
        odd = (x["token"] + p["shift"]) % 2
        return {"y": jnp.where(odd[..., None] == 1, x["h"] @ p["w"], 0.0), "odd": odd}

    def run(apply, w, h):
        p, z = params | {"w": w}, x | {"h": h}
        y = apply(p, z)
        return jnp.square(y["y"]).sum(), y["odd"]

    def both(apply):
        f = jax.value_and_grad(functools.partial(run, apply), (0, 1), has_aux=True)
        return quick(f)(params["w"], x["h"])

    close(both(functools.partial(blockwise, f, chunk=3)), both(f))
    gradients = jax.grad(
        lambda p, x: blockwise(f, p, x, chunk=3)["y"].sum(), (0, 1), allow_int=True
    )
    whole = quick(gradients)(params, x)
    assert not whole[0]["idle"].any() and not whole[1]["idle"].any()
    assert whole[1]["token"].dtype == jax.dtypes.float0


def test_dropout_inside():
    key, rows = jax.random.key_data(jax.random.key(0)), jnp.arange(26).reshape(2, 13)
    x = normal(0, 2, 13, D)

    def f(p, x):
        w, key = p
        return dropout(x[0] @ w, key, 0.4, x[1])

    def run(apply, w):
        return jnp.square(apply((w, key), (x, rows))).sum()

    plain = quick(jax.value_and_grad(functools.partial(run, f)))(PARAMS["up"])
    chunked = functools.partial(run, functools.partial(blockwise, f, chunk=5))
    close(quick(jax.value_and_grad(chunked))(PARAMS["up"]), plain)


def test_copies_past_the_end_leave_no_trace():
    """The last token stands in for the missing ones; f may be unbounded at 0."""
    x = 1 + jnp.abs(normal(0, 1, 5, 2))
    f = lambda p, x: p / x  # noqa: E731
    gradients = jax.grad(lambda p: blockwise(f, p, x, chunk=4).sum())(jnp.ones((1, 1, 2)))
    assert error(gradients, np.sum(1 / np.asarray(x), (0, 1), keepdims=True)) < TOLERANCE["float32"]


def test_chunk_is_positive():
    with pytest.raises(ValueError, match="chunk=0: must be at least 1 token"):
        blockwise(mlp, PARAMS, normal(0, 1, 2, D), chunk=0)


def test_sharded_parameters():
    """Sequences over four devices, each with a quarter of the parameters: what one device gives."""
    x, dy = normal(0, 8, 13, D), normal(4, 8, 13, D)

    def run(params, x, dy, axes=()):
        f = functools.partial(blockwise, mlp, chunk=5, axes=axes)
        return value_and_gradients(f, params, x, dy)

    wanted = run(PARAMS, x, dy)
    mesh = make_mesh(ParallelConfig(fsdp=4), jax.devices()[:4])
    where = NamedSharding(mesh, PartitionSpec("fsdp"))
    with jax.set_mesh(mesh):
        placed = jax.device_put((PARAMS, x, dy), where)
        close(quick(functools.partial(run, axes=("fsdp",)))(*placed), wanted)
