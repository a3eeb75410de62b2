"""The scale of adapters: 1 unless a config, a saved run or an adapter's files say otherwise."""

import json
import shutil
from math import sqrt

import numpy as np
import pytest

from bptjax.cli.preview import main as preview
from bptjax.cli.train import main
from bptjax.config_parser import parse
from bptjax.data.tokenizer import ByteTokenizer
from bptjax.models.config import ModelConfig
from bptjax.training.run_directory import saved_values
from bptjax.weights.hf.peft_config import ADAPTER_CONFIG, rank_and_scale
from bptjax.weights.lora import AdapterConfig
from bptjax.weights.pretrained import open_pretrained
from weights.hf.cases import config
from weights.hf.loading import random_base

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    raw = config("llama")
    raw.vocab_size = ByteTokenizer.vocab_size
    ByteTokenizer().save(random_base(folder / "base", raw))
    (folder / "text.txt").write_text(
        "".join(f"{i} plus {i % 7} is {i + i % 7}. " for i in range(99))
    )
    options = {
        "device": "cpu",
        "model.name_or_path": folder / "base",
        "data.path": folder / "text.txt",
        "train.max_steps": 2,
        "train.seq_len": 16,
        "checkpoint.save_steps": 1,
    }
    return [f"--{key}={value}" for key, value in options.items()]


def extended(command):
    return [x.replace("max_steps=2", "max_steps=3") for x in command]


def scales(directory):
    """Returns the distinct scales of a run's or adapter's low-rank products."""
    adapters = open_pretrained(ModelConfig(name_or_path=str(directory))).adapters
    return {x for _, _, scale in adapters.values.values() for x in np.unique(scale).tolist()}


@pytest.mark.parametrize(("use_rslora", "alpha"), [(False, 64.0), (True, 8.0)])
@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_the_default_scale_is_1_at_every_rank(kind, use_rslora, alpha):
    flags = ["--model.name_or_path=x", f"--adapter.type={kind}", "--adapter.r=64"]
    adapter = parse([*flags, f"--adapter.use_rslora={use_rslora}".lower()]).on("cpu").adapter
    assert (adapter.alpha, adapter.scale) == (alpha, 1.0)
    assert AdapterConfig(kind, r=64, use_rslora=use_rslora).scale == 1.0
    # Adapters that are not there have no alpha.
    assert parse([]).on("gpu").adapter.alpha is None


@pytest.mark.thorough
@pytest.mark.parametrize("kind, use_rslora", [("qlora", False), ("lora", True)])
def test_a_run_says_its_scale_and_exports_its_alpha(kind, use_rslora, arguments, tmp_path, capsys):
    run = tmp_path / "run"
    command = [*arguments, f"--run_dir={run}", f"--adapter.type={kind}", "--adapter.r=16"]
    command += [f"--adapter.use_rslora={use_rslora}".lower()]
    alpha = 4.0 if use_rslora else 16.0
    said = f"adapter: {kind}, rank 16, alpha {alpha:g}{' with use_rslora' * use_rslora}"
    said += ": adapter scale 1.0"
    assert preview(command) == 0
    assert said + "\n" in capsys.readouterr().out
    assert main(command) == 0
    assert f"\n{said}\n" in capsys.readouterr().out
    assert said in (run / "report.html").read_text()
    assert saved_values(run)["adapter.alpha"] == alpha
    assert scales(run) == {1.0}
    raw = json.loads((run / "adapter" / ADAPTER_CONFIG).read_text())
    assert rank_and_scale(raw, "model.layers.0.self_attn.q_proj") == (16, 1.0)
    assert (raw["lora_alpha"], raw["use_rslora"]) == (alpha, use_rslora)


@pytest.mark.thorough
def test_a_resumed_run_keeps_its_alpha(arguments, tmp_path, capsys):
    """Version 0.1 wrote alpha 8, the default of every rank, into the run's config."""
    run = tmp_path / "run"
    command = [*arguments, f"--run_dir={run}", "--adapter.type=lora", "--adapter.r=64"]
    assert main([*command, "--adapter.alpha=8"]) == 0
    metrics = (run / "metrics.jsonl").read_text()
    shutil.rmtree(run / "checkpoints" / "2")
    capsys.readouterr()
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "resumed at step 1" in out
    assert "rank 64, alpha 8: adapter scale 0.125; adapter.alpha=64, the default, gives 1.0" in out
    again = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for a, b in zip(map(json.loads, metrics.splitlines()), again, strict=True):
        assert all(a[k] == b[k] for k in a if k.endswith("/loss"))
    assert saved_values(run)["adapter.alpha"] == 8.0 and scales(run) == {0.125}
    raw = json.loads((run / "adapter" / ADAPTER_CONFIG).read_text())
    assert (raw["r"], raw["lora_alpha"]) == (64, 8.0)
    # Another alpha is another run.
    assert main([*command, "--adapter.alpha=64"]) == 2
    assert "with adapter.alpha=8.0, and this run has 64.0" in capsys.readouterr().err


@pytest.mark.thorough
def test_adapters_trained_further_keep_their_scale(arguments, tmp_path, capsys):
    first, then = tmp_path / "first", tmp_path / "then"
    flags = ["--adapter.type=lora", "--adapter.target_modules=[q_proj]"]
    own = [f"--run_dir={first}", "--adapter.r=4", "--adapter.alpha=6", "--adapter.use_rslora=true"]
    assert main([*arguments, *flags, *own]) == 0
    assert scales(first) == {6 / sqrt(4)}
    command = [*arguments, f"--model.name_or_path={first / 'adapter'}", f"--run_dir={then}"]
    command = [x for x in command if not x.endswith("/base")] + flags[:1]
    capsys.readouterr()
    assert preview(command) == 0
    assert main(command) == 0
    out = capsys.readouterr().out
    said = f"adapter: lora, rank 4, as in {first / 'adapter'}: adapter scale 3.0\n"
    assert out.count(said) == 2 and "adapter.alpha=" not in out
    assert scales(then) == scales(then / "adapter") == {3.0}
    assert main([*command, "--adapter.alpha=4"]) == 2
    assert "adapter.alpha=4.0: must not be set" in capsys.readouterr().err
    # The run goes on, also if its config is one of version 0.1.
    assert "  alpha: 8.0\n" in (then / "config.yaml").read_text()
    assert main(extended(command)) == 0
    assert scales(then) == {3.0}
