"""FLOPs of a step: the parameters and the pairs of tokens that count."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from bptjax.config import Config, TrainConfig
from bptjax.cost.flops import attended_pairs, matmul_parameters, model_flops
from bptjax.models.config import ModelConfig
from bptjax.models.groups.experts import ExpertsConfig
from bptjax.models.groups.linear_attention import LinearAttentionConfig
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.training.spec import TrainSpec
from bptjax.training.state import parameter_counts
from bptjax.weights.lora import AdapterConfig

T = 24
MODEL = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, tied_head=False
)


def make_spec() -> TrainSpec:
    config = Config(train=TrainConfig(seq_len=T, max_steps=20))
    return TrainSpec(config, MODEL, make_mesh(ParallelConfig(), jax.devices()[:1]))


# A layer's query, key, value and output projections, its gated feed-forward, and two norms.
LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 128 + 2 * 32
PACKED = dict(positions=jnp.array([[0, 1, 2, 0, 1, 0]]), segments=jnp.array([[1, 1, 1, 2, 2, 0]]))


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        (dict(tied_head=False), 2 * LAYER + 32 + 64 * 32),
        (dict(tied_head=True), 2 * LAYER + 32 + 64 * 32),
        (
            dict(position_embedding="learned", max_position_embeddings=T, rope_parameters={}),
            2 * LAYER + 32 + 64 * 32,
        ),
        # The head is 16 wide, and projections lead there and back.
        (dict(embedding_size=16), 2 * LAYER + 32 + 64 * 16 + 2 * 16 * 32),
    ],
    ids=["untied", "tied", "learned positions", "another width"],
)
def test_a_lookup_is_no_matmul(changes, parameters):
    spec = replace(make_spec(), model=replace(MODEL, **changes))
    assert matmul_parameters(spec) == (parameters, parameters)
    flops = model_flops(spec.model, matmul_parameters(spec), 5, 18.0)
    assert flops == 6 * parameters * 5 + 12 * 18 * 4 * 8


def test_linear_attention_attends_to_no_pairs():
    """It reads a state of 8 × 4 numbers twice and writes it once, in each of four heads."""
    sizes = LinearAttentionConfig(key_heads=2, value_heads=4, key_size=8, value_size=4)
    types = ["linear_attention", "full_attention"]
    model = replace(MODEL, layer_types=types, linear_attention=sizes)
    assert 2 * attended_pairs(model, **PACKED) == attended_pairs(MODEL, **PACKED)
    counts = matmul_parameters(replace(make_spec(), model=model))
    flops = model_flops(model, counts, 5, 0.0)
    assert flops == 6 * counts.total * 5 + 3 * 5 * 4 * (3 * 2 * 8 * 4)


def test_frozen_parameters_have_no_gradient():
    """Rank 2 beside the query kernels; the embedding that is trained in full is a lookup."""
    spec = make_spec()
    adapter = AdapterConfig("lora", r=2, target_modules=["query"], modules_to_save=["embedding"])
    spec = replace(spec, config=replace(spec.config, adapter=adapter))
    low_rank = 2 * 2 * (32 + 32)
    total = 2 * LAYER + 32 + 64 * 32 + low_rank
    assert parameter_counts(spec) == (total + 64 * 32, low_rank + 64 * 32)
    assert matmul_parameters(spec) == (total, low_rank)
    assert model_flops(MODEL, matmul_parameters(spec), 1, 0.0) == 4 * total + 2 * low_rank


@pytest.mark.parametrize("adapter", [AdapterConfig(), AdapterConfig("lora", r=2)], ids=["", "lora"])
def test_idle_experts_count_with_their_biases(adapter):
    """A token passes 2 of 4 experts: it needs the parameters of a model with 2, and routers."""
    spec = make_spec()
    spec = replace(spec, config=replace(spec.config, adapter=adapter))
    many, few = (
        replace(
            MODEL,
            feed_forward="experts",
            experts=ExpertsConfig(count=X, size=20, shared_size=12, shared_gate=True),
            mlp_bias=True,
        )
        for X in (4, 2)
    )
    found, wanted = (matmul_parameters(replace(spec, model=model)) for model in (many, few))
    routers = 2 * 2 * 32
    assert found.total == wanted.total + routers
    assert found.trained == wanted.trained + routers * (adapter.type == "none")


@pytest.mark.parametrize(
    ("changes", "pairs"),
    [
        (dict(), 2 * (1 + 2 + 3 + 1 + 2)),
        (dict(sliding_window=2), 2 * (1 + 2 + 2 + 1 + 2)),
        (
            dict(sliding_window=2, layer_types=["sliding_attention", "full_attention"]),
            (1 + 2 + 2 + 1 + 2) + (1 + 2 + 3 + 1 + 2),
        ),
        (dict(causal=False), 2 * (9 + 4)),
        (dict(causal=False, sliding_window=2), 2 * (2 + 3 + 2 + 2 + 2)),
        (
            dict(attention_pattern=dict(type="window", window=2, global_tokens=1)),
            2 * (1 + 2 + 3 + 1 + 2),
        ),
    ],
    ids=["packed", "windowed", "a windowed layer", "encoder", "windowed encoder", "pattern"],
)
def test_pairs_are_those_that_the_mask_lets_through(changes, pairs):
    model = replace(MODEL, **changes)
    assert attended_pairs(model, **PACKED) == pairs
    # Micro-batches.
    assert attended_pairs(model, **{name: x[None] for name, x in PACKED.items()}) == pairs
