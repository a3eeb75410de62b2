import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiers import fast

from bptjax.ops.loss import cross_entropy_and_z_loss, linear_cross_entropy
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from ops.comparing import TOLERANCE, close, error, normal, quick

B, T, D, V = 2, 13, 8, 19
HIDDEN, HEAD = normal(0, B, T, D), normal(1, V, D) / 2
LABELS = jnp.asarray(np.random.default_rng(2).integers(0, V, (B, T)))
SOME = jnp.where(jnp.arange(B * T).reshape(B, T) % 3 == 0, -100, LABELS)
WEIGHTS = jnp.abs(normal(3, B, T)).at[:, 4].set(0.0)
BIAS = 2 * normal(6, V)
CASES = {
    "plain": {},
    "ignored": dict(labels=SOME),
    "ignore 0": dict(labels=jnp.where(SOME == -100, 0, SOME), ignore=0),
    "weights": dict(weights=WEIGHTS),
    "integer weights": dict(weights=(WEIGHTS > 0.5).astype(jnp.float32)),
    "z-loss": dict(z_loss=1e-1),
    "soft cap": dict(softcap=1.5),
    "bias": dict(bias=BIAS),
    "everything": dict(labels=SOME, weights=WEIGHTS, bias=BIAS, z_loss=1e-2, softcap=2.0),
    "all ignored": dict(labels=jnp.full((B, T), -100)),
}


def plain(hidden, head, labels, weights=None, *, bias=None, ignore=-100, z_loss=0.0, softcap=None):
    """Each token's loss, from all logits at once, in float32."""
    logits = hidden.astype(jnp.float32) @ head.astype(jnp.float32).T
    logits += 0.0 if bias is None else bias.reshape(1, 1, -1)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, jnp.where(labels == ignore, 0, labels)
    )
    losses += z_loss * jax.nn.logsumexp(logits, -1) ** 2
    return jnp.where(labels == ignore, 0.0, losses * (1.0 if weights is None else weights))


def run(f, upstream, hidden, head):
    """(losses, dhidden, dhead), with a cotangent that is not 1."""
    losses, pull = jax.vjp(f, hidden, head)
    return losses, *pull(upstream)


UPSTREAM = {"sum": jnp.float32(0.3), "none": normal(4, B, T)}
GRID = [
    (name, reduction, dtype)
    for name, reduction, dtype in itertools.product(CASES, UPSTREAM, TOLERANCE)
    if dtype == "float32" or name in ("plain", "everything")
]


@functools.cache
def oracle(name, reduction):
    def f(*operands):
        losses = plain(*operands, **dict(labels=LABELS) | CASES[name])
        return losses.sum() if reduction == "sum" else losses

    return quick(functools.partial(run, f))(UPSTREAM[reduction], HIDDEN, HEAD)


@pytest.mark.parametrize(
    "name, reduction, dtype",
    fast(
        GRID,
        lambda name, reduction, dtype: (
            name == "everything" or (reduction, dtype) == ("none", "float32")
        ),
    ),
)
def test_equals_plain(name, reduction, dtype):
    def ours(*operands):
        options = dict(labels=LABELS, reduction=reduction, chunk=10) | CASES[name]
        return linear_cross_entropy(*operands, **options)

    operands = HIDDEN.astype(dtype), HEAD.astype(dtype)
    results = quick(functools.partial(run, ours))(UPSTREAM[reduction], *operands)
    expected = oracle(name, reduction)
    assert [x.dtype for x in results] == ["float32", dtype, dtype]
    for what, a, b in zip(("losses", "dhidden", "dhead"), results, expected, strict=True):
        assert error(a, b) <= TOLERANCE[dtype], what
        if name == "all ignored":
            assert not a.any(), what


@pytest.mark.parametrize("chunk", fast([1, 7, 26, 1000], [7]))
def test_any_chunk(chunk):
    for reduction, upstream in UPSTREAM.items():
        f = functools.partial(
            linear_cross_entropy, chunk=chunk, reduction=reduction, **CASES["everything"]
        )
        f = functools.partial(run, lambda hidden, head, f=f: f(hidden, head))
        close(quick(f)(upstream, HIDDEN, HEAD), oracle("everything", reduction))


def test_tied_head():
    """The embedding that looks tokens up and predicts them gets both gradients."""
    tokens = jnp.roll(LABELS, 1, axis=1)

    def whole(loss, table):
        return loss(table[tokens], table, LABELS).sum()

    ours, exact = (
        quick(jax.value_and_grad(functools.partial(whole, f)))(HEAD)
        for f in (linear_cross_entropy, plain)
    )
    close(ours, exact)


@pytest.mark.parametrize("reduction", UPSTREAM)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
def test_gradient_of_the_bias(reduction, frozen):
    """With sequences over two devices, and classes over two."""
    mesh = make_mesh(ParallelConfig(fsdp=2, tp=2), jax.devices()[:4])
    hidden, labels = jnp.tile(HIDDEN, (4, 1, 1)), jnp.tile(SOME % 18, (4, 1))
    labels = labels.at[:, 0].set(-100)
    upstream = jnp.tile(UPSTREAM["none"], (4, 1)) if reduction == "none" else UPSTREAM["sum"]

    def gradients(loss, **options):
        def total(head, bias):
            head = jax.lax.stop_gradient(head) if frozen else head
            return (upstream * loss(hidden, head, labels, bias=bias, **options)).sum()

        return jax.grad(total, argnums=(0, 1))

    wanted = gradients(plain)(HEAD[:18], BIAS[:18])
    ours = gradients(linear_cross_entropy, chunk=6, reduction=reduction, axes=("fsdp",))
    with jax.set_mesh(mesh):
        where = NamedSharding(mesh, PartitionSpec("tp"))
        close(quick(ours)(*jax.device_put((HEAD[:18], BIAS[:18]), where)), wanted)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("how", ["ignored", "weight 0"])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_bad_hidden_of_silent_tokens(bad, how, reduction):
    """What a padded token holds reaches neither the loss nor a gradient."""
    labels = SOME if how == "ignored" else LABELS
    weights = jnp.ones((B, T)) if how == "ignored" else (SOME != -100).astype(jnp.float32)
    silent = (SOME == -100)[..., None]

    def f(hidden, head):
        return linear_cross_entropy(
            hidden, head, labels, weights, chunk=10, reduction=reduction, z_loss=0.1
        ).sum()

    f = quick(jax.value_and_grad(f, (0, 1)))
    results = f(jnp.where(silent, bad, HIDDEN), HEAD)
    close(results, f(HIDDEN, HEAD))
    assert not jnp.where(silent, results[1][0], 0.0).any()


def test_a_long_sum_in_float16():
    """The head's gradient, as a sum beyond float16's range, comes back into it when the upstream
    factor 1 / tokens is applied."""
    tokens = 2**16
    hidden = 4 * jnp.ones((1, tokens, 4), jnp.float16)
    labels = jnp.zeros((1, tokens), jnp.int32)
    head = jnp.zeros((2, 4), jnp.float16)
    f = lambda head: linear_cross_entropy(hidden, head, labels) / tokens  # noqa: E731
    assert error(jax.grad(f)(head), jnp.array([[-2.0] * 4, [2.0] * 4])) < TOLERANCE["float16"]


def test_head_gradient_accumulates_in_float32():
    tokens = 4096
    hidden, head = jnp.abs(normal(5, 1, tokens, D)), HEAD
    labels = jnp.zeros((1, tokens), jnp.int32)
    exact = jax.grad(lambda head: plain(hidden, head, labels).sum())(head)
    f = lambda head: linear_cross_entropy(hidden.astype(head.dtype), head, labels, chunk=1)  # noqa: E731
    assert error(quick(jax.grad(f))(head.astype(jnp.bfloat16)), exact) < 5e-3


def test_large_logits():
    hidden = 1e4 * HIDDEN
    f, exact = (
        quick(jax.value_and_grad(lambda h, f=f: f(h, HEAD, LABELS).sum()))
        for f in (linear_cross_entropy, plain)
    )
    close(f(hidden), exact(hidden))


@pytest.mark.parametrize("chunk", [6, 1000])
def test_z_loss_apart(chunk):
    """The part that it adds, with the same sum and gradients, and without a gradient itself."""
    options = dict(CASES["everything"], chunk=chunk)
    both = functools.partial(cross_entropy_and_z_loss, **options)
    (total, z), pull = jax.vjp(both, HIDDEN, HEAD)
    wanted, gradients = jax.value_and_grad(
        lambda *x: linear_cross_entropy(*x, **options), argnums=(0, 1)
    )(HIDDEN, HEAD)
    without = linear_cross_entropy(HIDDEN, HEAD, **dict(options, z_loss=0.0))
    assert total == wanted
    close(total - z, without)
    close(pull((1.0, 1.0)), gradients)


def test_labels_out_of_range_in_jax_arrays_give_nan():
    """Also below 0, where an index would count from the end; not where the weight is 0."""
    for bad in (V, -1, -V, -101):
        labels = LABELS.at[1, 4].set(bad)
        for losses in (
            linear_cross_entropy(HIDDEN, HEAD, labels, reduction="none"),
            jax.jit(functools.partial(linear_cross_entropy, reduction="none"))(
                HIDDEN, HEAD, labels
            ),
        ):
            assert jnp.argwhere(jnp.isnan(losses)).tolist() == [[1, 4]], bad
        assert jnp.isfinite(linear_cross_entropy(HIDDEN, HEAD, labels, WEIGHTS))


NUMPY = np.array(LABELS)
BAD = {
    "chunk": (dict(chunk=0), "chunk=0: must be at least 1 token"),
    "reduction": (dict(reduction="mean"), "reduction='mean': must be sum or none"),
    "softcap 0": (
        dict(softcap=0.0),
        "softcap=0.0: must be positive and finite; leave it out for no cap",
    ),
    "softcap < 0": (dict(softcap=-30.0), "softcap=-30.0: must be positive"),
    "softcap NaN": (dict(softcap=float("nan")), "softcap=nan: must be positive"),
    "z-loss": (dict(z_loss=-1e-4), "z_loss=-0.0001: must be finite and not"),
    "no tokens": (dict(hidden=HIDDEN[:, :0]), r"hidden: must be .*, not \(2, 0, 8\)"),
    "no batch": (dict(hidden=HIDDEN[:0]), r"hidden: must be .*, not \(0, 13, 8\)"),
    "features": (dict(head=HEAD[:, :-1]), r"head: must be \[classes, 8\], not \(19, 7\)"),
    "fewer labels": (dict(labels=LABELS[:, :-1]), r"labels: must be \(2, 13\), .*not \(2, 12\)"),
    "bias": (dict(bias=BIAS[1:]), r"bias: must be \[19\], one per class, not \(18,\)"),
    "weights": (dict(weights=WEIGHTS[:1]), r"weights: must be \(2, 13\), .*not \(1, 13\)"),
    "float labels": (
        dict(labels=LABELS.astype(jnp.float32)),
        "labels: must be integers, not float32",
    ),
    "too large": (
        dict(labels=np.where(NUMPY == 3, V, NUMPY)),
        r"labels: must be in \[0, 19\), .*not 19",
    ),
    "negative": (
        dict(labels=np.where(NUMPY == 3, -1, NUMPY)),
        "labels: must be in .*or -100 for .*not -1",
    ),
}


@pytest.mark.parametrize("options, message", BAD.values(), ids=BAD)
def test_bad_arguments(options, message):
    # Without the shape checker of the tests, which users do not have.
    f = inspect.unwrap(linear_cross_entropy)
    with pytest.raises(ValueError, match=message):
        f(**dict(hidden=HIDDEN, head=HEAD, labels=LABELS) | options)


def test_an_ignored_label_may_be_any_number():
    labels = np.where(NUMPY == 3, -7, NUMPY)
    assert jnp.isfinite(linear_cross_entropy(HIDDEN, HEAD, labels, ignore=-7))


@pytest.mark.parametrize("reduction", UPSTREAM)
def test_a_sharded_head(reduction):
    """Sequences over four devices, each with a quarter of the head: what one device gives."""
    mesh = make_mesh(ParallelConfig(fsdp=4), jax.devices()[:4])
    hidden, labels = jnp.tile(HIDDEN, (4, 1, 1)), jnp.tile(SOME, (4, 1))
    options = dict(chunk=6, reduction=reduction)

    def loss(hidden, head, axes=("fsdp",)):
        return linear_cross_entropy(hidden, head, labels, axes=axes, **options).sum()

    wanted = jax.value_and_grad(functools.partial(loss, axes=()), argnums=(0, 1))(hidden, HEAD)
    both = jax.value_and_grad(loss, argnums=(0, 1))
    where = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp",), (None, "fsdp")))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, w) for x, w in zip((hidden, HEAD), where, strict=True)]
        close(quick(both)(*placed), wanted)


@pytest.mark.parametrize("axes", [(), ("fsdp",)], ids=["one device", "fsdp"])
def test_losses_under_a_frozen_head(axes):
    """Their gradients come from the forward pass, so that logits are computed once."""
    mesh = make_mesh(ParallelConfig(fsdp=4), jax.devices()[:4])
    hidden, labels = jnp.tile(HIDDEN, (4, 1, 1)), jnp.tile(SOME, (4, 1))
    upstream = jnp.tile(UPSTREAM["none"], (4, 1))

    def gradient(loss, **options):
        return jax.grad(lambda x: (upstream * loss(x, HEAD, labels, **options)).sum())

    ours = gradient(linear_cross_entropy, chunk=6, reduction="none", axes=axes)
    with jax.set_mesh(mesh):
        close(quick(ours)(hidden), gradient(plain)(hidden))
    products = str(jax.make_jaxpr(ours)(hidden)).count("dot_general")
    assert products == 2, products
