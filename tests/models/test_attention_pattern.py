"""Sparse patterns in place of full attention."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.comparing import quick

from bptjax.models.attention_pattern import AttentionPattern
from bptjax.models.cache import Cache
from bptjax.models.config import Execution, ModelConfig
from bptjax.models.decoder import Decoder
from bptjax.ops.mask import Mask
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.training.flops import attended_pairs

PATTERNS = {
    "window": dict(type="window", window=5, global_tokens=2),
    "window alone": dict(type="window", window=5, global_tokens=0),
    "strided": dict(type="strided", block_size=3, local=2, stride=3),
    "fixed": dict(type="fixed", block_size=3, local=1, stride=2),
    "bigbird": dict(type="bigbird", block_size=3, local=1, global_blocks=1, random=1),
}
T = 40
# A second document that starts inside a block.
LENGTHS = 23, 17
SEGMENTS = np.repeat([[1, 2]], LENGTHS, 1).astype(np.int32)
POSITIONS = np.concatenate([np.arange(n, dtype=np.int32) for n in LENGTHS])[None]
SMALL = dict(q_chunk=8, k_chunk=16, ffn_chunk=10)


def decoder(name):
    config = ModelConfig(
        vocab_size=61,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        attention_pattern=PATTERNS[name],
    )
    return Decoder(config, jax.random.key(0))


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(1), (1, T), 0, 61)


@quick
def hidden(decoder, tokens, **options):
    return decoder(
        tokens, execution=Execution(attention_implementation="scan", **SMALL), **options
    )[0]


def attends(name, p, s):
    """The definition, for one causal pair."""
    x = PATTERNS[name]
    if x["type"] == "window":
        return p - s < x["window"] or s < x["global_tokens"] or p < x["global_tokens"]
    p, s = p // x["block_size"], s // x["block_size"]
    if p - s < x["local"]:
        return True
    if x["type"] == "strided":
        return (p - s) % x["stride"] == 0
    if x["type"] == "fixed":
        return (s + 1) % x["stride"] == 0
    # Any other block may be a random one.
    return True if min(p, s) < x["global_blocks"] else None


@pytest.mark.parametrize("name", PATTERNS)
def test_pairs(name):
    """Allowed pairs are those of the definition, and as many as FLOPs are counted for."""
    pattern, at = AttentionPattern.parse(PATTERNS[name]), np.arange(T, dtype=np.int32)
    mask = pattern.apply(Mask(causal=True), at, at, T).resolve(T, T)
    marks = mask.global_tokens, mask.k_global_tokens
    marks = (None if x is None else jnp.asarray(x)[None] for x in marks)
    each = jnp.asarray(at)[None]
    allowed = np.asarray(mask.allowed(each, each, None, None, *marks))[0]
    for i in range(T):
        for j in range(i + 1):
            wanted = attends(name, i, j)
            assert wanted is None or allowed[i, j] == wanted, (i, j)
    assert not np.triu(allowed, 1).any() and 0.1 < allowed.sum() / np.tri(T).sum() < 0.95
    np.testing.assert_array_equal(pattern.keys(at, T), allowed.sum(1))
    longer = pattern.apply(Mask(causal=True), at, at, 3 * T).block_mask
    if longer is not None:
        np.testing.assert_array_equal(
            longer[: len(mask.block_mask), : len(mask.block_mask)], mask.block_mask
        )
    model = decoder(name).config
    pairs = attended_pairs(model, jnp.asarray(POSITIONS), jnp.asarray(SEGMENTS))
    window = sum(np.minimum(np.arange(n) + 1, 4).sum() for n in LENGTHS)
    assert float(pairs) == window + sum(allowed[:n, :n].sum() for n in LENGTHS)


@pytest.mark.parametrize("name", ["window", "bigbird"])
def test_packed_documents_are_separate(name, tokens):
    model = decoder(name)
    packed = hidden(model, tokens, positions=POSITIONS, segments=SEGMENTS)
    first, second = (hidden(model, x) for x in np.split(tokens, LENGTHS[:1], 1))
    assert np.abs(packed - np.concatenate([first, second], 1)).max() < 1e-5


@pytest.mark.parametrize("name", ["window", "fixed"])
def test_schedules_kernels_and_the_cache_agree(name, tokens):
    model = decoder(name)
    wanted = hidden(model, tokens)
    full = replace(model.config, attention_pattern=None)
    assert np.abs(hidden(Decoder(full, jax.random.key(0)), tokens) - wanted).max() > 1e-2
    for options in (
        dict(attention_implementation="reference"),
        dict(attention_implementation="loop"),
        dict(attention_implementation="scan", schedule="fused"),
    ):
        execution = Execution(**SMALL, **options)
        got = quick(lambda m, t, e=execution: m(t, execution=e)[0])(model, tokens)
        assert np.abs(got - wanted).max() < 1e-5, options
    # Prompts of two lengths, in two chunks.
    both = jnp.concatenate([tokens, jnp.roll(tokens, 7, 1)])
    cache = Cache.empty(model.config, 2, T, jnp.float32)
    cache = replace(cache, start=jnp.asarray([0, 7], jnp.int32))
    outs = []
    for chunk in (both[:, :30], both[:, 30:]):
        out, cache = quick(lambda m, t, c: m.decode(t, c))(model, chunk, cache)
        outs.append(out)
    got = jnp.concatenate(outs, 1)
    assert np.abs(got[0] - wanted[0]).max() < 1e-5
    assert np.abs(got[1, 7:] - wanted[0, : T - 7]).max() < 1e-5


@pytest.mark.parametrize("name, strategy", [("strided", "ring"), ("window", "ulysses")])
def test_a_sequence_on_two_devices(name, strategy, tokens):
    model = decoder(name)
    wanted = hidden(model, tokens, positions=POSITIONS, segments=SEGMENTS)
    with jax.set_mesh(make_mesh(ParallelConfig(1, 1, 1, 2), jax.devices()[:2])):
        got = jax.jit(
            lambda m, t, positions, segments: m(
                t,
                positions=positions,
                segments=segments,
                execution=Execution(attention_implementation="scan", **SMALL),
                sequence_strategy=strategy,
            )[0]
        )(model, tokens, POSITIONS, SEGMENTS)
    assert np.abs(np.asarray(got) - wanted).max() < 1e-5


@pytest.mark.parametrize(
    "values, text",
    [
        (dict(type="dense"), "model.attention_pattern.type=dense: must be one of window, strided"),
        (dict(window=9), "type=None: must be one of"),
        (dict(type=["window"]), "must be one of"),
        ("window", "must be keys and values"),
        (dict(type="window", stride=3), "stride: must be one of window, global_tokens with"),
        (dict(type="window", window=0), "window=0: must be a whole number, at least 1"),
        (dict(type="fixed", local="2"), "local=2: must be a whole number"),
        (dict(type="bigbird", random=True), "random=True: must be a whole number, at least 0"),
    ],
)
def test_refusals(values, text):
    with pytest.raises(ValueError, match=text):
        ModelConfig(attention_pattern=values)


def test_what_a_pattern_needs():
    pattern = dict(type="fixed", block_size=2)
    with pytest.raises(ValueError, match="must go with layers of full attention"):
        ModelConfig(attention_pattern=pattern, sliding_window=8)
    at = np.arange(4)
    with pytest.raises(ValueError, match="block_size=2: must be at least 128 with 1048576 tokens"):
        AttentionPattern.parse(pattern).apply(Mask(causal=True), at, at, 2**20)
