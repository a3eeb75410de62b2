"""Conversion of damaged checkpoints, and conversion that fails: one line, and no output."""

import json

import ml_dtypes  # noqa: F401
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from bptjax.cli import convert
from bptjax.data.tokenizer import FILE, load_tokenizer
from bptjax.models.config import ModelConfig
from bptjax.run.lazy_imports import transformers
from bptjax.weights import conversion
from bptjax.weights.hf.tensors import Tensors
from bptjax.weights.pretrained import open_pretrained


def cut_short(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def no_safetensors(directory):
    (directory / "model.safetensors").write_bytes(b"PK\x03\x04 something else altogether")


def pickled(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def shard_missing(directory):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def config_cut(directory):
    (directory / "config.json").write_text('{"model_type": "lla')


def config_nested(directory):
    (directory / "config.json").write_text("[" * 100_000)


def index_of(weight_map):
    def damage(directory):
        (directory / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": weight_map})
        )

    return damage


def empty(directory):
    (directory / "model.safetensors").write_bytes(b"")


def no_tensors(directory):
    save_file({}, directory / "model.safetensors")


def a_directory(directory):
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").mkdir()


def no_embedding(directory):
    arrays = load_file(directory / "model.safetensors")
    del arrays["model.embed_tokens.weight"]
    save_file(arrays, directory / "model.safetensors")


def keys(**changed):
    def damage(directory):
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))

    return damage


def only_others(directory):
    save_file({"head.weight": np.zeros(3, np.float32)}, directory / "model.safetensors")


def torch_list(directory):
    torch = pytest.importorskip("torch")
    (directory / "model.safetensors").unlink()
    torch.save([torch.zeros(3)], directory / "pytorch_model.bin")


def torch_steps(directory):
    torch = pytest.importorskip("torch")
    (directory / "model.safetensors").unlink()
    torch.save({"model": {"w": torch.zeros(3)}, "step": 3}, directory / "pytorch_model.bin")


def torch_numbers(directory):
    torch = pytest.importorskip("torch")
    (directory / "model.safetensors").unlink()
    torch.save({0: torch.zeros(3)}, directory / "pytorch_model.bin")


def torch_empty(directory):
    pytest.importorskip("torch")
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"")


def unknown_family(directory):
    (directory / "config.json").write_text('{"model_type": "mamba"}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, "model.safetensors is damaged"),
        (no_safetensors, "is damaged or not a safetensors file"),
        (pickled, "pytorch_model.bin"),
        (shard_missing, "lists files that do not exist"),
        (index_of({}), "its weight_map lists no tensors"),
        (index_of(None), "its weight_map lists no tensors"),
        (index_of(["a"]), "its weight_map lists no tensors"),
        (index_of({"a": 3}), "3 is not a file name"),
        (index_of({"a": ""}), "lists files that do not exist"),
        (index_of({"a": "../model.safetensors"}), "must be a file in this directory"),
        (index_of({"a": "/etc/passwd"}), "must be a file in this directory"),
        (empty, "model.safetensors is damaged"),
        (no_tensors, "missing: "),
        (a_directory, "model.safetensors"),
        (only_others, "unexpected: head.weight"),
        (no_embedding, "missing: model.embed_tokens.weight"),
        (keys(model_type=["llama"]), "model_type=['llama']: must be one of llama"),
        (keys(model_type={"a": 1}), "model_type={'a': 1}: must be one of llama"),
        (keys(model_type="gemma3", text_config=3), "text_config=3: must be a JSON object"),
        (
            keys(model_type="gemma3", text_config={"model_type": []}),
            "text_config.model_type=[]: must be one of",
        ),
        (torch_list, "pytorch_model.bin: must hold a dict of tensors"),
        (torch_steps, "pytorch_model.bin: must hold a dict of tensors"),
        (torch_numbers, "pytorch_model.bin: must hold a dict of tensors"),
        (torch_empty, "pytorch_model.bin is damaged or not a torch file"),
        (config_cut, "config.json is damaged"),
        (config_nested, "config.json is damaged"),
        (unknown_family, "model_type='mamba': must be one of llama"),
        (
            lambda directory: (directory / "config.json").unlink(),
            "must be a Hugging Face checkpoint",
        ),
    ],
)
def test_damage_is_named_and_leaves_nothing(llama, tmp_path, capsys, damage, message):
    directory = llama()
    damage(directory)
    before = sorted(tmp_path.iterdir())
    assert convert.main(["hf-to-bptjax", str(directory), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_failure_half_way_leaves_nothing(llama, tmp_path, monkeypatch):
    directory = llama()
    before = sorted(tmp_path.iterdir())
    read, count = Tensors.read, iter(range(5))

    def fails(self, name):
        if next(count, None) is None:
            raise OSError("the disk is gone")
        return read(self, name)

    monkeypatch.setattr(Tensors, "read", fails)
    with pytest.raises(OSError):
        conversion.to_bptjax(str(directory), tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_missing_unexpected_and_misshapen_tensors_are_listed_together(llama):
    def change(arrays):
        arrays["model.norm.weight"] = arrays["model.norm.weight"][:7]
        del arrays["model.layers.1.mlp.up_proj.weight"]
        return arrays | {"model.extra": np.zeros(3, np.float32)}

    directory = llama(change=change)
    with pytest.raises(
        ValueError,
        match=r"missing: model.layers.1.mlp.up_proj.weight; unexpected: model.extra; "
        r"wrong shape: model.norm.weight is \[7\], not \[32\]",
    ):
        open_pretrained(ModelConfig(name_or_path=str(directory)))


def test_out_is_not_written_over(llama, tmp_path, capsys):
    directory = llama()
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("kept")
    assert convert.main(["hf-to-bptjax", str(directory), str(out)]) == 2
    assert "must be new or empty; choose another" in capsys.readouterr().err
    assert (out / "precious").read_text() == "kept"


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, '{"type": "char"}', '{"type": "x"}'])
def test_a_damaged_tokenizer_is_named(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=f"{FILE}.* (is damaged|must hold)"):
        load_tokenizer(tmp_path)


def test_a_damaged_hugging_face_tokenizer_is_named(tmp_path):
    vocabulary = {"a": 0, "<eos>": 1, "<unk>": 2}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<unk>"))
    tokenizer = transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(str(tmp_path))
    assert load_tokenizer(tmp_path).stop_ids == [1]
    for name, keys, message in (
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id='x' of generation_config"),
        ("generation_config.json", {"eos_token_id": [1, None]}, "must be an integer or a list"),
        ("config.json", {"text_config": 3}, None),
        ("tokenizer_config.json", {"model_max_length": []}, "must hold a Hugging Face tokenizer"),
        ("tokenizer_config.json", {"eos_token": 3}, "must hold a Hugging Face tokenizer"),
        ("tokenizer_config.json", {"unk_token": ""}, "must hold a Hugging Face tokenizer"),
        ("tokenizer.json", {"added_tokens": 3}, "must hold a Hugging Face tokenizer"),
    ):
        file = tmp_path / name
        before = file.read_text() if file.exists() else "{}"
        file.write_text(json.dumps(json.loads(before) | keys))
        if message is None:
            assert load_tokenizer(tmp_path).stop_ids == [1]
        else:
            with pytest.raises(ValueError, match=message):
                load_tokenizer(tmp_path)
        file.write_text(before)
