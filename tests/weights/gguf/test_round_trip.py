"""A model of each family is the same after a GGUF file, and what such a file cannot hold is
refused."""

import re

import numpy as np
import pytest
from chats import CHATML, raw_tokenizer
from safetensors.numpy import load_file, save_file
from tiers import fast

from bptjax.cli import convert
from bptjax.weights.hf.tensors import Tensors
from weights.gguf.cases import ALL, keywords, kind, new
from weights.hf.loading import random_base

# Families whose values are rounded when 1 is added to norms.
ROUNDED = ("gemma", "gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# Starts of the lines about what llama.cpp does not compute, by case.
REFUSED = {
    "llama: linear, gelu": "model.activation=gelu",
    "llama: dynamic, beyond its positions": "rope_type",
    "qwen2: window in upper layers": "model.window=[None",
    "qwen2_5_vl: window in upper layers": "model.window=[None",
    "qwen3_vl: tied, yarn, biases": "model.attention.qkv_bias=True",
    "qwen3_vl: linear, MQA": "model.activation=gelu",
    "qwen3: biases, tied": "model.attention.qkv_bias=True",
    "qwen3: mixed windows, yarn": "model.window=[4",
    "gemma: MQA, biases": "model.attention.qkv_bias=True",
    "gemma: untied, exact gelu": "lm_head.weight",
    "gemma2": "model.attention.scale=0.0625",
    "gemma2: low caps, scale": "model.attention.scale=0.204",
    "gemma2: no caps, three layers": "model.logits_softcap=None",
    "gemma3": "model.attention.scale=0.0625",
    "gemma3: linear in full layers, caps": "model.attention.scale=0.0625",
    "gemma3: sliding only, untied, biases": "model.tied_head=False",
    "mixtral: one of three, gelu": "model.activation=gelu",
    "qwen3_moe": "model.layers.1.mlp.gate_proj.weight",
    "qwen3_moe: renormalized, tied, biases": "model.attention.qkv_bias=True",
    "qwen3_moe: window, yarn, every expert": "model.layers.0.mlp.gate_proj.weight",
    "qwen3_5_text": "mrope_section",
    "qwen3_5_text: linear first and last, full rotation, MQA": "linear_attention.value_size=12",
    "qwen3_5_text: tied, biases, a layer of each kind, other sizes": "attention.qkv_bias=True",
    "qwen3_next": "model.experts.renormalized=False",
    "qwen3_next: an MLP, a tied head, biases": "model.layers.1.mlp.gate_proj.weight",
    "qwen3_next: every other layer has experts, as many heads": "layers.0.mlp.gate_proj.weight",
    "qwen3_5_moe_text": "mrope_section",
    "qwen3_5_moe_text: one expert, without its loss": "mrope_section",
    "qwen3_5_moe_text: tied, biases": "model.attention.qkv_bias=True",
    "olmoe": "model.num_kv_heads=2",
    "olmoe: linear, tied, one of three": "model.tied_head=True",
    "olmoe: renormalized, biases, three of five": "model.attention.qkv_bias=True",
    "gpt_oss": "model.experts.glu_limit=0.3",
    "gpt_oss: yarn as it is, three of five, tied": "model.tied_head=True",
    "gpt_oss: no biases of attention, full layers": "model.attention.qkv_bias=False",
    "lfm2: attention alone, yarn": "layer_types",
    "smollm3: windows without rotation, untied, biases": "model.rope_layers=[True",
    "smollm3: yarn, MQA": "model.rope_layers=[False",
    "seed_oss: all biases, tied": "model.mlp_bias=True",
    "stablelm: all rotary, linear, tied": "model.tied_head=True",
    "starcoder2: no biases, MQA": "model.mlp_bias=False",
    "phi: norms of queries and keys, tied": "model.layers.0.self_attn.q_layernorm.weight",
    "phi: yarn, MQA": "model.activation=relu",
    "ernie4_5: biases, untied": "model.mlp_bias=True",
    "ernie4_5: yarn, MQA": "model.activation=gelu",
    "cohere2: biases, untied": "lm_head.weight",
    "granite: all factors, biases, tied": "model.mlp_bias=True",
    "granite: small residuals, MQA": "model.activation=gelu",
    "olmo2: biases, tied, MQA": "model.attention.qkv_bias=True",
    "olmo3: yarn in full layers, biases, tied": "model.attention.qkv_bias=True",
    "olmo3: yarn in full layers, two bases": "model.rope_parameters",
    "exaone4": "model.rope_layers=[True",
    "exaone4: wide heads, full layers alone": "model.rope_layers=[False",
    "ministral3: window, tied": "mistral3.attention.temperature_scale",
    "ministral3: no growth, gelu": "model.activation=gelu",
    "qwen3_5": "mrope_section",
    "qwen3_5: two layers": "linear_attention.value_size=4",
    "qwen3_5_moe": "mrope_section",
    "qwen3_5_moe: tied": "linear_attention.value_size=12",
    "qwen3_5: tied, biases": "model.attention.qkv_bias=True",
    "qwen3_5_moe: three of five, biases": "mrope_section",
    "gemma3 multimodal": "model.attention.scale=0.0625",
    "gemma3 multimodal: linear in full layers": "model.attention.scale=0.0625",
    "gemma3 multimodal: untied, biases": "model.tied_head=False",
    "gpt2: narrow feed-forward, relu": "model.activation=relu",
    "gpt2: no scale, untied": "model.attention.scale=1.0",
    "gpt_neox: sequential, half rotary": "model.activation=gelu_tanh",
    "gpt_neox: no attention biases, tied, linear": "model.tied_head=True",
    "bloom: 12 heads, normed residual": "model.residual_normed=True",
}
# Layers of other families than these differ from them in names alone.
QUICK = "llama: 3.1, tied, biases, wide heads, MQA", "gpt_oss: usual limit", "lfm2"
QUICK += (
    "qwen3_5_moe_text: equal heads",
    "gemma3: scaled by head",
    "gemma: untied, exact gelu",
    "bloom",
)


@pytest.fixture
def base(tmp_path):
    """A function from a case to a directory with random weights and a tokenizer."""

    def make(name):
        own = new(name)
        tokenizer = raw_tokenizer("bytes", CHATML)
        directory = random_base(tmp_path / "base", own)
        tokenizer.save_pretrained(directory)
        return directory

    return make


def trip(directory, tmp_path, *flags, back=()):
    file, out = tmp_path / "model.gguf", tmp_path / "back"
    assert convert.main(["to-gguf", str(directory), str(file), "--pre", "gpt-2", *flags]) == 0
    assert convert.main(["from-gguf", str(file), str(out), *back]) == 0
    return file, out


@pytest.mark.parametrize("name", fast(ALL, QUICK))
def test_a_model_is_the_same_after_a_gguf_file(base, tmp_path, capsys, name):
    directory = base(name)
    if name in REFUSED:
        command = ["to-gguf", str(directory), str(tmp_path / "x.gguf"), "--pre", "gpt-2"]
        assert convert.main(command) == 2
        assert REFUSED[name] in capsys.readouterr().err
        assert {path.name for path in tmp_path.iterdir()} == {"base"}
        return
    multimodal = "vision_config" in keywords(name)
    if multimodal:
        file = directory / "model.safetensors"
        vision = {"vision_tower.layers.0.proj.weight": np.ones((3, 2), np.float32)}
        save_file(load_file(file) | vision, file)
    _, out = trip(directory, tmp_path, "--type", "f32")
    before, after = Tensors(directory), Tensors(out)
    names = {name: re.sub(r"language_model\.", "", name) for name in before.specs}
    if multimodal:
        names = {name: new for name, new in names.items() if new in after.specs}
        assert "left out" in capsys.readouterr().out
    assert {new: before.specs[name] for name, new in names.items()} == after.specs
    for tensor in names:
        a, b = before.read(tensor), after.read(names[tensor])
        if kind(name) in ROUNDED:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
        else:
            assert a.tobytes() == b.tobytes(), tensor
