"""train.linear=float8: one result on every mesh and under every remat policy, little to gather."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_compiler_facts import equations
from tiers import fast

from bptjax.cli.train import main
from bptjax.config import Config, TrainConfig
from bptjax.cost.devices import absent_devices
from bptjax.cost.hlo import FLOAT8_PRODUCT, check_float8_products
from bptjax.cost.memory import tracing_for
from bptjax.models.config import ModelConfig
from bptjax.models.execution import ExecutionConfig
from bptjax.models.groups.experts import ExpertsConfig
from bptjax.ops.float8 import VALUES
from bptjax.optim.optimizer import OptimizerConfig
from bptjax.parallel.mesh import make_mesh
from bptjax.training.checks import check_float8
from bptjax.training.spec import TrainSpec
from bptjax.training.state import abstract_state
from bptjax.training.step import abstract_batch, compile_step, gradients, loss_sums
from bptjax.weights.float8_kernels import quantize_kernels
from bptjax.weights.quantized_kernels import QuantizedKernel
from training.specs import assert_same, gradient_sums, initial_state, needs_compiler

T = 32
MODEL = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    tied_head=False,
    init_std=0.1,
)
CONFIG = Config(
    train=TrainConfig(seq_len=T, max_steps=20, linear="float8"),
    execution=ExecutionConfig(
        attention_implementation="reference", q_chunk=16, ffn_chunk=T, ce_chunk=128
    ),
    optimizer=OptimizerConfig(learning_rate=1e-2),
)


def make_spec(devices=None, model=MODEL, **groups) -> TrainSpec:
    """`groups` change keys of CONFIG's."""
    changed = {name: replace(getattr(CONFIG, name), **keys) for name, keys in groups.items()}
    config = replace(CONFIG, **changed)
    mesh = config.parallel
    count = mesh.dp * mesh.fsdp * mesh.tp * mesh.sp if "parallel" in groups else 1
    return TrainSpec(config, model, make_mesh(mesh, (devices or jax.devices())[:count]))


@pytest.fixture(scope="module")
def batch():
    tokens = np.random.default_rng(0).integers(0, 64, (4, T), np.int32)
    place = np.broadcast_to(np.arange(T, dtype=np.int32), tokens.shape)
    labels = np.where(place % 3 == 0, -100, np.roll(tokens, -1, 1)).astype(np.int32)
    return dict(tokens=tokens, labels=labels, segments=np.ones_like(tokens), positions=place)


@pytest.fixture(scope="module")
def one(batch):
    return gradient_sums(make_spec(), batch)


QLORA = dict(type="qlora", r=4)


@pytest.fixture(scope="module")
def qlora(batch):
    return gradient_sums(make_spec(adapter=QLORA), batch)


@pytest.mark.parametrize(
    "execution",
    fast(
        [
            dict(remat="none"),
            dict(remat="nested(2)"),
            dict(remat="full", head_groups=2),
            dict(remat="dots", ffn_chunk=16),
            dict(schedule="fused"),
        ],
        [dict(remat="dots", ffn_chunk=16)],
    ),
    ids=str,
)
def test_execution_changes_nothing(batch, one, execution):
    assert_same(gradient_sums(make_spec(execution=execution), batch), one)


def gathered(text):
    """Dtypes in which devices gather arrays of the size of a kernel."""
    found = re.findall(r" = (.*?) all-gather(?:-start)?\(", text)
    arrays = [array for result in found for array in re.findall(r"(\w+)\[([\d,]+)\]", result)]
    sizes = [(dtype, np.prod([int(n) for n in shape.split(",")])) for dtype, shape in arrays]
    return {dtype for dtype, size in sizes if size in (32 * 32, 32 * 64)}


@pytest.mark.thorough
@pytest.mark.parametrize("ffn_chunk", [T, 16])
def test_fsdp_gathers_no_kernel_in_float32(batch, one, ffn_chunk):
    """Also with several chunks, before which every device gathers what its loop reads. XLA on a CPU
    sends float8 as float16."""
    spec = make_spec(parallel=dict(fsdp=2), execution=dict(ffn_chunk=ffn_chunk))
    with jax.set_mesh(spec.mesh):
        operands = initial_state(spec), spec.layout.put(batch, 1)
        step = jax.jit(partial(gradients, spec)).lower(*operands).compile()
    assert_same(step(*operands), one)
    dtypes = gathered(step.as_text())
    assert dtypes and dtypes <= {"f16", "f8e4m3fn", "u8"}, dtypes


@pytest.mark.thorough
@pytest.mark.parametrize("parallel", [dict(fsdp=1, tp=2), dict(fsdp=1, sp=2)], ids=str)
def test_other_meshes_and_micro_batches(batch, one, parallel):
    """A scale is that of all shards, and gradients of several micro-batches add up."""
    assert_same(gradient_sums(make_spec(parallel=parallel), batch, 2), one)


def test_kernels_are_rounded_once():
    """Before the loops over micro-batches and layers, which only run again."""
    spec = make_spec(train=dict(gradient_accumulation_steps=2), execution=dict(remat="full"))
    state, micro_batches = abstract_state(spec), abstract_batch(spec)
    made = [
        eqn.outvars[0].aval.shape
        for eqn in equations(partial(gradients, spec), state, micro_batches)
        if eqn.primitive.name == "convert_element_type" and eqn.params["new_dtype"] == VALUES
    ]
    heads = [(2, 4, 16, 32), (2, 2, 16, 32), (2, 2, 16, 32), (2, 32, 4, 16)]
    kernels = [*heads, (2, 64, 32), (2, 64, 32), (2, 32, 64)]
    assert sorted(shape for shape in made if shape[0] == 2) == sorted(kernels)
    micro_batch = {name: jax.ShapeDtypeStruct((1, T), jnp.int32) for name in micro_batches}
    loss = partial(loss_sums, spec, key=None, z_loss=0.0)
    evaluated = jax.make_jaxpr(loss)(state.model, micro_batch)
    assert "f8" not in str(evaluated)


@pytest.mark.thorough
def test_adapters_train_beside_a_base_in_8_bits(batch, one):
    found = gradient_sums(make_spec(adapter=dict(type="lora", r=4)), batch)
    np.testing.assert_allclose(found[0].loss, one[0].loss, rtol=1e-5)
    b = found[1].layers.mlp.down.kernel.b[...]
    assert np.linalg.norm(b) > 0


@pytest.mark.parametrize("remat", fast(["none", "full"], ["full"]))
@pytest.mark.parametrize("kind", fast(["lora", "qlora"], ["qlora"]))
def test_products_of_a_frozen_base_have_8_bits(kind, remat):
    """The forward product and the gradient of its input have 8 bits, a frozen kernel has no
    gradient, and no kernel is dequantized to 16 bits."""
    train, execution = dict(compute_dtype="bfloat16"), dict(remat=remat)
    spec = make_spec(train=train, execution=execution, adapter=dict(type=kind, r=4))
    found = [*equations(partial(gradients, spec), abstract_state(spec), abstract_batch(spec))]
    products = [
        tuple(x.aval.shape for x in (*eqn.invars[:2], *eqn.outvars))
        for eqn in found
        if eqn.primitive.name == "dot_general" and "float8" in str(eqn.invars[1].aval.dtype)
    ]
    assert len(products) >= 14 and all(each[2][:2] == (1, T) for each in products)
    for output, input in ((64, 32), (32, 64)):
        kernel = output, input
        assert ((1, T, input), kernel, (1, T, output)) in products
        assert ((1, T, output), kernel, (1, T, input)) in products
    made = {(y.aval.shape, str(y.aval.dtype)) for eqn in found for y in eqn.outvars}
    assert not made & {((32, 64), "bfloat16"), ((64, 32), "bfloat16")}


@pytest.mark.thorough
@pytest.mark.parametrize("double", [True, False])
def test_qlora_is_lora_on_the_dequantized_base(batch, double):
    adapter = QLORA | dict(double_quant=double)
    spec = make_spec(adapter=adapter)
    state = initial_state(spec)

    def dense(kernel):
        if not isinstance(kernel, QuantizedKernel):
            return kernel
        return nnx.Param(jax.lax.map(lambda k: k.dense(jnp.float32), kernel), axes=kernel.axes)

    @jax.jit
    def run(model):
        return jax.tree.map(dense, model, is_leaf=lambda x: isinstance(x, QuantizedKernel))

    model = run(state.model)
    lora = make_spec(adapter=dict(type="lora", r=4))
    wanted = gradient_sums(lora, batch, state=replace(state, model=model))
    assert_same(gradient_sums(spec, batch, state=state), wanted)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "groups",
    [
        dict(execution=dict(remat="nested(2)")),
        dict(execution=dict(remat="full", head_groups=2)),
        dict(execution=dict(schedule="fused")),
    ],
    ids=str,
)
def test_execution_changes_nothing_in_qlora(batch, qlora, groups):
    assert_same(gradient_sums(make_spec(adapter=QLORA, **groups), batch), qlora)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "parallel, micro_batches",
    [
        (dict(fsdp=2, zero_stage=2), 2),
        (dict(fsdp=2, tp=2, sp=2), 2),
    ],
    ids=str,
)
def test_meshes_and_micro_batches_of_qlora(batch, qlora, parallel, micro_batches):
    """Scales are those of all shards. Gradients differ because a rounding error of float32 moves
    a gradient by a step of 8 bits, as without quantized kernels."""
    one, spec = make_spec(adapter=QLORA), make_spec(adapter=QLORA, parallel=parallel)
    each = []
    for own in (one, spec):
        with jax.set_mesh(own.mesh):
            weights = jax.jit(quantize_kernels)(initial_state(own).model)
        each.append({path: np.asarray(weight.scale[...]) for path, weight in weights.items()})
    jax.tree.map(np.testing.assert_array_equal, *each)
    assert len(each[0]) == 7 and len(set(np.concatenate([*each[0].values()]))) > 1
    got = gradient_sums(spec, batch, micro_batches)
    np.testing.assert_allclose(got[0].loss, qlora[0].loss, rtol=1e-5)
    assert_same(got, qlora, rtol=0.05)


@pytest.mark.thorough
def test_fsdp_gathers_no_kernel_of_qlora_in_16_bits(batch, qlora):
    """XLA on a CPU sends float8 as float16."""
    spec = make_spec(parallel=dict(fsdp=2), adapter=QLORA)
    with jax.set_mesh(spec.mesh):
        operands = initial_state(spec), spec.layout.put(batch, 1)
        step = jax.jit(partial(gradients, spec)).lower(*operands).compile()
    dtypes = gathered(step.as_text())
    assert dtypes and dtypes <= {"f16", "f8e4m3fn", "u8"}, dtypes


@pytest.mark.thorough
def test_experts_of_qlora_keep_the_compute_dtype(batch):
    experts = dict(feed_forward="experts", experts=ExpertsConfig(count=4, per_token=2, size=64))
    spec = make_spec(model=replace(MODEL, **experts), adapter=QLORA)
    plain = make_spec(model=spec.model, adapter=QLORA, train=dict(linear=None))
    found, wanted = (gradient_sums(each, batch) for each in (spec, plain))
    assert float(found[0].loss) != float(wanted[0].loss)
    np.testing.assert_allclose(found[0].loss, wanted[0].loss, rtol=0.02)
    found = [*equations(partial(gradients, spec), abstract_state(spec), abstract_batch(spec))]
    products = {
        eqn.invars[1].aval.shape
        for eqn in found
        if eqn.primitive.name == "dot_general" and "float8" in str(eqn.invars[1].aval.dtype)
    }
    assert products == {(64, 32), (32, 32), (32, 64)}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["none", "qlora"])
def test_training_is_close_to_bfloat16(batch, kind):
    adapter = {} if kind == "none" else dict(adapter=QLORA)

    def losses(**train):
        spec = make_spec(train=dict(compute_dtype="bfloat16", **train), **adapter)
        state, placed = initial_state(spec), spec.layout.put(batch)
        step = compile_step(spec, state, placed)
        found = []
        for _ in range(20):
            state, metrics = step(state, placed)
            found.append(float(metrics["train/loss"]))
        return found

    float8, plain = losses(), losses(linear=None)
    assert float8 != plain and float8[-1] < (0.5 if kind == "none" else 0.8) * float8[0]
    np.testing.assert_allclose(float8, plain, rtol=0.1)


@pytest.mark.parametrize("adapter", [{}, QLORA], ids=["none", "qlora"])
def test_a_run_keeps_no_state(adapter):
    """Of scales, so that a run goes on from a checkpoint as it would have gone on."""
    specs = (make_spec(train=dict(linear=x), adapter=adapter) for x in ("float8", None))
    states = (abstract_state(spec) for spec in specs)
    first, second = ([(x.shape, x.dtype) for x in jax.tree.leaves(state)] for state in states)
    assert first == second


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--train.linear=int8"], "train.linear"),
        (["--train.linear=float8", "--model.hidden_size=24"], "layers.key.kernel has 24 inputs"),
    ],
)
def test_refusals(arguments, tmp_path, capsys, flags, message):
    assert main([*arguments, "--run_dir", str(tmp_path / "run"), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_shards_and_devices_are_checked():
    check_float8(make_spec(parallel=dict(fsdp=2, tp=2, sp=2)))
    with pytest.raises(ValueError, match=r"layers.key.kernel has 32 inputs and 8 outputs"):
        check_float8(make_spec(model=replace(MODEL, head_dim=8), parallel=dict(fsdp=1, tp=2)))


HLO = """HloModule jit_step

ENTRY %main (x: f8e4m3fn[32,16], w: f8e4m3fn[16,16], s: f32[]) -> bf16[32,16] {{
  %x = f8e4m3fn[32,16]{{1,0}} parameter(0)
  %w = f8e4m3fn[16,16]{{1,0}} parameter(1)
  %s = f32[] parameter(2)
  %y = f16[32,16]{{1,0}} convert(%x)
  %first = bf16[32,16]{{1,0}} custom-call(%x, %w, %s), custom_call_target="{0}", \
metadata={{op_name="jit(step)/float8/dot_general"}}, backend_config={{"dot_dimension_numbers":{{}}}}
  ROOT %second = bf16[32,16]{{1,0}} dot({1}, %w), lhs_contracting_dims={{1}}, \
rhs_contracting_dims={{1}}, metadata={{op_name="jit(step)/transpose(float8)/dot_general"}}
}}
"""


def test_a_step_without_8_bit_products_stops_the_run():
    check_float8_products(HLO.format(FLOAT8_PRODUCT, "%x"))
    with pytest.raises(RuntimeError, match="XLA turned 1 of 2 matrix products"):
        check_float8_products(HLO.format(FLOAT8_PRODUCT, "%y"))
    with pytest.raises(RuntimeError, match="train.linear=float8: .* and 0 into"):
        check_float8_products(HLO.format("__cublas$lt$matmul", "%x"))


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("adapter", [{}, QLORA], ids=["none", "qlora"])
def test_the_step_of_an_absent_gpu(adapter):
    """XLA recognizes the products of 8 bits, and devices gather kernels in 8 bits; an older GPU is
    refused."""
    kind, devices = absent_devices("h100:2")
    groups = dict(train=dict(compute_dtype="bfloat16"), parallel=dict(fsdp=2), adapter=adapter)
    spec = make_spec(devices, replace(MODEL, num_layers=1), **groups)
    check_float8(spec)
    with tracing_for(spec, kind.platform):
        step = compile_step(spec, abstract_state(spec), abstract_batch(spec))
    check_float8_products(step.as_text())
    assert gathered(step.as_text()) == {"f8e4m3fn"}
    _, devices = absent_devices("a100")
    with pytest.raises(ValueError, match="compute capability 8.9 or newer, not NVIDIA A100"):
        check_float8(make_spec(devices))


@pytest.mark.gpu
# FlashAttention-4's compiler warns about deprecated names in its own code.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("adapter", [{}, QLORA], ids=["none", "qlora"])
def test_remat_policies_on_a_gpu(adapter):
    """Compiling also checks that XLA recognizes the products. The first loss and the norm of its
    gradient are those without remat, and close to those in bfloat16."""
    sizes = dict(hidden_size=256, intermediate_size=512, head_dim=64)
    tokens = np.random.default_rng(0).integers(0, 96, (2, 257), np.int32)
    positions = np.broadcast_to(np.arange(256, dtype=np.int32), (2, 256))
    batch = dict(tokens=tokens[:, :-1], labels=tokens[:, 1:], positions=positions)
    batch |= dict(segments=np.ones_like(positions))

    def first(linear="float8", **execution):
        train = dict(seq_len=256, compute_dtype="bfloat16", linear=linear)
        execution = dict(attention_implementation="auto", ffn_chunk=256) | execution
        model, groups = replace(MODEL, **sizes), dict(train=train, execution=execution)
        spec = make_spec(model=model, adapter=adapter, **groups)
        state, placed = initial_state(spec), spec.layout.put(batch)
        _, metrics = compile_step(spec, state, placed)(state, placed)
        return [float(metrics[name]) for name in ("train/loss", "train/grad_norm")]

    wanted = first(remat="none")
    for execution in (dict(remat="full"), dict(remat="dots"), dict(remat="nested(2)")):
        np.testing.assert_allclose(first(**execution), wanted, rtol=1e-2)
    np.testing.assert_allclose(first(linear=None), wanted, rtol=5e-2)
