"""A mixture of experts is a dense sum over all experts, in any chunks and with any remat policy."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.test_decoder import ROTARY, assert_close
from ops.comparing import close, normal, quick

from bptjax.models.config import ModelConfig
from bptjax.models.decoder import Decoder
from bptjax.models.execution import Execution
from bptjax.models.experts import Experts, Router
from bptjax.models.feed_forward import ACTIVATIONS, activate
from bptjax.models.generation import generate
from bptjax.models.groups.experts import ExpertsConfig
from bptjax.models.sampling import Sampling
from bptjax.ops.blockwise import blockwise
from bptjax.ops.loss import linear_cross_entropy
from bptjax.parallel.mesh import ParallelConfig, make_mesh

ROUTED = replace(
    ROTARY,
    feed_forward="experts",
    experts=ExpertsConfig(count=6, size=20, aux_loss=1.0, z_loss=0.1),
)


@pytest.fixture(scope="module")
def model():
    return Decoder(replace(ROUTED, residual_dropout=0.1), jax.random.key(0))


TOKENS = jax.random.randint(jax.random.key(1), (2, 37), 0, 61)
SEGMENTS = jnp.array([[1] * 20 + [2] * 17, [1] * 30 + [0] * 7])


def loss_and_gradients(**how):
    """A compiled function of the model, the tokens and a factor on the auxiliary loss."""
    options = dict(remat="save_attention", q_chunk=8, k_chunk=16)
    execution = Execution(**(options | how))

    def loss(model, tokens, factor):
        hidden, sums = model(
            tokens, segments=SEGMENTS, dropout_key=jax.random.key(2), execution=execution
        )
        labels = jnp.where(SEGMENTS > 0, tokens, -100)
        count = (SEGMENTS > 0).sum().astype(jnp.float32)
        auxiliary = Experts.auxiliary_loss(model.config, sums, sums, count)
        cross_entropy = linear_cross_entropy(hidden, model.head_matrix, labels, chunk=16)
        return cross_entropy + factor * auxiliary

    return quick(jax.value_and_grad(loss))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    """In bfloat16 they are rounded once, and their inputs alone wait for the backward pass."""
    known = dict(gelu_tanh=functools.partial(jax.nn.gelu, approximate=True))
    f = known.get(name, ACTIVATIONS[name])
    gate, up, dy = (normal(i, 500) for i in range(3))

    def product(gate, up):
        return f(gate) * up

    wanted, pull = jax.vjp(product, gate, up)
    got, own = jax.vjp(functools.partial(activate, name), gate, up)
    close((got, own(dy)), (wanted, pull(dy)))
    assert len(jax.tree.leaves(own)) == 2
    alone, own = jax.vjp(functools.partial(activate, name), gate)
    close((alone, own(dy)[0]), (f(gate), jax.vjp(f, gate)[1](dy)[0]))
    half = [x.astype(jnp.bfloat16) for x in (gate, up)]
    wide = product(*(x.astype(jnp.float32) for x in half))
    assert (activate(name, *half) == wide.astype(jnp.bfloat16)).all()


def test_equals_all_experts():
    """Each token through every expert, weighted by 0 unless it is among its k."""
    choices = dict(glu_limit=0.5, glu_offset=1.0, per_token=3, router_bias=True, renormalized=False)
    experts = replace(ROUTED.experts, **choices)
    config = replace(ROUTED, init_std=0.5, mlp_bias=True, experts=experts)
    network = Experts(config, jax.random.key(0), jnp.float32)
    structure = jax.tree.structure(network)
    keys = jax.random.split(jax.random.key(1), structure.num_leaves)
    # Biases that are not 0.
    network = jax.tree.map(
        lambda p, key: p + 0.1 * jax.random.normal(key, p.shape), network, structure.unflatten(keys)
    )
    x, counted = jax.random.normal(jax.random.key(2), (2, 9, 32)), jnp.ones((2, 9), bool)

    def dense(network, x):
        def linear(p, x):
            y = jnp.einsum("btxi,xio->btxo", x, p.kernel[...], precision="highest")
            return y + p.bias[...][None, None]

        bias = network.router.bias[...].reshape(1, 1, -1)
        probability = jax.nn.softmax(x @ network.router.kernel[...] + bias)
        least = jnp.sort(probability, -1)[..., -3, None]
        weights = jnp.where(probability >= least, probability, 0)
        each = jnp.repeat(x[:, :, None], config.experts.count, 2)
        each = network.activate(linear(network.gate, each), linear(network.up, each))
        return jnp.einsum("btx,btxd->btd", weights, linear(network.down, each))

    def both(f):
        return quick(jax.value_and_grad(lambda *args: jnp.square(f(*args)).sum(), (0, 1)))(
            network, x
        )

    wanted = both(dense)
    assert_close(both(lambda network, x: network(x, counted=counted)[0]), wanted)
    assert all(jnp.abs(g).max() > 1e-3 for g in jax.tree.leaves(wanted))


@pytest.mark.thorough
def test_chunks_and_remat_change_nothing(model):
    """37 tokens in chunks of 10: copies of the last token fill up the last chunk, and count not.
    Nor does padding."""
    run = loss_and_gradients(remat="none", ffn_chunk=37)
    wanted, without = run(model, TOKENS, 1.0), run(model, TOKENS, 0.0)
    assert wanted[0] - without[0] > 1
    routers = (found[1].layers.mlp.router.kernel[...] for found in (wanted, without))
    assert jnp.abs(jnp.subtract(*routers)).max() > 1e-2
    others = jnp.where(SEGMENTS > 0, TOKENS, 60 - TOKENS)
    for how in (
        dict(remat="dots", ffn_chunk=37, offload=0.5),
        dict(remat="full", schedule="fused"),
        dict(remat="nested(2)", ffn_chunk=10),
    ):
        assert_close(loss_and_gradients(**how)(model, others, 1.0), wanted)


@pytest.mark.thorough
def test_memory_follows_the_chunk():
    """With 37 experts too, there are no numbers for each expert and token, or for each expert and
    choice of a token in a chunk."""
    network = Experts(
        replace(ROUTED, experts=replace(ROUTED.experts, count=37)), jax.random.key(0), jnp.float32
    )

    def loss(network, x, chunk):
        def f(network, x, inside):
            return network(x, counted=inside[None])

        return blockwise(f, network, x, chunk=chunk, has_aux=True)[0].sum()

    def compiled(T, chunk):
        gradients = jax.grad(functools.partial(loss, chunk=chunk), (0, 1))
        x = jax.ShapeDtypeStruct((1, T, 32), "float32")
        return quick(gradients).lower(network, x).compile()

    steps = [compiled(*sizes) for sizes in ((8192, 8192), (8192, 64), (16384, 64))]
    sizes = [step.memory_analysis().temp_size_in_bytes for step in steps]
    assert sizes[1] < 0.3 * sizes[0] and sizes[2] < 2 * sizes[1]
    shapes = {*re.findall(r"\w+\[([\d,]+)\]", steps[1].as_text())}
    assert "64,37" in shapes and not shapes & {"8192,37", "1,8192,37", "64,2,37", "128,37"}


@pytest.mark.thorough
def test_fewer_sequences_than_devices(model):
    """A generation on a mesh that cannot divide its sequences."""

    def written():
        execution = Execution(q_chunk=8, k_chunk=8, ffn_chunk=10)
        sampling = Sampling(temperature=0.0)
        prompts = [np.asarray(TOKENS[0, :9])]
        return [*generate(model, prompts, new_tokens=3, sampling=sampling, execution=execution)]

    alone = written()
    with jax.set_mesh(make_mesh(ParallelConfig(1, 2, 1, 1, 2), jax.devices()[:4])):
        assert np.array_equal(written(), alone)


@pytest.mark.thorough
def test_groups_are_chosen_by_their_scores():
    """The logits of the first group have the larger sum, the sigmoids of the second."""
    groups = dict(groups=2, groups_per_token=1, scores="sigmoid")
    experts = ExpertsConfig(count=4, per_token=1, **groups)
    config = ModelConfig(feed_forward="experts", experts=experts)
    router = Router(config, jax.random.key(0), jnp.float32)
    assert int(router.choose(jnp.array([[10.0, -5.0, 2.0, 2.5]]))[0, 0]) == 3
