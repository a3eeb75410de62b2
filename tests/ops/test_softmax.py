import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bptjax.ops import softmax
from bptjax.ops.softmax import AttentionState, OnlineSoftmax, empty_state, merge_states
from ops.comparing import close, normal


def state(logits, values):
    """Attention of one head, from `logits [T, S]` and `values [S, H]`."""
    out = jax.nn.softmax(logits, -1) @ values
    return AttentionState(out[None, :, None], jax.nn.logsumexp(logits, -1)[None, :, None])


LOGITS, VALUES = 10 * normal(0, 3, 8), normal(1, 8, 4)
EMPTY = empty_state(jnp.zeros((1, 3, 1, 4)))


def test_merge_is_softmax_of_the_union():
    parts = [state(LOGITS[:, s], VALUES[s]) for s in (slice(0, 3), slice(3, 4), slice(4, 8))]
    union = state(LOGITS, VALUES)
    close(merge_states(merge_states(parts[0], parts[1]), parts[2]), union)
    close(merge_states(parts[2], merge_states(parts[1], parts[0])), union)


def test_empty_is_the_unit():
    union = state(LOGITS, VALUES)
    close(merge_states(EMPTY, union), union)
    close(merge_states(union, EMPTY), union)
    both = merge_states(EMPTY, EMPTY)
    assert not both.out.any() and jnp.isneginf(both.lse).all()


def test_logsumexp_in_one_pass(monkeypatch):
    """As on GPUs, also of rows with a logit that is not finite."""
    monkeypatch.setattr(softmax, "platform", lambda: "gpu")
    logits = 30 * normal(0, 5, 7, 1000)
    for place, bad in ((0, -jnp.inf), (1, jnp.nan), (2, jnp.inf)):
        logits = logits.at[place, 0, 5].set(bad)
    logits = logits.at[3, 0].set(-jnp.inf)
    np.testing.assert_allclose(
        jax.jit(softmax.logsumexp)(logits), jax.nn.logsumexp(logits, -1), rtol=1e-6
    )


def test_merge_accumulates_in_float32():
    half = AttentionState(
        *(x.astype(d) for x, d in zip(state(LOGITS, VALUES), ("float16", "float32"), strict=True))
    )
    assert merge_states(half, half).out.dtype == jnp.float32


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_online_softmax(shift):
    """Chunks of keys, the first of them all masked, with logits that exp alone could not hold."""
    softmax = OnlineSoftmax.start(jnp.zeros((3, 4)))
    masked = jnp.full((3, 2), -jnp.inf)
    chunks = [(masked, VALUES[:2]), (LOGITS[:, :5] + shift, VALUES[:5])]
    chunks += [(masked, VALUES[:2]), (LOGITS[:, 5:] + shift, VALUES[5:])]
    for logits, values in chunks:
        softmax, weights = softmax.update(logits)
        softmax = softmax._replace(acc=softmax.acc + weights @ values)
    out, lse = softmax.normalize()
    exact = LOGITS + shift
    close(out, jax.nn.softmax(exact, -1) @ VALUES)
    close(lse, jax.nn.logsumexp(exact, -1))


def test_online_softmax_without_keys():
    out, lse = OnlineSoftmax.start(jnp.zeros((3, 4))).normalize()
    assert not out.any() and jnp.isneginf(lse).all()
