"""Types, bytes and metadata of GGUF files; damaged and foreign files; tokenizers."""

import json
import struct

import gguf
import numpy as np
import pytest
from chats import CHATML, raw_tokenizer

from bptjax.cli import convert
from bptjax.data.tokenizer import load_tokenizer
from bptjax.weights.gguf.pretokenizers import SPLITS, pre_tokenizer, splits
from bptjax.weights.gguf.tokenizer import _scores, read_tokenizer
from bptjax.weights.hf import mxfp4
from bptjax.weights.hf.tensors import Tensors
from weights.hf.cases import config
from weights.hf.loading import random_base

TEXT = "Hello there, <think> 12 be brief.\n\n  One two three π 🙂<|im_end|>"


@pytest.fixture
def base(tmp_path):
    """A function from a kind of tokenizer to a directory with it and random weights."""

    def make(kind="bytes", **keys):
        tokenizer = raw_tokenizer(kind, CHATML)
        if kind != "bytes":
            tokenizer.backend_tokenizer.model.byte_fallback = True
        own = config("llama")
        for key, value in dict(vocab_size=len(tokenizer), hidden_size=64, **keys).items():
            setattr(own, key, value)
        directory = random_base(tmp_path / "base", own)
        tokenizer.save_pretrained(directory)
        return directory

    return make


@pytest.fixture
def file(base, tmp_path):
    """A GGUF file."""
    path = tmp_path / "model.gguf"
    assert convert.main(["to-gguf", str(base()), str(path), "--type", "f32"]) == 0
    return path


def refused(argv, capsys):
    assert convert.main(argv) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    return lines[-1]


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_each_type_has_the_bytes_that_gguf_reads(base, tmp_path, capsys, kind):
    directory, path = base(), tmp_path / "model.gguf"
    assert convert.main(["to-gguf", str(directory), str(path), "--type", kind]) == 0
    reader, before = gguf.GGUFReader(path), Tensors(directory)
    found = {t.name: t for t in reader.tensors}
    assert found["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    up, wanted = found["blk.1.ffn_up.weight"], before.read("model.layers.1.mlp.up_proj.weight")
    assert up.tensor_type.name == kind.upper() and up.shape.tolist() == [64, 48]
    values = gguf.quants.dequantize(up.data, up.tensor_type)
    step = np.abs(wanted).max() / {"q8": 100, "q5": 14, "q4": 6}.get(kind[:2], 200)
    np.testing.assert_allclose(values.reshape(wanted.shape), wanted, atol=step)
    # 48 inputs are no multiple of a block of 32.
    down = found["blk.0.ffn_down.weight"].tensor_type.name
    quantized = kind.startswith("q")
    assert down == ("F16" if quantized else kind.upper())
    assert ("2 of 21 tensors are written as f16" in capsys.readouterr().err) == quantized
    # Heads' features are reordered so that neighbors rotate together.
    q = gguf.quants.dequantize(
        found["blk.0.attn_q.weight"].data, found["blk.0.attn_q.weight"].tensor_type
    )
    wanted = before.read("model.layers.0.self_attn.q_proj.weight").reshape(4, 2, 4, 64)
    np.testing.assert_allclose(q, wanted.swapaxes(1, 2).reshape(32, 64), atol=0.3)


@pytest.mark.parametrize("kind", ["bytes", "prepend"])
def test_a_tokenizer_is_the_same_after_a_gguf_file(base, tmp_path, kind):
    directory, path, out = base(kind), tmp_path / "model.gguf", tmp_path / "back"
    text = TEXT if kind == "bytes" else TEXT.replace("<think> ", "")
    assert convert.main(["to-gguf", str(directory), str(path)]) == 0
    assert convert.main(["from-gguf", str(path), str(out)]) == 0
    before, after = (load_tokenizer(each) for each in (directory, out))
    assert after.encode_prompt(text).tolist() == before.encode_prompt(text).tolist()
    assert after.decode(after.encode(text)) == before.decode(before.encode(text))
    assert (after.chat_template, after.stop_ids) == (before.chat_template, before.stop_ids)
    fields = gguf.GGUFReader(path).fields
    assert fields["tokenizer.ggml.add_bos_token"].contents() is True
    assert fields["tokenizer.ggml.add_eos_token"].contents() is False
    assert fields["tokenizer.ggml.model"].contents() == ("gpt2" if kind == "bytes" else "llama")
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 2


@pytest.mark.parametrize("name", SPLITS)
def test_expressions_of_a_pre_tokenizer_are_read_back(name):
    from tokenizers import Tokenizer

    part = pre_tokenizer(name)
    assert splits(part) == SPLITS[name]
    model = dict(type="BPE", vocab={}, merges=[])
    text = json.dumps(dict(version="1.0", added_tokens=[], model=model, pre_tokenizer=part))
    pieces = Tokenizer.from_str(text).pre_tokenizer.pre_tokenize_str("It's 1234 words")
    assert "".join(piece for piece, _ in pieces) == "It's\u01201234\u0120words"


def test_mxfp4_experts_keep_their_values():
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 8, 2, 16), np.uint8)
    scales = rng.integers(120, 134, (3, 8, 2), np.uint8)
    values = np.swapaxes(mxfp4.decode(blocks, scales), -1, -2).astype(np.float32)
    kind = gguf.GGMLQuantizationType.MXFP4
    again = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
    np.testing.assert_array_equal(again, values)


def test_merges_that_scores_cannot_express_are_refused():
    tokens, merges = ["a", "b", "c", "ab", "bc", "abc"], [["a", "b"], ["b", "c"], ["ab", "c"]]
    with pytest.raises(ValueError, match="as in SentencePiece"):
        _scores(merges, tokens, set())
    with pytest.raises(ValueError, match="as in SentencePiece"):
        _scores([["ab", "c"], *merges[:2], ["a", "bc"]], tokens, set())
    assert _scores([*merges, ["a", "bc"]], tokens, set())[3:] == [0.0, -1.0, -2.0]


def test_refusals_are_one_line(base, file, tmp_path, capsys):
    out = str(tmp_path / "out.gguf")
    source = str(tmp_path / "base")
    assert "llama-quantize" in refused(["to-gguf", source, out, "--type", "q4_k_m"], capsys)
    assert "must be one of f32" in refused(["to-gguf", source, out, "--type", "int7"], capsys)
    assert "must be new" in refused(["to-gguf", source, str(file)], capsys)
    tokenizer = tmp_path / "base" / "tokenizer.json"
    raw = json.loads(tokenizer.read_text())
    raw["pre_tokenizer"] = {"type": "Whitespace"}
    tokenizer.write_text(json.dumps(raw))
    assert "--pre NAME" in refused(["to-gguf", source, out], capsys)
    for path in (tmp_path / "base").glob("*token*"):
        path.unlink()
    assert "must have a tokenizer" in refused(["to-gguf", source, out], capsys)
    assert {p.name for p in tmp_path.iterdir()} == {"base", "model.gguf", "model.Modelfile"}


def test_a_file_cut_anywhere_is_refused_in_one_line(file, tmp_path, capsys):
    data, cut = file.read_bytes(), tmp_path / "cut.gguf"
    for size in (0, 3, 11, 24, 100, 4000, len(data) // 2, len(data) - 1):
        cut.write_bytes(data[:size])
        line = refused(["from-gguf", str(cut), str(tmp_path / "out")], capsys)
        assert line.startswith(f"error: {cut}: "), line
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "key",
    [
        struct.pack("<Q1sIIQ", 1, b"a", 9, 0, 2**63),
        struct.pack("<Q1sIQ", 1, b"a", 8, 2**62),
        struct.pack("<Q1sIIQ", 1, b"a", 9, 9, 1),
        struct.pack("<Q1sI", 1, b"a", 77),
        struct.pack("<Q", 2**64 - 1),
    ],
)
def test_hostile_metadata_is_refused_in_one_line(tmp_path, capsys, key):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 1) + key + bytes(64))
    assert "is damaged" in refused(["from-gguf", str(path), str(tmp_path / "out")], capsys)


def test_numbers_and_tokens_that_no_model_has_are_refused(file, tmp_path, capsys):
    data, key = file.read_bytes(), b"llama.attention.key_length"
    at, path = data.index(key) + len(key) + 4, tmp_path / "x.gguf"
    path.write_bytes(data[:at] + struct.pack("<I", 0) + data[at + 4 :])
    line = refused(["from-gguf", str(path), str(tmp_path / "out")], capsys)
    assert "llama.attention.key_length=0: must be at least 1" in line
    metadata = {"model": "llama", "tokens": ["a", "b" * 10**6], "scores": np.zeros(2)}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    with pytest.raises(ValueError, match="must have at most 1,024 characters each"):
        read_tokenizer(metadata, tmp_path, 0)


def test_a_split_model_is_read_and_must_be_complete(file, tmp_path, capsys):
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama", split_max_tensors=8)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind, sub = field.types[0], field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), kind, sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first = tmp_path / "part-00001-of-00003.gguf"
    for source, out in ((first, "a"), (file, "b")):
        assert convert.main(["from-gguf", str(source), str(tmp_path / out)]) == 0
    a, b = (Tensors(tmp_path / out) for out in "ab")
    assert all(a.read(n).tobytes() == b.read(n).tobytes() for n in b.specs) and a.specs == b.specs
    (tmp_path / "part-00002-of-00003.gguf").unlink()
    assert "part-00002" in refused(["from-gguf", str(first), str(tmp_path / "c")], capsys)
