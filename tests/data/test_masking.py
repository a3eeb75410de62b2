"""Masked tokens: their distribution, and the same ones after a stop and for any batch size."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bptjax.data.config import DataConfig
from bptjax.data.encode import encode
from bptjax.data.loader import eval_loader, train_loader
from bptjax.data.tokenizer import ByteTokenizer, make_tokenizer
from bptjax.models.config import ModelConfig
from bptjax.models.groups.encoder import EncoderConfig
from bptjax.objectives.masked_tokens import MaskedTokens, TokenMasking

TOKENIZER = SimpleNamespace(vocab_size=1000, eos_id=None, mask_id=3, special_ids=[0, 1, 2, 3])
LENGTHS = (5, 1, 18, 9, 2, 0, 8, 31, 3, 10, 17)
DOCUMENTS = [np.arange(n, dtype=np.int32) + 50 * i for i, n in enumerate(LENGTHS, 1)]
MODEL = ModelConfig(causal=False, encoder=EncoderConfig(masked_head=True))
HOW: dict[str, Any] = dict(seq_len=8, encoding=MaskedTokens().encoding(MODEL))
# Fields, and the values above which they count.
COUNTED = ("labels", -100), ("segments", 0)


def test_distribution():
    """15 % of all but special tokens: 80 % the mask, 10 % random, 10 % as they were."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1000, (100, 4000), np.int32)
    labels = np.where(rng.random(tokens.shape) < 0.5, tokens, -100)
    got = TokenMasking(TOKENIZER, 0.15)({"tokens": tokens, "labels": labels}, rng)
    chosen = got["labels"] != -100
    can = (labels != -100) & (tokens > 3)
    assert not chosen[~can].any() and abs(chosen[can].mean() - 0.15) < 2e-3
    np.testing.assert_array_equal(got["labels"][chosen], tokens[chosen])
    np.testing.assert_array_equal(got["tokens"][~chosen], tokens[~chosen])
    new, old = got["tokens"][chosen], tokens[chosen]
    assert abs((new == 3).mean() - 0.8) < 0.01 and abs((new == old).mean() - 0.1) < 0.01
    random = new[(new != 3) & (new != old)]
    assert random.min() == 0 and random.max() == 999 and abs(random.mean() - 499.5) < 15
    everything = TokenMasking(TOKENIZER, 1.0)({"tokens": tokens, "labels": labels}, rng)
    np.testing.assert_array_equal(everything["labels"] != -100, can)


def sequences(loader, count):
    batches = [next(loader) for _ in range(count)]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def assert_equal(one, other):
    for a, b in zip(one, other, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


@pytest.fixture
def train():
    opened = []

    def make(batch_size=2, **keys):
        config = DataConfig(mlm_probability=0.4, **keys)
        opened.append(train_loader(DOCUMENTS, TOKENIZER, config, batch_size=batch_size, **HOW))
        return opened[-1]

    yield make
    for loader in opened:
        loader.close()


@pytest.mark.parametrize(
    "keys",
    [dict(packing="concat"), dict(packing="none", group_by_length=True), dict(num_shards=2)],
    ids=["concat", "grouped", "shards"],
)
def test_masks_after_a_stop_are_the_same(train, keys):
    loader, again = train(**keys), train(**keys)
    wanted = [next(loader) for _ in range(12)]
    chosen, real = (sum((x[k] > least).sum() for x in wanted) for k, least in COUNTED)
    assert 0.2 * real < chosen < 0.5 * real
    assert_equal([next(again) for _ in range(5)], wanted[:5])
    resumed = train(**keys)
    resumed.set_state(again.get_state())
    assert_equal([next(resumed) for _ in range(7)], wanted[5:])
    other = train(**keys, seed=1)
    assert any(not np.array_equal(x["labels"], next(other)["labels"]) for x in wanted)


def test_masks_do_not_depend_on_the_batch_size(train):
    assert_equal([sequences(train(2), 9)], [sequences(train(6), 3)])
    config = DataConfig(mlm_probability=0.4)
    one, other = (eval_loader(DOCUMENTS, TOKENIZER, config, batch_size=n, **HOW) for n in (1, 3))
    wanted = [x for x in one]
    assert_equal(list(one), wanted)
    found = [{name: x[name][i : i + 1] for name in x} for x in other for i in range(3)]
    assert_equal(found[: len(wanted)], wanted)


def test_epochs_mask_other_tokens(train):
    found = sequences(train(1, shuffle=False, packing="none"), 60)["labels"]
    assert len(np.unique(found, axis=0)) > 30


@pytest.fixture(scope="session")
def wordpiece(tmp_path_factory):
    """A directory with a tokenizer of BERT's kind, which has no EOS."""
    from transformers import BertTokenizer

    directory = tmp_path_factory.mktemp("wordpiece")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "##es", "run"]
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(directory)
    return directory


def test_text_has_the_special_tokens_of_its_tokenizer(wordpiece, tmp_path):
    tokenizer = make_tokenizer(str(wordpiece))
    (example,) = MaskedTokens().encode("the foxes run", tokenizer, DataConfig())
    assert example["tokens"].tolist() == [2, 5, 6, 7, 8, 3]
    assert example["labels"].tolist() == example["tokens"].tolist()
    got = TokenMasking(tokenizer, 1.0)(example, np.random.default_rng(0))
    assert (got["labels"] == -100).tolist() == [True, *[False] * 4, True]
    tokenizer.save(tmp_path)
    saved = make_tokenizer(str(tmp_path))
    assert (saved.eos_id, saved.sep_id, saved.stop_ids) == (None, 3, [])
    (example,) = encode("the fox", tokenizer)
    assert example["labels"].tolist() == [5, 6]  # A decoder's text has no end without EOS.
    assert not (tmp_path / "generation_config.json").exists()


def test_bytes_are_masked_by_a_byte_that_text_never_has():
    tokenizer = ByteTokenizer()
    assert 255 not in tokenizer.encode("".join(map(chr, range(0x11000))))
    (example,) = MaskedTokens().encode("ab", tokenizer, DataConfig())
    assert example["tokens"].tolist() == [256, 97, 98, 256]
    assert TokenMasking(tokenizer, 1.0)(example, np.random.default_rng(0))["labels"].tolist() == [
        -100, 97, 98, -100,
    ]  # fmt: skip


def test_a_tokenizer_without_a_mask_is_refused():
    with pytest.raises(ValueError, match="data.tokenizer: must have a mask token"):
        TokenMasking(make_tokenizer("char", ["abc"]), 0.15)
