"""`bptjax plan`: the memory of a step on devices that are not there."""

import importlib.util
import json
import re
from dataclasses import replace

import jax
import measurements
import pytest
import recipes
from jax.sharding import SingleDeviceSharding
from tiers import fast
from training.specs import needs_compiler
from weights.hf.cases import config as hf_config

from bptjax.cli.main import main
from bptjax.cli.plan import open_model
from bptjax.config import Config, TrainConfig
from bptjax.config_parser import parse
from bptjax.cost.auto import absent_limit
from bptjax.cost.devices import KINDS, absent_devices, parse_devices
from bptjax.cost.estimate import Estimator
from bptjax.cost.memory import Plan, longest_context, plan, remedies, tracing_for, tree_bytes
from bptjax.cost.search import MemoryLimit, with_execution
from bptjax.models.architecture import new_model
from bptjax.models.config import ModelConfig
from bptjax.models.execution import Execution, ExecutionConfig
from bptjax.ops.attention.packed import documents
from bptjax.ops.choices import record_choices
from bptjax.ops.target import STAND_IN, absent, misreads_host_memory
from bptjax.optim.optimizer import OptimizerConfig
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.run import progress
from bptjax.training.spec import TrainSpec
from bptjax.training.state import abstract_state
from bptjax.training.step import abstract_batch, compile_step
from bptjax.weights.lora import AdapterConfig

needs_tpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs jax[tpu]"
)
MODEL = ModelConfig(
    vocab_size=512, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, tied_head=False
)
GIB = 2**30
RECIPES = measurements.read("recipes_planned.jsonl")
METHODS = "lora", "qlora"
FLAGS = [
    *("--model.vocab_size=512", "--model.hidden_size=128", "--model.num_layers=1"),
    *("--model.num_heads=2", "--train.seq_len=256"),
]


def make_spec(devices, model=MODEL, seq_len=4096, **groups):
    train = TrainConfig(
        seq_len=seq_len, max_steps=10, compute_dtype="bfloat16", param_dtype="bfloat16"
    )
    config = Config(**dict(dict(train=train), **groups))
    return TrainSpec(config, model, make_mesh(config.parallel, devices))


@pytest.mark.parametrize(
    "text, name, counts",
    [
        ("h200", "h200", (1, 1)),
        ("H100:8", "h100", (1, 8)),
        ("h100:64x8", "h100", (64, 8)),
        ("a100-40gb:4", "a100-40gb", (1, 4)),
        ("v5p:2x2x2", "v5p", (2, 2, 2)),
        ("v6e:4", "v6e", (4, 1)),
    ],
)
def test_devices_are_parsed(text, name, counts):
    assert parse_devices(text) == (KINDS[name], counts)


@pytest.mark.parametrize(
    "text, message",
    [
        ("h300:8", "devices=h300:8: must be one of a100-40gb, a100, h100"),
        ("h100:0", "devices=h100:0: must be like h100:8"),
        ("h100:x", "devices=h100:x: must be like"),
        ("h100:2x2x2", "devices=h100:2x2x2: must be h100:GPUS or h100:HOSTSxGPUS"),
        ("h100,", "devices=: must be one of"),
    ],
)
def test_bad_devices_are_refused_in_one_line(text, message, capsys):
    assert main(["plan", f"--devices={text}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


@pytest.mark.thorough
def test_this_machine(capsys):
    """Without `devices`, the step of a run here; a CPU does not say how much memory it has."""
    assert main(["plan", *FLAGS, "--device=cpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("8 x cpu, fsdp=8: ")
    assert "8 sequences of 256 tokens per step" in out
    assert "the memory of 8 x cpu is not known: a run would start" in out
    assert main(["plan", *FLAGS, "--device=cpu", "--parallel.tp=2", "--parallel.sp=4"]) == 0
    assert "\n1 sequence of 256 tokens per step\n" in capsys.readouterr().out
    assert main(["plan", *FLAGS, "--device=cpu", "--json", "--train.epochs=2"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["fits"] is None and row["peak"] > row["parameters"] > 0
    assert 0 < row["saved"] < row["activations"]
    assert row["optimizer"] == pytest.approx(2 * row["parameters"], rel=0.05)
    assert main(["plan", *FLAGS, "--device=cpu", "--max-context"]) == 2
    assert "max_context=true: the memory of 8 x cpu is not known" in capsys.readouterr().err


@pytest.mark.thorough
def test_weights_need_not_be_there(tmp_path, capsys):
    raw = hf_config("llama").to_dict() | dict(architectures=["LlamaForCausalLM"])
    (tmp_path / "config.json").write_text(json.dumps(raw))
    flags = [f"--model.name_or_path={tmp_path}", "--train.seq_len=32", "--device=cpu", "--json"]
    rows = []
    for more in ([], ["--adapter.type=qlora", "--adapter.r=2"]):
        assert main(["plan", *flags, *more]) == 0
        rows.append(json.loads(capsys.readouterr().out))
    full, adapters = rows
    assert adapters["parameters"] < full["parameters"]
    assert adapters["optimizer"] < full["optimizer"] / 2


def adapter(kind):
    return dict(adapter=AdapterConfig(type=kind, r=4))


ALIBI = replace(MODEL, position_embedding="alibi")
LAYERS = ("sliding_attention", "full_attention") * 2
WINDOWS = replace(MODEL, num_layers=4, sliding_window=128, layer_types=LAYERS)
NESTED = ExecutionConfig(remat="nested(2)", ffn_chunk=128, ce_chunk=64)
OFFLOADED = ExecutionConfig(remat="full", offload=0.5)
# By devices: the mesh, other groups of the config, the model, and the kernel that is chosen.
ABSENT_GPUS = {
    "a100-40gb:4": (dict(fsdp=2, sp=2), {}, MODEL, "cudnn"),
    "h200:2x2": (dict(fsdp=2, tp=2), {}, MODEL, "fa4"),
    "h100:8": (dict(dp=2, fsdp=2, sp=2), {}, WINDOWS, "fa4"),
    "h200": (dict(), dict(execution=OFFLOADED), MODEL, "fa4"),
    "b200:2": (dict(sp=2), dict(optimizer=OptimizerConfig(state_dtype="int8")), MODEL, "cudnn"),
    "l40s:2": (dict(fsdp=2), adapter("lora"), MODEL, "cudnn"),
    "rtx4090": (dict(), adapter("qlora"), ALIBI, "triton"),
}
ABSENT_TPUS = {
    "v5e:2x2": (dict(fsdp=2, sp=2), {}, MODEL, "scan"),
    "v5p:2x2x1": (dict(fsdp=2, tp=2), {}, WINDOWS, "scan"),
    "v5p:2x2x2": (dict(fsdp=4, sp=2), dict(execution=NESTED), MODEL, "scan"),
    "v6e:2x2": (dict(fsdp=4), adapter("lora"), ALIBI, "scan"),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "devices",
    [
        *(pytest.param(name, marks=needs_compiler) for name in ABSENT_GPUS),
        *(pytest.param(name, marks=needs_tpu_compiler) for name in ABSENT_TPUS),
    ],
)
def test_absent_devices(devices):
    """The step of a mesh, with the kernels of its devices."""
    parallel, groups, model, kernel = (ABSENT_GPUS | ABSENT_TPUS)[devices]
    kind, found = absent_devices(devices)
    # The compiler for TPUs takes twice as long for eight times the length.
    spec = make_spec(found, model, seq_len=512, parallel=ParallelConfig(**parallel), **groups)
    with record_choices() as choices:
        result = plan(spec, devices, int(kind.memory), kind.platform)
    assert {x.name for x in choices if x.operation == "attention"} == {kernel}
    assert result.fits and result.peak < GIB
    state, shards = abstract_state(spec), spec.mesh.size // parallel.get("dp", 1)
    count = sum(x.size for x in jax.tree.leaves(state.model))
    if not groups:
        assert result.parameters == pytest.approx(2 * count / shards, rel=0.05)
        assert result.optimizer == pytest.approx(2 * result.parameters, rel=0.05)
    assert result.optimizer == tree_bytes(state.opt_state)
    assert bool(result.link) == (spec.mesh.size > 1) and bool(result.host) == (devices == "h200")


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_embeddings_have_one_gradient(tied):
    """During the backward pass of the layers, the gradient of the output embedding exists in the
    dtype of the parameters alone, and that of the input embedding does not exist yet."""
    _, devices = absent_devices("h100")
    model = replace(MODEL, vocab_size=65536, num_layers=1, intermediate_size=1024, tied_head=tied)
    optimizer = OptimizerConfig(weight_decay=0.0)
    execution = ExecutionConfig(ce_chunk=16, ffn_chunk=4096)
    spec = make_spec(devices, model, optimizer=optimizer, execution=execution)
    found = plan(spec, "h100", None, "gpu")
    # The peak is in the feed-forward network: 1.8 times the head in float32, beside this gradient.
    head = 4 * model.V * model.hidden_size
    assert found.gradients + found.activations < 2.5 * head


@pytest.mark.thorough
@needs_compiler
def test_settings_are_chosen_for_absent_gpus(capsys):
    """Keys that are not set are in the plan, with an expected time where rates are measured."""
    flags = [*FLAGS, "--devices=h200:2", "--json", "--execution=auto"]
    assert main(["plan", *flags]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["execution"]["remat"] == "dots" and row["fits"]
    assert row["seconds"] > 0 and row["flops"] > 0 and row["link"] > 0


@pytest.mark.thorough
@needs_compiler
def test_states_in_the_host_memory_of_absent_devices():
    _, devices = absent_devices("h100")
    kinds = "device", "pinned_host"
    options = [OptimizerConfig(clip="delayed", state_memory_kind=kind) for kind in kinds]
    specs = [make_spec(devices, optimizer=each) for each in options]
    here, there = (plan(spec, "h100", None, "gpu") for spec in specs)
    size = tree_bytes(abstract_state(specs[0]).opt_state.slots)
    assert here.host == 0 and there.host == size
    assert (there.parameters, there.batch) == (here.parameters, here.batch)
    assert there.optimizer == here.optimizer - size == 4  # The number of steps.
    limits = [absent_limit(spec, KINDS["h100"]) for spec in specs]
    assert limits[0].device == limits[1].device and limits[0].host > limits[1].host
    assert Estimator(specs[0]).held - Estimator(specs[1]).held == size
    spec = make_spec(devices, optimizer=OptimizerConfig(in_backward=True))
    with pytest.raises(NotImplementedError, match="clip=exact: can only be"):
        plan(spec, "h100", None, "gpu")


@pytest.mark.thorough
@needs_compiler
def test_updates_in_the_backward_pass_read_moments_last():
    """Copies of a layer's moments do not exist while its gradients are computed."""
    _, devices = absent_devices("h100")
    model = replace(MODEL, hidden_size=1024, num_heads=8, intermediate_size=16_384)
    optimizer = OptimizerConfig(clip="delayed")
    execution = ExecutionConfig(remat="full", offload=1.0, ffn_chunk=512, ce_chunk=64)
    spec = make_spec(devices, model, 16_384, optimizer=optimizer, execution=execution)
    found = plan(spec, "h100", None, "gpu")
    # The copies of the moments would take two more.
    feed_forward = 2 * 3 * model.hidden_size * model.F
    assert found.gradients + found.activations < 8.5 * feed_forward


def compiled_text(of="h100", num_layers=1, **groups):
    """The program of a step on absent GPUs, with layers as wide as a small model's."""
    kind, devices = absent_devices(of)
    sizes = dict(hidden_size=1024, intermediate_size=4096, head_dim=64, num_layers=num_layers)
    spec = make_spec(devices, replace(MODEL, **sizes), seq_len=64, **groups)
    with tracing_for(spec, kind.platform):
        return compile_step(spec, abstract_state(spec), abstract_batch(spec)).as_text()


@pytest.mark.thorough
@needs_compiler
def test_slices_of_layers_are_arrays_of_their_own():
    """XLA fuses no slice into a kernel of attention, as in runs, where the gradients would be wrong
    (`fa4.XLA_FLAG`): plans of mixtures without these arrays were 8 % too small."""
    text = compiled_text(num_layers=4)
    loops = {*re.findall(r"body=%([\w.-]+)", text)}
    owners = [block.split(" ", 1)[0] for block in text.split("\n\n") if STAND_IN in block]
    assert owners and {name.lstrip("%") for name in owners} <= loops


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("clip", ["exact", "delayed"])
def test_slices_of_weights_are_linear_in_the_counter(clip):
    """Otherwise XLA copies them one after another, with nothing beside."""
    text = compiled_text(num_layers=4, optimizer=OptimizerConfig(clip=clip))
    blocks = [block for block in text.split("\n\n") if " dynamic-update-slice(" not in block]
    found = [block for block in blocks if " dynamic-slice(" in block]
    assert found
    assert not [block for block in found if " clamp(" in block or "s32[4]" in block]


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("clip", ["exact", "delayed"])
def test_documents_are_found_once(clip):
    """Not again in the backward passes of layers."""
    kind, devices = absent_devices("h100")
    placed = dict(dtype="int32", sharding=SingleDeviceSharding(devices[0]))
    with absent(devices[0]):
        alone = jax.jit(documents).lower(jax.ShapeDtypeStruct((1, 64), **placed)).compile()
    text = compiled_text(num_layers=4, optimizer=OptimizerConfig(clip=clip))
    found = [each.count(" reduce-window(") for each in (text, alone.as_text())]
    assert found[0] == found[1] > 0


@pytest.mark.thorough
@needs_compiler
def test_loops_read_host_memory_in_reverse():
    """In backward passes. With an older jaxlib they read it forward, which is wrong."""
    text = compiled_text(num_layers=4, execution=ExecutionConfig(remat="full", offload=1.0))
    reads = re.findall(r"dynamic-slice-start.* calls=%([\w.-]+)", text)
    sign = r"(?s)%%%s \(.*?byte_stride\":\"(-?)"
    signs = {re.search(sign % re.escape(name), text)[1] for name in reads}
    misread = misreads_host_memory("gpu")
    assert signs == ({""} if misread else {"-"})


@pytest.mark.thorough
@needs_compiler
def test_int8_codes_have_a_kernel_of_their_own():
    """XLA compiles the update of embeddings on a mesh, for example. One kernel that reduces the
    maxima of one slot and writes codes of another takes several times as long as two kernels."""
    text = compiled_text("h100:2", optimizer=OptimizerConfig(state_dtype="int8"))
    reductions = re.findall(r"= (.*) fusion\(.*kind=kInput", text)
    assert any("f32" in written for written in reductions)
    assert not [written for written in reductions if "u8[" in written]


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("of, adapter", [("h100", "none"), ("h100", "lora"), ("a100", "lora")])
def test_products_are_cublas(of, adapter):
    """XLA's own kernels for products would keep more activations of adapters alive. An H100 does
    not take them for other steps either."""
    rate = OptimizerConfig(learning_rate=1e-4)
    text = compiled_text(of, adapter=AdapterConfig(type=adapter), optimizer=rate)
    assert "__cublas" in text and "__triton_nested_gemm" not in text


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("offload", [0.5, 1.0])
def test_activations_of_micro_batches_in_host_memory(offload):
    """With updates inside the backward pass, where XLA refused slices of slices of host memory."""
    _, devices = absent_devices("h100")
    optimizer = OptimizerConfig(clip="delayed")
    execution = ExecutionConfig(remat="full", offload=offload, ffn_chunk=1024)
    spec = make_spec(devices, optimizer=optimizer, execution=execution)
    train = replace(spec.config.train, gradient_accumulation_steps=2, param_dtype="float32")
    spec = replace(spec, config=replace(spec.config, train=train))
    assert spec.in_backward
    inputs = MODEL.num_layers * 2 * 4096 * 2 * MODEL.hidden_size
    assert plan(spec, "h100", None, "gpu").host == offload * inputs


@pytest.mark.parametrize("model", fast(recipes.MODELS, ["Llama-3.2-1B"]))
def test_the_shapes_of_the_recipe_are_those_of_the_models(model, tmp_path):
    raw, parameters, methods = recipes.MODELS[model]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config, _ = open_model(parse([f"--model.name_or_path={tmp_path}"]))
    shapes = jax.eval_shape(lambda: new_model(config, jax.random.key(0)))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == parameters
    assert methods == tuple(row["method"] for row in RECIPES if row["model"] == model)


def test_every_plan_of_the_recipe_fits_into_24_gb():
    limit = absent_limit(make_spec(jax.devices()[:1]), KINDS[recipes.GPU]).device / GIB
    assert RECIPES and all(row["peak_gib"] < limit for row in RECIPES)


@pytest.mark.thorough
@needs_compiler
# Compiling every plan takes minutes; scripts/recipes.py does it.
@pytest.mark.parametrize(
    "row",
    [max((x for x in RECIPES if x["method"] == y), key=lambda x: x["peak_gib"]) for y in METHODS],
    ids=METHODS,
)
def test_the_recipe_fits_into_24_gb(row):
    """With the settings of the published row; a run chooses others where they do not fit."""
    spec = recipes.spec_of(row["model"], row["method"])
    spec = with_execution(spec, Execution(**row["execution"]))
    kind, _ = absent_devices(recipes.GPU)
    found = plan(spec, recipes.GPU, absent_limit(spec, kind).device, kind.platform)
    assert found.peak / GIB == pytest.approx(row["peak_gib"], rel=0.05)


def test_remedies_say_what_they_save():
    """The bytes are those of the states with and without the change."""
    spec = make_spec(jax.devices()[:1])
    found = dict(remedies(spec))
    state = abstract_state(spec).opt_state

    def size(tree):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    smaller = make_spec(jax.devices()[:1], optimizer=OptimizerConfig(state_dtype="int8"))
    saved = size(state) - size(abstract_state(smaller).opt_state)
    assert found["optimizer.state_dtype=int8"] == pytest.approx(saved, rel=1e-3)
    assert found["optimizer.state_memory_kind=pinned_host"] == size(state)
    assert "train.param_dtype=bfloat16" not in found
    layers = size(abstract_state(spec).model.layers)
    saved = layers - layers // spec.model.num_layers
    assert found["optimizer.clip=delayed"] == found["optimizer.in_backward=true"] == saved
    moved = make_spec(jax.devices()[:1], optimizer=OptimizerConfig(in_backward=True))
    assert "optimizer.in_backward=true" not in dict(remedies(moved))
    assert tree_bytes(abstract_state(moved), host=True) == layers


@pytest.mark.parametrize("first", [1024, 40_000, 3_000_000])
@pytest.mark.parametrize("curved", [False, True])
def test_the_longest_context_is_found(first, curved):
    """From below and from above, in few compilations, with linear and with other memory."""
    spec = make_spec(jax.devices()[:1])
    lengths = []

    def at(length):
        activations = int(30_000 * length + (1e-2 * length**2 if curved else 0))
        return Plan("x", length, 10 * GIB, 20 * GIB, 0, 5 * GIB, activations, 0, 0, 70 * GIB)

    def plan_length(spec):
        lengths.append(spec.config.train.seq_len)
        return at(lengths[-1])

    found = longest_context(spec, plan_length, at(first))
    assert found is not None and found.fits
    assert not at(found.seq_len + max(2048, found.seq_len // 32)).fits
    assert len(lengths) <= 9


def test_the_search_ends_where_lengths_are_rounded():
    """Interpolation between 47,104 and 49,152 tokens rounds to the first again."""
    spec = make_spec(jax.devices()[:1])
    lengths = []

    def at(length):
        return Plan("x", length, 0, 0, 0, 0, 7 * GIB + 341_000 * length, 0, 0, 22 * GIB)

    def plan_length(spec):
        lengths.append(spec.config.train.seq_len)
        assert len(lengths) < 9, lengths
        return at(lengths[-1])

    found = longest_context(spec, plan_length, at(8192))
    assert found is not None and found.fits and not at(found.seq_len + 2048).fits


@pytest.mark.parametrize("position", ["rope", "learned", "alibi"])
def test_a_context_beyond_the_positions_of_the_model_has_a_warning(position, monkeypatch, capsys):
    """The memory of any device says nothing of positions."""
    space = MemoryLimit(GIB // 4, 0)
    monkeypatch.setattr("bptjax.cli.plan.present_limit", lambda spec: space)
    monkeypatch.setattr("bptjax.cli.plan.plan", lambda spec, *_: _linear(spec, space.device))
    flags = [*FLAGS, "--device=cpu", "--max-context", f"--model.position_embedding={position}"]
    for positions, warned in ((1024, position != "alibi"), (2**20, False)):
        assert main(["plan", *flags, f"--model.max_position_embeddings={positions}"]) == 0
        out, err = capsys.readouterr()
        assert "max_context: searching the longest train.seq_len" in err
        text = f"warning: model.max_position_embeddings={positions}: longer sequences fit"
        assert (text in out) == warned


def _linear(spec, available):
    length = spec.config.train.seq_len
    return Plan("x", length, 0, 0, 0, 0, 4096 * length, 0, 0, available)


def test_no_context_fits():
    spec = make_spec(jax.devices()[:1])

    def too_much(spec):
        return Plan("x", spec.config.train.seq_len, 80 * GIB, 0, 0, 0, 0, 0, 0, 70 * GIB)

    assert longest_context(spec, too_much, too_much(spec)) is None


def test_plans_for_several_devices_show_the_time_left(monkeypatch, capsys):
    now = [0.0]

    def planned(*_):
        now[0] += 30.0
        return True

    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    monkeypatch.setattr("bptjax.cli.plan._run_on", planned)
    command = ["plan", *FLAGS, "--devices=h100,h200,b200"]
    assert main(command) == 0
    lines = ["planning: 33%", "planning: 67%, 0:00:30 left"]
    assert capsys.readouterr().err.splitlines() == lines
    assert main([*command, "--json"]) == 0
    assert capsys.readouterr().err == ""
