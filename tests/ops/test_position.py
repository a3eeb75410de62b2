import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from bptjax.ops.position import alibi_slopes, extend_positions, rope, rope_frequencies
from ops.comparing import TOLERANCE, error, normal, quick

PLAIN = {"rope_theta": 1e4}


def test_frequencies():
    frequencies, factor = rope_frequencies(8, {"rope_theta": 1e4})
    assert np.allclose(frequencies, [1, 0.1, 0.01, 0.001]) and factor == 1.0
    assert rope_frequencies(64, {"rope_theta": 5e5})[0].dtype == np.float32


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("turned", [8, 4])
def test_rope_is_complex_multiplication(turned, dtype):
    """Features i and i + R are one complex number; the features after them pass."""
    x, positions = (
        normal(0, 2, 5, 3, 8).astype(dtype),
        jnp.array([[0, 1, 2, 9, 4], [7, 7, 0, 1, 1000]]),
    )
    frequencies, R = rope_frequencies(turned, PLAIN)[0], turned // 2
    y = rope(x, positions, frequencies)
    z = np.asarray(x, np.float64)
    z = z[..., :R] + 1j * z[..., R:turned]
    angle = np.float32(positions[..., None]) * frequencies
    z = z * np.exp(1j * angle[:, :, None].astype(np.float64))
    assert y.dtype == dtype
    assert error(y[..., :turned], np.concatenate([z.real, z.imag], -1)) < TOLERANCE[dtype]
    assert (y[..., turned:] == x[..., turned:]).all()


def test_rope_is_relative():
    q, k = normal(0, 1, 1, 1, 16), normal(1, 1, 1, 1, 16)
    frequencies, _ = rope_frequencies(16, PLAIN)

    def score(p, s):
        turned = (rope(x, jnp.array([[t]]), frequencies) for x, t in ((q, p), (k, s)))
        return jnp.vdot(*turned)

    assert error(score(5, 2), score(105, 102)) < 1e-4
    assert error(score(5, 2), score(5, 3)) > 1e-2


@pytest.mark.parametrize(
    "heads, slopes",
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (8, [2.0**-i for i in range(1, 9)]),
        # As transformers' build_alibi_tensor of BLOOM gives them.
        (3, [2**-4, 2**-8, 2**-2]),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (12, [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_alibi_slopes(heads, slopes):
    assert np.allclose(alibi_slopes(heads), slopes)


def listed(R: int, first: float, last: float) -> list[float]:
    """As the lists of Phi-3: rising from pair to pair."""
    return np.geomspace(first, last, R).round(2).tolist()


LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
PHI3 = dict(
    original_max_position_embeddings=4096,
    short_factor=listed(48, 1.0, 2.8),
    long_factor=listed(48, 1.03, 64.0),
)

# What checkpoints have: features of a head, max_position_embeddings, rope_parameters.
SCALINGS = {
    "default": (64, 2048, {}),
    "default, a quarter": (96, 2048, dict(partial_rotary_factor=0.25)),
    "linear": (128, 16384, dict(rope_type="linear", factor=4.0)),
    "linear, the older key": (64, 16384, dict(type="linear", factor=2.5)),
    "dynamic": (128, 2048, dict(rope_type="dynamic", factor=2.0)),
    "dynamic, half": (80, 4096, dict(rope_type="dynamic", factor=1.1, partial_rotary_factor=0.5)),
    "llama 3.1": (128, 131072, dict(rope_type="llama3", rope_theta=5e5, factor=8.0, **LLAMA3)),
    "llama 3.2": (64, 131072, dict(rope_type="llama3", rope_theta=5e5, factor=32.0, **LLAMA3)),
    "qwen 2.5": (
        128,
        32768,
        dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768),
    ),
    # Equal mscales: a factor of 1 on cos and sin.
    "deepseek v3": (
        64,
        163840,
        dict(
            rope_type="yarn",
            factor=40,
            beta_fast=32,
            beta_slow=1,
            mscale=1.0,
            mscale_all_dim=1.0,
            original_max_position_embeddings=4096,
        ),
    ),
    "yarn, two mscales": (
        64,
        163840,
        dict(
            rope_type="yarn",
            factor=40.0,
            mscale=0.707,
            mscale_all_dim=1.0,
            original_max_position_embeddings=4096,
        ),
    ),
    "yarn, one mscale": (64, 4096, dict(rope_type="yarn", factor=40.0, mscale=0.707)),
    "gpt-oss": (
        64,
        131072,
        dict(
            rope_type="yarn",
            rope_theta=150000,
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=4096,
        ),
    ),
    "yarn, other betas": (64, 4096, dict(rope_type="yarn", factor=8, beta_fast=16, beta_slow=2)),
    "yarn, a step between pairs": (
        64,
        4096,
        dict(rope_type="yarn", factor=8.0, beta_fast=4, beta_slow=4, truncate=False),
    ),
    "yarn, its own factor": (64, 512, dict(rope_type="yarn", factor=8.0, attention_factor=1.3)),
    "yarn, max / original": (
        64,
        65536,
        dict(rope_type="yarn", factor=None, original_max_position_embeddings=8192),
    ),
    # The ramp is empty; it is cut at both ends.
    "yarn, short": (8, 4, dict(rope_type="yarn", factor=2.0)),
    "yarn, long": (8, 4096, dict(rope_type="yarn", rope_theta=10.0, factor=2.0, beta_fast=1000)),
    # Of these, only truncate=None is not as if it were left out: it is false.
    "yarn, None": (
        64,
        4096,
        dict(rope_type="yarn", factor=8.0, truncate=None, beta_fast=None, attention_factor=None),
    ),
    "phi 3": (96, 131072, dict(rope_type="longrope", **PHI3)),
    "phi 4, three quarters": (
        128,
        131072,
        dict(rope_type="longrope", partial_rotary_factor=0.75, **PHI3),
    ),
    "longrope, its factor": (96, 131072, dict(rope_type="longrope", factor=8.0, **PHI3)),
    "longrope, shorter": (96, 2048, dict(rope_type="longrope", **PHI3)),
    "longrope, its own factor": (
        96,
        131072,
        dict(rope_type="longrope", attention_factor=1.19, **PHI3),
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_match_transformers(name):
    """In a model's own module, which chooses by the positions it is given, on either side of every
    threshold; lengths known when traced, and not."""
    torch = pytest.importorskip("torch")
    from transformers import GPTNeoXConfig
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding

    head, longest, parameters = SCALINGS[name]
    # Else GPT-NeoX's own, 0.25. Llama's module does not read it where the type is default.
    parameters = PLAIN | dict(partial_rotary_factor=1.0) | parameters
    dim = int(head * parameters["partial_rotary_factor"])
    config = GPTNeoXConfig(
        hidden_size=2 * head,
        num_attention_heads=2,
        max_position_embeddings=longest,
        rope_parameters=dict(parameters),
    )

    def ours(length: Array | int | None) -> Array | np.ndarray:
        return rope_frequencies(dim, parameters, max_position_embeddings=longest, length=length)[0]

    assert ours(None).dtype == np.float32
    traced, original = quick(ours), parameters.get("original_max_position_embeddings", longest)
    for length in (None, 1, original, original + 1, longest, longest + 1, 5 * longest):
        # Anew for each: the module of `dynamic` keeps what it has grown to.
        module = GPTNeoXRotaryEmbedding(config)
        if length is not None:
            module(torch.zeros(1), torch.tensor([[length - 1]]))
        for got in (ours(length), ours(None) if length is None else traced(jnp.int32(length))):
            assert got.dtype == jnp.float32
            np.testing.assert_allclose(got, module.inv_freq.numpy(), rtol=1e-6, atol=0)
    factor = rope_frequencies(dim, parameters, max_position_embeddings=longest)[1]
    assert factor == pytest.approx(module.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("scaling", ["default", "qwen 2.5"])
def test_rope_of_some_features_is_that_of_transformers(scaling):
    torch = pytest.importorskip("torch")
    from transformers import GPTNeoXConfig
    from transformers.models.gpt_neox import modeling_gpt_neox as neox

    parameters = PLAIN | SCALINGS[scaling][2] | dict(partial_rotary_factor=0.25)
    config = GPTNeoXConfig(
        hidden_size=96,
        num_attention_heads=3,
        max_position_embeddings=32768,
        rope_parameters=dict(parameters),
    )
    q, k, positions = normal(0, 2, 5, 3, 32), normal(1, 2, 5, 3, 32), np.arange(10).reshape(2, 5)
    x, y = (torch.tensor(np.asarray(a)).transpose(1, 2) for a in (q, k))
    cos_sin = neox.GPTNeoXRotaryEmbedding(config)(x, torch.tensor(positions))
    frequencies, factor = rope_frequencies(8, parameters, max_position_embeddings=32768)
    for ours, theirs in zip((q, k), neox.apply_rotary_pos_emb(x, y, *cos_sin), strict=True):
        got = rope(ours, jnp.asarray(positions), frequencies, factor)
        assert error(got, theirs.transpose(1, 2).numpy()) < 1e-6
        assert (got[..., 8:] == ours[..., 8:]).all()


LISTS = dict(rope_type="longrope", original_max_position_embeddings=8, factor=2.0)


@pytest.mark.parametrize(
    "parameters, message",
    [
        (dict(rope_type="su"), "rope_type='su': must be one of default"),
        (dict(type="su"), "rope_type='su': must be one of default"),
        (dict(rope_theta=None), "rope_parameters.rope_theta: must be set with rope_type=default"),
        (dict(rope_type="linear"), "rope_parameters.factor: must be set with rope_type=linear"),
        (dict(rope_type="llama3", factor=8.0), "rope_parameters.low_freq_factor: must be set with"),
        (dict(factor=2.0), "rope_parameters.factor: must be left out with rope_type=default"),
        (dict(mrope_section=[2, 1, 1]), "rope_parameters.mrope_section: must be left out"),
        (dict(rope_type="dynamic", factor=2.0), "max_position_embeddings: must be set with"),
        (
            dict(rope_type="yarn", factor=2.0),
            "original_max_position_embeddings or max_position_embeddings",
        ),
        (
            dict(rope_type="yarn", original_max_position_embeddings=8),
            "rope_parameters.factor or max_position_embeddings: must be set with rope_type=yarn",
        ),
        (
            LISTS | dict(short_factor=[1.0], long_factor=[1.0] * 4),
            "short_factor: must have 4 entries, one for each rotated pair, not 1",
        ),
        (
            LISTS | dict(short_factor=[1.0] * 4, long_factor=[1.0] * 8),
            "long_factor: must have 4 entries, one for each rotated pair, not 8",
        ),
    ],
)
def test_impossible_scalings_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        rope_frequencies(8, PLAIN | parameters)


def test_odd_features_are_refused():
    with pytest.raises(ValueError, match="dim=7: must be even and at least 2, as features"):
        rope_frequencies(7, PLAIN)


@pytest.mark.parametrize("heads", [1, 3, 4, 6, 12, 71])
def test_alibi_slopes_of_mpt(heads):
    pytest.importorskip("torch")
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    assert np.allclose(alibi_slopes(heads), _get_alibi_slopes(heads, "cpu").numpy(), rtol=1e-6)
    bias = build_mpt_alibi_tensor(heads, 2)
    ours = alibi_slopes(heads, interleaved=True)
    assert np.allclose(ours, -bias[:, 0, 0].numpy(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_positions_are_extended_by_tiling(kind):
    table = kind(np.arange(10, dtype=np.float16).reshape(5, 2))
    longer = extend_positions(table, 7, offset=2)
    assert np.array_equal(longer[:, 0], [0, 2, 4, 6, 8, 4, 6, 8, 4])
    assert np.array_equal(extend_positions(table, 2), table[:2])
    assert np.array_equal(extend_positions(table, 2, offset=1), table[:3])
    assert isinstance(longer, np.ndarray if kind is np.asarray else jax.Array)
    assert longer.dtype == table.dtype
    with pytest.raises(ValueError, match="offset=5: must be less than the table's 5 rows"):
        extend_positions(table, 7, offset=5)
