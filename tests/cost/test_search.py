"""The choice of settings that are not set: fast, within the memory, and faithful to set keys."""

from dataclasses import asdict, replace

import jax
import numpy as np
import pytest
from tiers import fast

from bptjax.config import Config, TrainConfig
from bptjax.cost import auto
from bptjax.cost.estimate import Estimator
from bptjax.cost.memory import Plan, longest_context, plan
from bptjax.cost.search import MemoryLimit, _settings, choose, smallest, with_execution
from bptjax.models.config import ModelConfig
from bptjax.models.execution import UNCHUNKED, ExecutionConfig, MemoryConfig
from bptjax.models.groups.experts import ExpertsConfig
from bptjax.models.groups.full_attention import FullAttentionConfig, SharedKvConfig
from bptjax.models.groups.linear_attention import LinearAttentionConfig
from bptjax.objectives import ObjectiveConfig
from bptjax.optim.optimizer import OptimizerConfig
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.parsing.keys import replace_keys
from bptjax.training.guards import advice
from bptjax.training.spec import TrainSpec
from bptjax.weights.lora import AdapterConfig

GIB = 2**30
MODEL = ModelConfig(
    vocab_size=32_000,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=16,
    num_kv_heads=4,
    tied_head=False,
)


def make_spec(seq_len=16_384, model=MODEL, parallel=None, **groups):
    train = TrainConfig(
        seq_len=seq_len, max_steps=10, compute_dtype="bfloat16", param_dtype="bfloat16"
    )
    config = Config(train=train, parallel=parallel or ParallelConfig(), **groups)
    devices = jax.devices()[: 4 if parallel else 1]
    return TrainSpec(config, model, make_mesh(config.parallel, devices))


class Memory:
    """Stands for the compiler: a peak that differs from the estimate, and a list of calls."""

    def __init__(self, spec, limit, scale):
        self.estimator, self.limit, self.scale = Estimator(spec), limit, scale
        self.compiled = []

    def peak(self, execution):
        found, held = self.estimator(execution), self.estimator.held + self.estimator.gradients
        return int(held + found.saved + self.scale * found.workspace)

    def __call__(self, spec):
        execution = spec.execution
        self.compiled.append(execution)
        return Plan("x", 1, 0, 0, 0, 0, self.peak(execution), 0, 0, self.limit.device)


@pytest.mark.parametrize("scale", fast([0.6, 1.9], [1.9]))
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.thorough, id="16k"),
        pytest.param(dict(seq_len=2_000, execution=ExecutionConfig(offload=0.0)), id="no offload"),
        pytest.param(
            dict(seq_len=65_536, parallel=ParallelConfig(fsdp=1, sp=4)),
            marks=pytest.mark.thorough,
            id="sp=4",
        ),
        pytest.param(
            dict(model=replace(MODEL, gated=False, residual="parallel", num_kv_heads=None)),
            marks=pytest.mark.thorough,
            id="parallel residual",
        ),
    ],
)
def test_the_choice_is_close_to_an_exhaustive_search(options, scale):
    spec = make_spec(**options)
    estimator = Estimator(spec)
    least = Memory(spec, MemoryLimit(0, 0), scale).peak(smallest(spec, MemoryLimit(0, 64 * GIB)))
    for factor in (1.02, 1.3, 4.0):
        limit = MemoryLimit(int(least * factor), 32 * GIB)
        memory = Memory(spec, limit, scale)
        choice = choose(spec, limit, memory)
        assert choice.plan.fits and choice.plan.peak == memory.peak(choice.execution)
        assert estimator(choice.execution).host <= limit.host
        assert choice.compiled == len(memory.compiled) == len(set(memory.compiled)) <= 8
        every = _settings(spec, estimator, limit, {True: scale, False: scale})
        every = [x for x in every if memory.peak(x) <= limit.device]
        best = min(x.seconds for x in map(estimator, every) if x.host <= limit.host)
        assert estimator(choice.execution).seconds < 1.04 * best


def test_every_key_is_searched():
    spec = make_spec()
    found = [*_settings(spec, Estimator(spec), MemoryLimit(64 * GIB, 64 * GIB), {})]
    for key in ("remat", "save", "ffn_chunk", "ce_chunk", "head_groups"):
        assert len({getattr(execution, key) for execution in found}) > 1, key


def test_heads_run_in_groups_where_memory_is_short():
    spec = make_spec(65_536)
    least = smallest(spec, MemoryLimit(0, 0))
    assert least.head_groups == 4  # The key heads.
    peak = Memory(spec, MemoryLimit(0, 0), 1.0).peak
    limit = MemoryLimit(peak(replace(least, head_groups=1)) - GIB // 4, 0)
    chosen = choose(spec, limit, Memory(spec, limit, 1.0)).execution
    assert chosen.head_groups > 1 and peak(chosen) <= limit.device
    limit = MemoryLimit(80 * GIB, 0)
    assert choose(spec, limit, Memory(spec, limit, 1.0)).execution.head_groups == 1


def test_the_longest_sequences_save_the_inputs_of_groups_of_layers():
    """In host memory; heads run in groups, and attention runs again layer by layer."""
    spec = make_spec(1_048_576)
    found = smallest(spec, MemoryLimit(0, 16 * GIB))
    assert (found.remat, found.offload, found.head_groups) == ("nested_full(4)", 1.0, 4)
    estimator, kept = Estimator(spec), replace(found, remat="nested(4)")
    more = estimator(kept).saved - estimator(found).saved
    # Attention's output, and its statistics in float32, of four layers.
    assert more == 4 * 2**20 * (2 * MODEL.hidden_size + 4 * MODEL.num_heads)
    assert estimator(kept).host == estimator(found).host == 16 * GIB
    assert estimator(kept).seconds < estimator(found).seconds


def test_activations_in_host_memory_take_memory_while_their_layer_runs():
    """With all host memory, more saved activations are not free."""
    spec = make_spec(262_144)
    found = smallest(spec, MemoryLimit(0, 1000 * GIB))
    assert (found.remat, found.save, found.offload) == ("full", (), 1.0)
    estimator = Estimator(spec)
    queries = estimator(replace(found, save=("query",)))
    assert queries.saved - estimator(found).saved == 2 * 262_144 * MODEL.hidden_size


def test_optimizer_states_in_host_memory_take_time():
    kinds = "device", "pinned_host"
    specs = [make_spec(optimizer=OptimizerConfig(state_memory_kind=kind)) for kind in kinds]
    here, there = map(Estimator, specs)
    assert there.states_on_host == here.held - there.held > 0 == here.states_on_host
    assert there(specs[0].execution).seconds > here(specs[0].execution).seconds


def test_more_memory_is_never_slower():
    spec = make_spec()
    estimator, times = Estimator(spec), []
    for gib in (16, 22, 36, 60):
        limit = MemoryLimit(gib * GIB, 32 * GIB)
        times.append(estimator(choose(spec, limit, Memory(spec, limit, 1.2)).execution).seconds)
    assert times == sorted(times, reverse=True) and times[-1] < times[0]


@pytest.mark.parametrize(
    "set_keys",
    [
        dict(remat="full"),
        dict(save=("query",)),
        dict(ffn_chunk=1024),
        dict(ce_chunk=300),
        dict(offload=0.3),
        dict(remat="nested(4)", offload=1.0),
        dict(remat="none"),
        dict(save=("gate", "up")),
        dict(schedule="fused"),
        dict(schedule="fused", remat="full", ce_chunk=100),
    ],
    ids=str,
)
@pytest.mark.parametrize("gib", [20, 200])
def test_keys_that_are_set_are_kept(set_keys, gib):
    spec, limit = make_spec(execution=ExecutionConfig(**set_keys)), MemoryLimit(gib * GIB, GIB)
    chosen = choose(spec, limit, Memory(spec, limit, 1.0)).execution
    for key, value in set_keys.items():
        assert getattr(chosen, key) == value
    # A config with all keys set must be valid.
    assert with_execution(spec, chosen).config.execution.unset == ()
    if set(chosen.save) & UNCHUNKED:
        assert chosen.ffn_chunk >= spec.config.train.seq_len


def test_what_does_not_fit_is_the_least():
    """Without room for the gradients nothing fits; the plan is that of the smallest settings."""
    spec, limit = make_spec(), MemoryLimit(GIB, 0)
    memory = Memory(spec, limit, 1.0)
    choice = choose(spec, limit, memory)
    assert not choice.plan.fits and choice.execution == smallest(spec, limit)
    every = _settings(spec, memory.estimator, limit, {})
    assert choice.plan.peak <= 1.01 * min(memory.peak(x) for x in every)


def test_layers_without_keys_have_groups_of_their_own():
    types = 8 * ["sliding_attention", "full_attention"]
    model = replace(MODEL, layer_types=types, sliding_window=512)
    parts = dict(full_attention=FullAttentionConfig(256), shared_kv=SharedKvConfig(6))
    spec = make_spec(model=replace(model, **parts))
    found = [*_settings(spec, Estimator(spec), MemoryLimit(64 * GIB, 0), {})]
    for execution in found:
        execution.check(spec.model)
    assert "nested(2)" in {x.remat for x in found}
    with pytest.raises(ValueError, match="both the 16 layers and the last 6, which share"):
        replace(found[0], remat="nested(4)", save=()).check(spec.model)


@pytest.mark.thorough
def test_the_smallest_settings_do_not_depend_on_the_device_memory():
    """An offload that just fits would be no help if the estimate is too low."""
    spec = make_spec(262_144)
    estimator = Estimator(spec)
    for gib in (16, 24, 400):
        found = smallest(spec, MemoryLimit(gib * GIB, 64 * GIB))
        assert found.offload == 1.0 and estimator(found).host <= 64 * GIB
    assert smallest(spec, MemoryLimit(16 * GIB, 0)).offload == 0.0


@pytest.mark.parametrize("layers", fast([1, 2, 4], [2]))
def test_the_least_offload_fits(layers):
    """Activations of the layer that runs stay on the device."""
    spec = make_spec(model=replace(MODEL, num_layers=layers))
    none = MemoryLimit(0, 0)
    peak = Memory(spec, none, 1.0).peak
    every = sorted(map(peak, _settings(spec, Estimator(spec), none, {})))
    for device in every[:: len(every) // 20]:
        limit = MemoryLimit(device, 1000 * GIB)
        found = _settings(spec, Estimator(spec), limit, {})
        assert all(peak(x) <= device for x in found if 0 < x.offload < 1)


@pytest.mark.parametrize("fits", [True, False])
def test_settings_with_little_offload_are_also_compiled_without(fits):
    """Splitting activations takes memory, and the estimate may be too high."""
    keys = dict(remat="full", save=(), ffn_chunk=1024, ce_chunk=512, head_groups=1)
    spec = make_spec(execution=ExecutionConfig(**keys))
    plain = spec.execution
    needed = Memory(spec, MemoryLimit(0, 0), 1.0).peak(plain)
    limit = MemoryLimit(int(0.995 * needed), 32 * GIB)
    memory = Memory(spec, limit, 1.0)
    estimated = memory.peak
    memory.peak = lambda execution: (
        limit.device if fits and execution == plain else estimated(execution)
    )
    choice = choose(spec, limit, memory)
    assert choice.plan.fits and [x.offload for x in memory.compiled] == [0.1, 0.0]
    assert choice.execution.offload == (0.0 if fits else 0.1)


def test_all_is_offloaded_instead_of_most():
    """Splitting activations between device and host takes more copies."""
    keys = dict(remat="save_attention", save=(), ffn_chunk=4096, ce_chunk=512, head_groups=1)
    spec = make_spec(32_768, execution=ExecutionConfig(**keys))
    all_offloaded = replace(spec.execution, offload=1.0)
    host = Estimator(spec)(all_offloaded).host
    peak = Memory(spec, MemoryLimit(0, 0), 1.0).peak
    most, least = peak(spec.execution), peak(all_offloaded)

    def chosen(share: float, host: int) -> float:
        limit = MemoryLimit(int(most - share * (most - least)), host)
        return choose(spec, limit, Memory(spec, limit, 1.0)).execution.offload

    assert chosen(0.78, host) == 1.0
    assert (chosen(0.78, host - 1), chosen(0.28, host)) == (0.8, 0.3)


def test_settings_of_a_resumed_run_are_kept_if_they_fit():
    spec, limit = make_spec(), MemoryLimit(40 * GIB, 0)
    first = ExecutionConfig(remat="full", ffn_chunk=1024).complete()
    memory = Memory(spec, limit, 1.0)
    assert choose(spec, limit, memory, first=first).execution == first
    assert memory.compiled == [first]
    big = ExecutionConfig(remat="none").complete()
    limit = MemoryLimit(memory.peak(big) - 1, 0)
    assert choose(spec, limit, Memory(spec, limit, 1.0), first=big).execution != big


def test_adapters_have_no_gradients_of_frozen_weights():
    spec = make_spec()
    lora = replace(spec, config=replace(spec.config, adapter=AdapterConfig(type="lora")))
    full, adapters = Estimator(spec), Estimator(lora)
    assert adapters.gradients < full.gradients / 20
    execution = spec.execution
    assert adapters(execution).seconds < full(execution).seconds
    assert adapters(execution).saved == full(execution).saved


def test_small_chunks_of_tokens_are_slow_with_many_experts():
    """On an H200, 32 chunks took 1.59 times as long as 4, in the same memory of 12.9 GiB."""
    model = replace(
        MODEL,
        vocab_size=151_936,
        intermediate_size=6144,
        num_layers=12,
        num_heads=32,
        head_dim=128,
        feed_forward="experts",
        experts=ExpertsConfig(count=128, per_token=8, size=768),
    )
    spec = make_spec(32_768, model, adapter=AdapterConfig(type="qlora", r=16))
    estimator, common = Estimator(spec), dict(ce_chunk=512)
    large = ExecutionConfig(remat="full", ffn_chunk=8192, **common).complete()
    small = ExecutionConfig(ffn_chunk=1024, head_groups=4, **common).complete()
    assert 1.25 < estimator(small).seconds / estimator(large).seconds < 1.7
    held = estimator.held + estimator.gradients
    few, many = (held + (x := estimator(e)).saved + x.workspace for e in (large, small))
    assert many == pytest.approx(few, rel=0.05) == pytest.approx(13 * GIB, rel=0.1)


def test_a_reference_takes_a_forward_pass_more():
    spec = make_spec()
    spec = replace(spec, config=replace(spec.config, adapter=AdapterConfig(type="lora")))
    pairs = replace(spec, config=replace(spec.config, objective=ObjectiveConfig("dpo")))
    one, both = (Estimator(x)(spec.execution) for x in (spec, pairs))
    assert 1.2 * one.flops < both.flops < 1.4 * one.flops and both.seconds > 1.15 * one.seconds
    assert both.saved == one.saved and one.workspace <= both.workspace < 1.05 * one.workspace
    odds = replace(spec, config=replace(spec.config, objective=ObjectiveConfig("orpo")))
    assert Estimator(odds)(spec.execution).flops == one.flops


LINEAR = LinearAttentionConfig(key_heads=2, value_heads=8, key_size=4, value_size=4)


# The workspace of the rule depends on its saved results, so linear attention saves projections.
SAVED = dict(remat="full", save=("query", "key", "value", "gate", "up"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("linear", "saving"),
    [(None, dict(remat="dots")), (LINEAR, SAVED)],
    ids=["attention", "linear attention"],
)
def test_estimated_activations_are_those_of_the_compiler(linear, saving):
    """The difference between two remat policies, on a CPU in float32."""
    model = replace(MODEL, vocab_size=64, hidden_size=16, intermediate_size=64, num_heads=4)
    if linear:
        types = ["linear_attention"] * 15 + ["full_attention"]
        model = replace(model, layer_types=types, linear_attention=linear)
    spec = make_spec(256, model)
    config = replace(spec.config, train=replace(spec.config.train, compute_dtype="float32"))
    spec = replace(spec, config=config)
    peaks, saved = [], []
    for policy in (dict(remat="full"), saving):
        execution = ExecutionConfig(**policy, ffn_chunk=256).complete()
        peaks.append(plan(with_execution(spec, execution), "cpu").peak)
        saved.append(Estimator(spec)(execution).saved)
    assert np.diff(peaks) == pytest.approx(np.diff(saved), rel=0.15)


def test_complete_execution(tmp_path, monkeypatch):
    """One compilation, then none: the choice is cached for the same model, length and memory."""

    def plan(spec, kind, available, platform):
        memory = Memory(spec, MemoryLimit(available, 0), 1.0)
        compiled.append(1)
        return memory(spec)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(auto, "present_limit", lambda spec: MemoryLimit(int(size), 0))
    monkeypatch.setattr(auto, "plan", plan)
    size, compiled = 100 * GIB, []
    spec = make_spec(execution=ExecutionConfig(ce_chunk=64))
    lines = []
    chosen, (note,) = auto.complete_execution(spec, lines.append)
    assert chosen.execution.remat == "dots" and chosen.execution.ce_chunk == 64
    assert len(compiled) == len(lines) == 1 and "1 setting compiled" in note
    assert "remat: dots, save: [], ffn_chunk: 16384, offload: 0.0" in note

    other = replace(spec, config=replace(spec.config, seed=3))
    again, (note,) = auto.complete_execution(other, lines.append)
    assert again.execution == chosen.execution and len(compiled) == 1
    assert "found by an earlier run" in note
    # Settings of a run are checked again.
    _, (note,) = auto.complete_execution(spec, lines.append, first=chosen.execution)
    assert "as before" in note and len(compiled) == 2
    # Nothing to choose.
    assert auto.complete_execution(chosen, lines.append) == (chosen, [])

    size = GIB
    with pytest.raises(ValueError, match=r"memory: a step on x needs .* GiB more than"):
        auto.complete_execution(spec, lines.append)


def test_the_cache_tells_steps_apart():
    spec, memory = make_spec(), MemoryLimit(GIB, 0)
    changes = {"optimizer.clip": "delayed", "optimizer.in_backward": False, "objective.type": "dpo"}
    each = [{}, *({key: value} for key, value in changes.items())]
    specs = [replace(spec, config=replace_keys(spec.config, change)) for change in each]
    assert len({auto._cache_file(each, memory) for each in specs}) == len(specs)


@pytest.mark.parametrize("text", ["", "[]", "5", '{"remat": 5, "save": []}', '{"remat": "full"}'])
def test_a_damaged_cache_is_not_used(text, tmp_path):
    file = tmp_path / "choice.json"
    file.write_text(text)
    assert auto._read(file) is None
    auto._write(file, ExecutionConfig().complete())
    assert auto._execution(auto._read(file)) == ExecutionConfig().complete()
    auto._write(file / "no directory", ExecutionConfig().complete())


def test_processes_log_the_same(monkeypatch, tmp_path):
    """Each process measures its own seconds, and `setup` compares the notes of all processes."""
    lines = ["of process 0"]

    def gather(value):
        return [lines if isinstance(value[0], str) else value]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(auto, "all_gather_json", gather)
    monkeypatch.setattr(auto, "present_limit", lambda spec: MemoryLimit(100 * GIB, 0))
    monkeypatch.setattr(
        auto, "plan", lambda spec, *_: Memory(spec, MemoryLimit(100 * GIB, 0), 1.0)(spec)
    )
    assert auto.complete_execution(make_spec(), print)[1] == lines


def test_processes_of_a_host_share_its_memory(monkeypatch):
    each = [["a", 1, 400, 90], ["a", 3, 400, 80], ["b", 4, 800, 90]]
    monkeypatch.setattr(auto, "all_gather_json", lambda _: each)
    found = auto.present_limit(make_spec())
    assert found == auto.memory_limit(make_spec(), 80, 100)
    monkeypatch.setattr(auto, "misreads_host_memory", lambda platform: True)
    assert auto.present_limit(make_spec()) == found._replace(host=0)


@pytest.mark.parametrize("misread", [False, True])
def test_a_resumed_run_does_not_offload_if_host_memory_is_misread(misread, monkeypatch, tmp_path):
    limit = MemoryLimit(100 * GIB, 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(auto, "present_limit", lambda spec: limit)
    monkeypatch.setattr(auto, "misreads_host_memory", lambda platform: misread)
    monkeypatch.setattr(auto, "plan", lambda spec, *_: Memory(spec, limit, 1.0)(spec))
    first = ExecutionConfig(remat="full", offload=0.5).complete()
    spec, _ = auto.complete_execution(make_spec(), print, first=first)
    assert spec.execution.offload == (0.0 if misread else 0.5)


def test_the_budget_is_checked_if_all_keys_are_set(monkeypatch, tmp_path):
    spec, found = make_spec(memory=MemoryConfig(10.0)), MemoryLimit(10 * GIB, 0)
    spec = with_execution(spec, ExecutionConfig(remat="full").complete())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(auto, "present_limit", lambda _: found)
    monkeypatch.setattr(auto, "plan", lambda spec, *_: Memory(spec, found, 1.0)(spec))
    with pytest.raises(ValueError, match=r"GiB more than memory\.budget_gib=10\.0; "):
        auto.complete_execution(spec, print)


def test_an_offload_that_is_set_may_exceed_the_host():
    spec = make_spec(execution=ExecutionConfig(offload=1.0))
    limit = MemoryLimit(200 * GIB, 0)
    assert choose(spec, limit, Memory(spec, limit, 1.0)).execution.offload == 1.0


def test_a_chunk_longer_than_a_shard_of_the_sequence():
    """Its settings must be valid, though the devices of sp have shorter sequences."""
    options = dict(
        parallel=ParallelConfig(fsdp=1, sp=4), execution=ExecutionConfig(ffn_chunk=32768)
    )
    spec, limit = make_spec(65_536, **options), MemoryLimit(200 * GIB, 0)
    assert choose(spec, limit, Memory(spec, limit, 1.0)).execution.ffn_chunk == 32768


def test_the_longest_context_with_activations_that_need_one_chunk():
    spec, limit = make_spec(4096, execution=ExecutionConfig(save=("up",))), MemoryLimit(30 * GIB, 0)

    def measure(spec):
        return replace(Memory(spec, limit, 1.0)(spec), seq_len=spec.config.train.seq_len)

    found = longest_context(spec, measure, measure(spec))
    assert found.fits and found.seq_len > 4096


def test_a_search_ends_though_estimates_are_wrong():
    """The compiler needs memory that does not depend on the settings."""
    spec = make_spec(64)
    estimator = Estimator(spec)
    limit = MemoryLimit(estimator.held + estimator.gradients + 4 * GIB, 0)
    memory = Memory(spec, limit, 1.0)
    memory.peak = lambda execution: limit.device + 1
    choice = choose(spec, limit, memory)
    assert not choice.plan.fits and choice.compiled <= 9


def test_the_budget_limits_the_memory():
    spec = make_spec(memory=MemoryConfig(budget_gib=10.0))
    assert auto.memory_limit(spec, 80 * GIB, GIB).device == 10 * GIB
    assert auto.memory_limit(spec, 8 * GIB, GIB).device == int(auto.SAFE * 8 * GIB)
    with pytest.raises(ValueError, match=r"memory\.budget_gib=-1: must be finite and positive"):
        MemoryConfig(budget_gib=-1)


def test_on_a_cpu_the_keys_have_fixed_values():
    plain = Config(execution=ExecutionConfig(remat="full")).on("cpu").execution
    assert asdict(plain) == asdict(ExecutionConfig().complete()) | {"remat": "full"}
    assert Config().on("gpu").execution.unset == (
        "remat",
        "save",
        "ffn_chunk",
        "ce_chunk",
        "offload",
        "head_groups",
    )


def test_advice_when_memory_runs_out():
    spec = make_spec()
    assert "memory.budget_gib=36 " in next(advice(spec, 40 * GIB))
    first, *others = advice(make_spec(memory=MemoryConfig(10.0)), 40 * GIB)
    assert "memory.budget_gib=9 " in first
    assert any(text.startswith("optimizer.state_memory_kind=pinned_host") for text in others)
    assert not any("pinned_host" in text for text in advice(spec, None))


def test_float8_is_faster_and_holds_the_linear_layers_in_8_bits():
    spec = make_spec()
    config = replace(spec.config, train=replace(spec.config.train, linear="float8"))
    plain, float8 = Estimator(spec), Estimator(replace(spec, config=config))
    m = MODEL
    heads = 2 * m.hidden_size * m.H * (m.num_heads + m.K)
    assert float8.held - plain.held == m.num_layers * (heads + 3 * m.hidden_size * m.F)
    slow, fast = (each(spec.execution) for each in (plain, float8))
    assert 0.6 * slow.seconds < fast.seconds < 0.95 * slow.seconds
    assert fast.flops == slow.flops


def test_float8_of_qlora_holds_no_weights_in_8_bits():
    spec = make_spec(adapter=AdapterConfig(type="qlora"))
    config = replace(spec.config, train=replace(spec.config.train, linear="float8"))
    plain, float8 = Estimator(spec), Estimator(replace(spec, config=config))
    assert float8.held == plain.held
    slow, fast = (each(spec.execution) for each in (plain, float8))
    assert 0.6 * slow.seconds < fast.seconds < 0.95 * slow.seconds
