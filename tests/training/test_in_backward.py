"""Optimizer steps inside the backward pass give the states of the steps after it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import fast

from bptjax.models.groups.encoder import EncoderConfig
from bptjax.models.groups.experts import ExpertsConfig
from bptjax.models.groups.full_attention import FullAttentionConfig, SharedKvConfig
from bptjax.models.groups.layer_embedding import LayerEmbeddingConfig
from bptjax.models.groups.linear_attention import LinearAttentionConfig
from bptjax.models.groups.norms import NormsConfig
from bptjax.objectives import ObjectiveConfig
from bptjax.parallel.mesh import ParallelConfig
from bptjax.training.checks import check_in_backward
from bptjax.training.spec import TrainSpec
from bptjax.training.state import TrainState, abstract_state, checkpoint_view, init_state
from bptjax.training.step import abstract_batch, compile_step
from bptjax.weights.lora import AdapterConfig
from training.specs import initial_state, with_optimizer
from training.test_step import MODEL, make_spec

LAYERS = replace(MODEL, num_layers=4)
ROUTED = dict(feed_forward="experts", experts=ExpertsConfig(count=4, aux_loss=0.5, z_loss=0.1))
# Windows, heads of two sizes, layers that read the keys of earlier ones, embeddings of layers.
GEMMA4 = dict(
    num_layers=6,
    layer_types=["sliding_attention", "full_attention"] * 3,
    sliding_window=5,
    full_attention=FullAttentionConfig(head_dim=16, kv_heads=1),
    norms=NormsConfig(position="sandwich"),
    shared_kv=SharedKvConfig(layers=2),
    layer_embedding=LayerEmbeddingConfig(size=8),
    tied_head=True,
)
# Few parameters, because the update of each one's 8-bit states takes a while to compile.
FEW = dict(gated=False, norms=NormsConfig(scale=False))
WINDOWS = ["sliding_attention", "sliding_attention", "full_attention"]
CLASSES = dict(causal=False, encoder=EncoderConfig(classes=3), position_embedding="rope")
MUON = dict(type="muon", muon_dtype="float32")
# Model, execution, parallel, optimizer, train, adapter.
CASES = {
    "decoder": {},
    "tied head, remat full, z-loss": dict(
        model=dict(tied_head=True), execution=dict(remat="full"), train=dict(z_loss=0.1)
    ),
    "head groups in groups of layers": dict(
        execution=dict(remat="nested_full(2)", head_groups=2, offload=0.5), accumulate=2
    ),
    "head groups on a mesh": dict(
        execution=dict(head_groups=2, remat="save_attention"),
        parallel=dict(dp=2, fsdp=2, sp=2),
    ),
    "offload": dict(execution=dict(remat="nested(2)", offload=0.5)),
    "accumulated offload": dict(execution=dict(remat="save_attention", offload=0.5), accumulate=2),
    "fused, lion": dict(execution=dict(schedule="fused"), optimizer=dict(type="lion")),
    "windows": dict(model=dict(num_layers=5, sliding_window=5, layer_types=WINDOWS + WINDOWS[:2])),
    "gemma4": dict(model=GEMMA4),
    "gemma4 in groups": dict(model=GEMMA4, execution=dict(remat="nested(2)"), accumulate=2),
    "accumulated experts": dict(model=ROUTED, accumulate=2),
    "dropout": dict(model=dict(residual_dropout=0.3, embedding_dropout=0.2), accumulate=4),
    "encoder": dict(model=CLASSES),
    "muon": dict(optimizer=MUON),
    "muon of experts": dict(optimizer=MUON, model=ROUTED),
    "float8": dict(train=dict(linear="float8")),
    "lora": dict(adapter=dict(type="lora", r=4)),
    "qlora": dict(adapter=dict(type="qlora", r=4), accumulate=2),
    "delayed clipping of qlora in float8": dict(
        adapter=dict(type="qlora", r=4),
        train=dict(linear="float8"),
        optimizer=dict(clip="delayed", max_grad_norm=1e6),
        execution=dict(remat="full"),
        accumulate=2,
    ),
    "pairs": dict(objective="dpo", adapter=dict(type="lora", r=4)),
    "pairs and experts on a mesh": dict(
        objective="orpo", parallel=dict(dp=1, fsdp=2, ep=2, sp=2), model=ROUTED, accumulate=2
    ),
    "pairs and linear attention": dict(
        objective="simpo",
        share_prompt=True,
        model=dict(
            layer_types=["linear_attention", "full_attention"] * 2,
            linear_attention=LinearAttentionConfig(2, 4, 8, 4),
        ),
        parallel=dict(dp=4, fsdp=1, sp=2),
    ),
    "mesh": dict(parallel=dict(dp=1, fsdp=2, tp=2, sp=2)),
    "ring": dict(parallel=dict(dp=4, fsdp=1, sp=2, sequence_strategy="ring")),
    "experts on a mesh": dict(parallel=dict(dp=1, fsdp=2, ep=4), model=ROUTED),
    "zero stage 1": dict(parallel=dict(dp=1, fsdp=4, sp=2, zero_stage=1)),
    "zero stage 2": dict(parallel=dict(dp=2, fsdp=2, tp=2, zero_stage=2)),
}
# Optimizer states in host memory.
STATES_ON_HOST = (
    *("decoder", "gemma4 in groups", "muon", "lora", "experts on a mesh", "mesh", "zero stage 1"),
)
HOST = ", states on the host"
# With exact clipping only: further cases have the other parts of these.
CLIPPED = "gemma4", "qlora"
COMPARED = [name for name in CASES if name not in {*STATES_ON_HOST, *CLIPPED}]
COMPARED += [name + HOST for name in STATES_ON_HOST]
FAST = {"mesh" + HOST}


def spec_of(
    model=None,
    execution=None,
    parallel=None,
    optimizer=None,
    train=None,
    adapter=None,
    objective="auto",
    share_prompt=None,
    accumulate=1,
) -> TrainSpec:
    accumulation = dict(gradient_accumulation_steps=accumulate)
    spec = make_spec(parallel and ParallelConfig(**parallel), **(train or {}), **accumulation)
    config = spec.config
    config = replace(
        config,
        execution=replace(config.execution, **(execution or {})),
        adapter=AdapterConfig(**(adapter or {})),
        objective=ObjectiveConfig(objective, share_prompt=share_prompt),
    )
    spec = replace(spec, config=config, model=replace(LAYERS, **(model or {})))
    return with_optimizer(spec, **dict(max_grad_norm=0.0) | (optimizer or {}))


def steps(spec: TrainSpec, batch, n: int = 2) -> tuple[TrainState, list[dict]]:
    state = initial_state(spec)
    placed = spec.layout.put(batch, spec.config.train.gradient_accumulation_steps)
    step, rows = compile_step(spec, state, placed), []
    for _ in range(n):
        state, metrics = step(state, placed)
        rows.append({name: float(x) for name, x in metrics.items()})
    return state, rows


@pytest.mark.parametrize("name", fast(COMPARED, FAST))
def test_equals_the_step_after_the_backward_pass(batch, name):
    plain = name.removesuffix(HOST)
    spec = spec_of(**CASES[plain])
    if not spec.model.causal:
        first = np.arange(batch["tokens"].shape[1]) == 0
        labels = np.where(first, np.arange(8)[:, None] % 3, -100).astype(np.int32)
        batch = batch | dict(labels=labels, segments=np.minimum(batch["segments"], 1))
    if spec.objective.unit == "pair":
        answers = np.where((batch["labels"] >= 0) & (batch["positions"] > 0), batch["segments"], 0)
        batch = batch | dict(answers=answers)
    after, wanted = steps(with_optimizer(spec, in_backward=False), batch)
    memory = "device" if name == plain else "pinned_host"
    spec = with_optimizer(spec, in_backward=True, state_memory_kind=memory)
    inside, rows = steps(spec, batch)
    for row, other in zip(rows, wanted, strict=True):
        assert row.keys() == other.keys()
        for key in row:
            np.testing.assert_allclose(row[key], other[key], rtol=2e-5, atol=1e-6, err_msg=key)
    for a, b in zip(jax.tree.leaves(inside), jax.tree.leaves(after), strict=True):
        # By norm: where a gradient is zero but for rounding, Adam's step is arbitrary.
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) <= 1e-4 * max(np.linalg.norm(b), 1e-3)


# Gradients of the layers in host memory, and their update after the backward pass.
ON_HOST = {
    "decoder": dict(optimizer=dict(state_dtype="bfloat16")),
    "int8 states on the host": dict(
        optimizer=dict(state_dtype="int8", state_memory_kind="pinned_host"),
        train=dict(param_dtype="bfloat16"),
        model=FEW,
    ),
    **{
        name: CASES[name]
        for name in (*CLIPPED, "accumulated experts", "mesh", "muon", "zero stage 1")
    },
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ON_HOST)
def test_exact_clipping_with_gradients_on_the_host(batch, name):
    """The same step as with all gradients on the device, to rounding errors of the gradients: the
    updates are the same program."""
    spec = spec_of(**ON_HOST[name])
    after = with_optimizer(spec, max_grad_norm=0.01)
    inside = with_optimizer(after, in_backward=True)
    check_in_backward(inside)
    assert inside.gradients_on_host and not after.in_backward
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(abstract_state(inside).gradients)}
    assert kinds == {"pinned_host"}
    (a, rows), (b, wanted) = steps(inside, batch), steps(after, batch)
    for row, other in zip(rows, wanted, strict=True):
        assert row.keys() == other.keys() and row["train/grad_norm"] > 0.01
        for key in row:
            np.testing.assert_allclose(row[key], other[key], rtol=2e-5, err_msg=key)
    a, b = checkpoint_view(inside, a), checkpoint_view(after, b)
    coarse = spec.config.train.param_dtype == "bfloat16"
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        limit = (2e-2 if coarse else 1e-4) * max(np.linalg.norm(y), 1e-3)
        assert np.linalg.norm(x - y) <= limit


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_states_in_few_bits(batch, dtype):
    """Rounding is random, so the results differ by little."""
    train, optimizer = dict(param_dtype="bfloat16"), dict(state_dtype=dtype)
    spec = spec_of(model=FEW, train=train, optimizer=optimizer)
    after, wanted = steps(with_optimizer(spec, in_backward=False), batch, 8)
    inside, rows = steps(with_optimizer(spec, in_backward=True), batch, 8)
    losses = [[row["train/loss"] for row in each] for each in (rows, wanted)]
    assert losses[0][0] == losses[1][0] and losses[0][-1] < 0.9 * losses[0][0]
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.02)
    for a, b in zip(jax.tree.leaves(inside.model), jax.tree.leaves(after.model), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.abs(a - b).mean() < 0.05 * max(np.abs(b).mean(), 0.1)


@pytest.mark.thorough
def test_int8_states_on_a_mesh(batch):
    mesh = dict(dp=2, fsdp=2, tp=2, zero_stage=2)
    one, on_mesh = (
        spec_of(model=FEW, parallel=parallel, optimizer=dict(state_dtype="int8"))
        for parallel in (None, mesh)
    )
    _, wanted = steps(one, batch, 6)
    _, rows = steps(on_mesh, batch, 6)
    losses = [[row["train/loss"] for row in each] for each in (rows, wanted)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.02)


@pytest.mark.thorough
def test_delayed_clipping_below_the_maximum_is_exact_clipping(batch):
    exact = with_optimizer(spec_of(), max_grad_norm=1e6)
    delayed = with_optimizer(exact, clip="delayed")
    (a, _), (b, _) = steps(exact, batch, 3), steps(delayed, batch, 3)
    for x, y in zip(jax.tree.leaves(a.model), jax.tree.leaves(b.model), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("in_backward", fast([True, False], [True]))
def test_delayed_clipping_is_a_step_late_above_the_maximum(batch, in_backward):
    # Lion's sign would hide a factor, Adam's ratio nearly; the first moment shows it.
    low = dict(clip="delayed", max_grad_norm=0.1, type="lion", lion_beta2=0.0)
    low = with_optimizer(spec_of(), in_backward=in_backward, **low)
    state, placed = init_state(low), low.layout.put(batch)
    step = compile_step(low, state, placed)

    def moment(state):
        squares = (np.square(x).sum() for x in jax.tree.leaves(state.opt_state.slots["mu"]))
        return np.sqrt(sum(squares))

    state, metrics = step(state, placed)
    norm = float(metrics["train/grad_norm"])
    np.testing.assert_allclose(moment(state), norm, rtol=1e-5)
    np.testing.assert_allclose(state.last_norm, norm, rtol=1e-6)
    state, metrics = step(state, placed)
    np.testing.assert_allclose(moment(state), metrics["train/grad_norm"] * 0.1 / norm, rtol=1e-5)


def test_clipping_per_layer(batch):
    spec = with_optimizer(
        spec_of(), clip="per_layer", max_grad_norm=0.1, type="lion", lion_beta2=0.0
    )
    state, _ = steps(spec, batch, 1)
    slots = state.opt_state.slots["mu"]
    squares = sum(np.square(x).sum(tuple(range(1, x.ndim))) for x in jax.tree.leaves(slots.layers))
    np.testing.assert_allclose(np.sqrt(squares), 0.1, rtol=1e-5)


def test_a_loss_that_is_not_finite_changes_nothing(batch):
    spec = spec_of(optimizer=dict(clip="delayed"))
    state = init_state(spec)
    state.model.head.set_value(state.model.head.get_value().at[3, 5].set(jnp.nan))
    before = jax.tree.map(np.asarray, state)
    placed = spec.layout.put(batch)
    after, metrics = compile_step(spec, state, placed)(state, placed)
    assert not np.isfinite(metrics["train/loss"]) and not np.isfinite(metrics["train/grad_norm"])
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        if np.shape(b) != () or np.asarray(b).dtype != np.int32:  # The step counts on.
            np.testing.assert_array_equal(a, b)


@pytest.mark.thorough
def test_gradients_of_all_layers_never_exist_at_once():
    """More layers add their parameters, states and inputs to the memory of a step, but not their
    gradients."""
    model = replace(LAYERS, hidden_size=64, num_heads=2, intermediate_size=2048, vocab_size=256)
    temporary = []
    for layers in (4, 16):
        spec = spec_of(execution=dict(remat="full"), train=dict(seq_len=64))
        spec = replace(spec, model=replace(model, num_layers=layers))
        state = abstract_state(spec)
        needs = compile_step(spec, state, abstract_batch(spec)).memory_analysis()
        temporary.append(needs.temp_size_in_bytes)
        size = sum(4 * x.size for x in jax.tree.leaves(state.model.layers))
    inputs = 12 * 64 * 64 * 4
    assert temporary[1] - temporary[0] < inputs + 0.05 * size


@pytest.mark.parametrize(
    "keys, message",
    [
        (
            dict(train=dict(compute_dtype="float16")),
            "must be false with train.compute_dtype=float16",
        ),
        (dict(execution=dict(remat="none")), "must be false with execution.remat=none"),
    ],
)
def test_refused(keys, message):
    spec = spec_of(**keys)
    assert not spec.in_backward
    with pytest.raises(ValueError, match="optimizer.in_backward=true: " + message):
        check_in_backward(with_optimizer(spec, in_backward=True))
    with pytest.raises(ValueError, match="optimizer.clip=per_layer: must be exact with"):
        check_in_backward(with_optimizer(spec, clip="per_layer", in_backward=False))
    delayed = with_optimizer(spec, clip="delayed", in_backward=False)
    if spec.compute_dtype == jnp.float16:
        with pytest.raises(ValueError, match="optimizer.clip=delayed: must be exact with"):
            check_in_backward(delayed)
    else:
        check_in_backward(delayed)
