"""Muon: its updates are those of optax, and nearly orthogonal."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers, muon
from optim.test_optimizer import CONFIG, Model, assert_close, on, run, update

from bptjax.optim.optimizer import init_opt_state
from bptjax.optim.update_rules import orthogonalize
from bptjax.parallel.mesh import ParallelConfig, make_mesh

MUON = replace(CONFIG, type="muon", muon_dtype="float32", max_grad_norm=0.0)


# Shape, axes, numbers of input and output axes, and the same for optax.
KERNELS = {
    "query": ((3, 16, 4, 8), ("embed", "heads", None), (1, 2), MuonDimensionNumbers(1, (2, 3))),
    "out": ((3, 4, 8, 16), ("heads", None, "embed"), (2, 1), MuonDimensionNumbers((1, 2), 3)),
    "up": ((3, 16, 40), ("embed", "mlp"), (1, 1), MuonDimensionNumbers(1, 2)),
    "project_in": ((12, 20), (None, "embed"), (1, 1), MuonDimensionNumbers(0, 1)),
}


def kernels(key):
    return {
        name: {"kernel": nnx.Param(jax.random.normal(key, shape), axes=axes, matrix=matrix)}
        for name, (shape, axes, matrix, _) in KERNELS.items()
    }


@pytest.mark.thorough
@pytest.mark.parametrize("parallel", [None, ParallelConfig(dp=2, fsdp=2, tp=2)])
def test_muon_is_optax(parallel):
    """On each layer by itself, with heads merged; on a mesh too, where kernels are sharded."""
    dims = {name: {"kernel": row[-1]} for name, row in KERNELS.items()}
    oracle = muon(1e-2, weight_decay=0.5, consistent_rms=0.2, muon_weight_dimension_numbers=dims)
    model = wanted = kernels(jax.random.key(0))
    mesh = make_mesh(parallel) if parallel else None
    with jax.set_mesh(mesh) if mesh else nullcontext():
        placed = jax.tree.map(lambda x: x.sharding, on(mesh, model)) if mesh else None
        model = jax.device_put(model, placed)
        step, state = (
            jax.jit(partial(update, MUON, slice_elements=1024)),
            init_opt_state(MUON, model),
        )
        oracle_state = oracle.init(jax.tree.map(jnp.asarray, wanted))
        for number in range(4):
            g = kernels(jax.random.key(10 + number))
            with jax.numpy_dtype_promotion("standard"):
                updates, oracle_state = oracle.update(g, oracle_state, wanted)
            wanted = optax.apply_updates(wanted, updates)
            model, state, _ = step(jax.device_put(g, placed), model, state, jax.random.key(1))
    assert_close(model, wanted, 1e-6)
    assert list(state.slots) == ["mu"]


def test_muon_updates_other_parameters_like_adamw():
    model = Model(jax.random.key(0))
    adamw, mixed = (run(config, model)[:2] for config in (replace(CONFIG, max_grad_norm=0.0), MUON))
    for name in ("embedding", "scale", "bias"):
        np.testing.assert_array_equal(getattr(mixed[0], name), getattr(adamw[0], name))
    assert mixed[1].slots["nu"].kernel is None and mixed[1].slots["mu"].kernel is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_orthogonalized_kernels_are_nearly_orthogonal(dtype):
    x = jax.random.normal(jax.random.key(0), (2, 60, 40)) * jnp.geomspace(0.1, 1, 40)[None, None]
    singular = jnp.linalg.svd(orthogonalize(x, dtype).astype(jnp.float32), compute_uv=False)
    assert 0.6 < singular.min() and singular.max() < 1.25
    assert (orthogonalize(0 * x, dtype) == 0).all()
