"""The train step: sums divided once, any mesh, any dtype."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bptjax.checkpoint import Checkpoints
from bptjax.config import Config, TrainConfig
from bptjax.models.config import ModelConfig
from bptjax.optim import LossScale, OptimizerConfig, learning_rate
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.remat import ExecutionConfig
from bptjax.trainer import Task, TrainState

T = 24
MODEL = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, tied_head=False
)
CONFIG = Config(
    train=TrainConfig(seq_len=T, max_steps=20),
    execution=ExecutionConfig(q_chunk=8, k_chunk=8, ffn_chunk=16, ce_chunk=32),
    optimizer=OptimizerConfig(learning_rate=1e-2),
)


def task(parallel: ParallelConfig | None = None, **train) -> Task:
    config = replace(CONFIG, train=replace(CONFIG.train, **train))
    if parallel is None:
        return Task(config, MODEL, make_mesh(ParallelConfig(), jax.devices()[:1]))
    return Task(replace(config, parallel=parallel), MODEL, make_mesh(parallel))


def with_optimizer(work: Task, **optimizer) -> Task:
    config = replace(work.config, optimizer=replace(work.config.optimizer, **optimizer))
    return replace(work, config=config)


@pytest.fixture(scope="module")
def batch():
    """Eight ragged rows of packed documents: unequal counts of labels in every row."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (8, T), dtype=np.int32)
    ends = rng.integers(2, T + 1, (8, 1))
    place = np.arange(T, dtype=np.int32)[None]
    segments = np.where(place < ends, 1 + (place >= ends // 2), 0).astype(np.int32)
    positions = np.where(segments == 2, place - ends // 2, place).astype(np.int32)
    labels = np.where(segments > 0, np.roll(tokens, -1, 1), -100).astype(np.int32)
    return {"tokens": tokens, "labels": labels, "segments": segments, "positions": positions}


def sums(work: Task, batch, micro_batches: int):
    with jax.set_mesh(work.mesh):
        return jax.jit(work.gradients)(work.init_state(), work.layout.put(batch, micro_batches))


@pytest.fixture(scope="module")
def whole(batch):
    return sums(task(), batch, 1)


def assert_same(got, wanted, rtol=1e-5):
    assert int(got[2]) == int(wanted[2])
    np.testing.assert_allclose(got[0], wanted[0], rtol=rtol)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(wanted[1]), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.linalg.norm(a - b) <= rtol * max(np.linalg.norm(b), 1e-3)


def test_accumulated_micro_batches_are_one_big_batch(batch, whole):
    assert_same(sums(task(), batch, 4), whole)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_scalings_by_length_do_not_depend_on_the_batch(batch, kind):
    """Micro-batches on a mesh with the sequence in zigzag order give the loss and gradients of one
    big batch, though their longest documents differ."""
    lists = dict(short_factor=[1.0] * 4, long_factor=[2.0, 3.0, 4.0, 8.0])
    scaling = dict(dynamic={}, longrope=lists | dict(original_max_position_embeddings=8))
    parameters = dict(rope_type=kind, rope_theta=1e4, factor=4.0) | scaling[kind]
    model = replace(MODEL, num_layers=1, max_position_embeddings=8, rope_parameters=parameters)
    # Large weights, so that attention and thereby the frequencies matter.
    model = replace(model, init_std=0.5)
    one, mesh = task(), task(ParallelConfig(dp=2, fsdp=1, sp=4, sequence_strategy="ring"))
    one, mesh = (replace(work, model=model) for work in (one, mesh))
    assert_same(sums(mesh, batch, 2), sums(one, batch, 1))


def test_dropout_is_that_of_one_device(batch):
    """Also where rows are filled up, which one device does not."""
    dropping = replace(MODEL, num_layers=1, residual_dropout=0.3, embedding_dropout=0.2)
    parts = {name: x[:2, : T - 2] for name, x in batch.items()}
    ring = ParallelConfig(dp=2, fsdp=1, sp=4, sequence_strategy="ring")
    one, cut = (replace(work, model=dropping) for work in (task(), task(ring, seq_len=T - 2)))
    assert cut.layout.put(parts)["tokens"].shape[2] > T - 2
    wanted = sums(one, parts, 1)
    assert (
        abs(sums(replace(one, model=replace(MODEL, num_layers=1)), parts, 1)[0][0] - wanted[0][0])
        > 0.1
    )
    assert_same(sums(cut, parts, 1), wanted)


def test_rows_as_long_as_learned_positions(batch):
    """On a mesh that fills them up."""
    work = task(ParallelConfig(dp=1, fsdp=1, sp=8), seq_len=T - 2)
    learned = replace(
        MODEL, num_layers=1, position_embedding="learned", max_position_embeddings=T - 2
    )
    work = replace(work, model=replace(learned, num_heads=8))
    (loss, _), _, _ = sums(work, {name: x[:1, : T - 2] for name, x in batch.items()}, 1)
    assert np.isfinite(loss)


def test_both_axes_of_a_matrix_are_cut():
    """Tensor parallelism in two dimensions is fsdp and tp together."""
    model = task(ParallelConfig(dp=1, fsdp=4, tp=2)).abstract_state().model
    kernel = model.layers.mlp.up.kernel.get_value()
    L, D, F = kernel.shape
    assert kernel.sharding.shard_shape((L, D, F)) == (L, D // 4, F // 2)


def steps(work: Task, batch, n: int) -> tuple[TrainState, list[dict]]:
    state, placed, rows = work.init_state(), work.layout.put(batch), []
    step = work.compile_step(state, placed)
    for _ in range(n):
        state, metrics = step(state, placed)
        rows.append({name: float(x) for name, x in metrics.items()})
    return state, rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_loss_falls(batch, dtype):
    state, rows = steps(task(compute_dtype=dtype), batch, 12)
    losses = [row["train/loss"] for row in rows]
    assert losses[-1] < 0.7 * losses[0]
    assert int(state.step) == 12
    assert ("train/loss_scale" in rows[0]) == (dtype == "float16")


def test_bfloat16_parameters_stay_bfloat16(batch):
    state, rows = steps(task(compute_dtype="bfloat16", param_dtype="bfloat16"), batch, 3)
    assert {x.dtype for x in jax.tree.leaves(state.model)} == {jnp.dtype("bfloat16")}
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]


def shard_bytes(tree) -> int:
    """Of one device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("fsdp", [4, 2])
def test_zero_says_what_fsdp_and_sp_cut(batch, fsdp):
    """Two steps of each stage are those of one device, and each stage cuts more than the last."""

    def small(parallel=None):
        # Where a gradient is no more than rounding, AdamW steps by its sign.
        work = with_optimizer(task(parallel), learning_rate=1e-3)
        return replace(work, model=replace(MODEL, num_layers=1, gated=False, norm_scale=False))

    one, wanted = steps(small(), batch, 2)
    held = []
    for zero in (1, 2, 3):
        work = small(ParallelConfig(dp=1, fsdp=fsdp, tp=2, sp=4 // fsdp, zero_stage=zero))
        state, placed = work.init_state(), work.layout.put(batch)
        step = work.compile_step(state, placed)
        for row in wanted:
            state, metrics = step(state, placed)
            for name, x in metrics.items():
                np.testing.assert_allclose(x, row[name], rtol=1e-5)
        for a, b in zip(jax.tree.leaves(state.model), jax.tree.leaves(one.model), strict=True):
            a, b = np.asarray(a), np.asarray(b)
            assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)
        with jax.set_mesh(work.mesh):
            _, gradients, _ = jax.jit(work.gradients)(state, work.layout.put(batch, 2))
        parts = state.opt_state.mu, gradients, state.model
        argument = step.memory_analysis().argument_size_in_bytes
        held.append([*map(shard_bytes, parts), argument])
    (_, *first), *_, (cut, _, _, least) = held
    whole, _, most = first
    assert [row[:3] for row in held] == [[cut, whole, whole], [cut, cut, whole], [cut, cut, cut]]
    assert whole == 4 * cut and most - least == whole - cut


def test_the_reported_loss_leaves_the_z_loss_out(batch):
    """The first step's train/loss is the same with and without it; gradients are not."""
    plain, with_z = (steps(task(z_loss=z), batch, 1)[1][0] for z in (0.0, 0.1))
    np.testing.assert_allclose(with_z["train/loss"], plain["train/loss"], rtol=1e-6)
    assert with_z["train/z_loss"] > 0.5 and "train/z_loss" not in plain
    assert with_z["train/grad_norm"] != plain["train/grad_norm"]
    two = task(z_loss=0.1, gradient_accumulation_steps=2)
    placed = two.layout.put(batch, 2)
    _, micro = two.compile_step(two.init_state(), placed)(two.init_state(), placed)
    np.testing.assert_allclose(micro["train/z_loss"], with_z["train/z_loss"], rtol=1e-6)


def test_an_overflow_changes_the_scale_alone(batch):
    work = with_optimizer(task(compute_dtype="float16"), state_dtype="int8")
    state, placed = work.init_state(), work.layout.put(batch)
    state = replace(state, loss_scale=replace(state.loss_scale, value=jnp.float32(2.0**40)))
    before = jax.tree.map(np.asarray, (state.model, state.opt_state))
    step = work.compile_step(state, placed)
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


def test_loss_scale_doubles_after_good_steps():
    scale = replace(LossScale.start(), good_steps=jnp.int32(LossScale.INTERVAL - 2))
    scale = scale.update(jnp.bool(True))
    assert float(scale.value) == 1.0
    scale = scale.update(jnp.bool(True))
    assert float(scale.value) == 2.0 and int(scale.good_steps) == 0


def test_learning_rate_rises_and_falls():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, min_lr_ratio=0.1)
    rate = learning_rate(config, 14)
    np.testing.assert_allclose([rate(i) for i in range(5)], [0.25, 0.5, 0.75, 1.0, 1.0])
    np.testing.assert_allclose(rate(14), 0.1, rtol=1e-6)
    linear = learning_rate(replace(config, lr_scheduler_type="linear"), 14)
    np.testing.assert_allclose([linear(9), linear(20)], [0.55, 0.1], rtol=1e-6)
    constant = learning_rate(replace(config, lr_scheduler_type="constant"), 14)
    assert float(constant(14)) == 1.0
    wsd = learning_rate(replace(config, lr_scheduler_type="wsd", decay_ratio=0.25), 20)
    wanted = [0.25, 1.0, 1.0, 1.0, 0.82, 0.1, 0.1]
    np.testing.assert_allclose([wsd(i) for i in (0, 3, 4, 15, 16, 20, 30)], wanted, rtol=1e-6)
    ratio = learning_rate(replace(config, warmup_steps=None, warmup_ratio=0.07), 100)
    np.testing.assert_allclose([ratio(0), ratio(6)], [1 / 7, 1.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(warmup_steps=11), "warmup_steps=11: the warm-up must end within the 10 steps"),
        (
            dict(warmup_steps=6, lr_scheduler_type="wsd", decay_ratio=0.5),
            "decay_ratio=0.5: 6 steps of warm-up and 5 of decay must fit into the 10 steps",
        ),
        (dict(warmup_steps=1, warmup_ratio=0.1), "warmup_ratio=0.1: must not be set beside"),
        (dict(decay_ratio=0.5), "decay_ratio=0.5: must not be set with lr_scheduler_type=cosine"),
        (dict(warmup_ratio=1.5), r"warmup_ratio=1.5 is not in \[0, 1\]"),
        (dict(learning_rate=None), "optimizer.learning_rate: must be set"),
    ],
)
def test_schedules_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        learning_rate(OptimizerConfig(**{"learning_rate": 1.0} | changes), 10)


def test_moments_in_host_memory(batch, tmp_path):
    """The same steps as with moments on the device, also after a checkpoint."""
    small = replace(task(), model=replace(MODEL, num_layers=1, gated=False, norm_scale=False))
    device, host = (
        with_optimizer(small, state_dtype="int8", state_memory_kind=kind)
        for kind in ("device", "pinned_host")
    )
    (_, wanted), placed = steps(device, batch, 4), host.layout.put(batch)
    state = host.init_state()
    step, rows = host.compile_step(state, placed), []
    for n in range(4):
        if n == 2:
            checkpoints = Checkpoints(tmp_path)
            checkpoints.save(2, state, {})
            checkpoints.close()
            _, state, _ = Checkpoints(tmp_path).restore(host.abstract_state())
        state, metrics = step(state, placed)
        rows.append({name: float(x) for name, x in metrics.items()})
        moments = jax.tree.leaves((state.opt_state.mu, state.opt_state.nu))
        assert {x.sharding.memory_kind for x in moments} == {"pinned_host"}
        assert {x.sharding.memory_kind for x in jax.tree.leaves(state.model)} == {"device"}
    assert rows == wanted
    with pytest.raises(RuntimeError, match=r"=pinned_host, but the moments are in \{'device'\}"):
        host.compile_step(device.init_state(), placed)
