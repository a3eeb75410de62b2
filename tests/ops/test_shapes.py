"""The shapes that functions state are checked in tests."""

import jax.numpy as jnp
import pytest
from beartype.roar import BeartypeCallHintViolation

from bptjax.models.feed_forward import activate
from bptjax.ops.norm import rms_norm


def test_a_dimension_of_two_arguments_has_one_size():
    gate = jnp.ones((2, 4))
    assert activate("silu", gate, gate).shape == (2, 4)
    with pytest.raises(BeartypeCallHintViolation):
        activate("silu", gate, jnp.ones((2, 1)))


def test_dtypes_are_checked():
    with pytest.raises(BeartypeCallHintViolation):
        rms_norm(jnp.ones((2, 4), int), jnp.ones(4))
