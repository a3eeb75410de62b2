"""The train step on a mesh: loss, gradients and states are those of one device."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from bptjax.models.config import ModelConfig
from bptjax.models.groups.encoder import EncoderConfig
from bptjax.models.groups.experts import ExpertsConfig
from bptjax.models.groups.linear_attention import LinearAttentionConfig
from bptjax.models.groups.norms import NormsConfig
from bptjax.models.groups.short_convolution import ShortConvolutionConfig
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.training.state import abstract_state
from bptjax.training.step import abstract_batch, compile_step, gradients
from training.specs import assert_same, gradient_sums, initial_state, with_optimizer
from training.test_step import MODEL, SMALL, T, make_spec, steps

MESHES = [dict(dp=2, fsdp=1, sp=4, sequence_strategy="ring"), dict(dp=1, fsdp=2, tp=2, sp=2)]


@pytest.mark.thorough
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
    one, mesh = make_spec(), make_spec(ParallelConfig(dp=4, fsdp=1, sp=2, sequence_strategy="ring"))
    one, mesh = (replace(spec, model=model) for spec in (one, mesh))
    assert_same(gradient_sums(mesh, batch, 2), gradient_sums(one, batch, 1))


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", MESHES, ids=["ring", "tp"])
def test_layers_without_attention_on_a_mesh(batch, mesh, mixing):
    """Their state passes through the devices, also in zigzag order, and ends with each document."""
    model, wanted = mixing
    spec = replace(make_spec(ParallelConfig(**mesh)), model=model)
    assert_same(gradient_sums(spec, batch, 2), wanted)


@pytest.mark.thorough
def test_int8_states_of_linear_attention_and_experts_compile():
    """XLA cannot partition a device's index in the update if it shards over other axes itself."""
    sizes = LinearAttentionConfig(key_heads=2, value_heads=4, key_size=8, value_size=8)
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    experts = dict(feed_forward="experts", experts=ExpertsConfig(count=4, per_token=1, size=512))
    mixing = dict(num_layers=3, layer_types=kinds, linear_attention=sizes)
    model = replace(MODEL, num_heads=4, **mixing, **experts)
    spec = make_spec(ParallelConfig(dp=1, fsdp=1, tp=4, ep=2))
    spec = with_optimizer(replace(spec, model=model), type="lion", state_dtype="int8")
    compile_step(spec, abstract_state(spec), abstract_batch(spec))


KINDS = ["linear_attention", "short_convolution"]


@pytest.fixture(scope="module", params=KINDS)
def mixing(batch, request):
    """A model with a layer without attention, and the sums of one device."""
    sizes = dict(
        linear_attention=LinearAttentionConfig(2, 4, 8, 4),
        short_convolution=ShortConvolutionConfig(4),
    )
    mixing = {"layer_types": [request.param, "full_attention"], request.param: sizes[request.param]}
    model = replace(MODEL, attention=replace(MODEL.attention, gate=True), init_std=0.3, **mixing)
    return model, gradient_sums(replace(make_spec(), model=model), batch, 1)


@pytest.mark.thorough
def test_dropout_is_that_of_one_device(batch):
    """Also where rows are filled up, which one device does not."""
    dropping = replace(MODEL, num_layers=1, residual_dropout=0.3, embedding_dropout=0.2)
    parts = {name: x[:2, : T - 2] for name, x in batch.items()}
    ring = ParallelConfig(dp=2, fsdp=1, sp=4, sequence_strategy="ring")
    one, cut = (
        replace(spec, model=dropping) for spec in (make_spec(), make_spec(ring, seq_len=T - 2))
    )
    assert cut.layout.put(parts)["tokens"].shape[2] > T - 2
    wanted = gradient_sums(one, parts, 1)
    assert (
        abs(
            gradient_sums(replace(one, model=replace(MODEL, num_layers=1)), parts, 1)[0][0]
            - wanted[0][0]
        )
        > 0.1
    )
    assert_same(gradient_sums(cut, parts, 1), wanted)


@pytest.mark.thorough
def test_rows_as_long_as_learned_positions(batch):
    """On a mesh that fills them up."""
    spec = make_spec(ParallelConfig(dp=1, fsdp=1, sp=8), seq_len=T - 2)
    learned = replace(
        MODEL, num_layers=1, position_embedding="learned", max_position_embeddings=T - 2
    )
    spec = replace(spec, model=replace(learned, num_heads=8))
    losses, _, _ = gradient_sums(spec, {name: x[:1, : T - 2] for name, x in batch.items()}, 1)
    assert np.isfinite(losses.loss)


@pytest.mark.thorough
def test_a_masked_language_model_on_a_mesh(masked):
    """Packed documents with learned positions, in sequences that the mesh pads; dropout too."""
    parts, spec, wanted = masked
    spec = replace(spec, config=replace(spec.config, parallel=ParallelConfig(**MESHES[1])))
    spec = replace(spec, mesh=make_mesh(spec.config.parallel))
    assert_same(gradient_sums(spec, parts, 2), wanted)


@pytest.fixture(scope="module")
def masked(batch):
    """A batch, a spec and the sums of one device."""
    model = ModelConfig(
        causal=False,
        vocab_size=64,
        hidden_size=32,
        num_layers=1,
        num_heads=4,
        norms=NormsConfig("layer", bias=True, embedding=True),
        position_embedding="learned",
        max_position_embeddings=T,
        position_offset=2,
        encoder=EncoderConfig(token_types=2, masked_head=True),
        head_bias=True,
        residual_dropout=0.2,
    )
    parts = {name: x[:4, : T - 2] for name, x in batch.items()}
    chosen = (np.arange(T - 2) % 3 == 1) & (parts["segments"] > 0)
    parts |= dict(labels=np.where(chosen, parts["tokens"], -100).astype(np.int32))
    parts |= dict(token_types=parts["tokens"] % 2)
    spec = replace(make_spec(seq_len=T - 2), model=model)
    return parts, spec, gradient_sums(spec, parts, 2)


@pytest.mark.thorough
def test_windows_on_both_sides_on_a_mesh(masked):
    """Rotary positions, a first layer without a norm, and a window in every other layer, whose
    sequences are in zigzag order."""
    parts, spec, _ = masked
    layers = dict(
        num_layers=2,
        norms=replace(spec.model.norms, first=False),
        sliding_window=4,
        layer_types=["full_attention", "sliding_attention"],
        position_embedding="rope",
        rope_parameters=dict(
            full_attention=dict(rope_theta=1e4), sliding_attention=dict(rope_theta=50.0)
        ),
        position_offset=0,
        # So that attention matters.
        init_std=0.3,
        residual_dropout=0.0,
    )
    one = replace(spec, model=replace(spec.model, **layers))
    parallel = ParallelConfig(dp=2, fsdp=1, sp=4, sequence_strategy="ring")
    mesh = replace(one, config=replace(one.config, parallel=parallel), mesh=make_mesh(parallel))
    assert_same(gradient_sums(mesh, parts, 2), gradient_sums(one, parts, 2))


def shard_bytes(tree) -> int:
    """Of one device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def small(parallel=None):
    # If a gradient is only rounding noise, the direction of AdamW's step is noise too.
    spec = with_optimizer(make_spec(parallel), learning_rate=1e-3)
    return replace(spec, model=SMALL)


@pytest.fixture(scope="module")
def two_steps(batch):
    """The state and metrics of one device."""
    return steps(small(), batch, 2)


@pytest.mark.thorough
def test_zero_says_what_fsdp_and_sp_cut(batch, two_steps):
    """Two steps of each stage are those of one device, and each stage cuts more than the last."""
    one, wanted = two_steps
    held = []
    for zero in (1, 2, 3):
        spec = small(ParallelConfig(dp=1, fsdp=2, tp=2, sp=2, zero_stage=zero))
        state, placed = initial_state(spec), spec.layout.put(batch)
        step = compile_step(spec, state, placed)
        for row in wanted:
            state, metrics = step(state, placed)
            for name, x in metrics.items():
                np.testing.assert_allclose(x, row[name], rtol=1e-5)
        for a, b in zip(jax.tree.leaves(state.model), jax.tree.leaves(one.model), strict=True):
            a, b = np.asarray(a), np.asarray(b)
            assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)
        with jax.set_mesh(spec.mesh):
            _, found, _ = jax.jit(partial(gradients, spec))(state, spec.layout.put(batch, 2))
        parts = state.opt_state.slots["mu"], found, state.model
        argument = step.memory_analysis().argument_size_in_bytes
        held.append([*map(shard_bytes, parts), argument])
    (_, *first), *_, (cut, _, _, least) = held
    whole, _, most = first
    assert [row[:3] for row in held] == [[cut, whole, whole], [cut, cut, whole], [cut, cut, cut]]
    assert whole == 4 * cut and most - least == whole - cut


@pytest.mark.thorough
def test_muon_on_a_mesh_is_that_of_one_device(batch):
    options = dict(type="muon", muon_dtype="float32", learning_rate=1e-3)
    mesh = ParallelConfig(dp=1, fsdp=2, tp=2, sp=2)
    (_, wanted), (_, rows) = (
        steps(with_optimizer(make_spec(parallel), **options), batch, 3) for parallel in (None, mesh)
    )
    for row, other in zip(rows, wanted, strict=True):
        np.testing.assert_allclose(row["train/loss"], other["train/loss"], rtol=1e-5)
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]


@pytest.mark.thorough
def test_router_losses_are_of_the_global_batch(batch):
    """On a mesh whose devices and micro-batches send unequal shares of their tokens to an expert,
    and with gradient accumulation: loss and gradients of one big batch on one device. Also beside a
    layer without experts, and with a shared expert; the router's correction is not trained."""
    routed = dict(count=4, aux_loss=0.5, z_loss=0.1, mlp_only_layers=[0], shared_size=24)
    experts = ExpertsConfig(**routed, scores="sigmoid", correction=True)

    def spec(parallel=None):
        model = replace(MODEL, feed_forward="experts", experts=experts)
        return replace(make_spec(parallel), model=model)

    one, mesh = spec(), spec(ParallelConfig(dp=2, fsdp=1, tp=2, sp=2, sequence_strategy="ring"))
    wanted = gradient_sums(one, batch, 1)
    assert_same(gradient_sums(mesh, batch, 2), wanted)
    count, sums = int(wanted[2]), wanted[0].counts
    state, [row] = steps(one, batch, 1)
    assert not state.model.layers.mlp.router.correction[...].any()
    assert state.model.layers.dense.up.kernel.shape[0] == 1
    assert row["train/auxiliary_loss"] > 0.5
    assert row["train/auxiliary_loss"] == pytest.approx(float(wanted[0].auxiliary) / count)
    assert row["train/loss"] == pytest.approx(float(wanted[0].loss) / count)
    tokens = (batch["segments"] > 0).sum()
    assert sums.sums["chosen"].sum(1).tolist() == [2 * tokens]
    busiest = float(sums.sums["chosen"].max()) / (2 * tokens / 4)
    assert row["train/max_expert_load"] == pytest.approx(busiest)
