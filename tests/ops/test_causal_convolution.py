from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bptjax.ops.causal_convolution import causal_convolution
from ops.comparing import close, normal, quick

B, T, C, J = 2, 23, 6, 4
SEGMENTS = np.array(
    [[1] * 2 + [2] + [3] * 3 + [4] * 12 + [0] * 5, [0] * 3 + [5] * 9 + [0] * 2 + [6] * 9], np.int32
)
PREVIOUS = jnp.array([1, 4], jnp.int32)


def operands():
    return normal(0, B, T, C), normal(1, J, C), normal(2, B, J - 1, C)


def definition(x, kernel, history, segments=None, previous=None):
    """Token by token and term by term."""
    segments = np.ones((B, T), np.int32) if segments is None else segments
    previous = segments[:, 0] if previous is None else previous
    ids = np.concatenate([np.repeat(np.asarray(previous)[:, None], J - 1, 1), segments], 1)
    x = jnp.concatenate([history, x], 1)
    out = jnp.zeros((B, T, C))
    for b, t, i in np.ndindex(B, T, J):
        if ids[b, t + J - 1] == ids[b, t + J - 1 - i] != 0:
            out = out.at[b, t].add(kernel[J - 1 - i] * x[b, t + J - 1 - i])
    return jax.nn.silu(out)


@pytest.mark.parametrize("options", [{}, dict(segments=SEGMENTS, previous=PREVIOUS)], ids=str)
def test_equals_definition(options):
    def both(f):
        out, pull = jax.vjp(f, *operands())
        return out, pull(normal(3, B, T, C))

    def ours(x, kernel, history):
        return causal_convolution(x, kernel, history=history, **options)[0]

    close(*(quick(partial(both, f))() for f in (ours, partial(definition, **options))))


@pytest.mark.thorough
@pytest.mark.parametrize("at", [1, 2, 9])
def test_halves_make_the_whole(at):
    """Also where the first half is shorter than the history, and where the document ends."""
    x, kernel, history = operands()
    options = dict(segments=SEGMENTS, previous=PREVIOUS, history=history)
    whole, end = causal_convolution(x, kernel, **options)
    first, state = causal_convolution(
        x[:, :at], kernel, **options | dict(segments=SEGMENTS[:, :at])
    )
    previous = jnp.array([SEGMENTS[0, at - 1], 5 if at > 3 else 4])
    second, state = causal_convolution(
        x[:, at:], kernel, segments=SEGMENTS[:, at:], history=state, previous=previous
    )
    np.testing.assert_array_equal(jnp.concatenate([first, second], 1), whole)
    np.testing.assert_array_equal(state, end)
    # The last tokens of the last document, and nothing else: padding counts as 0.
    assert not end[0].any() and (end[1] == x[1, -3:]).all()


def test_other_documents_do_not_move_a_bit():
    x, kernel, _ = operands()
    inside = jnp.asarray((SEGMENTS == 3) | (SEGMENTS == 0))[..., None]

    def both(x, dout):
        out, pull = jax.vjp(lambda x: causal_convolution(x, kernel, segments=SEGMENTS)[0], x)
        return out, *pull(dout)

    dout = normal(3, B, T, C)
    plain = both(x, dout)
    moved = both(jnp.where(inside, jnp.nan, x), jnp.where(inside, 7.0, dout))
    for a, b in zip(plain, moved, strict=True):
        np.testing.assert_array_equal(jnp.where(inside, 0.0, a), jnp.where(inside, 0.0, b))


def test_bfloat16():
    """Sums are float32; the backward pass saves no float32 copies of the terms."""
    x, kernel, _ = (y.astype(jnp.bfloat16) for y in operands())
    out, _ = causal_convolution(x, kernel)
    assert out.dtype == jnp.bfloat16
    zeros = jnp.zeros((B, J - 1, C))
    expected = definition(x.astype(jnp.float32), kernel.astype(jnp.float32), zeros)
    np.testing.assert_array_equal(out, expected.astype(jnp.bfloat16))

    pull = jax.vjp(lambda *y: causal_convolution(*y, segments=SEGMENTS)[0], x, kernel)[1]
    assert sum(y.nbytes for y in jax.tree.leaves(pull)) <= 5 * x.nbytes


@pytest.mark.thorough
def test_equals_transformers():
    torch = pytest.importorskip("torch")
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    x, kernel, _ = operands()
    arrays = [torch.tensor(np.asarray(y)) for y in (x.mT, kernel.T)]
    for silu, name in ((True, "silu"), (False, None)):
        expected = theirs.causal_conv1d_fn(*arrays, activation=name)
        close(causal_convolution(x, kernel, silu=silu)[0], expected.mT.numpy())


def test_refuses():
    x, kernel, history = operands()
    f = causal_convolution.__wrapped__
    with pytest.raises(ValueError, match="kernel: must be"):
        f(x, kernel.T)
    with pytest.raises(ValueError, match="history: must be"):
        f(x, kernel, history=history[:, 1:])
    with pytest.raises(ValueError, match="previous: must be left out"):
        f(x, kernel, previous=PREVIOUS)
    with pytest.raises(ValueError, match="previous: must be set"):
        f(x, kernel, history=history, segments=SEGMENTS)
