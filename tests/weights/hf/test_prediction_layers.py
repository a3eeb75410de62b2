"""Layers for multi-token prediction, which no model reads: exports hold them byte for byte."""

import shutil

import jax
import ml_dtypes  # noqa: F401
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bptjax.cli import convert
from bptjax.cli.train import main as train
from bptjax.models.config import ModelConfig
from bptjax.weights import conversion
from bptjax.weights.hf.checkpoint import SIDECARS
from bptjax.weights.hf.other_tensors import OTHERS
from bptjax.weights.pretrained import open_pretrained
from weights.hf.cases import auto_model, config
from weights.hf.loading import random_base, tensors

PREFIXES = {
    "qwen3_5_text": "mtp.",
    "qwen3_5_moe_text": "mtp.",
    "qwen3_next": "mtp.",
    "glm4_moe": "model.layers.46.",
}


def prediction_layer(name):
    """The tensors of a layer, and a buffer that an old version of transformers saved in it."""
    return {
        PREFIXES[name] + "eh_proj.weight": np.arange(6, dtype="bfloat16").reshape(2, 3),
        PREFIXES[name] + "norm.weight": np.arange(5, dtype=np.float32),
        PREFIXES[name] + "self_attn.rotary_emb.inv_freq": np.ones(2, np.float64),
    }


def checkpoint(directory, name):
    """A checkpoint with text of bytes, random and in float32, made without torch."""
    raw = config(name)
    raw.vocab_size = 257
    file = random_base(directory, raw) / "model.safetensors"
    arrays = load_file(file) | prediction_layer(name)
    save_file(arrays, file)
    return directory


@pytest.mark.parametrize("name", PREFIXES)
def test_a_conversion_keeps_them(tmp_path, theirs, name):
    """transformers opens the export, with the parameters of the original."""
    torch = pytest.importorskip("torch")
    model, directory = theirs(name)
    shutil.copytree(directory, tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    beside = prediction_layer(name)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    save_file(load_file(file) | beside | buffer, file, dict(format="pt"))
    left_out = open_pretrained(ModelConfig(name_or_path=str(tmp_path / "hf"))).left_out
    assert left_out.startswith("left out 1 tensor of the files that hold no parameters of")
    assert "kept 3 tensors for exports, which are not trained: " in left_out
    conversion.to_bptjax(str(tmp_path / "hf"), tmp_path / "ours")
    conversion.to_hf(str(tmp_path / "ours"), tmp_path / "back", dtype=None, max_shard_size="5GB")
    wanted = tensors(tmp_path / "hf")
    del wanted[next(iter(buffer))]
    assert tensors(tmp_path / "back") == wanted
    # A directory from before exports held them, and a dtype, which is the model's alone.
    arguments = ["bptjax-to-hf", str(tmp_path / "ours"), str(tmp_path / "half"), "--dtype=bfloat16"]
    assert convert.main(arguments) == 0
    found = tensors(tmp_path / "half")
    assert all(found[n] == wanted[n] for n in beside)
    shutil.rmtree(tmp_path / "ours" / SIDECARS / OTHERS)
    conversion.to_hf(str(tmp_path / "ours"), tmp_path / "old", dtype=None, max_shard_size="5GB")
    assert tensors(tmp_path / "old").keys() == wanted.keys() - beside.keys()
    again, report = auto_model(name).from_pretrained(
        tmp_path / "back", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    one, other = model.state_dict(), again.state_dict()
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_names_without_the_prefix_of_the_model_stay(tmp_path):
    """The checkpoint has no head, and its config.json names no class."""
    directory = checkpoint(tmp_path / "hf", "glm4_moe")
    file = directory / "model.safetensors"
    save_file({n.removeprefix("model."): x for n, x in load_file(file).items()}, file)
    conversion.to_bptjax(str(directory), tmp_path / "ours")
    conversion.to_hf(str(tmp_path / "ours"), tmp_path / "back", dtype=None, max_shard_size="5GB")
    assert "layers.46.norm.weight" in tensors(directory)
    assert tensors(tmp_path / "back") == tensors(directory)


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    monkeypatch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:1])
    (tmp_path / "text.txt").write_text("".join(f"{i} plus 3 is {i + 3}. " for i in range(200)))
    options = {
        "device": "cpu",
        "model.name_or_path": checkpoint(tmp_path / "base", "qwen3_5_text"),
        "data.path": tmp_path / "text.txt",
        "data.tokenizer": "byte",
        "train.max_steps": 1,
        "train.seq_len": 24,
        "train.per_device_train_batch_size": 1,
        "optimizer.learning_rate": 0.01,
        "execution.q_chunk": 24,
        "execution.k_chunk": 24,
        "run_dir": tmp_path / "run",
    }
    return [f"--{key}={value}" for key, value in options.items()]


def assert_kept(out, before):
    after, beside = tensors(out), prediction_layer("qwen3_5_text").keys()
    assert after.keys() == before.keys() and after != before
    assert all(after[name] == before[name] for name in beside)


@pytest.mark.thorough
def test_a_run_keeps_them(tmp_path, arguments):
    """The export needs no base model."""
    assert train(arguments) == 0
    before = tensors(tmp_path / "base")
    shutil.rmtree(tmp_path / "base")
    assert convert.main(["bptjax-to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert_kept(tmp_path / "out", before)


@pytest.mark.thorough
def test_a_merged_adapter_keeps_them(tmp_path, arguments):
    assert train([*arguments, "--adapter.type=lora"]) == 0
    assert not (tmp_path / "run" / SIDECARS / OTHERS).exists()
    for source in ("run", "run/adapter"):
        out = tmp_path / f"merged {source.count('/')}"
        assert convert.main(["merge-adapter", str(tmp_path / source), str(out)]) == 0
        assert_kept(out, tensors(tmp_path / "base"))
