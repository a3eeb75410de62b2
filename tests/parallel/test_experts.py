"""Experts on several devices are those of one: gradients, updates, routing to a single device,
checkpoints and settings."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import CONFIG, MODEL, documents
from models.test_decoder import assert_close
from ops.comparing import quick
from tiers import fast
from training.specs import initial_state, with_optimizer

from bptjax.cost.estimate import Estimator
from bptjax.models.config import ModelConfig
from bptjax.models.execution import Execution
from bptjax.models.experts import Experts
from bptjax.models.groups.experts import ExpertsConfig
from bptjax.ops import grouped_triton
from bptjax.parallel.mesh import ParallelConfig, axis_sizes, make_mesh
from bptjax.run.checkpoint import Checkpoints
from bptjax.training.spec import TrainSpec
from bptjax.training.state import abstract_state, with_shardings
from bptjax.training.step import compile_step, gradients
from bptjax.weights.lora import AdapterConfig

ROUTED = replace(
    MODEL, num_layers=2, feed_forward="experts", experts=ExpertsConfig(count=4, size=20, z_loss=0.1)
)
# A model, a mesh and the keys of its execution.
CASES = {
    "norms of queries and keys": (
        replace(
            ROUTED,
            attention=replace(ROUTED.attention, qk_norm=True),
            experts=replace(ROUTED.experts, aux_loss=1.0, per_token=3),
        ),
        dict(ep=4),
        dict(ffn_chunk=8, remat="nested(2)"),
    ),
    "biases and sinks": (
        replace(
            ROUTED,
            activation="quick_gelu",
            experts=replace(ROUTED.experts, glu_limit=7.0, glu_offset=1.0, router_bias=True),
            mlp_bias=True,
            attention=replace(ROUTED.attention, sinks=True, qkv_bias=True, out_bias=True),
        ),
        dict(ep=2, tp=2, zero_stage=1),
        dict(schedule="fused", remat="none"),
    ),
    "groups, a shared expert, a layer without experts": (
        replace(
            ROUTED,
            experts=replace(
                ROUTED.experts,
                scores="sigmoid",
                correction=True,
                groups=2,
                shared_size=12,
                shared_gate=True,
                scale=1.5,
                mlp_only_layers=[0],
            ),
        ),
        dict(ep=2, fsdp=2, sp=2),
        dict(ffn_chunk=20, remat="dots"),
    ),
    "slices of experts with biases": (
        replace(
            ROUTED, experts=replace(ROUTED.experts, router_bias=True, shared_size=12), mlp_bias=True
        ),
        dict(tp=2, fsdp=2, sp=2),
        dict(ffn_chunk=20, remat="dots"),
    ),
    "a width that tp does not divide": (
        replace(ROUTED, experts=replace(ROUTED.experts, size=21)),
        dict(tp=2),
        {},
    ),
}


def make_spec(model: ModelConfig = ROUTED, execution=None, **sizes) -> TrainSpec:
    parallel = ParallelConfig(**dict(dp=1, fsdp=1) | sizes)
    mesh = make_mesh(parallel, jax.devices()[: math.prod(axis_sizes(parallel).values())])
    group = replace(CONFIG.execution, **execution or {})
    spec = TrainSpec(replace(CONFIG, parallel=parallel, execution=group), model, mesh)
    # So large an epsilon that the update of a gradient of rounding noise is noise.
    return with_optimizer(spec, learning_rate=1e-3, adam_epsilon=1e-2)


def step(spec: TrainSpec):
    """The state after a step, and its metrics. Zeros of the first state, as biases, get values."""
    state, batch = initial_state(spec), spec.layout.put(documents())

    def one(x):
        values = np.random.default_rng(x.size).normal(0, 0.1, x.shape).astype(np.float32)
        return x if np.any(x) else jax.device_put(values, x.sharding)

    state = replace(state, model=jax.tree.map(one, state.model))
    return compile_step(spec, state, batch)(state, batch)


def relative_errors(got, wanted) -> list[float]:
    pairs = zip(*(map(np.asarray, jax.tree.leaves(tree)) for tree in (got, wanted)), strict=True)
    return [float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-5)) for a, b in pairs]


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_one_device(case, tmp_path):
    """The first moment after a step is a multiple of the gradient. Another mesh reads the
    checkpoint bit for bit."""
    model, sizes, execution = CASES[case]
    one, mesh = make_spec(model), make_spec(model, execution, **sizes)
    (wanted, of_one), (got, of_mesh) = step(one), step(mesh)
    moments = (state.opt_state.slots["mu"] for state in (got, wanted))
    assert max(relative_errors(*moments)) < 5e-6
    assert max(relative_errors((got.model, of_mesh), (wanted.model, of_one))) < 2e-6
    up = got.model.layers.mlp.up.kernel.get_value()
    assert up.sharding.shard_shape(up.shape)[1] == 4 // sizes.get("ep", 1)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, got, {})
    checkpoints.close()
    found = Checkpoints(tmp_path).restore(abstract_state(one))
    assert found is not None
    jax.tree.map(np.testing.assert_array_equal, found[1], got)


def on_devices(network: Experts, mesh) -> Experts:
    where = with_shardings(TrainSpec(CONFIG, ROUTED, mesh), network)
    return jax.device_put(network, jax.tree.map(lambda x: x.sharding, where))


def test_no_token_is_dropped():
    """All tokens of all devices choose the experts of the first one."""
    config = replace(
        ROUTED, experts=replace(ROUTED.experts, count=8, router_bias=True), init_std=0.5
    )
    network = Experts(config, jax.random.key(0), jnp.float32)
    network.router.bias[...] = jnp.where(jnp.arange(8) < 2, 99.0, 0.0)
    x, counted = jax.random.normal(jax.random.key(1), (4, 37, 32)), jnp.ones((4, 37), bool)

    def loss(network, x):
        y, aux = network(x, counted=counted)
        return jnp.square(y).sum(), aux["chosen"]

    run = quick(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (wanted, chosen), gradients = run(network, x)
    assert chosen.sum(0).tolist() == [148, 148, 0, 0, 0, 0, 0, 0]
    mesh = make_mesh(ParallelConfig(ep=4, fsdp=1), jax.devices()[:4])
    with jax.set_mesh(mesh):
        (got, _), of_mesh = run(on_devices(network, mesh), x)
    assert_close((got, of_mesh), (wanted, gradients))


@pytest.mark.parametrize(
    "sizes",
    fast([dict(tp=4), dict(tp=2, ep=2), dict(tp=2, fsdp=2, sp=2)], [dict(tp=2, ep=2)]),
    ids=str,
)
@pytest.mark.parametrize(
    "adapter", [AdapterConfig(), AdapterConfig("qlora", r=3)], ids=lambda a: a.type
)
def test_each_gpu_runs_kernels_on_its_slices(adapter, sizes, monkeypatch):
    """Triton's, without a loop over blocks."""
    found, chosen, available = set(), [], grouped_triton.available

    def call(name, inputs, shapes, *_):
        found.add((shapes[0] if name == "gradient" else inputs[1]).shape)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in shapes)

    monkeypatch.setattr(grouped_triton, "platform", lambda: "gpu")
    monkeypatch.setattr(grouped_triton, "unusable", lambda: None)
    monkeypatch.setattr(grouped_triton, "available", lambda: chosen.append(available()) or True)
    monkeypatch.setattr(grouped_triton, "CALL", call)
    spec = make_spec(ROUTED, dict(remat="none"), **sizes)
    config = replace(spec.config, adapter=adapter)
    spec = replace(spec, config=config)
    with jax.set_mesh(spec.mesh):
        inputs = abstract_state(spec), spec.layout.put(documents())
        jax.eval_shape(partial(gradients, spec), *inputs)
    X, D, F = 4 // sizes.get("ep", 1), 32, 20 // sizes["tp"]
    low = {(X, D, 3), (X, 3, F), (X, F, 3), (X, 3, D)} if adapter.type == "qlora" else set()
    assert all(chosen) and found == {(X, D, F), (X, F, D)} | low


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (MODEL, "parallel.ep=4: must be 1 for a model without experts; use parallel.fsdp"),
        (
            replace(ROUTED, experts=replace(ROUTED.experts, count=6)),
            "parallel.ep=4: must divide model.experts.count=6; use 2, with",
        ),
    ],
)
def test_refusals(model, message):
    with pytest.raises(ValueError, match=message):
        _ = make_spec(model, ep=4).layout


def test_the_estimate_is_that_of_a_device():
    """Half of the experts, no activations of experts for the backward pass, and the stream of two
    devices."""
    one, two = (Estimator(make_spec(ROUTED, ep=ep, fsdp=2 // ep)) for ep in (1, 2))
    assert one.held == two.held and one.tokens == two.tokens
    assert {"gate", "up"} <= one.widths.keys() and not {"gate", "up"} & two.widths.keys()
    execution = Execution(ffn_chunk=20, remat="dots")
    assert two(execution).saved < one(execution).saved
    assert two(execution).flops > one(execution).flops
