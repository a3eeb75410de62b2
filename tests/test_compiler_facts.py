"""Claims read from jaxprs, lowered text and compiled programs, all in this file: a new jax or XLA
that prints a program in other words may break these tests while every result stays the same."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import checkpoint_policies
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.interpreters import partial_eval
from jax.sharding import NamedSharding, PartitionSpec
from models.test_decoder import gradient_of
from ops.comparing import quick
from ops.test_cudnn import DOCUMENTS, both, run_scan_as_triton
from optim.test_optimizer import CONFIG, Model, on, update
from tiers import fast
from weights.test_lora import MODEL, make_spec

from bptjax.models.groups.experts import ExpertsConfig
from bptjax.ops.attention import RESIDUAL_NAMES, cudnn
from bptjax.ops.attention import attention as attention_on_one
from bptjax.ops.attention.contract import AttentionSpec
from bptjax.ops.blockwise import blockwise
from bptjax.ops.loss import linear_cross_entropy
from bptjax.ops.mask import Mask
from bptjax.ops.taylor_attention import taylor_attention
from bptjax.optim.optimizer import init_opt_state
from bptjax.parallel.mesh import ParallelConfig, lookup, make_mesh, sharding
from bptjax.parallel.sequence import attention, fold_sequence_shards, unfold_sequence_shards
from bptjax.training.state import abstract_state
from bptjax.training.step import abstract_batch, gradients
from bptjax.weights.lora import AdapterConfig
from bptjax.weights.quantized_kernels import KernelAxes, quantize_kernels


def equations(f: Callable, *operands) -> Iterator[JaxprEqn]:
    """The equations of the jaxpr of `f`; those of a loop's body once."""
    return within(jax.make_jaxpr(f)(*operands).jaxpr)


def within(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in jaxprs_in_params(eqn.params):
            yield from within(sub)


def is_product(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "dot_general"


def collectives(text: str) -> list[tuple[str, str]]:
    """(result, kind) of each message between devices in a compiled program."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text)


def sends_once(text: str) -> bool:
    """Whether devices exchange something, and nothing of it in a loop or a branch."""
    before, entry = text.split("\nENTRY")
    return bool(collectives(entry)) and not collectives(before)


def array(shape, *axes, mesh=None, dtype="float32"):
    """An array that is not there, with its axes over those of the mesh."""
    where = mesh and NamedSharding(mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)


# Attention


@pytest.mark.parametrize(
    "mask, kinds",
    [
        (Mask(causal=True), [("CAUSAL", "0", "1")]),
        (Mask(), [("NO_MASK", "0", "1")]),
        (Mask(causal=True, window=100), [("CAUSAL", "100", "1")]),
        (
            Mask(causal=True, segments=DOCUMENTS),
            [("CAUSAL", "0", "1"), ("PADDING_CAUSAL", "0", "16")],
        ),
        (Mask(segments=DOCUMENTS), [("PADDING", "0", "16")]),
        (Mask(causal=True, window=100, segments=DOCUMENTS), [("CAUSAL", "100", "1")]),
    ],
    ids=["causal", "all", "window", "documents", "documents, all", "documents, window"],
)
def test_cudnn_is_called_with_the_mask(mask, kinds, monkeypatch):
    """With this jax's private primitives, on any machine."""
    run_scan_as_triton(monkeypatch)
    q, k = (array((*DOCUMENTS.shape, heads, 64), dtype="bfloat16") for heads in (4, 2))
    run = jax.jit(lambda q, k, v, dout: both(q, k, v, dout, AttentionSpec(mask, 0.1)))
    text = run.trace(q, k, k, q).lower(lowering_platforms=("cuda",)).as_text()
    text = text.replace(r"\22", '"')
    calls = [line for line in text.splitlines() if "cudnn_fmha_backend_config" in line]
    found = {
        target: [
            tuple(
                re.search(rf'"{name}": "?(\w+)', line)[1]
                for name in ("mask_type", "sliding_window_length", "max_seg_per_batch")
            )
            for line in calls
            if f"@{target}(" in line
        ]
        for target in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
    }
    without_padding = [kind for kind in kinds if "PADDING" not in kind[0]]
    assert list(found.values()) == [kinds, without_padding]


def test_cudnn_on_a_mesh_takes_no_empty_arrays(monkeypatch):
    """Shardy crashes on empty operands that it finds unused. Keys are too long for the cache."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    run_scan_as_triton(monkeypatch)
    monkeypatch.setattr(cudnn, "_count_pieces", lambda k: 4)

    def loss(q, segments):
        @partial(jax.checkpoint, policy=checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES))
        def layer(q, _):
            mask = Mask(causal=True, segments=segments)
            return attention(q, q, q, mask=mask, impl="cudnn"), None

        return jax.lax.scan(layer, q, None, length=2)[0].sum()

    with jax.set_mesh(make_mesh(ParallelConfig(fsdp=1, sp=2), jax.devices()[:2])):
        operands = array((1, 512, 4, 64), dtype="bfloat16"), array((1, 512), dtype="int32")
        run = jax.jit(jax.grad(loss)).trace(*operands)
        text = run.lower(lowering_platforms=("cuda",)).as_text()
    taken = [line for line in text.splitlines() if "sdy.manual_computation" in line]
    assert len(taken) > 1 and "while" in text
    assert not any(re.search(r"tensor<(\d+x)*0x", line) for line in taken)


def test_static_masks_fix_the_number_of_steps():
    """A NumPy mask stays static in `attention`, so the loops over non-empty tiles have a length."""
    mask = Mask(window=2, global_tokens=np.arange(16) == 0, block_mask=np.eye(4), block_size=4)
    options = dict(impl="scan", q_chunk=4, k_chunk=4)

    def loops(mask):
        f = jax.grad(lambda q: attention_on_one(q, q, q, mask=mask, **options).sum())
        return str(jax.make_jaxpr(f)(array((1, 16, 1, 8))))

    assert loops(mask).count("length=10") == 2 and "while[" not in loops(mask)
    assert loops(jax.tree.map(jnp.asarray, mask)).count("while[") == 2


@pytest.mark.parametrize(
    "strategy, kinds",
    fast(
        [
            ("ring", {"collective-permute"}),
            ("ulysses_ring", {"all-to-all", "collective-permute"}),
            ("ulysses", {"all-to-all"}),
            ("gather", {"all-gather", "reduce-scatter"}),
        ],
        lambda strategy, _: strategy in ("ring", "gather"),
    ),
)
def test_collectives_of_strategies(strategy, kinds):
    """And nothing else of the size of a sequence."""
    mesh = make_mesh(ParallelConfig(fsdp=1, sp=4), jax.devices()[:4])
    heads = (6, 2) if strategy == "ulysses_ring" else (8, 4)
    q, k = (array((2, 48, n, 8), None, "sp", mesh=mesh) for n in heads)

    def both(q, k, v, dout):
        options = dict(strategy=strategy, impl="scan", q_chunk=4, k_chunk=4)
        return jax.vjp(lambda q, k, v: attention(q, k, v, **options), q, k, v)[1](dout)

    with jax.set_mesh(mesh):
        step = jax.jit(both, out_shardings=q.sharding)
        text = step.lower(q, k, k, q).compile().as_text()
    assert {kind for shape, kind in collectives(text) if "f32" in shape} == kinds


def test_gradients_of_gathered_keys_add_up_in_float32():
    q, k = (array((2, 48, n, 8), dtype="bfloat16") for n in (8, 2))
    f = partial(attention, strategy="gather", impl="scan")
    with jax.set_mesh(make_mesh(ParallelConfig(fsdp=1, sp=4), jax.devices()[:4])):
        text = str(jax.make_jaxpr(lambda q, k, v, dout: jax.vjp(f, q, k, v)[1](dout))(q, k, k, q))
    sums = [line.split("=")[0] for line in text.splitlines() if "= reduce_scatter" in line]
    assert len(sums) == 2 and all("f32[" in result for result in sums)


def test_folding_sequence_shards_sends_nothing():
    mesh = make_mesh(ParallelConfig(2, 1, 2, 2))
    x = array((4, 48, 8, 3), ("dp", "fsdp"), "sp", "tp", mesh=mesh)
    with jax.set_mesh(mesh):
        there = jax.jit(fold_sequence_shards).lower(x).compile()
        folded = jax.tree.map(
            lambda info, where: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=where),
            there.out_info,
            there.output_shardings,
        )
        back = jax.jit(unfold_sequence_shards).lower(folded).compile()
    assert not any(collectives(f.as_text()) for f in (there, back))


def test_messages_of_taylor_attention_do_not_grow_with_the_sequence():
    mesh = make_mesh(ParallelConfig(fsdp=1, sp=8))

    def told(T):
        x = array((1, T, 2, 16), None, "sp", mesh=mesh)
        step = jax.grad(lambda *a: taylor_attention(*a).sum(), (0, 1, 2))
        text = jax.jit(step, out_shardings=x.sharding).lower(x, x, x).compile().as_text()
        return sorted(collectives(text))

    short, long = told(1024), told(4096)
    assert short == long and {kind for _, kind in short} == {"all-reduce"}


# Feed-forward, loss, and tables


def test_devices_exchange_parameters_once():
    """Not once a chunk."""
    mesh = make_mesh(ParallelConfig(fsdp=4), jax.devices()[:4])
    up, down, x = (array(shape, "fsdp", mesh=mesh) for shape in ((8, 24), (24, 8), (8, 13, 8)))

    def mlp(params, x):
        up, down = params
        return x + jax.nn.silu(x @ up) @ down

    def run(params, x, dy):
        y, pull = jax.vjp(partial(blockwise, mlp, chunk=5, axes=("fsdp",)), params, x)
        return y, *pull(dy)

    with jax.set_mesh(mesh):
        assert sends_once(quick(run).lower((up, down), x, x).compile().as_text())


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_devices_exchange_the_head_once(reduction):
    """Not once a chunk."""
    mesh = make_mesh(ParallelConfig(fsdp=4), jax.devices()[:4])
    hidden, head = array((8, 13, 8), "fsdp", mesh=mesh), array((19, 8), None, "fsdp", mesh=mesh)
    labels = jnp.where(jnp.arange(8 * 13).reshape(8, 13) % 3 == 0, -100, 1)

    def loss(hidden, head):
        options = dict(axes=("fsdp",), chunk=6, reduction=reduction)
        return linear_cross_entropy(hidden, head, labels, **options).sum()

    step = loss if reduction == "none" else jax.value_and_grad(loss, argnums=(0, 1))
    with jax.set_mesh(mesh):
        assert sends_once(quick(step).lower(hidden, head).compile().as_text())


def test_logits_are_computed_once():
    """Value and gradients of the sum take three products a chunk: logits, dhidden, dhead."""

    def products(f):
        jaxpr = jax.make_jaxpr(f)(array((2, 13, 8)), array((19, 8))).jaxpr
        jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        return sum(map(is_product, within(jaxpr)))

    f = partial(linear_cross_entropy, labels=jnp.arange(26).reshape(2, 13) % 19, chunk=4)
    assert products(f) == 1
    assert products(jax.value_and_grad(f, (0, 1))) == 3


def test_a_table_that_tp_does_not_shard_is_gathered_and_no_more():
    """As learned positions: if tp sharded it, rows looked up would have to be summed."""
    mesh = make_mesh(ParallelConfig(fsdp=1, tp=2, sp=2), jax.devices()[:4])
    table, indices = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(mesh, axes, shape))
        for axes, shape, dtype in (
            ((None, "embed"), (24, 8), jnp.float32),
            (("batch", "sequence"), (2, 16), jnp.int32),
        )
    )
    with jax.set_mesh(mesh):
        found = jax.jit(lookup, out_shardings=indices.sharding)
        text = found.lower(table, indices).compile().as_text()
    assert [kind for _, kind in collectives(text)] == ["all-gather"]


# Models


def test_no_array_is_as_large_as_a_mask():
    """Not even what JAX computes beforehand because no gradient flows through it."""
    f, operands = gradient_of(remat="full")
    made = [v.aval for eqn in equations(f, *operands) for v in eqn.outvars]
    largest = max(made, key=lambda aval: aval.size)
    assert largest.size <= 1024 * 1024, largest


@pytest.mark.parametrize(
    "how, moved",
    [
        (dict(remat="full"), {(1024, 32): 1}),
        (dict(remat="full", offload=0.25), {(256, 32): 1}),
        (dict(remat="save_attention"), {(1024, 32): 1, (1024, 4, 8): 1, (1024, 4): 1}),
        (dict(remat="nested(3)"), {(1024, 32): 1}),
        (dict(remat="nested_full(3)"), {(1024, 32): 1}),
    ],
    ids=str,
)
def test_offload_moves_saved_activations(how, moved):
    """To host memory in the forward pass of a layer, and back in its backward pass."""
    f, operands = gradient_of(**dict(offload=1.0) | how)
    found = {"Host": {}, "Device": {}}

    for eqn in equations(f, *operands):
        if eqn.primitive.name == "device_put":
            where = str(eqn.params["devices"][0])
            place = next(name for name in found if name in where)
            shape = eqn.invars[0].aval.shape[1:]
            found[place][shape] = found[place].get(shape, 0) + 1
    assert found == {"Host": moved, "Device": moved}


def test_offload_runs_nothing_again():
    """A group of nested(k) finds its activations under the names for host memory too."""

    def products(**how):
        f, operands = gradient_of(remat="nested(3)", **how)
        return sum(map(is_product, equations(f, *operands)))

    assert products(offload=0.5) == products(offload=1.0) == products()


def test_frozen_weights_have_no_gradient_products():
    """In the step's jaxpr no product makes an array like a frozen kernel, or the head."""
    model = replace(MODEL, vocab_size=96, hidden_size=40, intermediate_size=72, head_dim=10)
    spec = make_spec(model=model, adapter=dict(type="lora", dropout=0.0))
    shapes = {(40, 72), (72, 40), (96, 40), (40, 96)}
    batch = {k: np.zeros((1, 32), np.int32) for k in ("tokens", "labels", "segments", "positions")}

    def made(config):
        one = replace(spec, config=config)
        eqns = equations(partial(gradients, one), abstract_state(one), one.layout.put(batch))
        return shapes & {eqn.outvars[0].aval.shape for eqn in filter(is_product, eqns)}

    assert not made(spec.config)
    assert made(replace(spec.config, adapter=AdapterConfig()))


@pytest.mark.thorough
def test_experts_stay_on_their_devices():
    """Neither they nor their gradients travel, and memory does not grow with the devices, although
    all tokens may choose the experts of one."""
    routed = dict(feed_forward="experts", experts=ExpertsConfig(count=16, size=48))
    model, sizes = replace(MODEL, num_layers=1, **routed), []
    for ep in (2, 8):
        parallel = ParallelConfig(dp=1, fsdp=8 // ep, ep=ep)
        spec = make_spec(
            parallel, model, train=dict(seq_len=1024), execution=dict(ffn_chunk=1024, ce_chunk=64)
        )
        spec = replace(spec, config=replace(spec.config, adapter=AdapterConfig()))
        with jax.set_mesh(spec.mesh):
            batch = jax.tree.map(lambda x: x.update(shape=x.shape), abstract_batch(spec))
            step = quick(partial(gradients, spec)).lower(abstract_state(spec), batch).compile()
        sizes.append(step.memory_analysis().temp_size_in_bytes)
        shapes = [shape for shape, _ in collectives(step.as_text())]
        # Matrices of all experts, in any layout.
        every = [s for s in shapes if re.search(r"\b16,(\d+,)*(32,48|48,32)\b", s)]
        assert not every and shapes
    assert sizes[1] < 1.5 * sizes[0]


def test_experts_are_quantized_where_they_are():
    mesh = make_mesh(ParallelConfig(fsdp=1, ep=4), jax.devices()[:4])
    kernel = nnx.Param(array((1, 8, 64, 48), None, "ep", mesh=mesh), axes=("experts", None, None))
    with jax.set_mesh(mesh):
        step = jax.jit(lambda kernel: quantize_kernels(kernel, KernelAxes(2, 1), "nf4", True))
        assert not collectives(step.lower(kernel).compile().as_text())


# The optimizer


@pytest.mark.parametrize("kind", fast(["float32", "int8"], ["int8"]))
def test_each_device_updates_its_own(kind):
    """If every shard holds full blocks, devices exchange only the norm of the gradients."""
    mesh = make_mesh(ParallelConfig(dp=2, fsdp=2, tp=2))
    config = replace(CONFIG, state_dtype=kind)
    model = jax.eval_shape(partial(Model, L=2, D=512, F=1024, V=64))
    state = on(mesh, jax.eval_shape(partial(init_opt_state, config), model))
    model = on(mesh, model)
    where = jax.tree.map(lambda x: x.sharding, (model, state))
    with jax.set_mesh(mesh):
        step = jax.jit(
            partial(update, config, slice_elements=4096),
            donate_argnums=(1, 2),
            out_shardings=(*where, None),
        )
        key = jax.eval_shape(partial(jax.random.key, 0))
        compiled = step.lower(model, model, state, key).compile()
    told = re.findall(r" (all-\w+|collective-\w+|reduce-scatter)", compiled.as_text())
    assert set(told) == {"all-reduce"}
    sizes = sum(
        math.prod(w.shard_shape(x.shape)) * x.dtype.itemsize
        for w, x in zip(*map(jax.tree.leaves, (where, (model, state))), strict=True)
    )
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((model, state)))
    assert compiled.memory_analysis().alias_size_in_bytes == sizes < 0.3 * total
    assert compiled.memory_analysis().temp_size_in_bytes < 2**19
