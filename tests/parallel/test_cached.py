"""Generation on meshes: the tokens of one device, with the cache sharded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiers import fast

from bptjax.models.cache import Cache
from bptjax.models.config import ModelConfig
from bptjax.models.decoder import Decoder
from bptjax.models.execution import Execution
from bptjax.models.generation import _steps, generate
from bptjax.models.groups.attention import AttentionConfig
from bptjax.models.groups.experts import ExpertsConfig
from bptjax.models.groups.full_attention import FullAttentionConfig, SharedKvConfig
from bptjax.models.groups.layer_embedding import LayerEmbeddingConfig
from bptjax.models.groups.linear_attention import LinearAttentionConfig
from bptjax.models.groups.norms import NormsConfig
from bptjax.models.groups.short_convolution import ShortConvolutionConfig
from bptjax.models.sampling import Sampling
from bptjax.parallel import cached
from bptjax.parallel.mesh import STATE_AXIS, ParallelConfig, make_mesh, sharding

GREEDY = Sampling(temperature=0.0)
# Attention reads four keys at a time, and the prompt of 19 tokens is read in four chunks.
SMALL, CHUNK = Execution(q_chunk=4, k_chunk=1, ffn_chunk=3), 6
EXPERTS = dict(feed_forward="experts", experts=ExpertsConfig(count=4, per_token=2, size=16))
MODELS = {
    "two key heads": dict(num_kv_heads=2),
    "windows, sinks, experts": dict(
        num_kv_heads=2,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        attention=AttentionConfig(sinks=True),
        **EXPERTS,
    ),
    "alibi": dict(position_embedding="alibi"),
    "linear": dict(
        layer_types=["linear_attention", "full_attention"],
        linear_attention=LinearAttentionConfig(
            key_heads=2, value_heads=4, key_size=8, value_size=4
        ),
        attention=AttentionConfig(gate=True),
    ),
    "convolution": dict(
        layer_types=["short_convolution", "full_attention"],
        short_convolution=ShortConvolutionConfig(4),
    ),
    "full heads, shared keys": dict(
        num_layers=4,
        layer_types=2 * ["sliding_attention", "full_attention"],
        sliding_window=5,
        full_attention=FullAttentionConfig(head_dim=16, kv_heads=1),
        shared_kv=SharedKvConfig(layers=2),
        layer_embedding=LayerEmbeddingConfig(size=8),
        norms=NormsConfig(position="sandwich"),
    ),
    "strided": dict(attention_pattern=dict(type="strided", block_size=2, local=2, stride=3)),
    "markers": dict(
        attention_pattern=dict(type="window", window=3, global_markers=[*range(0, 60, 9)])
    ),
}


@functools.cache
def make(name):
    options = dict(vocab_size=60, hidden_size=32, num_layers=2, num_heads=4, init_std=0.3)
    return Decoder(ModelConfig(**options | MODELS[name]), jax.random.key(0))


def mesh_of(tp, sp):
    return make_mesh(ParallelConfig(fsdp=1, tp=tp, sp=sp), jax.devices()[: tp * sp])


def shard(model, mesh):
    def place(v):
        where = sharding(mesh, v.axes, v.get_value().shape, (STATE_AXIS,))
        return v.replace(jax.device_put(v.get_value(), where))

    return jax.tree.map(place, model, is_leaf=lambda x: isinstance(x, nnx.Variable))


def tokens_of(model, sampling):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 60, n) for n in (3, 19)]
    options = dict(new_tokens=6, prefill_chunk=CHUNK, execution=SMALL, seed=3)
    return np.stack(list(generate(model, prompts, sampling=sampling, **options)), 1)


@functools.cache
def on_one_device(name, sampling):
    return tokens_of(make(name), sampling)


@pytest.mark.parametrize(
    ("name", "tp", "sp", "sampling"),
    fast(
        [
            ("two key heads", 4, 1, GREEDY),
            ("two key heads", 1, 4, GREEDY),
            ("two key heads", 2, 2, Sampling(top_k=20, repetition_penalty=1.2)),
            ("windows, sinks, experts", 2, 2, GREEDY),
            ("alibi", 2, 2, GREEDY),
            ("linear", 2, 2, GREEDY),
            ("convolution", 2, 2, GREEDY),
            ("full heads, shared keys", 2, 2, GREEDY),
            ("strided", 1, 2, GREEDY),
            ("markers", 2, 2, GREEDY),
        ],
        lambda name, tp, sp, _: tp == sp == 2 and name == "two key heads",
    ),
)
def test_tokens_are_those_of_one_device(name, tp, sp, sampling):
    wanted = on_one_device(name, sampling)
    assert len(np.unique(wanted)) > 3
    assert np.array_equal(tokens_of(shard(make(name), mesh_of(tp, sp)), sampling), wanted)


@pytest.mark.parametrize(
    ("name", "tp", "sp"),
    fast(
        [("two key heads", 1, 1), ("windows, sinks, experts", 2, 2), ("alibi", 1, 1)],
        [("two key heads", 1, 1)],
    ),
)
def test_a_gpu_reads_parts_of_the_cache_at_once(name, tp, sp, monkeypatch):
    """As on a GPU, with a cache that is longer by empty slots."""
    wanted, parts = on_one_device(name, GREEDY), []
    attend = cached._attend_in_parts
    monkeypatch.setattr(cached, "platform", lambda: "gpu")
    monkeypatch.setattr(cached, "_attend_in_parts", lambda *x: parts.append(x) or attend(*x))
    assert np.array_equal(tokens_of(shard(make(name), mesh_of(tp, sp)), GREEDY), wanted)
    assert {q.shape[1] for _, q, *_ in parts} == {1, CHUNK}


@pytest.mark.thorough
def test_logits_are_those_of_one_device():
    """The devices do not divide the length of the first chunk; single tokens follow it."""
    tokens = np.random.default_rng(0).integers(0, 60, (2, 9))

    @jax.jit
    def read(model, tokens, cache):
        hidden, cache = model.decode(tokens, cache, execution=SMALL)
        return model.logits(hidden), cache

    def logits_of(model, mesh):
        with jax.set_mesh(mesh):
            cache, found = Cache.empty(model.config, 2, 9, jnp.float32), []
            for part in np.split(tokens, (7, 8), axis=1):
                logits, cache = read(model, jnp.asarray(part), cache)
                found.append(np.asarray(logits))
        return np.concatenate(found, 1)

    model = make("two key heads")
    wanted = logits_of(model, mesh_of(1, 1))
    assert np.abs(wanted).max() > 1
    mesh = mesh_of(2, 2)
    np.testing.assert_allclose(logits_of(shard(model, mesh), mesh), wanted, atol=1e-5)


def compiled(tp, sp, size):
    """Compiles a decoding step of one token. Returns its memory on a device, and the bytes of the
    complete cache."""
    config = ModelConfig(vocab_size=60, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2)
    with jax.set_mesh(mesh_of(tp, sp)):
        model = jax.eval_shape(lambda: Decoder(config, jax.random.key(0)))
        cache = Cache.empty(config, 1, size, jnp.float32)
        lowered = _steps.lower(
            model,
            jnp.zeros(1, jnp.int32),
            cache,
            jnp.zeros((1, 60), bool),
            jax.random.split(jax.random.key(0), 4),
            jnp.ones(1, jnp.int32),
            jnp.zeros(1, bool),
            jnp.zeros(2, jnp.int32),
            jnp.int32(4),
            sampling=GREEDY,
            dtype=jnp.dtype("float32"),
            execution=Execution(k_chunk=16),
        )
    return lowered.compile().memory_analysis(), cache.k.nbytes + cache.v.nbytes


@pytest.mark.parametrize(
    ("tp", "sp", "shards"), fast([(1, 1, 1), (2, 2, 4), (4, 2, 2)], [(2, 2, 4)])
)
def test_each_device_holds_its_shard_of_the_cache_and_copies_none_of_it(tp, sp, shards):
    """Two key heads are not sharded over four devices."""
    (small, few), (large, many) = (compiled(tp, sp, size) for size in (1024, 4096))
    cached = (many - few) // shards
    grown = large.argument_size_in_bytes - small.argument_size_in_bytes
    assert cached <= grown < 1.01 * cached
    assert large.alias_size_in_bytes - small.alias_size_in_bytes == cached
    # The mask is all that grows beside the cache; a layer has half of the cache.
    assert large.temp_size_in_bytes - small.temp_size_in_bytes < cached / 4
