"""Models trained from scratch: the family of the export computes the same."""

import json
from dataclasses import replace

import numpy as np
import pytest
from tiers import fast

from bptjax.models.config import ModelConfig
from bptjax.models.groups.attention import AttentionConfig
from bptjax.models.groups.encoder import EncoderConfig
from bptjax.models.groups.norms import NormsConfig
from bptjax.weights.hf.from_scratch import family_of, from_scratch
from bptjax.weights.pretrained import open_pretrained
from bptjax.weights.verification import difference
from weights.hf.loading import random_weights

SIZES = dict(vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=64)
CLASSIC = dict(norms=NormsConfig("layer", bias=True), gated=False, tied_head=False, mlp_bias=True)
CLASSIC |= dict(attention=AttentionConfig(qkv_bias=True, out_bias=True))
SANDWICH = NormsConfig(position="sandwich", unit_offset=True)
NORMED = dict(attention=AttentionConfig(qk_norm=True))
LAYERS = dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])
MODELS = {
    "llama": dict(activation="gelu_tanh", num_kv_heads=2),
    "llama, relu": dict(activation="relu_squared", head_dim=16),
    "qwen3": NORMED | dict(activation="quick_gelu") | LAYERS,
    "phi3": dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.5)),
    "gemma3_text": LAYERS | NORMED | dict(norms=SANDWICH, embedding_scale=32**0.5),
    "gpt2": CLASSIC | dict(position_embedding="learned", activation="gelu_tanh"),
    "gpt_neox": CLASSIC | dict(residual="parallel", activation="gelu"),
    "mistral": dict(sliding_window=5, num_kv_heads=1),
    "qwen2": dict(attention=AttentionConfig(qkv_bias=True)) | LAYERS,
    "gemma": dict(
        norms=NormsConfig(unit_offset=True), embedding_scale=32**0.5, activation="gelu_tanh"
    ),
    "gemma2": LAYERS
    | dict(norms=SANDWICH, embedding_scale=32**0.5)
    | dict(attention=AttentionConfig(softcap=50.0, scale=0.25), logits_softcap=30.0),
    "bloom": CLASSIC
    | dict(norms=NormsConfig("layer", bias=True, embedding=True))
    | dict(position_embedding="alibi", activation="gelu_tanh"),
    "opt": CLASSIC | dict(position_embedding="learned", position_offset=2, activation="relu"),
    "falcon": dict(
        norms=NormsConfig("layer", bias=True), gated=False, residual="shared", num_kv_heads=2
    ),
    "falcon, old": dict(norms=NormsConfig("layer", bias=True), gated=False, activation="gelu"),
    "bert": CLASSIC
    | dict(norms=NormsConfig("layer", position="post", bias=True, embedding=True, final=False))
    | dict(causal=False, position_embedding="learned", activation="gelu")
    | dict(encoder=EncoderConfig(token_types=2, masked_head=True))
    | dict(head_bias=True, tied_head=True),
    "mpt": dict(
        norms=NormsConfig("layer"), gated=False, position_embedding="alibi", activation="gelu"
    ),
}


def attention(**choices):
    return dict(attention=AttentionConfig(**choices))


FEW = "qwen3", "gemma2", "bloom", "falcon", "bert"


@pytest.mark.parametrize("name", fast(MODELS, FEW))
def test_transformers_computes_the_same(tmp_path, name):
    pytest.importorskip("torch")
    config = ModelConfig(**SIZES | MODELS[name])
    raw, family = from_scratch(config)
    assert raw["model_type"] == name.split(",")[0]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    random_weights(tmp_path, family, config)
    # With the config that it was trained by, not the one that is read back.
    model = replace(open_pretrained(ModelConfig(name_or_path=str(tmp_path))), config=config)
    layers, logits = difference(tmp_path, model)
    assert max(*layers, logits) < 1e-5


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (dict(norms=NormsConfig("layer")), "model.norms.type=layer with"),
        (dict(position_embedding="none"), "model.position_embedding=none with"),
        (attention(qkv_bias=True, qk_norm=True), "model.attention.qk_norm=True with"),
        (attention(clip=1.0), "model.attention.clip=1.0 with"),
        (attention(scale=1e-200), "model.attention.scale=1e-200 with"),
        (attention(scale=2.0), "model.attention.scale=2.0 with"),
        (attention(sinks=True), "model.attention.sinks=True with"),
    ],
)
def test_keys_that_no_family_has_are_named(choice, message):
    with pytest.raises(ValueError, match=f"no Hugging Face family has {message}"):
        family_of(ModelConfig(**SIZES | choice))


def test_scalings_are_written_out():
    """Those that leave the length to the model, too."""
    yarn = dict(rope_theta=1e4, rope_type="yarn", original_max_position_embeddings=16)
    raw, _ = from_scratch(ModelConfig(**SIZES | dict(rope_parameters=yarn)))
    assert raw["rope_scaling"]["factor"] == 4.0
    assert np.isclose(raw["rope_parameters"]["factor"], 4.0)
