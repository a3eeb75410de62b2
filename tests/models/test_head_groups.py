"""Attention for one group of heads at a time gives what attention for all heads gives."""

import functools
import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from models.test_decoder import MODELS, ROTARY, SEGMENTS, T, assert_close, attention
from tiers import fast

from bptjax.models.decoder import Decoder
from bptjax.models.execution import Execution
from bptjax.models.groups.full_attention import FullAttentionConfig
from bptjax.models.groups.norms import NormsConfig
from bptjax.ops.loss import linear_cross_entropy
from bptjax.parallel.mesh import ParallelConfig, make_mesh

BIASED = replace(ROTARY, **attention(qkv_bias=True, out_bias=True, qk_norm=True, softcap=5.0))
ALIBI = replace(ROTARY, position_embedding="alibi", num_heads=8, num_kv_heads=4)
SHARED = replace(
    MODELS["full heads, shared keys, layers' embeddings"],
    full_attention=FullAttentionConfig(head_dim=12, kv_heads=2, keys_as_values=True),
)
GATED = MODELS["linear attention, gate"]
LONG = dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
DROPOUT = replace(ROTARY, attention_dropout=0.2, residual_dropout=0.2)
FULL = Execution(remat="full", q_chunk=8, k_chunk=16, ffn_chunk=10)
# (model, execution); two groups unless the execution has another number.
CASES = {
    "biases, norms, soft cap": (BIASED, {}),
    "every head": (MODELS["learned"], dict(head_groups=4)),
    "alibi": (ALIBI, dict(head_groups=4)),
    "sinks, growth": (MODELS["sinks, growth, a layer without rotation"], {}),
    "gate, linear attention": (GATED, {}),
    "shared keys, values from keys": (SHARED, {}),
    "dropout": (DROPOUT, {}),
    "dropout, attention saved": (DROPOUT, dict(remat="save_attention")),
    "one window": (replace(ROTARY, sliding_window=5), {}),
    "long rope": (
        replace(
            ROTARY,
            max_position_embeddings=16,
            rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4),
        ),
        {},
    ),
    "clipped, scaled": (replace(ROTARY, **attention(clip=0.1, scale=0.3)), {}),
    "after the norm": (replace(ROTARY, norms=NormsConfig(position="post")), {}),
    "parallel residual": (replace(ROTARY, residual="parallel"), {}),
    "shared norm": (replace(ROTARY, residual="shared"), {}),
    "reference": (ROTARY, dict(attention_implementation="reference")),
    "everything saved": (BIASED, dict(remat="dots", ffn_chunk=T)),
    "nested": (BIASED, dict(remat="nested(2)")),
    "nested, attention again": (BIASED, dict(remat="nested_full(2)")),
    "queries saved": (BIASED, dict(save=("query",))),
    "keys saved": (BIASED, dict(save=("key", "value"), remat="save_attention")),
    "on the host": (BIASED, dict(remat="save_attention", offload=0.5)),
}
TOKENS = jax.random.randint(jax.random.key(1), (2, T), 0, 61)


@functools.cache
def step(execution):
    def loss(model, segments):
        options = dict(segments=segments, dropout_key=jax.random.key(2))
        hidden, _ = model(TOKENS, execution=execution, **options)
        labels = TOKENS if segments is None else jnp.where(segments > 0, TOKENS, -100)
        return linear_cross_entropy(hidden, model.head_matrix, labels, chunk=16)

    return jax.jit(jax.value_and_grad(loss))


def compare(model, how, segments=None):
    """Remat changes nothing, so that many cases share the program without groups."""
    with_groups = step(replace(FULL, **dict(head_groups=2) | how))(model, segments)
    kernel = {key: x for key, x in how.items() if key == "attention_implementation"}
    assert_close(with_groups, step(replace(FULL, **kernel))(model, segments))


@pytest.mark.parametrize("case", fast(CASES, ["biases, norms, soft cap"]))
def test_groups_change_nothing(case):
    config, how = CASES[case]
    model = Decoder(replace(config, init_std=0.2), jax.random.key(0))
    compare(model, how, SEGMENTS if len(case) % 2 else None)


REFUSED = {
    "must divide the 2 key heads; use 1": (ROTARY, dict(head_groups=3)),
    "must be 1 with model.attention.qk_norm_joint=true": (
        replace(ROTARY, **attention(qk_norm=True, qk_norm_joint=True)),
        dict(head_groups=2),
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_heads_that_do_not_divide_are_refused(message):
    config, how = REFUSED[message]
    model = Decoder(config, jax.random.key(0))
    with pytest.raises(ValueError, match=rf"^execution\.head_groups=\d: {re.escape(message)}"):
        model(TOKENS, execution=replace(FULL, **how))


@pytest.mark.parametrize("how", [dict(schedule="fused"), dict(remat="none")])
def test_what_groups_cannot_do_is_refused(how):
    with pytest.raises(ValueError, match=r"^execution\.head_groups=2: must be 1 with "):
        replace(FULL, head_groups=2, **how)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sizes, strategy",
    [
        (dict(fsdp=1, tp=2, sp=2), "ring"),
        (dict(fsdp=1, tp=2, sp=2), "ulysses"),
        (dict(fsdp=2, sp=4), "gather"),
    ],
)
def test_meshes_change_nothing(sizes, strategy):
    config = replace(ALIBI, attention_dropout=0.2, init_std=0.2)
    model = Decoder(config, jax.random.key(0))
    how = dict(head_groups=2, remat="save_attention")
    plain = step(replace(FULL, **how | dict(head_groups=1)))(model, None)
    count = math.prod(sizes.values())
    mesh = make_mesh(ParallelConfig(dp=1, **sizes), jax.devices()[:count])

    def loss(model):
        options = dict(dropout_key=jax.random.key(2), sequence_strategy=strategy)
        hidden, _ = model(TOKENS, execution=replace(FULL, **how), **options)
        return linear_cross_entropy(hidden, model.head_matrix, TOKENS, chunk=16)

    with jax.set_mesh(mesh):
        sharded = jax.jit(jax.value_and_grad(loss))(model)
    assert_close(jax.device_get(sharded), plain)


@pytest.mark.thorough
def test_groups_take_less_memory():
    config = replace(ROTARY, num_heads=8, num_kv_heads=8, head_dim=32, hidden_size=64)
    model = jax.eval_shape(lambda: Decoder(config, jax.random.key(0)))

    def temporary(groups):
        def loss(model, tokens):
            execution = Execution(remat="full", ffn_chunk=128, head_groups=groups)
            hidden, _ = model(tokens, execution=execution)
            return linear_cross_entropy(hidden, model.head_matrix, tokens, chunk=128)

        tokens = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
        compiled = jax.jit(jax.grad(loss)).lower(model, tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    sizes = [temporary(groups) for groups in (1, 2, 8)]
    assert sizes[1] < 0.8 * sizes[0] and sizes[2] < 0.5 * sizes[0], sizes


@pytest.mark.thorough
def test_projections_of_groups_run_in_chunks():
    """The normed stream and its gradient from each projection never exist for all tokens."""
    config = replace(ROTARY, num_heads=8, num_kv_heads=8, head_dim=32, hidden_size=256)
    model = jax.eval_shape(lambda: Decoder(config, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((1, 4096), jnp.int32)

    def temporary(chunk):
        def loss(model, tokens):
            execution = Execution(remat="full", ffn_chunk=chunk, head_groups=8)
            hidden, _ = model(tokens, execution=execution)
            return linear_cross_entropy(hidden, model.head_matrix, tokens, chunk=128)

        compiled = jax.jit(jax.grad(loss)).lower(model, tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (4 * 4096 * config.hidden_size)

    # With ffn_chunk=512, the chunk of a group's projections has all tokens.
    sizes = temporary(16), temporary(512)
    assert sizes[0] < 12 and sizes[0] < sizes[1] - 1, sizes
