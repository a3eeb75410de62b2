import jax.numpy as jnp
import numpy as np
import pytest

from bptjax.ops.position import alibi_slopes, extend_positions, rope, rope_frequencies
from ops.comparing import TOLERANCE, error, normal

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


SCALINGS = {
    "default": {},
    "linear": dict(factor=4.0),
    "dynamic": dict(factor=2.0),
    "llama 3.1": dict(
        rope_type="llama3",
        rope_theta=5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    "yarn": dict(factor=4.0, original_max_position_embeddings=32768, rope_theta=1e6),
    "yarn, not rounded": dict(
        rope_type="yarn",
        factor=40.0,
        original_max_position_embeddings=4096,
        beta_fast=32,
        beta_slow=1,
        mscale=1.0,
        mscale_all_dim=0.7,
        truncate=False,
    ),
    "yarn, its own factor": dict(
        rope_type="yarn", factor=8.0, attention_factor=1.3, original_max_position_embeddings=512
    ),
    "longrope": dict(
        short_factor=[1 + 0.01 * i for i in range(32)],
        long_factor=[1 + 0.5 * i for i in range(32)],
        original_max_position_embeddings=4096,
    ),
}


@pytest.mark.parametrize("length", [None, 100, 4096, 4097, 200_000])
@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_are_those_of_transformers(name, length):
    pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = dict(rope_type=name, rope_theta=1e4) | SCALINGS[name]
    parameters["rope_type"] = parameters["rope_type"].split(",")[0]
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131_072,
        rope_parameters=dict(parameters),
    )
    if name == "default":
        wanted, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        make = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
        wanted, factor = make(config, None, seq_len=length)
    for reach in (length, length and jnp.int32(length)):
        got, ours = rope_frequencies(64, parameters, max_positions=131_072, length=reach)
        assert np.allclose(got, wanted.numpy(), rtol=2e-6, atol=0)
        assert ours == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize(
    "parameters, message",
    [
        (dict(rope_type="su"), "rope_type='su' is not known; there are default"),
        (dict(rope_theta=None), "rope_type=default needs rope_parameters.rope_theta"),
        (dict(rope_type="linear"), "rope_type=linear needs rope_parameters.factor"),
        (dict(factor=2.0), "rope_type=default does not use rope_parameters.factor"),
        (dict(rope_type="dynamic", factor=2.0), "needs max_position_embeddings"),
        (
            dict(
                rope_type="longrope",
                factor=2.0,
                original_max_position_embeddings=8,
                short_factor=[1.0],
                long_factor=[1.0] * 4,
            ),
            "short_factor has 1 entries for 4 pairs",
        ),
    ],
)
def test_impossible_scalings_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        rope_frequencies(8, PLAIN | parameters)


@pytest.mark.parametrize("heads", [1, 3, 4, 6, 12, 71])
def test_alibi_slopes_of_mpt(heads):
    pytest.importorskip("torch")
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    bias = build_mpt_alibi_tensor(heads, 2)
    assert np.allclose(alibi_slopes(heads, interleaved=True), -bias[:, 0, 0].numpy(), rtol=1e-6)
    assert np.allclose(alibi_slopes(heads), _get_alibi_slopes(heads, "cpu").numpy(), rtol=1e-6)


def test_positions_are_extended_by_tiling():
    table = np.arange(10.0).reshape(5, 2)
    longer = extend_positions(table, 7, offset=2)
    assert np.array_equal(longer[:, 0], [0, 2, 4, 6, 8, 4, 6, 8, 4])
    assert np.array_equal(extend_positions(table, 2), table[:2])
