"""Sources, held-out split, baselines and tokenizers."""

import json
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bptjax.data.text import byte_baselines, open_documents, split_documents
from bptjax.data.tokenizer import CharTokenizer, make_tokenizer

TEXTS = ["one\ntwo\n", "", "drei – vier", "\ufeffsix\r\n\r\nseven 🙂\n\n\neight"]
ROWS = [{"text": text, "n": i} for i, text in enumerate(TEXTS)]


def write(path, data, codec=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = data.encode() if isinstance(data, str) else data
    if codec is None:
        path.write_bytes(data)
    else:
        with pa.output_stream(path, compression=codec) as stream:
            stream.write(data)
    return path


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("end, codec", [("", None), (".gz", "gzip"), (".zst", "zstd")])
class TestTextFormats:
    def test_text(self, tmp_path, end, codec):
        path = write(tmp_path / f"a.txt{end}", TEXTS[3], codec)
        read = {by: list(open_documents(path, sample_by=by)) for by in ("document", "line")}
        assert read == {"document": [TEXTS[3]], "line": ["\ufeffsix", "seven 🙂", "eight"]}
        text = "a\nb\n\n \nc\r\n\n"
        path = write(tmp_path / f"b.md{end}", text, codec)
        assert list(open_documents(path, sample_by="paragraph")) == ["a\nb", "c"]

    def test_jsonl(self, tmp_path, end, codec):
        path = write(tmp_path / f"a.jsonl{end}", lines(ROWS) + "\n", codec)
        assert list(open_documents(path)) == TEXTS
        path = write(tmp_path / f"b.jsonl{end}", lines([{"t": "x"}, {"input_ids": [3, 1]}]), codec)
        documents = open_documents(path, text_key="t")
        assert documents[0] == "x"
        np.testing.assert_array_equal(documents[1], np.array([3, 1], np.int32), strict=True)


def test_parquet(tmp_path):
    table = pa.Table.from_pylist(ROWS * 3)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=5)
    ids = [[1, 2, 3], [], [4]]
    pq.write_table(pa.table({"input_ids": ids}), tmp_path / "b.parquet")
    documents = open_documents(tmp_path)
    assert len(documents.files) == 4
    assert [documents[i] for i in range(12)] == TEXTS * 3
    for document, expected in zip([documents[i] for i in (12, 13, 14)], ids, strict=True):
        np.testing.assert_array_equal(document, np.array(expected, np.int32), strict=True)
    with pytest.raises(IndexError):
        documents[15]


def test_order_of_directories_and_globs(tmp_path):
    for name in ("b/2.txt", "a.txt", "b/10.txt", "c.bin", "empty.txt"):
        write(tmp_path / name, "" if name == "empty.txt" else name)
    pq.write_table(pa.table({"text": ["parquet"]}), tmp_path / "0.parquet")
    assert list(open_documents(tmp_path)) == ["a.txt", "b/10.txt", "b/2.txt", "parquet"]
    assert list(open_documents(str(tmp_path / "**" / "*0.txt"))) == ["b/10.txt"]


def test_standard_library():
    documents = open_documents("python-stdlib")
    root = Path(sysconfig.get_path("stdlib"))
    names = [file.path.relative_to(root).as_posix() for file in documents.files]
    assert {"json/decoder.py", "os.py"} <= set(names)
    assert len(documents) > 400 and sum(map(len, documents)) > 5e6
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in names)
    assert documents[0] == documents.files[0].path.read_bytes().decode()


@pytest.mark.parametrize(
    "rows", [[{"messages": []}], [{"text": None}], [{"input_ids": ["a"]}], [{"text": 5}]]
)
def test_rows_without_text_name_their_keys(tmp_path, rows):
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    write(tmp_path / "a.jsonl", lines(rows))
    for path in (tmp_path / "a.parquet", tmp_path / "a.jsonl"):
        must = "" if "messages" in rows[0] else "must be .*"
        message = rf"{path.name}.*{next(iter(rows[0]))}.*{must}data.text_key"
        with pytest.raises(ValueError, match=message):
            open_documents(path)


def test_input_ids_are_a_list_of_integers(tmp_path):
    for ids in ([[1, 2], [3]], [[1], [2]], None, [1.5], "12"):
        write(tmp_path / "a.jsonl", lines([{"input_ids": ids}]))
        with pytest.raises(ValueError, match="record 1: 'input_ids' must be a list of integers"):
            open_documents(tmp_path / "a.jsonl")
    write(tmp_path / "a.jsonl", lines([{"input_ids": [1, 2], "labels": [[1, 2], [3]]}]))
    with pytest.raises(ValueError, match="record 1: labels must be a list of 2 integers"):
        open_documents(tmp_path / "a.jsonl")


def test_duplicate_columns_are_refused(tmp_path):
    texts = pa.array(["a"])
    for name, others in (("text", []), ("note", ["prompt", "answer"])):
        names = [name, name, *others]
        table = pa.Table.from_arrays([texts] * len(names), names=names)
        pq.write_table(table, tmp_path / "a.parquet")
        with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
            writer.write_table(table)
        for path in (tmp_path / "a.parquet", tmp_path / "a.arrow"):
            with pytest.raises(
                ValueError, match=f"{path.name}: '{name}': must be the name of one column"
            ):
                open_documents(path, format="auto")


def test_records_may_follow_a_byte_order_mark(tmp_path):
    write(tmp_path / "a.jsonl", "\ufeff" + lines(ROWS))
    assert list(open_documents(tmp_path / "a.jsonl")) == TEXTS


def test_ids_beyond_int32_are_refused(tmp_path):
    rows = [{"input_ids": [2**32 + 1, 5]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    write(tmp_path / "a.jsonl", lines(rows))
    for name in ("a.parquet", "a.jsonl"):
        with pytest.raises(ValueError, match=f"{name}.*from 5 to 4294967297: must be in"):
            open_documents(tmp_path / name)[0]


def test_bad_sources(tmp_path):
    write(tmp_path / "a.csv", "x")
    write(tmp_path / "empty.txt", "")
    write(tmp_path / "latin.txt", "é".encode("latin-1"))
    write(tmp_path / "bad.jsonl", '{"text": "x"}\n{\n')
    for name in ("no.parquet", "no.txt.gz", "a.parquet.gz"):
        write(tmp_path / name, "not really")
    for name, message in {
        "missing.txt": "no such file",
        "a.csv": "extension '.csv': must be one of",
        "a.parquet.gz": "extension '.parquet.gz': must be one of",
        "*.none": "no such file",
        "empty.txt": "must hold documents",
        "latin.txt": "latin.txt: .*utf-8",
        "no.parquet": "not a parquet file",
        "no.txt.gz": "cannot be decompressed",
    }.items():
        with pytest.raises(ValueError, match=message):
            open_documents(tmp_path / name)
    with pytest.raises(ValueError, match="'': must name a file"):
        open_documents("")
    write(tmp_path / "records.json", '{"text": "x"}\n{"text": "y"}\n')
    with pytest.raises(ValueError, match="records.json: .*one record per line to .jsonl"):
        open_documents(tmp_path / "records.json")
    with pytest.raises(ValueError, match="bad.jsonl, record 2"):
        open_documents(tmp_path / "bad.jsonl")[1]
    write(tmp_path / "deep.jsonl", '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ValueError, match="deep.jsonl, record 1: .*recursion|must be text"):
        open_documents(tmp_path / "deep.jsonl")[0]
    with pytest.raises(ValueError, match="sample_by='word'"):
        open_documents(tmp_path, sample_by="word")
    write(tmp_path / "described" / "records.json", "[]")
    with pytest.raises(ValueError, match=r"must hold .*arrow files; .json .*described/\*\.json$"):
        open_documents(tmp_path / "described")


@pytest.mark.parametrize("count, fraction", [(2, 0.1), (10, 0.1), (97, 0.25), (7, 0.99)])
def test_split_holds_out_complete_documents(count, fraction):
    documents = [str(i) for i in range(count)]
    for seed in (None, *range(20)):
        train, held_out = split_documents(documents, fraction, seed)
        assert sorted([*train, *held_out], key=int) == documents
        numbers = [int(i) for i in held_out]
        assert numbers == sorted(numbers)
        wanted = min(max(1, round(count * fraction)), count - 1)
        assert len(held_out) == wanted or seed is not None and abs(len(held_out) - wanted) <= 1
        assert len(train) and len(held_out)
        if seed is None and len(numbers) > 1:
            assert np.ptp(np.diff(numbers)) <= 1


def test_split_of_one_document_and_none():
    for seed in (None, 0):
        assert split_documents(["0123456789"], 0.2, seed) == (["01234567"], ["89"])
        assert split_documents(["a", "b"], 0, seed) == (["a", "b"], [])
        assert [len(part) for part in split_documents(["a", "b"], 5e-324, seed)] == [1, 1]
        with pytest.raises(ValueError, match="data.eval_fraction=1: must be"):
            split_documents(["a", "b"], 1, seed)


def test_byte_baselines():
    assert byte_baselines(["ab" * 50, "ba"]) == {
        "uniform": 8.0,
        "unigram": pytest.approx(1),
        "bigram": pytest.approx(0, abs=1e-12),
    }
    everything = bytes(range(128)).decode()
    assert byte_baselines([everything])["unigram"] == pytest.approx(7)
    # Half of the a's are followed by a, half by b, within documents only.
    assert byte_baselines(["aab", "aab"])["bigram"] == pytest.approx(1)


def test_byte_tokenizer(tmp_path):
    tokenizer = make_tokenizer("byte")
    text = "π\ud800\n"
    assert tokenizer.encode(text).dtype == np.int32 and tokenizer.encode(text).max() < 256
    assert tokenizer.decode([256, *tokenizer.encode("π\n"), 256]) == "π\n"
    tokenizer.save(tmp_path)
    assert make_tokenizer(str(tmp_path)).vocab_size == tokenizer.vocab_size == 257


def test_char_tokenizer(tmp_path):
    tokenizer = make_tokenizer("char", ["hello 🙂", "abc"])
    assert tokenizer.characters == " abcehlo🙂" and tokenizer.vocab_size == 9
    tokenizer.save(tmp_path / "run")
    loaded = make_tokenizer(str(tmp_path / "run"))
    assert isinstance(loaded, CharTokenizer)
    ids = loaded.encode("hello 🙂")
    np.testing.assert_array_equal(ids, tokenizer.encode("hello 🙂"), strict=True)
    assert ids.dtype == np.int32 and loaded.decode(ids) == "hello 🙂"
    assert not loaded.encode("").size
    with pytest.raises(ValueError, match="character 'z': must be one of the 9 "):
        loaded.encode("az")
    for documents, message in (([np.arange(3)], "token ids"), ([""], "empty")):
        with pytest.raises(ValueError, match=message):
            make_tokenizer("char", documents)


def test_hugging_face_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = {"<s>": 0, "</s>": 1, "?": 2, "long": 3, "context": 4}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>")
    fast.add_tokens(["added"])
    fast.save_pretrained(tmp_path / "a")
    tokenizer = make_tokenizer(str(tmp_path / "a"))
    assert (tokenizer.vocab_size, tokenizer.prefix.size, tokenizer.eos_id) == (6, 0, 1)
    np.testing.assert_array_equal(
        tokenizer.encode("long long context added"), np.array([3, 3, 4, 5], np.int32), strict=True
    )
    assert tokenizer.decode(np.array([3, 4])) == "long context"
    tokenizer.save(tmp_path / "b")
    assert make_tokenizer(str(tmp_path / "b")).vocab_size == 6
    few = make_tokenizer(str(tmp_path / "a"), limit=5)
    assert few.vocab_size == 5 and few.encode("long context").tolist() == [3, 4]
    with pytest.raises(ValueError, match="'added': must be in the model's vocabulary of 5"):
        few.encode("long added")
    with pytest.raises(ValueError, match="must be byte, a local directory"):
        make_tokenizer("gpt2")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="must hold a Hugging Face tokenizer"):
        make_tokenizer(str(tmp_path / "empty"))
