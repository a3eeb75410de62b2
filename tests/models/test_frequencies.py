"""Rotary frequencies that depend on the length of a document."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.test_decoder import ROTARY, SMALL, assert_close

from bptjax.models.decoder import Decoder
from bptjax.ops.loss import linear_cross_entropy

# Rotary scalings whose frequencies follow the length of the document, both past 10 tokens.
BY_LENGTH = {
    "dynamic": dict(rope_theta=1e4, rope_type="dynamic", factor=4.0),
    "longrope": dict(
        rope_theta=1e4,
        rope_type="longrope",
        factor=4.0,
        original_max_position_embeddings=10,
        short_factor=[1.0, 1.1, 1.3, 1.5],
        long_factor=[2.0, 3.0, 4.0, 8.0],
    ),
}
IN_SOME_LAYERS = dict(full_attention=BY_LENGTH["dynamic"], sliding_attention=dict(rope_theta=1e4))
BY_LENGTH = BY_LENGTH | {"in some layers": IN_SOME_LAYERS}


def by_length(kind: str) -> Decoder:
    config = replace(
        ROTARY, max_position_embeddings=10, rope_parameters=BY_LENGTH[kind], init_std=0.3
    )
    if kind == "in some layers":
        types = ["sliding_attention", "full_attention"]
        config = replace(config, sliding_window=6, layer_types=types)
    return Decoder(config, jax.random.key(0))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BY_LENGTH)
def test_frequencies_follow_each_document(kind):
    """Documents on both sides of the original length, packed, give the values and gradients of
    each document alone."""
    lengths = (25, 8, 4)
    rng, model = np.random.default_rng(0), by_length(kind)
    documents = [rng.integers(0, 61, n) for n in lengths]
    labels = [np.append(d[1:], -100) for d in documents]

    def loss(model, tokens, labels, segments, positions, execution):
        hidden, _ = model(tokens, segments=segments, positions=positions, execution=execution)
        return linear_cross_entropy(hidden, model.head_matrix, labels, chunk=16)

    run = jax.jit(jax.value_and_grad(loss), static_argnums=5)

    def alone(tokens, labels):
        n = len(tokens)
        fields = zip((tokens, labels, np.ones(n, int), np.arange(n)), (0, -100, 0, 0), strict=True)
        # Padded to one shape, which compiles once.
        one = (jnp.asarray(np.pad(x, (0, 38 - n), constant_values=f))[None] for x, f in fields)
        return run(model, *one, replace(SMALL, attention_implementation="reference"))

    each = [alone(*x) for x in zip(documents, labels, strict=True)]
    wanted = jax.tree.map(lambda *x: sum(x), *each)
    packed = (
        np.concatenate(documents),
        np.concatenate(labels),
        # Numbers need not count from 1, nor be small.
        np.repeat([7, 1000, 2], lengths),
        np.concatenate([np.arange(n) for n in lengths]),
    )
    # One token of padding.
    fills = zip(packed, (0, -100, 0, 99), strict=True)
    packed = [jnp.asarray(np.append(x, fill))[None] for x, fill in fills]
    for how in (dict(remat="full"), dict(schedule="fused")):
        assert_close(run(model, *packed, replace(SMALL, **how)), wanted)
