"""Small specs, and sums of gradients to compare."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np

from bptjax.training.spec import TrainSpec
from bptjax.training.state import init_state
from bptjax.training.step import gradients


def gradient_sums(spec, batch, micro_batches=1, state=None):
    with jax.set_mesh(spec.mesh):
        state = init_state(spec) if state is None else state
        return jax.jit(partial(gradients, spec))(state, spec.layout.put(batch, micro_batches))


def assert_same(got, wanted, rtol=1e-5):
    assert int(got[2]) == int(wanted[2])
    np.testing.assert_allclose(got[0], wanted[0], rtol=rtol)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(wanted[1]), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.linalg.norm(a - b) <= rtol * max(np.linalg.norm(b), 1e-3)


def with_optimizer(spec: TrainSpec, **optimizer) -> TrainSpec:
    config = replace(spec.config, optimizer=replace(spec.config.optimizer, **optimizer))
    return replace(spec, config=config)
