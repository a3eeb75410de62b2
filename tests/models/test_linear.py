"""Gradients of parameters that every token adds are sums in float32, also with 16-bit tokens. A GPU
computes the product of one row as a sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bptjax.models import linear
from bptjax.models.config import ModelConfig
from bptjax.models.encoder import Encoder
from bptjax.models.experts import ExpertLinear
from bptjax.models.groups.encoder import EncoderConfig
from bptjax.models.linear import Linear
from bptjax.ops.grouped_matmul import group

# A sum of ones stops at 256 in bfloat16, and at 2048 in float16.
T = 4096
OPTIONS = dict(std=0.1, bias=True, dtype=jnp.float32)


def gradients(call, module):
    """Gradients of the sum of all elements of `call(module)`."""
    graph, params = nnx.split(module)
    return jax.grad(lambda p: call(nnx.merge(graph, p)).astype(jnp.float32).sum())(params)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_bias(dtype):
    linear = Linear(jax.random.key(0), (2,), (8,), ("embed", "mlp"), **OPTIONS)
    found = gradients(lambda m: m(jnp.zeros((64, T // 64, 2), dtype)), linear)
    assert np.asarray(found["bias"][...]).tolist() == [T] * 8


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_bias_of_experts(dtype):
    experts = ExpertLinear(jax.random.key(0), (2, 2, 8), ("embed", "mlp"), **OPTIONS)
    groups = group(jnp.zeros((T, 1), jnp.int32), 2, block=1)
    rows = jnp.zeros((len(groups.choices), 2), dtype)
    found = gradients(lambda m: m(rows, groups), experts)
    assert np.asarray(found["bias"][...])[0].tolist() == [T] * 8


def test_embeddings_of_all_tokens():
    """The type of all tokens, and the first token of each image."""
    small = dict(causal=False, hidden_size=8, num_heads=1, num_layers=1, position_embedding="none")
    text = Encoder(ModelConfig(**small, vocab_size=3, encoder=EncoderConfig(2)), jax.random.key(0))
    tokens = jnp.zeros((64, T // 64, 8), jnp.bfloat16)
    found = gradients(lambda m: m._add_types(tokens, None), text)
    assert np.asarray(found["types"][...]).tolist() == [[T] * 8, [0] * 8]
    own = EncoderConfig(image_size=(1, 1), patch_size=(1, 1), classes=2)
    images = Encoder(ModelConfig(**small, encoder=own), jax.random.key(0))
    patches, first = jnp.zeros((64, T // 64, 3)), jnp.zeros((64, T // 64), jnp.int32)
    found = gradients(lambda m: m._look_up(patches, jnp.bfloat16, first), images)
    assert np.asarray(found["first"][...]).tolist() == [[T] * 8]


@pytest.mark.parametrize("inputs, outputs", [((192,), (5, 2)), ((4, 6), (7,)), ((130,), (3,))])
@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-6), (jnp.bfloat16, 4e-3)])
def test_the_product_of_one_row_on_a_gpu(inputs, outputs, dtype, tolerance, monkeypatch):
    """Into several sums of SUMMED inputs, and into sums of fewer that divide their number."""
    key, axes = jax.random.key(0), (None,) * (len(inputs) + len(outputs))
    layer = Linear(key, inputs, outputs, axes, **OPTIONS)
    x = jax.random.normal(jax.random.key(1), (1, 1, *inputs)).astype(dtype)
    kernel = np.asarray(layer.kernel[...].astype(dtype), np.float64)
    wanted = np.tensordot(np.asarray(x, np.float64), kernel, len(inputs))
    rows, product = [], linear._product_of_one_row
    monkeypatch.setattr(linear, "platform", lambda: "gpu")
    monkeypatch.setattr(linear, "_product_of_one_row", lambda *x: rows.append(x) or product(*x))
    found = layer(x)
    assert found.shape == wanted.shape and found.dtype == dtype and len(rows) == 1
    np.testing.assert_allclose(
        np.asarray(found, np.float64), wanted, atol=tolerance, rtol=tolerance
    )
    layer(jnp.zeros((2, 1, *inputs), dtype))
    assert len(rows) == 1
