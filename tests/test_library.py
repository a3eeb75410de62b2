"""The library's calls give what the long way gives: load, generate, train."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from weights.hf.cases import config as hf_config
from weights.hf.loading import random_base, random_weights

import bptjax
from bptjax.cli import generate as command
from bptjax.cli import train as command_of_runs
from bptjax.config import Config, TrainConfig
from bptjax.data.config import DataConfig
from bptjax.data.tokenizer import ByteTokenizer
from bptjax.models.config import ModelConfig
from bptjax.models.generation import generate as tokens_of
from bptjax.models.sampling import Sampling
from bptjax.weights import conversion
from bptjax.weights.hf.config import read_config
from bptjax.weights.pretrained import open_pretrained


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Hugging Face directory with a tokenizer of bytes."""
    raw = hf_config("llama")
    raw.vocab_size = ByteTokenizer.vocab_size
    directory = random_base(tmp_path_factory.mktemp("library") / "base", raw)
    ByteTokenizer().save(directory)
    return directory


def opened(name, dtype=jnp.float32):
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return open_pretrained(ModelConfig(name_or_path=str(name))).load(where, dtype)


def assert_same(got, wanted):
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(wanted), strict=True)
    for (path, a), (other, b) in pairs:
        assert path == other and a.dtype == b.dtype and np.array_equal(a, b), path


def test_load_takes_every_kind_of_checkpoint(base, tmp_path):
    conversion.to_bptjax(str(base), tmp_path / "converted")
    for name in (str(base), base, tmp_path / "converted"):
        model, tokenizer, config = bptjax.load(name, device="cpu")
        assert_same(model, opened(base))
        assert config == model.config and config.V == tokenizer.vocab_size
        assert tokenizer.decode(tokenizer.encode("né")) == "né"
    model, tokenizer, _ = bptjax.load(
        base, tokenizer="byte", dtype="bfloat16", device=jax.devices()[3]
    )
    assert isinstance(tokenizer, ByteTokenizer)
    assert_same(model, opened(base, jnp.bfloat16))
    assert all(x.devices() == {jax.devices()[3]} for x in jax.tree.leaves(model))


def test_load_takes_encoders(tmp_path):
    raw = hf_config("bert: pooler, no masked head")
    raw.architectures = ["BertModel"]
    (tmp_path / "config.json").write_text(raw.to_json_string())
    random_weights(tmp_path, *read_config(tmp_path))
    model, tokenizer, config = bptjax.load(tmp_path, device="cpu")
    assert tokenizer is None and config.encoder.pooler
    assert_same(model, opened(tmp_path))


@pytest.mark.thorough
def test_generate_returns_the_text_of_the_tokens(base, capsys):
    model, tokenizer, _ = bptjax.load(base, device="cpu")
    prompts = ["one two", "a longer prompt than that"]
    options = dict(max_new_tokens=6, temperature=0.0, prefill_chunk=8)
    got = bptjax.generate(model, tokenizer, prompts, **options)
    ids = [tokenizer.encode_prompt(prompt) for prompt in prompts]
    sampling = Sampling(temperature=0.0)
    written = np.stack(list(tokens_of(model, ids, new_tokens=6, sampling=sampling)), 1)
    assert got == [tokenizer.decode(row) for row in written] and len(set(got)) == 2
    assert bptjax.generate(model, tokenizer, prompts[0], **options) == got[0]
    stop = got[0][2]
    before = got[0][: got[0].index(stop)]
    assert bptjax.generate(model, tokenizer, prompts[0], stop=stop, **options) == before
    for seed in (1, 2):
        flags = ["--model", str(base), "--prompt", "one two", "--max_new_tokens", "6"]
        assert command.main([*flags, "--seed", str(seed)]) == 0
        text = bptjax.generate(model, tokenizer, "one two", max_new_tokens=6, seed=seed)
        assert capsys.readouterr().out == f"{command.printable(text)}\n"


@pytest.mark.thorough
def test_load_shards_a_model_that_generates_the_same_text(base, capsys, monkeypatch):
    whole, tokenizer, config = bptjax.load(base, device="cpu")
    model, _, _ = bptjax.load(base, device="cpu", tp=2, sp=2)
    assert_same(model, whole)
    query, up = model.layers.query.kernel[...], model.layers.mlp.up.kernel[...]
    assert query.sharding.shard_shape(query.shape)[2] == config.num_heads // 2
    assert up.sharding.shard_shape(up.shape)[2] == config.F // 2
    assert len(up.devices()) == 4
    flags = ["--model", str(base), "--device", "cpu", "--prompt", "one two", "--temperature", "0"]
    flags += ["--max_new_tokens", "6"]
    text = bptjax.generate(whole, tokenizer, "one two", max_new_tokens=6, temperature=0.0)
    assert command.main([*flags, "--tp", "2", "--sp", "2"]) == 0
    assert capsys.readouterr().out == f"{command.printable(text)}\n"
    for wrong, message in (
        (["--tp", "0"], "tp=0: must be at least 1"),
        (["--tp", "3"], f"tp=3: must divide the model's {config.num_heads} heads"),
        (["--tp", "4", "--sp", "4"], "tp=4, sp=4: must multiply to at most 8, the number"),
    ):
        assert command.main([*flags, *wrong]) == 2
        *_, error = capsys.readouterr().err.splitlines()
        assert error.startswith("error: ") and message in error
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="tp=1, sp=2: must be 1 in a run of several processes"):
        bptjax.load(base, device="cpu", sp=2)


@pytest.mark.parametrize(
    "options",
    [dict(max_new_tokens=0), dict(prefill_chunk=0), dict(stop=[""]), dict(seed=-1)],
    ids=str,
)
def test_generate_names_a_bad_option(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name}"):
        bptjax.generate(None, ByteTokenizer(), "x", **options)


@pytest.mark.thorough
def test_train_is_the_command(base, tmp_path, monkeypatch):
    """A run of adapters, from a dict and from `python -m bptjax.train` in the same process; the run
    and its export load."""
    monkeypatch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:1])
    (tmp_path / "text.txt").write_text("one two three four. " * 40)
    settings = {
        "run_dir": str(tmp_path / "run"),
        "device": "cpu",
        "model": {"name_or_path": str(base)},
        "data": {"path": str(tmp_path / "text.txt"), "packing": "none"},
        "train": {"max_steps": 2, "seq_len": 16},
        "optimizer": {"learning_rate": 1e-5},
        "adapter": {"type": "lora", "r": 2},
    }
    run = bptjax.train(settings)
    assert run == tmp_path / "run"
    flags = {f"{k}.{n}": v for k, vs in settings.items() if type(vs) is dict for n, v in vs.items()}
    flags |= {"device": "cpu", "run_dir": str(tmp_path / "other")}
    monkeypatch.setattr(sys, "argv", ["train", *(f"--{k}={x}" for k, x in flags.items())])
    with pytest.raises(SystemExit) as done:
        runpy.run_module("bptjax.train", run_name="__main__")
    assert done.value.code == 0
    logs = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("run", "other")]
    first, second = ([json.loads(line) for line in log.splitlines()] for log in logs)
    losses = [row["train/loss"] for row in first if "train/loss" in row]
    assert losses == [row["train/loss"] for row in second if "train/loss" in row]
    assert len(losses) == 2

    for name in (run, run / "adapter"):
        model, tokenizer, _ = bptjax.load(name, device="cpu")
        assert_same(model, opened(name))
        assert isinstance(tokenizer, ByteTokenizer)
    assert bptjax.train(settings) == run  # Complete: nothing is left to do.


def test_train_reads_a_file_a_dict_and_a_config(tmp_path):
    settings = {"data": {"path": "x.txt"}, "train": {"max_steps": 2}, "run_dir": str(tmp_path)}
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    wanted = Config(
        run_dir=str(tmp_path), data=DataConfig(path="x.txt"), train=TrainConfig(max_steps=2)
    )
    read = command_of_runs._config
    for config in (settings, str(tmp_path / "run.yaml"), tmp_path / "run.yaml", wanted):
        assert read(config) == wanted
    with pytest.raises(ValueError, match="unknown key train.max_step; nearest: train.max_steps"):
        bptjax.train({"train": {"max_step": 2}})


def test_the_package_is_light_and_typed():
    """Neither the package nor its version nor `train` imports jax, whatever was imported before."""
    code = (
        "import sys, bptjax; bptjax.__version__, bptjax.train; assert 'jax' not in sys.modules\n"
        "import bptjax.cli.train as command; assert bptjax.train is command.train\n"
        "from inspect import signature\n"
        "assert [*signature(bptjax.train).parameters] == ['config', 'profile']\n"
        "assert [*signature(bptjax.generate).parameters][:3] == ['model', 'tokenizer', 'prompts']\n"
        "assert callable(bptjax.load)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (Path(bptjax.__file__).parent / "py.typed").exists()
    assert set(bptjax.__all__) <= {*dir(bptjax), *bptjax.MODULES, "__version__"}
