"""Names with several fields: a mixture of experts has a tensor per layer and expert."""

import json
import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bptjax.cli import convert
from bptjax.models.config import ModelConfig
from bptjax.models.groups.attention import AttentionConfig
from bptjax.models.groups.experts import ExpertsConfig
from bptjax.models.params import stacked
from bptjax.weights import conversion
from bptjax.weights.hf.families import FAMILIES
from bptjax.weights.hf.families.family import Family, activation
from bptjax.weights.hf.families.gated import rmsnorm_glu_decoder, rules_rmsnorm_glu
from bptjax.weights.hf.peft import WEIGHTS, read_peft, write_peft
from bptjax.weights.hf.tensor_rules import linear
from bptjax.weights.hf.tensors import Tensors
from bptjax.weights.lora import AdapterConfig, Adapters
from bptjax.weights.pretrained import open_pretrained

L, E, D, F = 2, 3, 32, 48
UP = "model.layers.{}.mlp.experts.{}.up_proj.weight"


def read(c):
    return rmsnorm_glu_decoder(
        c,
        activation=activation(c.hidden_act),
        attention=AttentionConfig(qk_norm=True),
        intermediate_size=c.moe_intermediate_size,
        feed_forward="experts",
        experts=ExpertsConfig(count=c.num_experts),
    )


def rules(c):
    mlp = "model.layers.{layer}.mlp."
    yield from (rule for rule in rules_rmsnorm_glu(c) if not rule.hf.startswith(mlp))
    D, F, E = (c.hidden_size,), (c.F,), (c.experts.count,)
    yield from linear(f"{mlp}gate", "layers.mlp.router", D, E, bias=False)
    for name, shapes in (("gate", (D, F)), ("up", (D, F)), ("down", (F, D))):
        hf = f"{mlp}experts.{{expert}}.{name}_proj"
        yield from linear(hf, f"layers.mlp.{name}", *shapes, bias=False)


@pytest.fixture
def family(monkeypatch):
    """Qwen 3 with experts, whose files have a tensor per expert."""
    family = Family(read, rules)
    monkeypatch.setitem(FAMILIES, "qwen3_moe", family)
    return family


@pytest.fixture
def checkpoint(family, tmp_path):
    def make(change=lambda arrays: arrays, experts=E, inner=F):
        import transformers

        config = transformers.Qwen3MoeConfig(
            vocab_size=61,
            hidden_size=D,
            num_hidden_layers=L,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,  # pyrefly: ignore[unexpected-keyword]
            moe_intermediate_size=inner,
            num_experts=experts,
            architectures=["Qwen3MoeForCausalLM"],
        )
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf" / "config.json").write_text(config.to_json_string())
        rng, ours = np.random.default_rng(0), ModelConfig(**read(config))
        arrays = {
            name: rng.normal(size=rule.shape).astype(np.float32)
            for rule, names in family.names(ours).items()
            for name in names.values()
        }
        save_file(change(arrays), tmp_path / "hf" / "model.safetensors")
        return tmp_path / "hf"

    return make


def test_experts_are_stacked_behind_layers(checkpoint):
    directory = checkpoint()
    model = open_pretrained(ModelConfig(name_or_path=str(directory)))
    assert model.source.specs["layers.mlp.up.kernel"] == ("float32", (L, E, D, F))
    assert model.source.specs["layers.mlp.router.kernel"] == ("float32", (L, D, E))
    up = dict(stacked(model.source))["layers.mlp.up.kernel"]
    for layer, expert in np.ndindex(L, E):
        wanted = Tensors(directory).read(UP.format(layer, expert)).T
        assert np.array_equal(up[layer, expert], wanted)
        assert np.array_equal(model.source.read("layers.mlp.up.kernel", (layer, expert)), wanted)
        assert np.array_equal(
            model.source.read("layers.mlp.up.kernel", (layer, expert, 5)), wanted[5]
        )
    assert np.array_equal(model.source.read("layers.mlp.up.kernel", (1,)), up[1])


def test_experts_come_back_bit_for_bit(checkpoint, tmp_path):
    directory = checkpoint()
    conversion.to_bptjax(str(directory), tmp_path / "ours")
    assert Tensors(tmp_path / "ours").specs["layers.mlp.down.kernel"][1] == (L, E, F, D)
    conversion.to_hf(str(tmp_path / "ours"), tmp_path / "back", dtype=None, max_shard_size="30KB")
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 2
    before, after = Tensors(directory), Tensors(tmp_path / "back")
    assert before.specs == after.specs and UP.format(1, 2) in before.specs
    for name in before.specs:
        assert before.read(name).tobytes() == after.read(name).tobytes(), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {n: x for n, x in a.items() if n != UP.format(1, 2)}, "missing: {}"),
        (lambda a: a | {UP.format(0, E): a[UP.format(0, 0)]}, "unexpected: {}"),
        (lambda a: a | {UP.format(1, 2): a[UP.format(1, 2)].T.copy()}, "wrong shape: {} is"),
    ],
    ids=["missing", "unexpected", "wrong shape"],
)
def test_wrong_experts_are_named_in_one_line(checkpoint, tmp_path, capsys, change, message):
    directory = checkpoint(change)
    assert convert.main(["hf-to-bptjax", str(directory), str(tmp_path / "ours")]) == 2
    error = capsys.readouterr().err
    name = UP.format(0, E) if "unexpected" in message else UP.format(1, 2)
    assert message.format(name) in error and error.count("\n") == 1


def test_conversion_holds_one_expert_in_memory(checkpoint, tmp_path):
    experts, inner = 16, 2048
    directory = checkpoint(experts=experts, inner=inner)
    one = 4 * D * inner
    tracemalloc.start()
    try:
        conversion.to_bptjax(str(directory), tmp_path / "ours")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        conversion.to_hf(
            str(tmp_path / "ours"), tmp_path / "back", dtype=None, max_shard_size="5GB"
        )
        _, peak_back = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The tensor as read and its transpose, and small objects; the stack has 32 experts.
    assert max(peak, peak_back) < 8 * one < L * experts * one


def test_adapters_of_experts_are_written_for_each_and_read_back(family, checkpoint, tmp_path):
    model = open_pretrained(ModelConfig(name_or_path=str(checkpoint())))
    rng, r = np.random.default_rng(0), 4

    def values(inputs, outputs, *stacked):
        a = rng.normal(size=(*stacked, inputs, r)).astype(np.float32)
        b = rng.normal(size=(*stacked, r, outputs)).astype(np.float32)
        return a, b, np.full(stacked, 2.0, np.float32)

    adapters = Adapters(
        AdapterConfig(type="lora", r=r, alpha=8.0),
        {
            "layers.mlp.up.kernel": values(D, F, L, E),
            "layers.mlp.down.kernel": values(F, D, L, E),
            "layers.mlp.router.kernel": values(D, E, L),
        },
    )
    write_peft(tmp_path, adapters, family, model.config, "base")
    written, (a, b, _) = load_file(tmp_path / WEIGHTS), adapters.values["layers.mlp.up.kernel"]
    assert len(written) == 2 * (2 * L * E + L)
    for layer, expert in np.ndindex(L, E):
        name = "base_model.model." + UP.format(layer, expert).removesuffix("weight")
        assert np.array_equal(written[f"{name}lora_A.weight"], a[layer, expert].T)
        assert np.array_equal(written[f"{name}lora_B.weight"], b[layer, expert].T)
    back = read_peft(tmp_path, family, model.config)
    assert back.values.keys() == adapters.values.keys()
    for path, wanted in adapters.values.items():
        for got, x in zip(back.values[path], wanted, strict=True):
            assert np.array_equal(got, x), path
    targets = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert "mlp.experts.2.up_proj" in targets and "mlp.gate" in targets
