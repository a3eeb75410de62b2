"""The directory of a run: who may take it, and which keys and settings of a run stay."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml
from tiers import fast

from bptjax.cli.train import main
from bptjax.config import Config, to_yaml
from bptjax.config_parser import parse
from bptjax.models.config import ModelConfig
from bptjax.models.execution import ExecutionConfig
from bptjax.parsing.keys import flatten
from bptjax.run import versions
from bptjax.run.checkpoint_files import HALF_WRITTEN, write_manifest
from bptjax.run.output import leftovers
from bptjax.training.run_directory import (
    acquire_run_dir,
    saved_execution,
    saved_values,
    with_old_values,
)
from bptjax.training.setup import _with_defaults
from bptjax.weights.pretrained import open_pretrained
from training.runs import rows, stop_at


def test_another_config_does_not_write_over_a_run(arguments, uninterrupted, capsys):
    before = {p: p.read_bytes() for p in uninterrupted.glob("*.*")}
    assert main([*arguments, "--run_dir", str(uninterrupted), "--model.num_layers", "2"]) == 2
    assert "model.num_layers=1, and this run has 2" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in uninterrupted.glob("*.*")} == before


def test_a_damaged_config_of_a_run_is_said(arguments, tmp_path, capsys):
    for text in ("", "train: [", "adapter: {type: lora, alpha: a}", "adapter: {alpha: 1e400}"):
        (tmp_path / "config.yaml").write_text(text)
        assert main([*arguments, "--run_dir", str(tmp_path), "--adapter.type=lora"]) == 2
        assert "config.yaml is damaged" in capsys.readouterr().err


def test_a_renamed_checkpoint_is_not_resumed(arguments, uninterrupted, tmp_path, capsys):
    run_dir = shutil.copytree(uninterrupted, tmp_path / "run")
    step = (run_dir / "checkpoints" / "20").rename(run_dir / "checkpoints" / "19")
    assert main([*arguments, f"--run_dir={run_dir}"]) == 2
    error = f"error: {step}: must hold the checkpoint of step 19, not of step 20; rename it\n"
    assert capsys.readouterr().err.endswith(error) and step.exists()


@pytest.mark.parametrize(
    "name", ["log.txt", "metrics.jsonl", "loss.png", "bad_records.jsonl", "checkpoints"]
)
def test_a_directory_in_place_of_a_file_is_refused(
    arguments, uninterrupted, tmp_path, capsys, name
):
    """Or a file in place of a directory. They ended the run, after it had loaded its model."""
    run_dir = shutil.copytree(uninterrupted, tmp_path / "run")
    path = run_dir / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    kind, other = ("directory", "file") if name == "checkpoints" else ("file", "directory")
    path.touch() if kind == "directory" else path.mkdir()
    assert main([*arguments, f"--run_dir={run_dir}"]) == 2
    error = f"error: {path}: must be a {kind}, not a {other}; remove it\n"
    assert capsys.readouterr().err == error


def resaved(uninterrupted, run_dir, change):
    """Copies a run, with other values beside the arrays of its checkpoint."""
    shutil.copytree(uninterrupted, run_dir)
    step = run_dir / "checkpoints" / "20"
    file = step / "meta" / "metadata"
    meta = json.loads(file.read_text())
    change(meta["extra"])
    file.write_text(json.dumps(meta))
    step.rename(f"{step}{HALF_WRITTEN}")
    write_manifest(step.with_name(f"20{HALF_WRITTEN}"))
    step.with_name(f"20{HALF_WRITTEN}").rename(step)
    return run_dir


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda extra: extra["versions"].update(bptjax="9"), None),
        (lambda extra: extra["versions"].update(jax="0.1", arithmetic="0", x="1"),
         r"bptjax 0.2.0 → 0.2.0 \(arithmetic 0 → 3\), jax 0.1 → [\d.]+, x 1 → absent"),
        (lambda extra: extra.pop("versions"), "an earlier bptjax, which did not record versions"),
    ],
)  # fmt: skip
def test_a_resumed_run_says_which_versions_have_changed(
    arguments, uninterrupted, tmp_path, capsys, change, reason
):
    run_dir = resaved(uninterrupted, tmp_path / "run", change)
    assert main([*arguments, f"--run_dir={run_dir}", "--train.max_steps=21"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    text = "step 20 was saved by other versions, so the run is no longer bit-exact: "
    assert re.search(text + reason, out) if reason else text not in out


def test_code_that_is_not_installed_has_no_version(monkeypatch):
    """As on a cluster where PYTHONPATH names the clone."""
    with_version = versions.computing_versions()
    find = versions.installed
    monkeypatch.setattr(versions, "installed", lambda x: None if x == "bptjax" else find(x))
    own = versions.computing_versions()
    assert versions.describe_changes(own) == versions.describe_changes(with_version) == ""
    assert "bptjax not installed → not installed (" in versions.describe_changes(
        own | dict(arithmetic="0")
    )


CHANGES = [
    lambda extra: extra.pop("data"),
    lambda extra: extra.update(data=[{"row": 0}]),
    lambda extra: extra.update(data=[{"parent": {"next_index": 3}, "offset": 1}]),
    lambda extra: extra.update(best={"epoch": 1}),
    lambda extra: extra.update(best=3),
    lambda extra: extra.update(spikes=[]),
    lambda extra: extra.update(steps=None),
    lambda extra: extra.update(data_size=None),
    lambda extra: extra.update(data_size=["a", 1]),
]


@pytest.mark.parametrize(
    "change",
    fast(CHANGES, CHANGES[::3]),
)
def test_a_checkpoint_of_another_version_is_refused(
    arguments, uninterrupted, tmp_path, capsys, change
):
    run_dir = resaved(uninterrupted, tmp_path / "run", change)
    assert main([*arguments, f"--run_dir={run_dir}", "--train.max_steps=21"]) == 2
    error = capsys.readouterr().err
    assert "must be of this version of bptjax (" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"adapter": {"rank": 4}},
        {"adapter": None},
        {"model": None},
        {"train": None},
        {"model": {"num_layers": None}},
        {"model": {"norms": {"position": "middle"}}},
        {"model": {"add_tokens": 3}},
        {"train": {"seq_len": "long"}},
    ],
    ids=str,
)
def test_a_damaged_config_of_a_checkpoint_is_said(tmp_path, changes):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": {}, "train": {}} | changes))
    with pytest.raises(ValueError, match="config.yaml: must be the config of a run"):
        open_pretrained(ModelConfig(name_or_path=str(tmp_path)))


def test_two_processes_do_not_share_a_run(arguments, tmp_path, capsys):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    handle = os.open(run_dir, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert main([*arguments, "--run_dir", str(run_dir)]) == 2
    assert "must not be in use by another process" in capsys.readouterr().err
    os.close(handle)


def test_a_run_of_an_older_version_goes_on_with_the_defaults_of_new_keys(arguments, tmp_path):
    command = [*arguments, f"--run_dir={tmp_path}"]
    old = re.sub("  (num_shards: 1|warmup_ratio: null)\n", "", to_yaml(parse(command)))
    (tmp_path / "config.yaml").write_text(old)
    acquire_run_dir(tmp_path, parse(command))
    for key, found in (("data.num_shards=2", "=1"), ("optimizer.warmup_ratio=0.5", "=null")):
        name, _, value = key.partition("=")
        with pytest.raises(ValueError, match=f"run with {name}{found}, and this run has {value}"):
            acquire_run_dir(tmp_path, parse([*command, f"--{key}"]))
    # Fine-tuning had the defaults of pre-training.
    (tmp_path / "config.yaml").write_text(old.replace("name_or_path: null", "name_or_path: x"))
    tuned = [*command, "--model.name_or_path=x", "--train.compute_dtype=float32"]
    tuned.append("--optimizer.warmup_steps=0")
    with pytest.raises(ValueError, match="weight_decay=0.1, and this run has 0.0"):
        acquire_run_dir(tmp_path, parse(tuned))
    acquire_run_dir(tmp_path, parse([*tuned, "--optimizer.weight_decay=0.1"]))
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def without_eval_split(run_dir):
    """Writes the config as versions did that did not have the key data.eval_split."""
    file = run_dir / "config.yaml"
    text, count = re.subn("  eval_split: .*\n", "", file.read_text())
    assert count == 1
    file.write_text(text)


def test_a_run_of_an_older_version_keeps_its_evenly_spaced_documents(arguments, tmp_path):
    command = [*arguments, f"--run_dir={tmp_path}"]
    assert with_old_values(parse(command)).data.eval_split == "random"
    acquire_run_dir(tmp_path, parse(command))
    assert with_old_values(parse(command)) == parse(command)
    with pytest.raises(ValueError, match="run with data.eval_split=random, and this run has spac"):
        acquire_run_dir(tmp_path, parse([*command, "--data.eval_split=spaced"]))
    without_eval_split(tmp_path)
    old = with_old_values(parse(command))
    assert old == replace(old, data=replace(parse(command).data, eval_split="spaced"))
    acquire_run_dir(tmp_path, old)
    assert "eval_split" not in (tmp_path / "config.yaml").read_text()
    with pytest.raises(ValueError, match="run with data.eval_split=spaced, and this run has rand"):
        acquire_run_dir(tmp_path, parse(command))


@pytest.mark.thorough
def test_a_run_of_an_older_version_is_resumed_exactly(arguments, tmp_path, monkeypatch):
    run_dir, whole = tmp_path / "stopped", tmp_path / "whole"
    spaced, command = "--data.eval_split=spaced", [*arguments, f"--run_dir={run_dir}"]
    assert main([*arguments, spaced, f"--run_dir={whole}"]) == 0
    with monkeypatch.context() as patch:
        stop_at(9, signal.SIGTERM, patch)
        assert main([*command, spaced]) == 143
    without_eval_split(run_dir)
    assert main(command) == 0
    log = (run_dir / "log.txt").read_text()
    assert "resumed at step 10" in log and "evenly spaced (data.eval_split=spaced)" in log
    for name in ("train/loss", "eval/loss"):
        assert rows(run_dir, name) == rows(whole, name)


def test_a_resumed_run_may_name_a_default(tmp_path):
    command, key = [f"--run_dir={tmp_path}", "--objective.type=dpo"], "objective.share_prompt"
    unset = {key: True, "objective.reference": "cached"}
    acquire_run_dir(tmp_path, parse(command).on("cpu"))  # With reference=auto.
    for named in ([], [f"--{key}=true", "--objective.reference=cached"]):
        acquire_run_dir(tmp_path, parse([*command, *named]).on("cpu"), unset)
    with pytest.raises(ValueError, match=f"with {key}=True, and this run has False"):
        acquire_run_dir(tmp_path, parse([*command, f"--{key}=false"]).on("cpu"), unset)


def test_a_resumed_run_may_name_the_objective_that_auto_takes(arguments, uninterrupted, tmp_path):
    """And leave it to auto again."""
    run_dir = shutil.copytree(uninterrupted, tmp_path / "run")
    for named in (["--objective.type=next_token"], []):
        assert main([*arguments, f"--run_dir={run_dir}", *named]) == 0
    assert saved_values(run_dir)["objective.type"] == "auto"
    command, unset = [f"--run_dir={tmp_path / 'other'}"], {"objective.type": "next_token"}
    acquire_run_dir(tmp_path / "other", parse(command))
    with pytest.raises(ValueError, match="with objective.type=next_token, and this run has class"):
        acquire_run_dir(tmp_path / "other", parse([*command, "--objective.type=class"]), unset)


def test_sources_of_an_older_version_lack_newer_keys(tmp_path):
    command = [f"--run_dir={tmp_path}", "--data.sources=[{path: a}, {path: b, weight: 2}]"]
    old = to_yaml(parse(command)).replace("    fields: null\n", "")
    assert "fields: null" not in old and "weight: 2" in old
    (tmp_path / "config.yaml").write_text(old)
    acquire_run_dir(tmp_path, parse(command))
    with pytest.raises(ValueError, match="run with data.sources="):
        acquire_run_dir(tmp_path, parse([command[0], "--data.sources=[{path: a}]"]))


def test_a_resumed_run_keeps_the_execution_that_its_keys_allow(tmp_path):
    chosen = ExecutionConfig("auto", "split", 512, 512, "full", ("up",), 2048, 8, 0.5)
    config = Config(run_dir=str(tmp_path))
    assert saved_execution(config) is None
    (tmp_path / "config.yaml").write_text(to_yaml(replace(config, execution=chosen)))
    assert saved_execution(config) == chosen.complete()
    for keys, kept in (
        (dict(offload=0.0), True),
        (dict(remat="none"), False),
        (dict(ffn_chunk=64), False),
    ):
        config = replace(config, execution=ExecutionConfig(**keys))
        wanted = replace(chosen, **keys).complete() if kept else None
        assert saved_execution(config) == wanted
        assert _with_defaults(config, "cpu").execution.offload == 0.0
    # An offload that is set is not changed, so that `setup` refuses it.
    config = replace(config, execution=ExecutionConfig(offload=1.0))
    assert _with_defaults(config, "cpu").execution.offload == 1.0


def test_a_directory_with_something_else_is_not_taken(arguments, tmp_path, capsys, monkeypatch):
    """The directory is checked before data and weights are read."""
    monkeypatch.setattr("bptjax.training.setup._open_run", None)
    (tmp_path / "thesis.tex").write_text("dear reader")
    assert main([*arguments, "--run_dir", str(tmp_path)]) == 2
    assert "must be empty or hold a run" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_killed_start_does_not_take_the_directory(tmp_path):
    """A process that is killed while it writes the config leaves a temporary file."""
    killed = """
import os, pathlib, signal, sys
from bptjax.run.output import write_atomically
pathlib.Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
write_atomically(pathlib.Path(sys.argv[1]), "seed: 1")
"""
    file = tmp_path / "config.yaml"
    ended = subprocess.run([sys.executable, "-c", killed, file])
    assert ended.returncode == -signal.SIGKILL
    assert {*tmp_path.iterdir()} == leftovers(file) != set()
    acquire_run_dir(tmp_path, Config())
    assert saved_values(tmp_path) == flatten(Config())
