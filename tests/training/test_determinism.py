"""Runs with train.deterministic."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from bptjax.cli.train import main
from bptjax.config import Config, TrainConfig, to_yaml
from bptjax.config_parser import parse
from bptjax.cost.devices import absent_devices
from bptjax.cost.memory import tracing_for
from bptjax.models.config import ModelConfig
from bptjax.models.execution import ExecutionConfig
from bptjax.ops.choices import record_choices
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.run.checkpoint import Checkpoints
from bptjax.training.notes import describe_determinism
from bptjax.training.run_directory import acquire_run_dir
from bptjax.training.spec import TrainSpec
from bptjax.training.state import abstract_state
from bptjax.training.step import abstract_batch, compile_step
from training.runs import TRAIN, rows
from training.specs import needs_compiler

# A tiny run of packed documents whose kernels are those of large runs.
MODEL = ModelConfig(
    vocab_size=300, hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64
)
ON_GPU = """
model: {hidden_size: 256, num_layers: 2, num_heads: 4, num_kv_heads: 2, head_dim: 64}
data: {packing: best_fit, eval_fraction: 0.1}
train: {deterministic: true, seq_len: 1000, per_device_train_batch_size: 2,
  compute_dtype: bfloat16, eval_steps: 3}
optimizer: {learning_rate: 1.0e-3, lr_scheduler_type: constant}
checkpoint: {save_steps: 3}
"""


@pytest.mark.parametrize("kernel", ["fa4", "cudnn"])
def test_kernels_that_add_with_atomics_are_refused(kernel, tmp_path, capsys):
    command = ["--train.deterministic=true", f"--execution.attention_implementation={kernel}"]
    assert main([*command, f"--run_dir={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err.strip()
    assert f"execution.attention_implementation={kernel}: must be auto" in error
    assert "with train.deterministic=true" in error and "\n" not in error


def test_the_first_lines_name_the_kernels_that_are_not_used():
    config = Config(train=TrainConfig(deterministic=True))
    first, *_ = describe_determinism(config, "gpu")
    assert first.startswith("deterministic: without the attention kernels fa4 and cudnn;")
    assert describe_determinism(config, "cpu") == describe_determinism(Config(), "gpu") == []


def test_a_run_may_be_resumed_with_and_without_it(arguments, tmp_path):
    """Also a run of an older version, whose config lacks the key."""
    command = [*arguments, f"--run_dir={tmp_path}"]
    old = to_yaml(parse(command)).replace("  deterministic: false\n", "")
    assert "deterministic" not in old
    (tmp_path / "config.yaml").write_text(old)
    for value in ("false", "true"):
        acquire_run_dir(tmp_path, parse([*command, f"--train.deterministic={value}"]))


@pytest.mark.thorough
def test_on_a_cpu_it_changes_nothing(arguments, uninterrupted, tmp_path):
    assert main([*arguments, "--train.deterministic=true", f"--run_dir={tmp_path / 'run'}"]) == 0
    for name in ("train/loss", "eval/loss"):
        assert rows(tmp_path / "run", name) == rows(uninterrupted, name)


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("on", [True, False])
def test_the_step_of_an_absent_gpu(on):
    """Plans compile this step too."""
    kind, devices = absent_devices("h100")
    train = TrainConfig(deterministic=on, seq_len=1000, compute_dtype="bfloat16")
    config = Config(train=train, execution=ExecutionConfig(ffn_chunk=1000))
    spec = TrainSpec(config, MODEL, make_mesh(ParallelConfig(), devices))
    with tracing_for(spec, kind.platform), record_choices() as choices:
        text = compile_step(spec, abstract_state(spec), abstract_batch(spec)).as_text()
    assert choices[0].name == ("triton" if on else "fa4")
    scatters = [line for line in text.splitlines() if " scatter(" in line]
    assert scatters and all(("unique_indices=true" in line) == on for line in scatters)
    assert ("__cublas$lt$matmul" in text) == on


def run(folder, run_dir, steps):
    """Trains in a process that shares no compiled programs with others."""
    environment = os.environ | {
        "XLA_FLAGS": "",
        # The process of the tests holds memory of the GPU too.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_COMPILATION_CACHE_DIR": str(folder / f"cache-{run_dir.name}-{steps}"),
        "XDG_CACHE_HOME": str(folder / f"home-{run_dir.name}-{steps}"),
    }
    command = [sys.executable, *TRAIN, f"--config={folder / 'config.yaml'}"]
    command += [f"--run_dir={run_dir}", f"--train.max_steps={steps}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def results(run_dir):
    """Metrics by name and step, and all arrays of the last checkpoint."""
    names, kept = ("train/loss", "train/grad_norm", "eval/loss"), Checkpoints(run_dir)
    metrics = {name: rows(run_dir, name) for name in names}
    return metrics, {name: kept.read(6, name) for name in kept.specs(6)}


@pytest.mark.gpu
def test_runs_in_several_processes_are_equal_to_the_bit(tmp_path):
    """And a run that is stopped and resumed."""
    rng, words = np.random.default_rng(0), "the quick brown fox jumps over a lazy dog".split()
    documents = (" ".join(rng.choice(words, rng.integers(5, 90))) for _ in range(900))
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    (tmp_path / "config.yaml").write_text(ON_GPU.replace("data: {", f"data: {{path: {texts}, "))
    log = run(tmp_path, tmp_path / "one", 6)
    assert "deterministic: without" in log and "attention: triton" in log
    run(tmp_path, tmp_path / "other", 6)
    for steps in (3, 6):
        run(tmp_path, tmp_path / "resumed", steps)
    metrics, arrays = results(tmp_path / "one")
    assert len(metrics["train/loss"]) == 6 and len(metrics["eval/loss"]) == 3
    for name in ("other", "resumed"):
        found = results(tmp_path / name)
        assert found[0] == metrics and found[1].keys() == arrays.keys()
        for key, value in arrays.items():
            np.testing.assert_array_equal(found[1][key], value, strict=True)
