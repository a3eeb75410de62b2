"""Files and directories appear complete or not at all."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file
from weights.hf.cases import config
from weights.hf.loading import contents, random_base

from bptjax.cli import convert
from bptjax.run.output import _locked, atomic_directory, replaced_files
from bptjax.weights import conversion
from bptjax.weights.adapter_export import export_adapter, open_adapter, write_adapter
from bptjax.weights.hf.peft import WEIGHTS
from bptjax.weights.hf.peft_config import ADAPTER_CONFIG

# Each command is killed in the middle of its output, in a process of its own.
KILLED = """
import json, os, signal, sys
import bptjax.cli.convert, bptjax.weights.hf.tensors, bptjax.weights.hf.peft
from bptjax.weights.hf.config import read_config
from pathlib import Path

def die(*rest, **more):
    os.kill(os.getpid(), signal.SIGKILL)

bptjax.weights.hf.tensors.Writer.__exit__ = die
bptjax.weights.hf.peft.save_file = die
commands = json.loads(sys.argv[1])
read_config(Path(commands[0][1]))  # Imports transformers once for all.
for command in commands:
    if (child := os.fork()) == 0:
        os._exit(bptjax.cli.convert.main(command))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, command
"""


def adapter_of(base, directory):
    directory.mkdir()
    raw = dict(peft_type="LORA", r=2, lora_alpha=2, bias="none", base_model_name_or_path=str(base))
    (directory / ADAPTER_CONFIG).write_text(json.dumps(raw | dict(target_modules=["q_proj"])))
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (2, 32), "B": (32, 2)}
    arrays = {name.format(i, x): np.ones(shapes[x], np.float32) for i in range(2) for x in "AB"}
    save_file(arrays, directory / WEIGHTS)
    return directory


@pytest.mark.thorough
def test_a_killed_command_leaves_nothing_under_its_name(tmp_path):
    base = random_base(tmp_path / "base", config("llama"))
    adapter = adapter_of(base, tmp_path / "adapter")
    conversion.to_bptjax(str(base), tmp_path / "ours")
    before = sorted(tmp_path.iterdir())
    commands = [
        ["hf-to-bptjax", str(base), str(tmp_path / "a")],
        ["bptjax-to-hf", str(tmp_path / "ours"), str(tmp_path / "b")],
        ["merge-adapter", str(adapter), str(tmp_path / "c")],
        ["export-adapter", str(adapter), str(tmp_path / "d")],
    ]
    command = [sys.executable, "-W", "ignore", "-c", KILLED, json.dumps(commands)]
    subprocess.run(command, check=True)
    left = sorted(set(tmp_path.iterdir()) - set(before))
    assert [path.name[:3] for path in left] == [".a.", ".b.", ".c.", ".d."]
    assert all(any(path.iterdir()) for path in left if path.name[1] != "d")
    # The next start removes them.
    for command in commands:
        assert convert.main(command) == 0
    names = [path.name for path in sorted(set(tmp_path.iterdir()) - set(before))]
    assert names == ["a", "b", "c", "d"]


def test_the_hidden_directory_of_a_living_process_stays(tmp_path):
    living, dead, other = (tmp_path / f".out{x}.tmp" for x in (".1", ".2", ".x.3"))
    for path in (living, dead, other):
        path.mkdir()
    lock = _locked(living)
    assert lock is not None and _locked(living) is None
    with atomic_directory(tmp_path / "out") as directory:
        (directory / "file").write_text("new")
    assert {p.name for p in tmp_path.iterdir()} == {living.name, other.name, "out"}


def test_an_earlier_export_is_replaced_at_the_end(tmp_path):
    base = random_base(tmp_path / "base", config("llama"))
    adapter, out = adapter_of(base, tmp_path / "adapter"), tmp_path / "out"
    export_adapter(str(adapter), out)
    first = (out / WEIGHTS).read_bytes()
    (out / "stale").write_text("")
    with pytest.raises(ValueError, match="must be new or empty; choose another"):
        export_adapter(str(adapter), out)
    with pytest.raises(OSError), atomic_directory(out, replace=True):
        raise OSError("the disk is full")
    assert (out / "stale").exists()
    with atomic_directory(out, replace=True) as directory:
        write_adapter(open_adapter(str(adapter)), directory)
    assert (out / WEIGHTS).read_bytes() == first and not (out / "stale").exists()
    assert {p.name for p in tmp_path.iterdir()} == {"base", "adapter", "out"}


def test_files_are_replaced_whole(tmp_path):
    """In subdirectories too; an error changes nothing, and what a killed process left goes away."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("old")
    (tmp_path / ".replaced.tmp").mkdir()
    (tmp_path / ".replaced.tmp" / "vocab.txt").write_text("half")

    def write(fails):
        with replaced_files(tmp_path) as fresh:
            (fresh / "hf").mkdir()
            (fresh / "hf" / "config.json").write_text("new")
            assert (tmp_path / "hf" / "config.json").read_text() == "old"
            if fails:
                raise OSError

    with pytest.raises(OSError):
        write(True)
    assert contents(tmp_path) == {"hf/config.json": b"old"}
    write(False)
    assert contents(tmp_path) == {"hf/config.json": b"new"}
