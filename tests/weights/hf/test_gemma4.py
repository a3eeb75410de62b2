"""Gemma 4: runs of its multimodal models, files of its small models, and refused configs."""

import json
import math

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bptjax.cli import convert
from bptjax.cli.generate import main as generate
from bptjax.cli.train import main as train
from bptjax.models.config import ModelConfig
from bptjax.run.metrics import read_metrics
from bptjax.weights import conversion
from bptjax.weights.hf.config import merge, read_config
from bptjax.weights.hf.config_export import exported
from bptjax.weights.pretrained import open_pretrained
from weights.hf.cases import CASES, SHARED_KEYS, config
from weights.hf.loading import random_base, tensors
from weights.hf.test_multimodal import BESIDE, checkpoint


@pytest.mark.thorough
def test_an_adapter_of_quantized_weights(tmp_path, monkeypatch):
    """Trained, used, and merged: only weights with adapters change."""
    monkeypatch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:1])
    (tmp_path / "text.txt").write_text("".join(f"{i} plus 3 is {i + 3}. " for i in range(200)))
    base, run = checkpoint(tmp_path / "base", "gemma4 with experts"), tmp_path / "run"
    options = {
        "run_dir": run,
        "device": "cpu",
        "model.name_or_path": base,
        "data.path": tmp_path / "text.txt",
        "data.tokenizer": "byte",
        "train.max_steps": 3,
        "train.seq_len": 24,
        "train.per_device_train_batch_size": 2,
        "optimizer.learning_rate": 0.02,
        "adapter.type": "qlora",
        "execution.remat": "none",
        "execution.q_chunk": 24,
        "execution.k_chunk": 24,
    }
    assert train([f"--{key}={value}" for key, value in options.items()]) == 0
    rows = read_metrics(run / "metrics.jsonl")
    losses = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert losses[-1] < losses[0] and math.isfinite(losses[-1])
    assert generate(["--model", str(run), "--prompt", "1 plus", "--max-new-tokens=3"]) == 0
    assert convert.main(["merge-adapter", str(run / "adapter"), str(tmp_path / "merged")]) == 0
    merged, before = tensors(tmp_path / "merged"), tensors(base)
    assert merged.keys() == before.keys()
    changed = {name for name in merged if merged[name] != before[name]}
    ends = ("_proj.weight", "_proj", "input_gate.weight", "per_layer_projection.weight")
    assert changed and all(name.endswith(ends) for name in changed - BESIDE.keys())
    assert not changed & BESIDE.keys()
    weights = {name for name in merged if "language_model" in name and name.endswith(ends)}
    assert changed == {name for name in weights if "router" not in name}


def test_keys_of_layers_without_keys_are_left_out(tmp_path):
    """Published files of the small models hold them, and transformers does not read them."""
    directory = random_base(tmp_path / "hf", config("gemma4_text with shared keys"))
    before, file = tensors(directory), directory / "model.safetensors"
    extra = {
        f"model.layers.4.self_attn.{name}.weight": np.ones((2, 2), np.float32)
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    }
    save_file(load_file(file) | extra, file)
    found = open_pretrained(ModelConfig(name_or_path=str(directory)))
    assert "left out 4 tensors" in found.left_out
    conversion.to_bptjax(str(directory), tmp_path / "ours")
    conversion.to_hf(str(tmp_path / "ours"), tmp_path / "back", dtype=None, max_shard_size="5GB")
    assert tensors(tmp_path / "back") == before
    extra = {name.replace("layers.4", "layers.2"): x for name, x in extra.items()}
    save_file(load_file(file) | extra, file)
    with pytest.raises(ValueError, match=r"unexpected: model.layers.2.self_attn.v_norm.weight"):
        open_pretrained(ModelConfig(name_or_path=str(directory)))


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        (
            "gemma4_text",
            dict(use_bidirectional_attention="all"),
            "is_causal=False: must be true",
        ),
        ("gemma4_text", dict(attention_bias=True), "attention_bias=True: must be False"),
        (
            "gemma4_text",
            dict(layer_types=["full_attention"] * 2),
            "must have both sliding and full",
        ),
        (
            "gemma4_text: soft cap, untied, factor, as many key heads",
            dict(per_layer_config={"0": {"head_dim": 16}, "2": {"head_dim": 20}}),
            "per_layer_config: must be the same in all layers of full_attention",
        ),
        (
            "gemma4_text",
            dict(per_layer_config={"1": {"intermediate_size": 20}}),
            "per_layer_config: .'intermediate_size'.: must not be set",
        ),
        (
            "gemma4_text with shared keys",
            dict(vocab_size_per_layer_input=60),
            "vocab_size_per_layer_input=60: must be 61",
        ),
        (
            "gemma4_text with experts",
            SHARED_KEYS,
            "use_double_wide_mlp=True: must be false with enable_moe_block",
        ),
        (
            "gemma4_text",
            dict(
                rope_parameters=dict(
                    sliding_attention=dict(rope_type="default", rope_theta=1e4),
                    full_attention=dict(
                        rope_type="linear", factor=2.0, rope_theta=1e6, partial_rotary_factor=0.25
                    ),
                )
            ),
            "partial_rotary_factor: must be 1 in this family",
        ),
    ],
)
def test_refused(tmp_path, name, keys, message):
    kind, own = CASES[name]
    made = config(name).to_dict()
    if keys.keys() & {"layer_types"}:
        made = {**own, "model_type": made["model_type"]}
    (tmp_path / "config.json").write_text(json.dumps(made | keys, default=str))
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_added_tokens_are_refused_with_embeddings_of_layers(tmp_path):
    (tmp_path / "config.json").write_text(config("gemma4_text with shared keys").to_json_string())
    with pytest.raises(ValueError, match="model.add_tokens: must be empty with"):
        merge(read_config(tmp_path)[1], ModelConfig(add_tokens=["<x>"]))


def test_longer_positions_of_full_layers(tmp_path):
    """By the factor of their own type of rotation; other types are refused before a run starts."""
    raw = json.loads(config("gemma4_text").to_json_string())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    _, read = read_config(tmp_path)
    now = merge(read, ModelConfig(name_or_path="it", rope_parameters=dict(factor=8.0)))
    new = exported(raw, read, now)
    assert new["rope_parameters"]["full_attention"]["factor"] == 8.0
    (tmp_path / "config.json").write_text(json.dumps(new))
    assert read_config(tmp_path)[1].rope_parameters == now.rope_parameters
    other = merge(
        read, ModelConfig(name_or_path="it", rope_parameters=dict(rope_type="linear", factor=8.0))
    )
    with pytest.raises(ValueError, match="a gemma4_text cannot be exported with it"):
        exported(raw, read, other)


def test_an_adapter_of_all_layers_embeddings_is_refused(tmp_path):
    base = random_base(tmp_path / "hf", config("gemma4_text with shared keys"))
    raw = dict(peft_type="LORA", r=2, lora_alpha=2, base_model_name_or_path=str(base))
    name = "per_layer_model_projection"
    (tmp_path / "adapter_config.json").write_text(json.dumps(raw | dict(target_modules=[name])))
    shapes = dict(A=(2, 32), B=(30, 2))
    file = {
        f"base_model.model.model.{name}.lora_{part}.weight": np.ones(shape, np.float32)
        for part, shape in shapes.items()
    }
    save_file(file, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="adapters of linear layers of the model only, not base_"):
        open_pretrained(ModelConfig(name_or_path=str(tmp_path)))
