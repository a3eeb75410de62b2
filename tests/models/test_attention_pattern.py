"""Sparse patterns in place of full attention."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.comparing import quick
from tiers import fast

from bptjax.cost.flops import attended_pairs
from bptjax.models.attention_pattern import AttentionPattern
from bptjax.models.cache import Cache
from bptjax.models.config import ModelConfig
from bptjax.models.decoder import Decoder
from bptjax.models.execution import Execution
from bptjax.ops.mask import Mask
from bptjax.parallel.mesh import ParallelConfig, make_mesh

PATTERNS = {
    "window": dict(type="window", window=5, global_tokens=2),
    "markers": dict(type="window", window=5, global_tokens=1, global_markers=[7, 30]),
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
    """No token twice; two are markers."""
    others = np.setdiff1d(np.arange(61), [7, 30])
    ids = np.random.default_rng(1).permutation(others)[:T]
    ids[[12, 29]] = 7, 30
    return jnp.asarray(ids)[None]


@quick
def hidden(decoder, tokens, **options):
    return decoder(
        tokens, execution=Execution(attention_implementation="scan", **SMALL), **options
    )[0]


@pytest.mark.parametrize("name", PATTERNS)
def test_other_patterns_than_landmark_attention_have_no_landmarks(name):
    assert ModelConfig(attention_pattern=PATTERNS[name]).landmarks is None


def attends(name, p, s, ids):
    """The definition, for one causal pair."""
    x = PATTERNS[name]
    if x["type"] == "window":
        markers = x.get("global_markers", [])
        return p - s < x["window"] or any(
            at < x["global_tokens"] or ids[at] in markers for at in (p, s)
        )
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
def test_pairs(name, tokens):
    """Allowed pairs are those of the definition, and as many as FLOPs are counted for."""
    pattern, at = AttentionPattern.parse(PATTERNS[name]), np.arange(T, dtype=np.int32)
    marked, ids = pattern.marked(tokens), tokens[0].tolist()
    assert (marked is None) == (name != "markers")
    mask = pattern.apply(Mask(causal=True), at, at, T, marked, marked).resolve(T, T)
    of_queries, of_keys = jax.tree.map(jnp.asarray, (mask.of_queries, mask.of_keys))
    allowed = np.asarray(quick(mask.allowed)(of_queries, of_keys))[0]
    for i in range(T):
        for j in range(i + 1):
            wanted = attends(name, i, j, ids)
            assert wanted is None or allowed[i, j] == wanted, (i, j)
    assert not np.triu(allowed, 1).any() and 0.1 < allowed.sum() / np.tri(T).sum() < 0.95
    keys = pattern.keys(at if marked is None else at[None], T, marked)
    np.testing.assert_array_equal(np.reshape(keys, T), allowed.sum(1))
    longer = pattern.apply(Mask(causal=True), at, at, 3 * T).block_mask
    if longer is not None:
        np.testing.assert_array_equal(
            longer[: len(mask.block_mask), : len(mask.block_mask)], mask.block_mask
        )
    model = decoder(name).config
    # The second document is the start of the first. Tokens in any order.
    order = np.random.default_rng(0).permutation(T)
    positions, segments, ids = (
        jnp.asarray(x[:, order]) for x in (POSITIONS, SEGMENTS, np.asarray(tokens)[:, POSITIONS[0]])
    )
    pairs = attended_pairs(model, positions, segments, ids, order)
    window = sum(np.minimum(np.arange(n) + 1, 4).sum() for n in LENGTHS)
    assert float(pairs) == window + sum(allowed[:n, :n].sum() for n in LENGTHS)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["strided", "fixed", "bigbird"])
def test_blocks_do_not_depend_on_the_length(name, causal):
    """A sequence may be padded to a multiple of the devices, or packed with others."""
    pattern = AttentionPattern(**PATTERNS[name])
    found = pattern.blocks(20, causal)
    np.testing.assert_array_equal(pattern.blocks(23, causal)[:20, :20], found)
    later = np.triu(found, pattern.local)[1:]  # The first blocks attend to every block.
    assert np.any(later) != causal


@pytest.mark.parametrize("name", fast(["markers", "bigbird"], ["markers"]))
def test_packed_documents_are_separate(name, tokens):
    model = decoder(name)
    packed = hidden(model, tokens, positions=POSITIONS, segments=SEGMENTS)
    first, second = (hidden(model, x) for x in np.split(tokens, LENGTHS[:1], 1))
    assert np.abs(packed - np.concatenate([first, second], 1)).max() < 1e-5


def test_markers_are_seen_from_afar_but_not_before(tokens):
    """By the gradient of a hidden state with respect to the embedding of each token."""
    model, at, execution = decoder("markers"), 31, Execution(**SMALL)

    def seen(tokens):
        found = quick(jax.grad(lambda m, t: m(t, execution=execution)[0][0, at].sum()))(
            model, tokens
        )
        return np.flatnonzero(np.abs(found.embedding[...][tokens[0]]).max(1)).tolist()

    # The other layer has a window of 4.
    near = [0, *range(24, at + 1)]
    assert seen(tokens) == sorted([*near, *range(9, 13)])
    assert seen(tokens.at[0, jnp.array([12, 35])].set(tokens[0, jnp.array([35, 12])])) == near


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["markers", "fixed"])
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name, strategy", [("strided", "ring"), ("markers", "ring"), ("markers", "ulysses")]
)
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
        (dict(type="window", stride=3), "stride: must be one of window, global_tokens, global_m"),
        (dict(type="window", global_markers=[""]), "global_markers=.*: must be a list of tokens"),
        (dict(type="window", global_markers=7), "global_markers=7: must be a list of tokens"),
        (dict(type="landmark"), "token=None: must be the landmark"),
        (dict(type="landmark", token="<l>", block_size=1), "block_size=1: must be at least 2"),
        (dict(type="window", window=0), "window=0: must be an integer, at least 1"),
        (dict(type="fixed", local="2"), "local=2: must be an integer"),
        (dict(type="bigbird", random=True), "random=True: must be an integer, at least 0"),
    ],
)
def test_refusals(values, text):
    with pytest.raises(ValueError, match=text):
        ModelConfig(attention_pattern=values)


def test_what_a_pattern_needs():
    pattern = dict(type="fixed", block_size=2)
    with pytest.raises(ValueError, match="requires layers of full attention"):
        ModelConfig(attention_pattern=pattern, sliding_window=8)
    at = np.arange(4)
    with pytest.raises(ValueError, match="block_size=2: must be at least 128 with 1048576 tokens"):
        AttentionPattern.parse(pattern).apply(Mask(causal=True), at, at, 2**20)
