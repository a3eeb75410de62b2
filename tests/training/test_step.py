"""The train step: sums divided once, any mesh, any dtype."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import fast

from bptjax.config import Config, TrainConfig
from bptjax.models.config import ModelConfig
from bptjax.models.execution import ExecutionConfig
from bptjax.models.groups.encoder import EncoderConfig
from bptjax.models.groups.experts import ExpertsConfig
from bptjax.models.groups.norms import NormsConfig
from bptjax.ops.choices import record_choices
from bptjax.optim.optimizer import OptimizerConfig
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.run.checkpoint import Checkpoints
from bptjax.training.spec import TrainSpec
from bptjax.training.state import TrainState, abstract_state, init_state
from bptjax.training.step import (
    abstract_batch,
    check_kernel,
    compile_step,
)
from training.specs import assert_same, gradient_sums, initial_state, with_optimizer

T = 24


MODEL = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, tied_head=False
)
# Few parameters, because the update of each one's 8-bit states takes a while to compile.
SMALL = replace(MODEL, num_layers=1, gated=False, norms=NormsConfig(scale=False))


CONFIG = Config(
    train=TrainConfig(seq_len=T, max_steps=20),
    execution=ExecutionConfig(q_chunk=8, k_chunk=8, ffn_chunk=16, ce_chunk=32),
    optimizer=OptimizerConfig(learning_rate=1e-2),
)


def make_spec(parallel: ParallelConfig | None = None, **train) -> TrainSpec:
    config = replace(CONFIG, train=replace(CONFIG.train, **train))
    if parallel is None:
        return TrainSpec(config, MODEL, make_mesh(ParallelConfig(), jax.devices()[:1]))
    return TrainSpec(replace(config, parallel=parallel), MODEL, make_mesh(parallel))


@pytest.fixture(scope="module")
def whole(batch):
    return gradient_sums(make_spec(), batch, 1)


def test_accumulated_micro_batches_are_one_big_batch(batch, whole):
    assert_same(gradient_sums(make_spec(), batch, 4), whole)


@pytest.mark.parametrize("kind", fast(["decoder", "experts", "classifier"], ["decoder"]))
def test_blank_sequences_are_neutral(batch, kind):
    """A shard without further records provides them: here two of three micro-batches are blank."""
    spec = make_spec()
    if kind == "experts":
        routed = dict(
            feed_forward="experts", experts=ExpertsConfig(count=4, aux_loss=0.5, z_loss=0.1)
        )
        spec = replace(spec, model=replace(MODEL, **routed))
    if kind == "classifier":
        spec = replace(
            spec,
            model=replace(
                MODEL, causal=False, encoder=EncoderConfig(classes=3), position_embedding="rope"
            ),
        )
        first = np.arange(T) == 0
        labels = np.where(first, np.arange(8)[:, None] % 3, -100).astype(np.int32)
        batch = batch | {"labels": labels, "segments": np.minimum(batch["segments"], 1)}
    blank = {k: np.full((16, T), -100 * (k == "labels"), np.int32) for k in batch}
    more = {name: np.concatenate([x, blank[name]]) for name, x in batch.items()}
    wanted = gradient_sums(spec, batch)
    assert_same(gradient_sums(spec, more, 3), wanted)
    assert_same(gradient_sums(spec, more), wanted)


def steps(spec: TrainSpec, batch, n: int) -> tuple[TrainState, list[dict]]:
    state, placed, rows = initial_state(spec), spec.layout.put(batch), []
    step = compile_step(spec, state, placed)
    for _ in range(n):
        state, metrics = step(state, placed)
        rows.append({name: float(x) for name, x in metrics.items()})
    return state, rows


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_loss_falls(batch, dtype):
    state, rows = steps(make_spec(compute_dtype=dtype), batch, 12)
    losses = [row["train/loss"] for row in rows]
    assert losses[-1] < 0.7 * losses[0]
    assert int(state.step) == 12
    assert ("train/loss_scale" in rows[0]) == (dtype == "float16")


@pytest.mark.thorough
def test_bfloat16_parameters_stay_bfloat16(batch):
    state, rows = steps(make_spec(compute_dtype="bfloat16", param_dtype="bfloat16"), batch, 3)
    assert {x.dtype for x in jax.tree.leaves(state.model)} == {jnp.dtype("bfloat16")}
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]


@pytest.mark.thorough
def test_the_reported_loss_leaves_the_z_loss_out(batch):
    """The first step's train/loss is the same with and without it; gradients are not."""
    plain, with_z = (steps(make_spec(z_loss=z), batch, 1)[1][0] for z in (0.0, 0.1))
    np.testing.assert_allclose(with_z["train/loss"], plain["train/loss"], rtol=1e-6)
    assert with_z["train/z_loss"] > 0.5 and "train/z_loss" not in plain
    assert with_z["train/grad_norm"] != plain["train/grad_norm"]


@pytest.mark.thorough
def test_the_z_loss_of_micro_batches_is_that_of_one_batch(batch):
    _, [with_z] = steps(make_spec(z_loss=0.1), batch, 1)
    two = make_spec(z_loss=0.1, gradient_accumulation_steps=2)
    placed = two.layout.put(batch, 2)
    state = initial_state(two)
    _, micro = compile_step(two, state, placed)(state, placed)
    np.testing.assert_allclose(micro["train/z_loss"], with_z["train/z_loss"], rtol=1e-6)


def test_an_overflow_changes_the_scale_alone(batch):
    spec = with_optimizer(make_spec(compute_dtype="float16"), state_dtype="int8")
    spec = replace(spec, model=SMALL)
    state, placed = initial_state(spec), spec.layout.put(batch)
    assert state.loss_scale is not None
    state = replace(state, loss_scale=replace(state.loss_scale, value=jnp.float32(2.0**40)))
    before = jax.tree.map(np.asarray, (state.model, state.opt_state))
    step = compile_step(spec, state, placed)
    after, metrics = step(state, placed)
    assert not np.isfinite(metrics["train/grad_norm"]) and np.isfinite(metrics["train/loss"])
    assert float(after.loss_scale.value) == 2.0**39
    after, again = step(after, placed)
    # The schedule stands still with the optimizer, and so does what is told of it.
    assert again["train/learning_rate"] == metrics["train/learning_rate"]
    for a, b in zip(
        jax.tree.leaves((after.model, after.opt_state)), jax.tree.leaves(before), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.thorough
def test_moments_in_host_memory(batch, tmp_path):
    """The same steps as with moments on the device, also after a checkpoint."""
    small = replace(make_spec(), model=SMALL)
    device, host = (
        with_optimizer(small, state_dtype="int8", state_memory_kind=kind)
        for kind in ("device", "pinned_host")
    )
    (_, wanted), placed = steps(device, batch, 4), host.layout.put(batch)
    state = init_state(host)
    step, rows = compile_step(host, state, placed), []
    for n in range(4):
        if n == 2:
            checkpoints = Checkpoints(tmp_path)
            checkpoints.save(2, state, {})
            checkpoints.close()
            _, state, _ = Checkpoints(tmp_path).restore(abstract_state(host))
        state, metrics = step(state, placed)
        rows.append({name: float(x) for name, x in metrics.items()})
        moments = jax.tree.leaves(state.opt_state.slots)
        assert {x.sharding.memory_kind for x in moments} == {"pinned_host"}
        assert {x.sharding.memory_kind for x in jax.tree.leaves(state.model)} == {"device"}
    assert rows == wanted
    with pytest.raises(RuntimeError, match=r"=pinned_host, but the state is in \{'device'\}"):
        compile_step(host, init_state(device), placed)


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["split", "fused"])
def test_compiling_records_the_kernel(batch, schedule):
    spec = make_spec()
    spec = replace(spec, config=replace(spec.config, execution=ExecutionConfig(schedule=schedule)))
    placed = spec.layout.put(batch)
    for _ in range(2):
        with record_choices() as choices:
            compile_step(spec, abstract_state(spec), placed)
        assert [choice.name for choice in choices] == ["scan"]


def test_a_ring_chooses_for_the_arrays_of_a_device():
    """Padded to what the mesh divides, without compiling; also with a named kernel."""
    spec = make_spec(ParallelConfig(dp=2, fsdp=1, sp=4, sequence_strategy="ring"), seq_len=T - 2)
    with record_choices() as choices:
        check_kernel(spec)
    assert {choice.name for choice in choices} == {"scan"}
    for name, error, message in (
        ("cudnn", NotImplementedError, "needs an NVIDIA GPU"),
        ("quick", ValueError, "'quick': must be one of auto, fa4, cudnn"),
    ):
        execution = replace(spec.config.execution, attention_implementation=name)
        named = replace(spec, config=replace(spec.config, execution=execution))
        with pytest.raises(error, match=message):
            check_kernel(named)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="this jax drops optimization barriers on the CPU"
)
def test_no_gradients_of_layers_beside_the_logits():
    """The stacks that take the gradients of the layers are made after the loss, where most memory
    is for logits: more layers do not add their gradients to it."""
    model = replace(MODEL, vocab_size=8192, hidden_size=64, num_heads=2, intermediate_size=1024)
    spec = make_spec(seq_len=256)
    execution = replace(spec.config.execution, remat="full", ffn_chunk=256, ce_chunk=256)
    needs, sizes = [], []
    for layers in (2, 8):
        small = replace(model, num_layers=layers)
        small = replace(spec, model=small, config=replace(spec.config, execution=execution))
        state = abstract_state(small)
        compiled = compile_step(small, state, abstract_batch(small))
        needs.append(compiled.memory_analysis().temp_size_in_bytes)
        sizes.append(sum(4 * x.size for x in jax.tree.leaves(state.model)))
    assert needs[1] - needs[0] < 0.5 * (sizes[1] - sizes[0])
