"""Layers of several kinds: loops over patterns give what the layers give one after another."""

import time
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from models.test_decoder import ROTARY, assert_close

from bptjax.models.cache import Cache
from bptjax.models.decoder import Decoder
from bptjax.models.execution import Execution
from bptjax.models.layer_loops import LayerLoop, layer_loops
from bptjax.ops.loss import linear_cross_entropy

DIVISIONS = {
    "A" * 24: [("A", 24)],
    # 26 = 4 · 6 + 2.
    "AAAAAB" * 4 + "AA": [("AAAAAB", 4), ("A", 2)],
    "AB" * 18: [("AB", 18)],
    # Windows in the upper layers; leading layers of another kind.
    "A" * 12 + "B" * 12: [("A", 12), ("B", 12)],
    "AAA" + "BBBC" * 5: [("A", 3), ("BBBC", 5)],
    "A": [("A", 1)],
    "ABCA": [("ABCA", 1)],
}


@pytest.mark.parametrize("kinds", DIVISIONS)
def test_the_shortest_patterns(kinds):
    found = layer_loops(list(kinds))
    assert found == [LayerLoop(tuple(pattern), n) for pattern, n in DIVISIONS[kinds]]


def test_thousands_of_layers_are_divided_at_once():
    start = time.perf_counter()
    assert layer_loops(["A"] * 2048) == [LayerLoop(("A",), 2048)]
    assert time.perf_counter() - start < 10


S, F = "sliding_attention", "full_attention"
# Two rounds of a pattern, and one layer that is left.
MIXED = replace(
    ROTARY,
    num_layers=5,
    sliding_window=5,
    layer_types=[S, F, S, F, S],
    rope_parameters={F: dict(rope_theta=1e6), S: dict(rope_theta=1e4)},
    attention_dropout=0.1,
    residual_dropout=0.1,
    init_std=0.2,
)
ALIKE = replace(MIXED, layer_types=5 * [S], residual_dropout=0.0)
SMALL = dict(q_chunk=8, k_chunk=16, ffn_chunk=10)
TOKENS = jax.random.randint(jax.random.key(1), (2, 37), 0, 61)


@dataclass(frozen=True)
class OneByOne(Execution):
    """Without loops and remat."""

    def scan(self, step, carry, kinds, stack=None):
        outputs = []
        for index, kind in enumerate(kinds):
            entry = jax.tree.map(lambda x, i=index: x[i], stack)
            carry, output = step(carry, jnp.int32(index), entry, kind)
            outputs.append(output)
        return carry, jax.tree.map(lambda *each: jnp.stack(each), *outputs)


@pytest.fixture(scope="module", params=[MIXED, ALIKE], ids=["mixed", "alike"])
def model(request):
    return Decoder(request.param, jax.random.key(0))


def loss_and_gradients(model, execution):
    def loss(model):
        hidden, _ = model(TOKENS, dropout_key=jax.random.key(2), execution=execution)
        return linear_cross_entropy(hidden, model.head_matrix, TOKENS, chunk=16)

    return jax.jit(jax.value_and_grad(loss))(model)


@pytest.fixture(scope="module")
def wanted(model):
    return loss_and_gradients(model, OneByOne(remat="none", **SMALL))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "how",
    [
        dict(remat="none"),
        dict(remat="full", schedule="fused"),
        dict(remat="nested(5)"),
    ],
    ids=str,
)
def test_loops_give_what_the_layers_give(model, wanted, how):
    assert_close(loss_and_gradients(model, Execution(**SMALL, **how)), wanted)


def test_decoding_and_hidden_states(model):
    """Every output of a loop is that of its layer: the cache, and the stream after each layer."""
    one, loops = (kind(remat="none", **SMALL) for kind in (OneByOne, Execution))

    @jax.jit
    def decoded(model):
        cache = Cache.empty(model.config, 2, 40, jnp.float32)
        _, cache = model.decode(TOKENS[:, :30], cache, execution=loops)
        return model.decode(TOKENS[:, 30:], cache, execution=loops)[0]

    states, each = (
        jax.jit(lambda m, how=how: m.hidden_states(TOKENS, execution=how))(model)
        for how in (one, loops)
    )
    assert len(each) == MIXED.num_layers + 2
    jax.tree.map(lambda a, b: assert_near(a, b), each, states)
    assert_near(decoded(model), states[-1][:, 30:])


def assert_near(got, wanted):
    assert float(jnp.abs(got - wanted).max()) < 2e-5


@pytest.mark.thorough
def test_no_copy_of_the_parameters():
    """Two loops over one stack need the memory of one, and a loop over more layers no more memory,
    within a layer's parameters."""
    D, F_ = 128, 1024
    config = replace(ROTARY, hidden_size=D, intermediate_size=F_, sliding_window=4)

    def bytes_of(types):
        new = partial(Decoder, replace(config, num_layers=len(types), layer_types=types))
        model = jax.eval_shape(new, jax.random.key(0))

        def loss(model):
            execution = Execution(remat="none", ffn_chunk=16)
            return model(jnp.zeros((1, 16), jnp.int32), execution=execution)[0].sum()

        compiled = jax.jit(jax.grad(loss)).lower(model).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    layer = 4 * 3 * D * F_
    assert bytes_of([F] * 4 + [S] * 4) < bytes_of([S] * 8) + layer
    assert bytes_of([S] * 8) < bytes_of([S] * 4) + layer
