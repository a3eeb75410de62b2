"""Adapters: frozen weights stay, stored weights are small, and every layout gives the same
result."""

from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiers import fast
from training.specs import assert_same, gradient_sums

from bptjax.config import Config, TrainConfig
from bptjax.models.config import ModelConfig
from bptjax.models.decoder import Decoder
from bptjax.models.execution import ExecutionConfig
from bptjax.models.groups.experts import ExpertsConfig
from bptjax.models.params import put_param
from bptjax.optim.optimizer import OptimizerConfig
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.training.spec import TrainSpec
from bptjax.training.state import (
    abstract_state,
    init_state,
    parameter_counts,
    split_trained,
    with_shardings,
)
from bptjax.training.step import compile_step
from bptjax.weights.lora import AdapterConfig, LoraKernel, target_kernels
from bptjax.weights.quantized_kernels import (
    QuantizedKernel,
    linear_kernels,
    quantize_kernels,
    quantizer,
)

T = 32
MODEL = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, tied_head=False
)
CONFIG = Config(
    train=TrainConfig(seq_len=T, max_steps=20),
    execution=ExecutionConfig(q_chunk=8, k_chunk=8, ffn_chunk=16, ce_chunk=32),
    optimizer=OptimizerConfig(learning_rate=1e-2),
    adapter=AdapterConfig(type="qlora", r=4, alpha=16, dropout=0.1),
)


def make_spec(
    parallel: ParallelConfig | None = None, model: ModelConfig = MODEL, **groups
) -> TrainSpec:
    """`groups` change keys of CONFIG's."""
    mesh = make_mesh(parallel or ParallelConfig(), None if parallel else jax.devices()[:1])
    changed = {name: replace(getattr(CONFIG, name), **keys) for name, keys in groups.items()}
    config = replace(CONFIG, parallel=parallel or ParallelConfig(), **changed)
    return TrainSpec(config, model, mesh)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (8, T), dtype=np.int32)
    place = np.broadcast_to(np.arange(T, dtype=np.int32), tokens.shape)
    segments = np.where(place < rng.integers(2, T + 1, (8, 1)), 1, 0).astype(np.int32)
    labels = np.where(segments > 0, np.roll(tokens, -1, 1), -100).astype(np.int32)
    return {"tokens": tokens, "labels": labels, "segments": segments, "positions": place}


def moved(state):
    """Both low-rank matrices away from where they start: with `b` zero half would be untested."""

    def one(at, v):
        if not isinstance(v, nnx.LoRAParam):
            return v
        key = jax.random.fold_in(jax.random.key(7), len(jax.tree_util.keystr(at)))
        noise = 0.1 * jax.random.normal(key, v.shape)
        return v.replace(jax.device_put(v[...] + noise, v.get_value().sharding))

    is_variable = dict(is_leaf=lambda x: isinstance(x, nnx.Variable))
    return replace(state, model=jax.tree.map_with_path(one, state.model, **is_variable))


@pytest.fixture(scope="module")
def state():
    return moved(init_state(make_spec()))


@pytest.fixture(scope="module")
def whole(batch, state):
    return gradient_sums(make_spec(), batch, state=state)


def dense(state):
    """The same state with its kernels in float32."""

    def one(kernel):
        if not isinstance(kernel, QuantizedKernel):
            return kernel
        return nnx.Param(jax.lax.map(lambda k: k.dense(jnp.float32), kernel), axes=kernel.axes)

    @jax.jit
    def run(model):
        return jax.tree.map(one, model, is_leaf=lambda x: isinstance(x, QuantizedKernel))

    return replace(state, model=run(state.model))


@pytest.mark.thorough
def test_qlora_is_lora_on_the_dequantised_base(batch, state, whole):
    assert_same(
        gradient_sums(make_spec(adapter=dict(type="lora")), batch, state=dense(state)), whole
    )


@pytest.mark.thorough
def test_so_it_is_in_8_bits(batch):
    few = dict(bits=8, double_quant=False, target_modules=["query", "mlp.down"])
    spec = make_spec(adapter=few)
    state = moved(init_state(spec))
    lora = make_spec(adapter=dict(type="lora"))
    assert_same(
        gradient_sums(lora, batch, state=dense(state)), gradient_sums(spec, batch, state=state)
    )


@pytest.mark.thorough
def test_gradients_are_those_of_the_merged_kernel(batch):
    """dL/da = scale · dL/dW · bᵀ and dL/db = scale · aᵀ · dL/dW, W the sum of base and product."""
    spec = make_spec(adapter=dict(type="lora", dropout=0.0))
    state = moved(init_state(spec))
    _, got, _ = gradient_sums(spec, batch, state=state)

    def merged(kernel):
        if not isinstance(kernel, LoraKernel):
            return kernel
        product = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1))(kernel.a[...], kernel.b[...])
        return nnx.Param(kernel.base[...] + 4.0 * product, axes=kernel.base.axes)

    model = jax.tree.map(merged, state.model, is_leaf=lambda x: isinstance(x, LoraKernel))
    full = replace(spec, config=replace(spec.config, adapter=AdapterConfig()))
    _, wanted, _ = gradient_sums(full, batch, state=replace(state, model=model))
    for name in ("query", "key", "value", "out"):
        kernel = getattr(state.model.layers, name).kernel
        L, r = kernel.b.shape[:2]
        a, b = np.asarray(kernel.a[...]).reshape(L, -1, r), np.asarray(kernel.b[...])
        dw = np.asarray(getattr(wanted.layers, name).kernel[...]).reshape(L, a.shape[1], -1)
        da, db = (np.asarray(x[...]) for x in got_of(got, name))
        b = b.reshape(L, r, -1)
        for x, y in ((da, 4 * dw @ b.swapaxes(1, 2)), (db, 4 * a.swapaxes(1, 2) @ dw)):
            np.testing.assert_allclose(x.reshape(y.shape), y, atol=1e-5 * abs(y).max())


def got_of(gradients, name):
    kernel = getattr(gradients.layers, name).kernel
    assert kernel.base is None and kernel.scale is None
    return kernel.a, kernel.b


@pytest.mark.thorough
@pytest.mark.parametrize(
    "execution",
    [
        dict(remat="save_attention", head_groups=2),
        dict(remat="none"),
        dict(remat="nested(2)", ffn_chunk=64),
        dict(schedule="fused"),
    ],
    ids=str,
)
def test_remat_and_schedule_change_nothing(batch, state, whole, execution):
    assert_same(gradient_sums(make_spec(execution=execution), batch, state=state), whole)


@pytest.mark.thorough
def test_accumulated_micro_batches_are_one_big_batch(batch):
    """But for dropout, whose key is the micro-batch's own."""
    spec = make_spec(adapter=dict(dropout=0.0, target_modules=["value", "mlp.up"]))
    state = moved(init_state(spec))
    assert_same(gradient_sums(spec, batch, 4, state), gradient_sums(spec, batch, state=state))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(dp=2, fsdp=2, tp=2),
        ParallelConfig(dp=1, fsdp=2, tp=2, sp=2, sequence_strategy="ring"),
    ],
    ids=str,
)
def test_eight_devices_are_one(batch, whole, parallel):
    spec = make_spec(parallel)
    state = moved(init_state(spec))
    assert_same(gradient_sums(spec, batch, state=state), whole)
    up = state.model.layers.mlp.up.kernel
    for x in (up.base.matrix.codes, up.a):
        assert x.get_value().addressable_shards[0].data.size < x.size


@pytest.mark.parametrize(
    ("optimizer", "rate"),
    fast([("adamw", 1e-2), ("lion", 1e-2), ("muon", 5e-2)], [("adamw", 1e-2)]),
)
def test_only_adapters_learn(batch, optimizer, rate):
    spec = make_spec(
        train=dict(compute_dtype="float16"),
        adapter=dict(r=8, target_modules=["value", "mlp.down"]),
        optimizer=dict(type=optimizer, learning_rate=rate, weight_decay=0.0),
    )
    state, placed = init_state(spec), spec.layout.put(batch)
    before = jax.tree.map(np.asarray, split_trained(spec, state.model))
    step, losses = compile_step(spec, state, placed), []
    for _ in range(20):
        state, metrics = step(state, placed)
        losses.append(float(metrics["train/loss"]))
    assert losses[-1] < losses[0] - 0.1
    for i, same in ((0, False), (1, True)):
        after = jax.tree.leaves(split_trained(spec, state.model)[i])
        for x, y in zip(after, jax.tree.leaves(before[i]), strict=True):
            assert np.array_equal(x, y) == same
    assert {x.dtype for x in jax.tree.leaves(state.opt_state.slots)} == {jnp.dtype("float32")}
    trained = sum(x.size for x in jax.tree.leaves(state.opt_state.slots["mu"]))
    assert parameter_counts(spec).trained == trained


@pytest.mark.thorough
@pytest.mark.parametrize("remat", ["none", "save_attention"])
def test_no_dense_copy_of_the_model(remat):
    """A step's memory: 4.13 bits a parameter, and no more beside than a few layers' kernels."""
    L, D = 16, 256
    model = replace(MODEL, hidden_size=D, num_layers=L, num_kv_heads=4)
    adapter = dict(target_modules=["key"], dropout=0.0)
    train, execution = dict(compute_dtype="bfloat16"), dict(remat=remat)
    spec = make_spec(model=model, train=train, execution=execution, adapter=adapter)
    abstract = abstract_state(spec)
    kernels = [
        x
        for x in jax.tree.leaves(abstract.model, is_leaf=lambda x: isinstance(x, QuantizedKernel))
        if isinstance(x, QuantizedKernel)
    ]
    stored = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kernels))
    count = sum(L * prod(k.inputs) * prod(k.matrix.absmax.shape[2:]) for k in kernels)
    assert count == L * 16 * D * D
    assert stored <= 0.53 * count
    batch = {k: np.zeros((1, T), np.int32) for k in ("tokens", "labels", "segments", "positions")}
    needs = compile_step(spec, abstract, spec.layout.put(batch)).memory_analysis()
    # In bfloat16 all of them take 2 bytes a parameter, in float32, as the CPU multiplies, 4.
    assert needs.temp_size_in_bytes < 0.5 * 2 * count


@pytest.mark.thorough
def test_adapters_of_experts_in_4_bits(batch):
    """Each expert has matrices of its own, quantized by itself; so have the shared expert and the
    layer without experts."""
    model = replace(MODEL, feed_forward="experts", experts=ExpertsConfig(count=4, size=40))
    model = replace(
        model, num_layers=3, experts=replace(model.experts, mlp_only_layers=[0], shared_size=24)
    )
    spec = make_spec(model=model, adapter=dict(dropout=0.0))
    state = moved(init_state(spec))
    got = gradient_sums(spec, batch, state=state)
    for name, (inputs, outputs) in dict(gate=(32, 40), up=(32, 40), down=(40, 32)).items():
        kernel = getattr(got[1].layers.mlp, name).kernel
        assert (kernel.a.shape, kernel.b.shape) == ((2, 4, inputs, 4), (2, 4, 4, outputs))
        assert all(jnp.abs(x[...]).max((2, 3)).min() > 1e-4 for x in (kernel.a, kernel.b))
    lora = make_spec(model=model, adapter=dict(type="lora", dropout=0.0))
    assert_same(gradient_sums(lora, batch, state=dense(state)), got)
    mesh = make_spec(ParallelConfig(dp=1, fsdp=2, tp=2, ep=2), model, adapter=dict(dropout=0.0))
    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(mesh))
    placed = jax.device_put(state, shardings)
    up = placed.model.layers.mlp.up.kernel
    for x in (*up.base.matrix, up.a, up.b, up.scale):
        assert x.get_value().sharding.shard_shape(x.shape)[1] == 2
    assert_same(gradient_sums(mesh, batch, state=placed), got)

    wide = make_spec(
        model=replace(model, hidden_size=256, experts=replace(model.experts, size=128))
    )
    mlp = abstract_state(wide).model.layers.mlp
    kernels = [linear.kernel.base for linear in (mlp.gate, mlp.up, mlp.down)]
    stored = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kernels))
    assert stored <= 0.53 * (2 * 3 * 4 * 256 * 128)


@pytest.mark.thorough
def test_adapters_of_slices_of_experts(batch):
    """With dropout and kernels in 4 bits."""
    model = replace(MODEL, feed_forward="experts", experts=ExpertsConfig(count=4, size=40))
    one = make_spec(model=model, execution=dict(remat="none"))
    state = moved(init_state(one))
    wanted = gradient_sums(one, batch, state=state)
    parallel = ParallelConfig(dp=1, fsdp=1, tp=2, ep=2, sp=2)
    spec = make_spec(parallel, model, execution=dict(remat="save_attention"))
    placed = jax.device_put(state, jax.tree.map(lambda x: x.sharding, abstract_state(spec)))
    assert_same(gradient_sums(spec, batch, state=placed), wanted)


def test_checkpoints_are_quantized_a_layer_at_a_time(monkeypatch):
    """The devices never hold all layers unquantized; codes and scales are those of the stack."""
    sizes = dict(num_layers=3, feed_forward="experts", experts=ExpertsConfig(count=2, size=64))
    config = replace(MODEL, hidden_size=64, **sizes)
    spec = make_spec(ParallelConfig(dp=1, fsdp=2, tp=2, ep=2), config)
    model = Decoder(config, jax.random.key(0), jnp.bfloat16)
    put = []

    def counted(leaf, array, dtype):
        put.append(array.shape)
        return put_param(leaf, array, dtype)

    monkeypatch.setattr("bptjax.weights.quantized_kernels.put_param", counted)
    quantize = quantizer(with_shardings(spec, model), "nf4", True)
    for name, linear in (("mlp.up", model.layers.mlp.up), ("query", model.layers.query)):
        path, kernel = f"layers.{name}.kernel", linear.kernel
        wanted = quantize_kernels(kernel, linear_kernels(model)[path], "nf4", True)
        leaf = with_shardings(spec, kernel)
        found = quantize(path, leaf, np.asarray(kernel[...]))
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
        assert not found.matrix.codes[...].sharding.is_fully_replicated
    assert {shape[0] for shape in put} == {1} and len(put) == 6


def test_targets():
    modules = {
        "model.layers.{}.self_attn.q_proj": ("layers.query.kernel",),
        "model.layers.{}.mlp.c_proj": ("layers.mlp.down.kernel",),
        "model.layers.{}.attn.c_proj": ("layers.out.kernel",),
        "model.layers.{}.attn.c_attn": ("layers.key.kernel", "layers.value.kernel"),
    }
    assert target_kernels(["q_proj", "mlp.c_proj"], modules) == {
        "layers.query.kernel",
        "layers.mlp.down.kernel",
    }
    assert len(target_kernels("all-linear", modules)) == 5
    assert len(target_kernels(["c_proj", "c_attn"], modules)) == 4
    with pytest.raises(ValueError, match="target_modules=proj: must be one of attn.c_attn, "):
        target_kernels(["proj"], modules)
    with pytest.raises(ValueError, match="nothing would be trained"):
        target_kernels([], modules)
    assert set(linear_kernels(abstract_state(make_spec()).model).values()) == {(1, 1), (1, 2)}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (dict(type="none", r=4), "adapter.r=4: must be 8 with adapter.type=none"),
        (dict(type="lora", bits=8), "adapter.bits=8: must be 4 with adapter.type=lora"),
        (
            dict(type="qlora", bits=8, quant_type="nf4"),
            "adapter.bits=8: must be 4 with adapter.quant_type=nf4",
        ),
        (dict(type="lora", r=0), "adapter.r=0: must be at least 1"),
        (dict(type="lora", dropout=1.0), "adapter.dropout=1.0: must be in"),
        (dict(type="lora", alpha=float("inf")), "adapter.alpha=inf: must be positive and finite"),
        (dict(type="lora", alpha=0.0), "adapter.alpha=0.0: must be positive and finite"),
        (dict(type="lora", target_modules="q_proj"), "must be all-linear or a list of names"),
    ],
    ids=str,
)
def test_refused_configs(keys, message):
    with pytest.raises(ValueError, match=message):
        AdapterConfig(**keys)
