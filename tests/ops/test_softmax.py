import jax
import jax.numpy as jnp
import pytest

from bptjax.ops.softmax import Partial, Running, merge
from ops.comparing import close, normal


def part(logits, values):
    """`logits [T, S]`, `values [S, H]`, as one head of one row."""
    out = jax.nn.softmax(logits, -1) @ values
    return Partial(out[None, :, None], jax.nn.logsumexp(logits, -1)[None, :, None])


LOGITS, VALUES = 10 * normal(0, 3, 8), normal(1, 8, 4)
NOTHING = Partial(jnp.zeros((1, 3, 1, 4)), jnp.full((1, 3, 1), -jnp.inf))


def test_merge_is_softmax_of_the_union():
    parts = [part(LOGITS[:, s], VALUES[s]) for s in (slice(0, 3), slice(3, 4), slice(4, 8))]
    whole = part(LOGITS, VALUES)
    close(merge(merge(parts[0], parts[1]), parts[2]), whole)
    close(merge(parts[2], merge(parts[1], parts[0])), whole)


def test_nothing_is_the_unit():
    whole = part(LOGITS, VALUES)
    close(merge(NOTHING, whole), whole)
    close(merge(whole, NOTHING), whole)
    both = merge(NOTHING, NOTHING)
    assert not both.out.any() and jnp.isneginf(both.lse).all()


def test_merge_accumulates_in_float32():
    half = Partial(
        *(x.astype(d) for x, d in zip(part(LOGITS, VALUES), ("float16", "float32"), strict=True))
    )
    assert merge(half, half).out.dtype == jnp.float32


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_running(shift):
    """Chunks of keys, the first of them all masked, with logits that exp alone could not hold."""
    running = Running.start(jnp.zeros((3, 4)))
    masked = jnp.full((3, 2), -jnp.inf)
    chunks = [(masked, VALUES[:2]), (LOGITS[:, :5] + shift, VALUES[:5])]
    chunks += [(masked, VALUES[:2]), (LOGITS[:, 5:] + shift, VALUES[5:])]
    for logits, values in chunks:
        running, weights = running.rescale(logits)
        running = running._replace(acc=running.acc + weights @ values)
    out, lse = running.finish()
    exact = LOGITS + shift
    close(out, jax.nn.softmax(exact, -1) @ VALUES)
    close(lse, jax.nn.logsumexp(exact, -1))


def test_running_meets_no_key():
    out, lse = Running.start(jnp.zeros((3, 4))).finish()
    assert not out.any() and jnp.isneginf(lse).all()
