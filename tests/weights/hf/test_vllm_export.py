"""Adapters in vLLM's form: the same change of the weights as in PEFT's, read back and merged."""

import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiers import fast

from bptjax.cli import convert
from bptjax.models.architecture import new_model
from bptjax.models.config import ModelConfig
from bptjax.weights.adapter_export import export_note, write_adapter
from bptjax.weights.conversion import merging
from bptjax.weights.hf.peft import WEIGHTS
from bptjax.weights.hf.peft_config import ADAPTER_CONFIG
from bptjax.weights.hf.peft_modules import modules
from bptjax.weights.hf.vllm import RANKS, max_lora_rank
from bptjax.weights.lora import AdapterConfig, Adapters, new_adapters
from bptjax.weights.pretrained import open_pretrained
from weights.hf.cases import FAMILIES, config
from weights.hf.loading import random_base

REFUSED = ["bloom", "falcon", "gpt2", "mpt", "stablelm"]
SERVED = [
    n for n in FAMILIES.values() if n not in (*REFUSED, "bert", "roberta", "modernbert", "vit")
]
ALL = r".*"
# Family, adapted modules, and adapter settings.
CASES = {name: (name, ALL, {}) for name in SERVED} | {
    "mixtral: only down": ("mixtral", "w2", {}),
    "gpt_oss: only down": ("gpt_oss", "down_proj", {}),
    "gpt_oss: only up, rsLoRA": ("gpt_oss", "gate_up_proj", dict(use_rslora=True, alpha=5.0)),
    "qwen3_5: only z": ("qwen3_5_text", "in_proj_z", {}),
    "qwen3_5: odd rank": ("qwen3_5_text", ALL, dict(r=7, alpha=3.0)),
    "qwen3_moe: rsLoRA": ("qwen3_moe", ALL, dict(r=3, alpha=7.0, use_rslora=True)),
}
FAST = [
    "llama",
    "mixtral: only down",
    "gpt_oss",
    "qwen3_5: only z",
]


@pytest.fixture
def adapted(tmp_path):
    """A random base with random adapters on the modules that match."""

    def make(name, pattern=ALL, **settings):
        base = random_base(tmp_path / "base", config(name))
        model = open_pretrained(ModelConfig(name_or_path=str(base)))
        named = modules(model.config, model.family)
        paths = {
            p for n, ps in named.items() if re.fullmatch(pattern, n.split(".")[-1]) for p in ps
        }
        abstract = jax.eval_shape(lambda: new_model(model.config, jax.random.key(0), jnp.float32))
        lora, rng = AdapterConfig("lora", **dict(r=4) | settings), np.random.default_rng(0)
        new = new_adapters(abstract, paths, lora, jnp.float32, jax.random.key(0))
        values = {
            path: (np.asarray(a), rng.normal(size=b.shape).astype(np.float32), np.asarray(scale))
            for path, (a, b, scale) in new.items()
        }
        return model.adapted(Adapters(lora, values))

    return make


def exported(model, directory, form):
    directory.mkdir()
    write_adapter(model, directory, form)
    return open_pretrained(ModelConfig(name_or_path=str(directory)))


def check_equal(got, wanted):
    """The same kernels have adapters, and these change the weights equally."""
    assert got.adapters.values.keys() == wanted.adapters.values.keys()
    first, second = merging(got), merging(wanted)
    for path in wanted.adapters.values:
        x, y = first(path, ()), second(path, ())
        assert np.abs(x - y).max() <= 2e-6 * np.abs(y).max(), path
        assert np.abs(y - wanted.source.read(path)).max() > 0.1


@pytest.mark.parametrize("case", fast(CASES, FAST))
def test_both_forms_change_the_weights_equally(adapted, tmp_path, case):
    name, pattern, settings = CASES[case]
    model = adapted(name, pattern, **settings)
    for form in ("peft", "vllm"):
        check_equal(exported(model, tmp_path / form, form), model)
    # vLLM's older versions read the scale alpha / r of all modules from these keys alone.
    raw = json.loads((tmp_path / "vllm" / ADAPTER_CONFIG).read_text())
    root = raw["r"] ** 0.5 if raw["use_rslora"] else raw["r"]
    assert raw["lora_alpha"] / root == pytest.approx(model.adapters.config.scale)
    assert "modules_to_save" not in raw and raw["r"] == max(
        [raw["r"], *raw["rank_pattern"].values()]
    )


def test_vllm_has_each_expert_by_its_name(adapted, tmp_path):
    model = adapted("qwen3_moe", "down_proj")
    exported(model, tmp_path / "vllm", "vllm")
    tensors = load_file(tmp_path / "vllm" / WEIGHTS)
    layer = f"base_model.model.model.layers.{model.config.expert_layers[0]}.mlp.experts"
    X = model.config.experts.count
    # vLLM wants the adapters of gate and up too.
    for i in range(X):
        for n in ("gate", "up", "down"):
            A, B = (tensors[f"{layer}.{i}.{n}_proj.lora_{p}.weight"] for p in "AB")
            assert A.ndim == B.ndim == 2 and len(A) == B.shape[1] == (4 if n == "down" else 1)
            assert A.any() == B.any() == (n == "down")


def test_one_scale_where_those_of_layers_differ(adapted, tmp_path):
    model = adapted("llama")
    path = "layers.query.kernel"
    a, b, _ = model.adapters.values[path]
    values = model.adapters.values | {path: (a, b, np.array([0.5, 3.0], np.float32))}
    model = replace(model, adapters=replace(model.adapters, values=values))
    check_equal(exported(model, tmp_path / "vllm", "vllm"), model)
    assert not json.loads((tmp_path / "vllm" / ADAPTER_CONFIG).read_text())["alpha_pattern"]


def test_the_command_line_is_printed(adapted, tmp_path, capsys):
    peft, out = tmp_path / "peft", tmp_path / "my adapter"
    model = adapted("phi3", r=6)
    exported(model, peft, "peft")
    assert convert.main(["export-adapter", str(peft), str(out), "--format", "vllm"]) == 0
    said = capsys.readouterr().out
    # Query, key and value are one module.
    assert "largest rank 18, above vLLM's default maximum of 16" in said
    wanted = f"vllm serve {tmp_path / 'base'} --enable-lora --lora-modules 'my adapter={out}' "
    assert wanted + "--max-lora-rank 32" in said
    quantized = replace(model, adapters=replace(model.adapters, config=AdapterConfig("qlora")))
    assert "trained on a quantized base model" in export_note(quantized, out, "vllm")


def test_fused_kernels_share_ranks_of_one_adapter(adapted, tmp_path):
    """An adapter of PEFT keeps its rank on the way through."""
    model = adapted("phi3", r=6)
    a = model.adapters.values["layers.query.kernel"][0]
    values = {
        path: (a if path.split(".")[1] in ("query", "key", "value") else x[0], *x[1:])
        for path, x in model.adapters.values.items()
    }
    model = replace(model, adapters=replace(model.adapters, values=values))
    check_equal(exported(model, tmp_path / "peft", "peft"), model)
    tensors = load_file(tmp_path / "peft" / WEIGHTS)
    name = "base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight"
    assert len(tensors[name]) == 6


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_vllm_refuses(adapted, tmp_path, name, capsys):
    exported(adapted(name), tmp_path / "peft", "peft")
    out = tmp_path / "out"
    assert (
        convert.main(["export-adapter", str(tmp_path / "peft"), str(out), "--format", "vllm"]) == 2
    )
    said = capsys.readouterr().err
    assert "refuses all adapters of this family (" in said and "merge-adapter" in said
    assert not out.exists()


def test_ranks_and_embeddings_that_vllm_refuses(adapted, tmp_path):
    assert [max_lora_rank(r) for r in (1, 2, 8, 17, 512)] == [1, 8, 8, 32, 512]
    model = adapted("phi3", r=171)
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=rf"ranks above {RANKS[-1]} \(qkv_proj 513\); serve the"):
        write_adapter(model, tmp_path / "out", "vllm")
    in_full = replace(model.adapters, values={}, modules={"embedding": np.zeros((61, 32))})
    with pytest.raises(ValueError, match=r"fully trained embeddings \(embedding\); serve"):
        write_adapter(replace(model, adapters=in_full), tmp_path / "out", "vllm")
