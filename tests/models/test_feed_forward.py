"""Feed-forward networks with an auxiliary loss: the sums over tokens depend on nothing else."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from models.test_decoder import ROTARY, assert_close

from bptjax.models.decoder import Decoder
from bptjax.models.feed_forward import FEED_FORWARDS, Mlp
from bptjax.models.linear import Linear
from bptjax.ops.loss import linear_cross_entropy
from bptjax.remat import TrainingExecution

EXPERTS = 3


class Routed(Mlp):
    """An MLP beside a router that decides nothing: it makes the losses of Switch Transformers,
    Fedus et al. 2021, arXiv 2101.03961, equation 4, and of ST-MoE, arXiv 2202.08906, equation 5."""

    has_auxiliary_loss = True

    def __init__(self, config, key, dtype):
        super().__init__(config, key, dtype)
        D, axes = (config.hidden_size,), ("embed", None)
        self.router = Linear(key, D, (EXPERTS,), axes, std=1.0, bias=False, dtype=dtype)

    def __call__(self, x, *, seeds=None, offload=0.0):
        y, _ = super().__call__(x, seeds=seeds, offload=offload)
        logits = self.router(x).astype(jnp.float32)
        chosen = jax.nn.one_hot(logits.argmax(-1), EXPERTS)
        z = jnp.square(jax.nn.logsumexp(logits, -1))
        return y, dict(chosen=chosen, probability=jax.nn.softmax(logits), z=z)

    @staticmethod
    def auxiliary_loss(config, sums, tokens):
        balance = (sums["chosen"] * sums["probability"]).sum() / jnp.square(tokens)
        return EXPERTS * balance + 0.1 * sums["z"].sum() / tokens


@pytest.fixture(autouse=True)
def routed(monkeypatch):
    monkeypatch.setitem(FEED_FORWARDS, "routed", Routed)


@pytest.fixture
def model():
    config = replace(ROTARY, feed_forward="routed", residual_dropout=0.1)
    return Decoder(config, jax.random.key(0))


TOKENS = jax.random.randint(jax.random.key(1), (2, 37), 0, 61)
SEGMENTS = jnp.array([[1] * 20 + [2] * 17, [1] * 30 + [0] * 7])


def loss_and_gradients(model, tokens, *, coefficient=1.0, **how):
    execution = TrainingExecution(**(dict(q_chunk=8, k_chunk=16) | how))

    def loss(model):
        hidden, sums = model(
            tokens, segments=SEGMENTS, dropout_key=jax.random.key(2), execution=execution
        )
        labels = jnp.where(SEGMENTS > 0, tokens, -100)
        count = (SEGMENTS > 0).sum().astype(jnp.float32)
        auxiliary = Routed.auxiliary_loss(model.config, sums, count)
        cross_entropy = linear_cross_entropy(hidden, model.head_matrix, labels, chunk=16)
        return cross_entropy + coefficient * auxiliary

    return jax.jit(jax.value_and_grad(loss))(model)


def test_chunks_and_remat_change_nothing(model):
    """37 tokens in chunks of 10: copies of the last token fill up the last chunk, and count not."""
    wanted = loss_and_gradients(model, TOKENS, remat="none", ffn_chunk=37)
    without = loss_and_gradients(model, TOKENS, coefficient=0.0, remat="none", ffn_chunk=37)
    router = without[1].layers.mlp.router.kernel[...]
    assert wanted[0] - without[0] > 1 and not router.any()
    assert jnp.abs(wanted[1].layers.mlp.router.kernel[...]).max() > 1e-2
    for how in (
        dict(remat="none", ffn_chunk=10),
        dict(remat="full", schedule="fused"),
        dict(remat="nested(2)", ffn_chunk=10),
    ):
        assert_close(loss_and_gradients(model, TOKENS, **how), wanted)


def test_padding_does_not_count(model):
    others = jnp.where(SEGMENTS > 0, TOKENS, 60 - TOKENS)
    wanted = loss_and_gradients(model, TOKENS, ffn_chunk=10)
    assert_close(loss_and_gradients(model, others, ffn_chunk=10), wanted)
