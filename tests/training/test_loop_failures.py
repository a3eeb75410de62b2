"""Runs that fail, or are killed: what they say, what they leave, and that they go on."""

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from bptjax.cli.train import main
from bptjax.data.check import DataCheck
from bptjax.run.metrics import JsonlWriter, Throughput, read_metrics
from training.runs import TRAIN, rows, stop_at


@pytest.mark.thorough
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_used(
    arguments, uninterrupted, tmp_path, monkeypatch, caplog
):
    run_dir = tmp_path / "run"
    command = [*arguments, "--run_dir", str(run_dir)]
    with monkeypatch.context() as patch:
        stop_at(9, signal.SIGTERM, patch)
        main(command)
    file = max(
        (run_dir / "checkpoints" / "10" / "state").rglob("*"), key=lambda p: p.stat().st_size
    )
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert main(command) == 0
    assert "step 10 is damaged" in caplog.text and "using step 6" in caplog.text
    assert rows(run_dir) == rows(uninterrupted)


@pytest.mark.thorough
def test_kill_9_loses_at_most_the_steps_since_the_last_checkpoint(
    arguments, uninterrupted, tmp_path
):
    """A real process, killed twice wherever it happens to be."""
    run_dir = tmp_path / "run"
    command = [sys.executable, *TRAIN, *arguments, "--run_dir", str(run_dir)]
    command += ["--checkpoint.save_steps", "1"]
    flags = os.environ["XLA_FLAGS"].split()
    # One device, and else as here.
    flags = " ".join(flag for flag in flags if "device_count" not in flag)
    environment = os.environ | {"XLA_FLAGS": flags}
    for steps in (4, 11):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if (run_dir / "metrics.jsonl").exists() and max(rows(run_dir), default=0) >= steps:
                process.kill()
            time.sleep(0.02)
        assert process.wait() in (-signal.SIGKILL, 0)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "resumed at step" in done.stdout
    assert rows(run_dir) == rows(uninterrupted)


def test_a_loss_that_is_not_finite_ends_the_run(arguments, tmp_path, capsys):
    command = [*arguments, "--run_dir", str(tmp_path / "run")]
    extra = ["--optimizer.learning_rate", "1e38", "--checkpoint.save_steps", "1"]
    assert main([*command, *extra]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "step 2: loss" in message and "norm nan, learning rate 9.9" in message
    assert "(step 1 had loss 5." in message and "last good checkpoint: step 1" in message
    assert "lower optimizer.learning_rate" in message
    # No state of the data loader.
    assert len(message) < 500 and "{" not in message
    assert "failed: step 2: loss" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("broken", [True, False], ids=["parameters", "loss alone"])
def test_an_evaluation_that_is_not_finite(arguments, tmp_path, monkeypatch, capsys, broken):
    """Ends the run where parameters are broken. Else, as after an overflow of float16 in the
    forward pass, the run goes on and its report says so."""
    run_dir, resumed = tmp_path / "run", []
    extra = ["--train.eval_steps=null", "--train.sample_tokens=0"]
    extra.append(f"--train.max_steps={1 if broken else 2}")
    if broken:
        extra += ["--optimizer.learning_rate=1e38", "--optimizer.weight_decay=1e38"]
    else:
        nans = iter([2.0, math.nan])

        def evaluator(spec):
            return lambda *_: {"eval/loss": next(nans)}

        monkeypatch.setattr("bptjax.training.loop.evaluator", evaluator)
        monkeypatch.setattr(Throughput, "resume", lambda self: resumed.append(1))
    assert main([*arguments, f"--run_dir={run_dir}", *extra]) == (1 if broken else 0)
    values = [r["eval/loss"] for r in read_metrics(run_dir / "metrics.jsonl") if "eval/loss" in r]
    assert values[0] > 0 and values[1:] == [None]
    out, err = capsys.readouterr()
    if broken:
        assert err.count("\n") == 1 and "step 1: eval/loss nan, parameters not finite" in err
        assert not (run_dir / "checkpoints" / "1").exists()
    else:
        assert "step 2: eval/loss nan: not finite, but all parameters are" in out
        assert "warning: held-out loss rose from 2.0000 before training to nan" in out
        # After each of two evaluations, the compilation and the save.
        assert len(resumed) == 4


@pytest.mark.thorough
def test_parameters_that_are_not_finite_are_not_saved(arguments, tmp_path, capsys):
    """The loss of the step that breaks them is finite, and no evaluation follows."""
    extra = ["--optimizer.learning_rate=1e38", "--optimizer.weight_decay=1e38"]
    extra += ["--train.max_steps=1", "--data.eval_fraction=0", "--train.eval_steps=null"]
    assert main([*arguments, f"--run_dir={tmp_path / 'run'}", *extra]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "step 1: parameters not finite (step 1 had loss 5." in error
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.thorough
def test_changed_data_end_a_run(arguments, tmp_path, monkeypatch, capsys):
    """During the run, whose last step is saved, and between two starts. Restored data continue."""
    arguments = [*arguments, "--data.shuffle=false", "--data.packing=concat"]
    command, write = [*arguments, f"--run_dir={tmp_path / 'run'}"], JsonlWriter.write
    shutil.copytree(Path(arguments[1]).parent / "texts", tmp_path / "texts")
    files = list((tmp_path / "texts").iterdir())
    command += [f"--data.path={tmp_path / 'texts'}", "--train.eval_steps=null"]

    def changing(self, step, metrics):
        for file in files if step == 4 and "train/loss" in metrics else ():
            file.touch()
        write(self, step, metrics)

    with monkeypatch.context() as patch:
        patch.setattr(JsonlWriter, "write", changing)
        assert main(command) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and ": must not change during the run; restore it" in error
    assert " is saved" in error
    before = files[0].read_bytes()
    files[0].write_bytes(before + b" more")
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "error: data: must be the 20 files of " in error
    files[0].write_bytes(before)
    assert main(command) == 0
    assert list(rows(tmp_path / "run")) == list(range(1, 21))


@pytest.mark.thorough
def test_a_full_disk_ends_the_run_in_one_line(
    arguments, uninterrupted, tmp_path, monkeypatch, capsys, caplog
):
    """Files may grow to some bytes only: too few for the metrics, or for a checkpoint."""
    command, write = [*arguments, f"--run_dir={tmp_path / 'run'}"], JsonlWriter.write
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size, where in ((1, ""), (4000, "/checkpoints/6")):

        def limited(self, step, metrics, size=size):
            if step == 4:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
            write(self, step, metrics)

        with monkeypatch.context() as patch:
            patch.setattr(JsonlWriter, "write", limited)
            try:
                assert main(command) == 1
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        text = f"error: {tmp_path / 'run'}{where}: File too large; free some space, then start the "
        error = capsys.readouterr().err
        assert error.startswith(text) and error.count("\n") == 1
    assert main(command) == 0
    assert rows(tmp_path / "run") == rows(uninterrupted)
    assert all("half-written" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("text", ["RESOURCE_EXHAUSTED: of a GPU", "INTERNAL: Out of memory"])
def test_out_of_memory_names_the_largest_uses(arguments, tmp_path, monkeypatch, capsys, text):
    def refuse(*_):
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr("bptjax.training.compilation.compile_step", refuse)
    assert main([*arguments, "--run_dir", str(tmp_path / "run")]) == 1
    message = capsys.readouterr().err
    assert "out of memory: per device, parameters take" in message
    assert "with execution={remat: save_attention, save: []," in message
    assert "execution.remat=full" in message and "pinned_host" not in message


@pytest.mark.thorough
def test_a_bad_record_deep_in_the_data(arguments, tmp_path, capsys, monkeypatch):
    """Refused at the start if found in time; else the run saves, ends, and can go on without it."""
    lines = [json.dumps({"text": "the quick brown fox"})] * 400
    lines[20] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    # So that the iterator reads no record before its step.
    command = [*arguments, "--data.packing=none", "--data.shuffle=false"]
    command += [f"--data.path={tmp_path / 'a.jsonl'}"]
    command += ["--data.eval_fraction=0.01", "--train.eval_steps=null", "--train.sample_tokens=0"]
    assert main([*command, f"--run_dir={tmp_path / 'run'}"]) == 2
    assert "a.jsonl, record 21: " in capsys.readouterr().err and not (tmp_path / "run").exists()
    # The data are too many to be checked beforehand: the iterator meets the record.
    run = DataCheck.run
    monkeypatch.setattr(DataCheck, "run", lambda self: run(self, 0.0))
    with monkeypatch.context() as patch:
        patch.setattr("bptjax.data.check.DataCheck.start", lambda self, directory: None)
        for _ in range(2):
            assert main([*command, f"--run_dir={tmp_path / 'run'}"]) == 1
            error = capsys.readouterr().err
            assert error.count("\n") == 1 and "record 21: " in error and "bad_records=skip" in error
    saved = max(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert 6 < saved < 20 and f"step {saved + 1}: " in error, "not a step is lost"
    skip = [*command, "--data.bad_records=skip"]
    assert main([*skip, f"--run_dir={tmp_path / 'run'}"]) == 0
    assert main([*skip, f"--run_dir={tmp_path / 'other'}"]) == 0
    assert rows(tmp_path / "run") == rows(tmp_path / "other")
    listed = (tmp_path / "other" / "bad_records.jsonl").read_text()
    assert json.loads(listed)["record"] == "record 21"
    log = (tmp_path / "other" / "log.txt").read_text()
    assert "left out; see bad_records.jsonl" in log or "sequences per epoch" in log
    # The check on its thread is ahead of the iterator, here at its end before the first step.
    start = DataCheck.start

    def start_and_wait(self, directory):
        start(self, directory)
        self._thread.join()

    monkeypatch.setattr(DataCheck, "start", start_and_wait)
    lines[20], lines[380] = lines[0], "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    capsys.readouterr()
    assert main([*command, f"--run_dir={tmp_path / 'third'}"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "saved: " in error and "record 381: " in error
    assert list((tmp_path / "third" / "checkpoints").iterdir())
