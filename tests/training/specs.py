"""Small specs, sums of gradients to compare, and what tests of absent GPUs need."""

import importlib.util
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.training.spec import TrainSpec
from bptjax.training.state import TrainState, abstract_state, init_state
from bptjax.training.step import gradients

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the extra plan"
)
_STATES: dict[str, TrainState] = {}


def initial_state(spec: TrainSpec) -> TrainState:
    """Returns the state at step 0, initialized on one device: once for all specs that differ in
    the mesh or in how a step is computed, because each initialization compiles for a second."""
    config = spec.config
    train = replace(config.train, gradient_accumulation_steps=1)
    optimizer = replace(config.optimizer, in_backward=None, state_memory_kind="device")
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), abstract_state(spec))
    key = repr((spec.model, config.seed, train, optimizer, config.adapter, shapes))
    if key not in _STATES:
        mesh = make_mesh(ParallelConfig(), jax.devices()[:1])
        one = replace(spec, config=replace(config, parallel=ParallelConfig()), mesh=mesh)
        _STATES[key] = init_state(one)
    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(spec))
    # A step overwrites its state; of jax's arrays even may_alias=False keeps one for a device.
    return jax.device_put(jax.tree.map(np.array, _STATES[key]), shardings)


def gradient_sums(spec, batch, micro_batches=1, state=None):
    with jax.set_mesh(spec.mesh):
        state = initial_state(spec) if state is None else state
        # In the spec, so that further calls with the same shapes trace nothing.
        compute = vars(spec).setdefault("gradients", jax.jit(partial(gradients, spec)))
        return compute(state, spec.layout.put(batch, micro_batches))


def assert_same(got, wanted, rtol=1e-5):
    assert int(got[2]) == int(wanted[2])
    # Sums of differences, such as margins, may cancel.
    atol = 0.1 * rtol * int(wanted[2])
    for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(wanted[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(wanted[1]), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.linalg.norm(a - b) <= rtol * max(np.linalg.norm(b), 1e-3)


def with_optimizer(spec: TrainSpec, **optimizer) -> TrainSpec:
    config = replace(spec.config, optimizer=replace(spec.config.optimizer, **optimizer))
    return replace(spec, config=config)
