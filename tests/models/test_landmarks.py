"""Landmark attention in a decoder: training in packed batches, and generation."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.comparing import error, quick
from ops.test_landmark import definition

from bptjax.config import Config, TrainConfig
from bptjax.data.config import DataConfig
from bptjax.data.encoding import Encoding
from bptjax.data.landmarks import Landmarks, ignored
from bptjax.data.loader import eval_loader, train_loader
from bptjax.data.tokenizer import ByteTokenizer
from bptjax.models import stack
from bptjax.models.cache import Cache
from bptjax.models.config import ModelConfig
from bptjax.models.decoder import Decoder
from bptjax.models.execution import Execution, ExecutionConfig
from bptjax.models.generation import generate
from bptjax.models.sampling import Sampling
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.parallel.ring import zigzag
from bptjax.training.checks import check_landmarks
from bptjax.training.spec import TrainSpec

BLOCK, MARK = 4, 60
LANDMARKS = Landmarks(BLOCK, MARK)
CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    init_std=0.3,
    attention_pattern=dict(type="landmark", block_size=BLOCK, token=MARK),
)
SMALL = Execution(q_chunk=8, k_chunk=8, ffn_chunk=10)
# Documents of 14 and 8 tokens: 5 and 3 blocks.
TEXTS = [np.random.default_rng(i).integers(0, 60, n) for i, n in enumerate((14, 8))]


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, jax.random.key(0))


def packed_texts():
    each = [example(text)["tokens"] for text in TEXTS]
    lengths = [len(x) for x in each]
    segments = np.repeat([[1, 2]], lengths, 1).astype(np.int32)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])[None]
    return each, (np.concatenate(each)[None], positions, segments)


def example(text):
    return LANDMARKS.insert({"tokens": text[:-1], "labels": text[1:]})


@quick
def hidden(model, tokens, **options):
    return model(tokens, execution=SMALL, **options)[0]


def test_documents_in_blocks():
    """A landmark predicts the token after it, and the token before it nothing."""
    text = np.arange(1, 9)
    found = ignored(example(text))
    x = -100
    assert found["tokens"].tolist() == [1, 2, 3, MARK, 4, 5, 6, MARK, 7, MARK, MARK, MARK]
    assert found["labels"].tolist() == [2, 3, x, 4, 5, 6, x, 7, 8, x, x, x]
    # A prompt whose blocks are complete ends with a landmark, which predicts the next token.
    for n in range(1, 8):
        start = LANDMARKS.prompt(text[:n])
        assert start.tolist() == found["tokens"][: len(start)].tolist()
        assert found["labels"][len(start) - 1] == n + 1
        assert len(start) <= LANDMARKS.longest(n)


def test_packed_documents_are_separate_and_equal_the_definition(model, monkeypatch):
    each, (tokens, positions, segments) = packed_texts()
    packed = hidden(model, jnp.asarray(tokens), positions=positions, segments=segments)
    alone = np.concatenate([hidden(model, jnp.asarray(x)[None])[0] for x in each])
    assert np.abs(packed[0] - alone).max() < 1e-5
    with jax.set_mesh(make_mesh(ParallelConfig(fsdp=1, tp=2), jax.devices()[:2])):
        sharded = hidden(model, jnp.asarray(each[0])[None])
    assert np.abs(np.asarray(sharded)[0] - alone[: len(each[0])]).max() < 1e-5

    def dense(q, k, v, *, landmark_block, **options):
        return definition(q, k, v, block_size=landmark_block)[0]

    monkeypatch.setattr(stack, "attention", dense)
    run = quick(lambda model, x: model(x)[0][0])
    wanted = [run(model, jnp.asarray(x)[None]) for x in each]
    assert np.abs(np.concatenate(wanted) - alone).max() < 1e-5


@pytest.mark.thorough
def test_generation_equals_the_model_on_the_text_with_landmarks(model):
    prompts = [TEXTS[0][:9], TEXTS[1][:1], TEXTS[0][:12]]
    options = dict(new_tokens=7, sampling=Sampling(temperature=0.0), execution=SMALL)
    found = np.stack(list(generate(model, prompts, prefill_chunk=5, **options)), 1)
    for prompt, new in zip(prompts, found, strict=True):
        text = np.concatenate([prompt, new])
        tokens = LANDMARKS.prompt(text[:-1])
        states = hidden(model, jnp.asarray(np.pad(tokens, (0, 28 - len(tokens))))[None])
        logits = model.logits(states)[0, : len(tokens), :MARK]
        # The positions that predict a token of the text: landmarks, and tokens inside a block.
        at = [len(LANDMARKS.prompt(text[:n])) - 1 for n in range(len(prompt), len(text))]
        assert logits[np.array(at)].argmax(-1).tolist() == new.tolist()
    assert len(np.unique(found)) > 5


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("strategy", "documents"), [("ring", 2), ("ring", 1), ("gather", 2), ("ulysses", 2)]
)
def test_a_sequence_on_two_devices(strategy, documents, model):
    """In zigzag order, in which each device has two parts of two blocks, or in order."""
    arrays = packed_texts()[1]
    order = zigzag(arrays[0].shape[1], 2).astype(np.int32)

    def gradients(strategy, order):
        at = slice(None) if order is None else order
        tokens, positions, segments = (jnp.asarray(x[:, at]) for x in arrays)
        places = dict(positions=positions, segments=segments) if documents > 1 else {}
        places |= dict(order=order, sequence_strategy=strategy)

        def loss(model):
            out, _ = model(tokens, execution=SMALL, **places)
            return (out * jnp.cos(positions + segments)[..., None]).sum()

        return quick(jax.grad(loss))(model)

    wanted = gradients("auto", None)
    with jax.set_mesh(make_mesh(ParallelConfig(fsdp=1, sp=2), jax.devices()[:2])):
        got = gradients(strategy, None if strategy == "ulysses" else order)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert error(a, b) < 1e-5


@pytest.mark.parametrize("packing", ["none", "concat", "best_fit"])
def test_blocks_start_documents_and_pieces_in_every_packing(packing):
    marks, tokenizer = Landmarks(BLOCK, 300), ByteTokenizer()
    texts = ["".join(map(chr, range(65, 65 + n))) for n in (50, 3, 11, 24, 1)]
    how = dict(seq_len=16, batch_size=2, encoding=Encoding(landmarks=marks))
    config = DataConfig(packing=packing, num_shards=1)
    batches = train_loader(texts, tokenizer, config, **how)
    shuffled = [next(batches) for _ in range(8)]
    batches.close()
    ordered = list(eval_loader(texts, tokenizer, config, **how))
    for batch in (*shuffled, *ordered):
        inside = batch["segments"] != 0
        ends = batch["positions"] % BLOCK == BLOCK - 1
        assert (batch["tokens"] == marks.token)[inside & ends].all()
        assert not (np.arange(16) % BLOCK != batch["positions"] % BLOCK)[inside].any()
        assert ((batch["labels"] >= 0) | (batch["labels"] == -100)).all()
    found = np.concatenate([batch["labels"][batch["labels"] != -100] for batch in ordered])
    wanted = [*"".join(texts).encode(), *[tokenizer.eos_id] * len(texts)]
    np.testing.assert_array_equal(np.sort(found), np.sort(np.array(wanted)))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            dict(
                parallel=ParallelConfig(fsdp=1, sp=2),
                train=TrainConfig(seq_len=40, sample_tokens=8),
            ),
            "sample_tokens=8: must be 0 with .*landmark and parallel.sp=2",
        ),
        (
            dict(parallel=ParallelConfig(fsdp=1, sp=2, sequence_strategy="ring")),
            "train.seq_len=40: must be a multiple of 16 with",
        ),
        (
            dict(
                parallel=ParallelConfig(fsdp=1, sp=2),
                data=DataConfig(packing="none", group_by_length=True),
            ),
            "group_by_length=True: must be False with .*landmark and parallel.sp=2",
        ),
        (dict(execution=ExecutionConfig(schedule="fused")), "schedule=fused: must be split with"),
        (dict(train=TrainConfig(seq_len=42)), "train.seq_len=42: must be a multiple of 4 with"),
    ],
)
def test_settings_that_landmarks_refuse(changes, text):
    config = replace(Config(train=TrainConfig(seq_len=40)), **changes)
    mesh = make_mesh(config.parallel, jax.devices()[: 1 + ("parallel" in changes)])
    with pytest.raises(ValueError, match=text):
        check_landmarks(TrainSpec(config, CONFIG, mesh))


def test_generation_refuses_a_sharded_sequence():
    with jax.set_mesh(make_mesh(ParallelConfig(fsdp=1, sp=2), jax.devices()[:2])):
        with pytest.raises(ValueError, match="sp=2: must be 1 with model.attention_pattern"):
            Cache.empty(CONFIG, 1, 8, jnp.float32)
    with pytest.raises(ValueError, match="type=landmark: requires a decoder"):
        replace(CONFIG, causal=False)
