"""Commands where JAX's plugin for CUDA is installed, as by `.[plan]`, and no GPU is there."""

import os
import subprocess
import sys

import pytest

# The part of the plugin that fails without a GPU, unless JAX is to run on the CPU alone.
PLUGIN = """
def initialize():
    from jax._src import config

    if config.jax_platforms.value != "cpu":
        raise RuntimeError("Unable to load cuDNN. Is it installed?")
"""
DATA = "--data.path {0}/text.txt --train.seq_len 32"
MODEL = "--model.hidden_size 16 --model.num_layers 1 --train.max_steps 1"
# In this order: the later commands read the run of the first.
COMMANDS = [
    f"train {DATA} {MODEL} --run_dir {{0}}/run",
    f"preview {DATA}",
    "generate --model {0}/run --prompt a --max_new_tokens 1",
    "evaluate --model {0}/run --data {0}/text.txt --perplexity 16 --buckets 1 --out {0}/evaluation",
    "convert bptjax-to-hf {0}/run {0}/hf",
]


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plugins")
    (directory / "text.txt").write_text("the cat sat on the mat. " * 100)
    (directory / "jax_plugins" / "xla_fake").mkdir(parents=True)
    (directory / "jax_plugins" / "xla_fake" / "__init__.py").write_text(PLUGIN)
    return directory


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="needs a machine without a GPU")
@pytest.mark.thorough
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[0])
def test_a_plugin_without_its_device_is_not_reported(machine, command):
    path = os.pathsep.join([str(machine), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "bptjax", *command.format(machine).split()],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": ""},
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "Traceback" not in said and "cuDNN" not in said, said
