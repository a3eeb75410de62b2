"""The decoder: schedules, remat, decoding and packing give one and the same model."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import fast

from bptjax.models.cache import Cache
from bptjax.models.config import ModelConfig
from bptjax.models.decoder import Decoder
from bptjax.models.execution import Execution
from bptjax.models.groups.alibi import AlibiConfig
from bptjax.models.groups.attention import AttentionConfig
from bptjax.models.groups.encoder import EncoderConfig
from bptjax.models.groups.experts import ExpertsConfig
from bptjax.models.groups.full_attention import FullAttentionConfig, SharedKvConfig
from bptjax.models.groups.layer_embedding import LayerEmbeddingConfig
from bptjax.models.groups.linear_attention import LinearAttentionConfig
from bptjax.models.groups.norms import NormsConfig
from bptjax.models.groups.short_convolution import ShortConvolutionConfig
from bptjax.ops.loss import linear_cross_entropy

ROTARY = ModelConfig(vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2)
MODELS = {
    "rotary": ROTARY,
    "learned": replace(
        ROTARY,
        norms=NormsConfig("layer", bias=True),
        position_embedding="learned",
        max_position_embeddings=48,
        activation="gelu_tanh",
        gated=False,
        attention=AttentionConfig(qkv_bias=True, out_bias=True),
        mlp_bias=True,
        num_kv_heads=None,
    ),
    "alibi": replace(ROTARY, position_embedding="alibi", tied_head=False, num_heads=6, head_dim=8),
    "sinks, growth, a layer without rotation": replace(
        ROTARY,
        attention=AttentionConfig(sinks=True, query_growth=0.5, query_growth_length=4),
        rope_layers=[True, False],
    ),
    "normalized outputs, factors": replace(
        ROTARY,
        norms=NormsConfig(position="output"),
        attention=AttentionConfig(qk_norm=True, qk_norm_joint=True),
        residual_scale=0.3,
        logits_scale=0.5,
    ),
    "linear attention, gate": replace(
        ROTARY,
        layer_types=["linear_attention", "full_attention"],
        linear_attention=LinearAttentionConfig(
            key_heads=2, value_heads=4, key_size=8, value_size=6
        ),
        attention=AttentionConfig(gate=True),
    ),
    "short convolution": replace(
        ROTARY,
        layer_types=["short_convolution", "full_attention"],
        short_convolution=ShortConvolutionConfig(3),
    ),
    "full heads, shared keys, layers' embeddings": replace(
        ROTARY,
        num_layers=4,
        layer_types=2 * ["sliding_attention", "full_attention"],
        sliding_window=6,
        full_attention=FullAttentionConfig(head_dim=12, kv_heads=1, keys_as_values=True),
        attention=AttentionConfig(value_norm=True),
        shared_kv=SharedKvConfig(layers=2, intermediate_size=40),
        layer_embedding=LayerEmbeddingConfig(size=6),
        layer_scale=True,
        norms=NormsConfig(position="sandwich"),
    ),
    "dropout": replace(ROTARY, attention_dropout=0.2, residual_dropout=0.2, embedding_dropout=0.2),
}
MIXED = ["linear_attention", "full_attention"]
SIZES = LinearAttentionConfig(2, 2, 2, 2)
LINEAR = dict(layer_types=MIXED, linear_attention=SIZES)


def attention(**choices):
    return dict(attention=AttentionConfig(**choices))


def linear(*sizes, **more):
    return dict(linear_attention=LinearAttentionConfig(*sizes, **more))


def images(**choices):
    sizes = dict(image_size=(8, 8), patch_size=(4, 4))
    return dict(causal=False, encoder=EncoderConfig(**sizes | choices))


SMALL = Execution(remat="none", q_chunk=8, k_chunk=16, ffn_chunk=10)
B, T = 2, 37
REFERENCE = dict(attention_implementation="reference", ffn_chunk=T)


LATEST = "linear attention, gate", "full heads, shared keys, layers' embeddings"


@pytest.fixture(scope="module", params=fast(MODELS, ["rotary"]))
def model(request):
    return Decoder(MODELS[request.param], jax.random.key(0))


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(1), (B, T), 0, 61)


SEGMENTS = jnp.array([[1] * 20 + [2] * 17, [1] * 30 + [0] * 7])


@functools.cache
def step(execution):
    def loss(model, tokens, segments, positions):
        options = dict(segments=segments, positions=positions, dropout_key=jax.random.key(2))
        hidden, _ = model(tokens, execution=execution, **options)
        labels = jnp.where(segments > 0, tokens, -100)
        return linear_cross_entropy(hidden, model.head_matrix, labels, chunk=16)

    return jax.jit(jax.value_and_grad(loss))


def loss_and_gradients(model, tokens, segments=SEGMENTS, positions=None, **how):
    return step(replace(SMALL, **how))(model, tokens, segments, positions)


def norm(x):
    return float(np.linalg.norm(x))


def assert_close(got, wanted, rtol=2e-5):
    (loss, gradients), (true_loss, true_gradients) = got, wanted
    np.testing.assert_allclose(loss, true_loss, rtol=1e-6)
    gradients, true_gradients = jax.device_get((gradients, true_gradients))
    size = max(map(norm, jax.tree.leaves(true_gradients)))
    for (path, a), b in zip(
        jax.tree.leaves_with_path(gradients), jax.tree.leaves(true_gradients), strict=True
    ):
        # Some gradients are 0 but for rounding (key biases): they are held to the largest one.
        assert norm(a - b) <= rtol * max(norm(b), 1e-2 * size), (path, norm(a - b))


def test_schedules_and_implementations_agree(model, tokens):
    wanted = loss_and_gradients(model, tokens, **REFERENCE)
    assert_close(loss_and_gradients(model, tokens, schedule="fused"), wanted)
    # The split schedule of other models is in `test_packed_equals_separate`.
    if model.config == ROTARY or model.config.residual_dropout:
        assert_close(loss_and_gradients(model, tokens, q_chunk=64), wanted)


POLICIES = [
    dict(remat="dots", ffn_chunk=64),
    dict(remat="save_attention"),
    dict(remat="full", save=("query", "key")),
    dict(remat="nested(2)"),
    dict(remat="nested_full(2)"),
]


@pytest.mark.parametrize(
    "name, policies",
    [
        ("dropout", POLICIES[4:]),
        pytest.param("dropout", POLICIES[:4], marks=pytest.mark.thorough),
        pytest.param(LATEST[0], POLICIES[3:4], marks=pytest.mark.thorough),
        pytest.param(LATEST[1], POLICIES[2::2], marks=pytest.mark.thorough),
    ],
)
def test_remat_changes_nothing(tokens, name, policies):
    config = MODELS[name]
    types = config.layer_types and (2 * config.layer_types)[:4]
    model = Decoder(replace(config, num_layers=4, layer_types=types), jax.random.key(0))
    wanted = loss_and_gradients(model, tokens)
    for how in policies:
        assert_close(loss_and_gradients(model, tokens, **how), wanted, rtol=1e-6)


def gradient_of(**how):
    """Of a model of 24 layers and 1,024 tokens, lowered."""
    model = jax.eval_shape(lambda: Decoder(replace(ROTARY, num_layers=24), jax.random.key(0)))

    def loss(model, tokens):
        execution = Execution(**{"remat": "save_attention"} | how)
        return model(tokens, execution=execution)[0].sum()

    return jax.jit(jax.grad(loss)), (model, jax.ShapeDtypeStruct((1, 1024), jnp.int32))


@pytest.mark.thorough
def test_remat_saves_memory():
    """Each policy keeps less than the one before."""

    def bytes_of(how):
        f, operands = gradient_of(**how)
        return f.lower(*operands).compile().memory_analysis().temp_size_in_bytes

    policies = [
        dict(remat="none"),
        dict(remat="dots"),
        dict(remat="save_attention", save=("gate",)),
        dict(remat="save_attention"),
        dict(remat="full"),
        dict(remat="nested(4)"),
        dict(remat="nested_full(4)"),
    ]
    sizes = [bytes_of(dict(ffn_chunk=1024) | how) for how in policies]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes), sizes


@pytest.mark.thorough
def test_keys_that_layers_share_are_saved_once():
    """Another layer without keys of its own adds its input to the memory of a step, and less than
    keys and values."""
    T = 1024
    full = FullAttentionConfig(head_dim=64, kv_heads=4)
    wide = dict(head_dim=64, num_kv_heads=4, full_attention=full)

    def bytes_of(layers):
        config = replace(
            MODELS["full heads, shared keys, layers' embeddings"],
            num_layers=layers,
            layer_types=(layers // 2) * ["sliding_attention", "full_attention"],
            shared_kv=SharedKvConfig(layers=layers - 2),
            **wide,
        )
        model = jax.eval_shape(lambda: Decoder(config, jax.random.key(0)))

        def loss(model, tokens):
            how = Execution(remat="full", q_chunk=64, k_chunk=64, ffn_chunk=64)
            return model(tokens, execution=how)[0].sum()

        tokens = jax.ShapeDtypeStruct((1, T), jnp.int32)
        compiled = jax.jit(jax.grad(loss)).lower(model, tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    each = (bytes_of(24) - bytes_of(8)) / 16
    stream, keys_and_values = 4 * T * 32, 4 * T * 2 * 4 * 64
    assert each < 2 * stream < keys_and_values


def test_impossible_remat_policies_are_refused():
    with pytest.raises(ValueError, match=r"remat=nested\(1\): must be one of none, dots"):
        Execution(remat="nested(1)")
    with pytest.raises(ValueError, match="save=down: must be among query"):
        Execution(save=("down",))
    with pytest.raises(ValueError, match="save=query: must be empty with remat=none"):
        Execution(remat="none", save=("query",))
    with pytest.raises(ValueError, match="offload=0.5: must be 0 with remat=none"):
        Execution(remat="none", offload=0.5)
    f, operands = gradient_of(remat="nested(5)")
    with pytest.raises(ValueError, match="k must divide the 24 layers"):
        f.lower(*operands)


def test_decoding_with_a_cache_equals_reading_at_once(model, tokens):
    wanted = jax.jit(lambda m: m(tokens, execution=SMALL)[0])(model)
    cache = Cache.empty(model.config, B, T + 3, jnp.float32)
    parts = []
    decode = jax.jit(lambda m, t, c: m.decode(t, c, execution=SMALL))
    # Each length is a program.
    for part in jnp.split(tokens, (17, 18, 19, 20), 1):
        hidden, cache = decode(model, part, cache)
        parts.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), wanted, atol=2e-5)
    assert int(cache.length) == T


def test_packed_equals_separate(model, tokens):
    """Two documents in one sequence, with restarting positions, give the loss and gradients of two
    sequences of the reference implementation."""
    if model.config.residual_dropout:
        return  # Dropout differs by a token's place in the sequence.
    order = np.arange(T)
    first = order < 19
    positions, documents = np.where(first, order, order - 19), np.where(first, 1, 2)
    # The second sequence is padding.
    segments = np.stack([documents, 0 * order]).astype(np.int32)
    packed = loss_and_gradients(model, tokens, segments, np.stack([positions, order]))
    both = np.asarray(tokens)[0]
    apart = np.stack([both, np.concatenate([both[19:], both[:19]])])
    lengths = np.array([[19], [T - 19]])
    wanted = loss_and_gradients(model, apart, (order < lengths).astype(np.int32), **REFERENCE)
    assert_close(packed, wanted)


def test_later_tokens_and_other_documents_do_not_reach_a_token(model, tokens):
    """By gradient with respect to the embedded tokens, each of which occurs once."""

    @jax.jit
    @jax.grad
    def two_tokens(table):
        changed = jax.tree.map(lambda x: x, model)
        changed.embedding = changed.embedding.replace(table)
        hidden, _ = changed(jnp.arange(T)[None], segments=SEGMENTS[:1], execution=SMALL)
        # Weighted, because a layer norm's plain sum is constant.
        return (hidden[0, jnp.array([10, 25])] * jnp.arange(32.0)[None]).sum()

    reach = np.abs(two_tokens(model.embedding[...])).sum(-1)[:T]
    reached = np.flatnonzero(reach > 0)
    assert set(reached) == {*range(11), *range(20, 26)}


def test_dropout_needs_a_key_and_follows_it(tokens):
    model = Decoder(MODELS["dropout"], jax.random.key(0))
    run = jax.jit(lambda key: model(tokens, dropout_key=key, execution=SMALL)[0])
    quiet = run(None)
    a, b, again = run(jax.random.key(1)), run(jax.random.key(2)), run(jax.random.key(1))
    assert jnp.array_equal(a, again)
    assert not jnp.allclose(a, b) and not jnp.allclose(a, quiet)


def test_more_tokens_than_learned_positions_are_refused():
    model = Decoder(MODELS["learned"], jax.random.key(0))
    with pytest.raises(ValueError, match="49 tokens.*max_position_embeddings=48"):
        model(jnp.zeros((1, 49), jnp.int32))


def test_positions_of_padding_may_lie_beyond_the_learned_ones():
    model = Decoder(replace(MODELS["learned"], max_position_embeddings=4), jax.random.key(0))
    tokens, segments = jnp.zeros((1, 8), jnp.int32), jnp.array([[1, 1, 1, 1, 0, 0, 0, 0]])
    run = jax.jit(lambda positions: model(tokens, positions=positions, segments=segments)[0])
    inside, beyond = (run(jnp.minimum(jnp.arange(8), last)[None]) for last in (3, 7))
    assert jnp.array_equal(inside[:, :4], beyond[:, :4]) and jnp.isfinite(beyond).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near(tokens, dtype):
    model = Decoder(ROTARY, jax.random.key(0))
    wanted, got = jax.jit(
        lambda model: [
            model(tokens, execution=SMALL, dtype=jnp.dtype(each))[0] for each in ("float32", dtype)
        ]
    )(model)
    assert got.dtype == dtype
    got = got.astype(jnp.float32)
    assert float(jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted)) < 2e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, "num_kv_heads=2: must divide num_heads=5"),
        ({"num_heads": 6}, "num_heads=6: must divide hidden_size=32"),
        ({"head_dim": 7}, "head_dim=7: must be even"),
        ({"position_embedding": "learned"}, "requires model.max_position_embeddings"),
        ({"residual_dropout": 1.0}, r"residual_dropout=1.0: must be in \[0, 1\)"),
        ({"num_layers": 0}, "num_layers=0"),
        (linear(key_size=8), "attention.key_size=8: requires linear_attention in model"),
        (
            {"linear_attention": SIZES},
            "linear_attention: must have sizes if, and only if, model.lay",
        ),
        ({"layer_types": MIXED}, "linear_attention: must have sizes if, and only if, model.lay"),
        (LINEAR | linear(2, 3, 2, 2), "value_heads=3: must be a multiple of key_heads=2"),
        (LINEAR | {"layer_types": 2 * MIXED[:1]}, "layer_types: must also have attention layers"),
        (linear(key_size=2**24), "attention.key_size=16777216: must be at most 65,536"),
        ({"full_attention": FullAttentionConfig(0, 1)}, "kv_heads=1: requires model.full_att"),
        ({"full_attention": FullAttentionConfig(8)}, "head_dim=8: requires full_attention and"),
        ({"layer_scale": True}, "layer_scale=True: requires norms.position=sandwich"),
        ({"experts": ExpertsConfig(norms=True)}, "experts.norms=True: requires model.experts"),
        (LINEAR | {"residual": "parallel"}, "layer_types: must have no linear_attention unless"),
        (images(patch_size=None), r"image_size=\(8, 8\), patch_size=None: must be set together"),
        (images(image_size=None), r"image_size=None, patch_size=\(4, 4\): must be set"),
        (images(patch_size=(0, 4)), r"patch_size=\(0, 4\): must divide image_size="),
        (images(patch_size=(4, 3)), r"patch_size=\(4, 3\): must divide image_size=\(8, 8\)"),
        (images(image_size=(0, 8)), r"divide image_size=\(0, 8\), both of at least 1"),
        (images(channels=0), "channels=0: must be at least 1"),
        ({"position_offset": -3}, "position_offset=-3: must be at least 0"),
        ({"norms": NormsConfig(eps=-1.0)}, "norms.eps=-1.0: must be finite and not negative"),
        ({"norms": NormsConfig(eps=math.nan)}, "norms.eps=nan: must be finite and not negative"),
        (attention(query_growth=math.inf), "query_growth=inf: must be finite"),
        ({"init_std": math.nan}, "init_std=nan: must be finite and not negative"),
        ({"residual_scale": math.nan}, "residual_scale=nan: must be finite and positive"),
        ({"alibi": AlibiConfig(0.0)}, "alibi.scale=0.0: must be finite and positive"),
        (attention(scale=math.nan), "attention.scale=nan: must be finite and positive"),
        (attention(clip=-1.0), "attention.clip=-1.0: must be finite and positive"),
        ({"embedding_scale": math.inf}, "embedding_scale=inf: must be finite and positive"),
        ({"logits_scale": 0.0}, "logits_scale=0.0: must be finite and positive"),
    ],
)
def test_impossible_models_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(ROTARY, **change)


@pytest.mark.thorough
def test_documents_share_no_bit_through_linear_attention():
    """Other tokens in a document, and in padding, change no bit of the loss and gradients of the
    documents beside it, which are shorter than the convolution."""
    model = Decoder(MODELS["linear attention, gate"], jax.random.key(0))
    segments = jnp.array([[1, 0, 2, 2, 2, 3, 3, 0, 4, 0]])
    positions = jnp.array([[0, 0, 0, 1, 2, 0, 1, 0, 0, 0]])
    others = ((segments != 2) & (segments != 0))[..., None]

    @jax.jit
    def run(tokens):
        def loss(model):
            hidden, _ = model(tokens, positions=positions, segments=segments)
            return jnp.where(others, hidden**3, 0).sum(), jnp.where(others, hidden, 0)

        return jax.value_and_grad(loss, has_aux=True)(model)

    tokens = jnp.arange(3, 13)[None]
    changed = tokens.at[0, jnp.array([1, 2, 3, 4, 7, 9])].add(7)
    for x, y in zip(jax.tree.leaves(run(tokens)), jax.tree.leaves(run(changed)), strict=True):
        assert jnp.array_equal(x, y)
