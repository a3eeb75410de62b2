"""Pairs of texts: tokens, truncation and logits are those of transformers, packed or not."""

import json
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiers import fast

from bptjax.data.config import DataConfig
from bptjax.data.loader import eval_loader
from bptjax.data.packing import PACKINGS
from bptjax.data.sources import open_split
from bptjax.data.tokenizer import ByteTokenizer, load_tokenizer
from bptjax.objectives.classes import LABELED, Classes, Labeled, encode_labeled
from weights.hf.loading import load

WORDS = [f"w{i}" for i in range(56)]
SPECIAL = {
    "bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
    "roberta": ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
}
SPECIAL["modernbert"] = SPECIAL["modernbert: classes of the mean"] = SPECIAL["bert"]
LENGTHS = [(5, 3), (1, 9), (9, 1), (7, 7), (4, 0), (12, None), (6, 11), (2, 2)]


@pytest.fixture(scope="module", params=fast(SPECIAL, ["bert", "roberta"]))
def family(request, tmp_path_factory):
    """A family, and a directory with a tokenizer as its checkpoints have it."""
    import tokenizers
    import transformers

    folder = tmp_path_factory.mktemp(request.param)
    own = SPECIAL[request.param]
    vocabulary = {word: i for i, word in enumerate([*own, *WORDS])}
    if request.param == "bert":
        found = transformers.BertTokenizer(vocab=vocabulary)
    else:
        model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=own[3]))
        model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        first, last = ("<s>", "</s>") if request.param == "roberta" else ("[CLS]", "[SEP]")
        middle = f"{last} {last}" if request.param == "roberta" else last
        # ModernBERT's tokenizer has types too, which its model does not read.
        kind = 0 if request.param == "roberta" else 1
        model.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{first} $A {last}",
            pair=f"{first} $A {middle} $B:{kind} {last}:{kind}",
            special_tokens=[(token, vocabulary[token]) for token in (first, last)],
        )
        names = dict(model_input_names=["input_ids", "attention_mask"], sep_token=last)
        names |= dict(eos_token=last) if request.param == "roberta" else {}
        found = transformers.PreTrainedTokenizerFast(tokenizer_object=model, **names)
    found.save_pretrained(folder)
    return request.param, folder


def records():
    rng = np.random.default_rng(0)

    def text(length):
        return " ".join(rng.choice(WORDS, length))

    for number, (first, second) in enumerate(LENGTHS):
        pair = {} if second is None else {"text_pair": text(second)}
        yield {"text": text(first), **pair, "label": number % 2}


def test_tokens_are_those_of_transformers(family):
    from transformers import AutoTokenizer

    _, folder = family
    ours = load_tokenizer(folder)
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    for record in records():
        texts = record["text"], record.get("text_pair") or None
        document = Labeled("here", texts[0], 0, texts[1])
        for limit in (None, *range(5, 20)):
            (got,) = encode_labeled(document, ours, DataConfig(), classes=2, limit=limit)
            short = dict(truncation=True, max_length=limit) if limit else {}
            wanted = theirs(*texts, **short)
            assert got["tokens"].tolist() == wanted["input_ids"]
            types = wanted.get("token_type_ids", [0] * len(got["tokens"]))
            assert got["token_types"].tolist() == types
            assert {value.dtype for value in got.values()} == {np.dtype(np.int32)}
            assert got["labels"].tolist() == [0] + [-100] * (len(types) - 1)
    with pytest.raises(ValueError, match="seq_len=2: must be at least [34], the number of special"):
        encode_labeled(Labeled("here", "w1", 0, "w2"), ours, DataConfig(), classes=2, limit=2)


def test_logits_of_packed_pairs_are_those_of_transformers(family, theirs, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoTokenizer

    name, folder = family
    model, directory = theirs(name if ":" in name else f"{name}: classes")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records()))
    config = DataConfig(
        path=str(tmp_path / "data.jsonl"),
        eval_fraction=0,
        too_long="truncate_right",
    )
    documents, _ = open_split(config, LABELED)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    T, wanted = 16, {}
    for record in records():
        texts = record["text"], record.get("text_pair")
        inputs = tokenizer(*texts, truncation=True, max_length=T, return_tensors="pt")
        with torch.no_grad():
            wanted[tuple(inputs["input_ids"][0].tolist())] = model(**inputs).logits[0].numpy()
    encoder, how = load(directory), dict(seq_len=T, batch_size=8)
    how |= dict(encoding=Classes().encoding(encoder.config))

    @jax.jit
    def run(batch, types):
        places = dict(positions=batch["positions"], segments=batch["segments"])
        hidden, _ = encoder(batch["tokens"], token_types=types, **places)
        return encoder.product(encoder.for_head(encoder.pool(hidden, batch["segments"])))

    for packing in PACKINGS:
        packed = replace(config, packing=packing)
        (batch,) = eval_loader(documents, load_tokenizer(folder), packed, **how)
        segments, got = batch["segments"], {}
        logits = np.asarray(run(batch, batch["token_types"] if name == "bert" else None))
        for b, start in np.argwhere(batch["labels"] != -100):
            own = segments[b] == segments[b, start]
            got[tuple(batch["tokens"][b, own].tolist())] = logits[b, start]
        assert got.keys() == wanted.keys() and len(got) == len(LENGTHS)
        assert (segments.max() > 1) == (packing != "none")
        for key, logits in wanted.items():
            assert np.abs(got[key] - logits).max() < 1e-5 * max(1, np.abs(logits).max())


@pytest.mark.parametrize(
    "names", [("text", "text_pair"), ("premise", "hypothesis"), ("question", "sentence")]
)
@pytest.mark.parametrize("file", ["data.jsonl", "data.parquet"])
def test_names_of_the_fields(names, file, tmp_path):
    rows = [dict(zip(names, ("one", "two"), strict=True), label=1, idx=3)] * 4
    if file == "data.jsonl":
        (tmp_path / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / file)
    config = DataConfig(path=str(tmp_path / file))
    document = open_split(config, LABELED)[0][0]
    assert (document.text, document.pair, document.label) == ("one", "two", 1)
    (got,) = encode_labeled(document, ByteTokenizer(), DataConfig(), classes=2, limit=8)
    assert got["tokens"].tolist() == [256, *b"on", 256, *b"two", 256]
    assert got["token_types"].tolist() == [0] * 4 + [1] * 4
    alone = DataConfig(path=str(tmp_path / file), text_key=names[0])
    assert open_split(alone, LABELED)[0][0].pair == ("two" if names[0] == "text" else None)


@pytest.mark.parametrize(
    ("row", "record", "message"),
    [
        (dict(text="a", text_pair=3, label=0), LABELED, "'text_pair' must be the second text"),
        (dict(premise="a", label=0), LABELED, "must have text in 'text' and the number of a class"),
        (dict(premise="a", hypothesis=None, label=0), LABELED, "'hypothesis' must be the second"),
        (dict(text="a", text_pair="b"), None, "'text_pair' must be left out; only classifiers"),
    ],
)
def test_bad_pairs(row, record, message, tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=message):
        open_split(DataConfig(path=str(tmp_path / "data.jsonl")), record)
