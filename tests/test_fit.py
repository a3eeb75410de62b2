"""Whole runs: they learn, stop, resume exactly, survive kills, and say clearly what is wrong."""

import fcntl
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from bptjax.config import flatten, parse, to_yaml
from bptjax.fit import _extended, _Loop
from bptjax.metrics import Progress, read_metrics
from bptjax.optim import OptimizerConfig, describe_schedule, learning_rate
from bptjax.run import _with_defaults
from bptjax.run_directory import claim
from bptjax.train import main
from bptjax.trainer import Task

TINY = """
device: cpu
model: {hidden_size: 16, num_layers: 1, num_heads: 2, attention_dropout: 0.1, residual_dropout: 0.1}
data: {packing: best_fit, eval_fraction: 0.1}
train: {max_steps: 20, seq_len: 32, per_device_train_batch_size: 2, eval_steps: 8, sample_tokens: 8}
optimizer: {learning_rate: 1.0e-2}
execution: {q_chunk: 16, k_chunk: 16, ffn_chunk: 16}
checkpoint: {save_steps: 6}
"""

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Command line of the tiny run, without its run directory."""
    folder = tmp_path_factory.mktemp("tiny")
    texts = folder / "texts"
    (folder / "config.yaml").write_text(TINY.replace("data: {", f"data: {{path: {texts}, "))
    texts.mkdir()
    words = "the quick brown fox jumps over a lazy dog".split()
    rng = random.Random(0)
    for i in range(20):
        (texts / f"{i:02}.txt").write_text(" ".join(rng.choices(words, k=rng.randrange(5, 60))))
    return ["--config", str(folder / "config.yaml")]


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    monkeypatch.setattr("bptjax.run.select_devices", lambda device: jax.devices()[:1])


def rows(run_dir, name="train/loss"):
    return {r["step"]: r[name] for r in read_metrics(run_dir / "metrics.jsonl") if name in r}


@pytest.fixture(scope="module")
def uninterrupted(arguments, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bptjax.run.select_devices", lambda device: jax.devices()[:1])
        assert main([*arguments, "--run_dir", str(run_dir)]) == 0
    return run_dir


def test_a_run_learns_and_leaves_its_files(uninterrupted):
    losses = rows(uninterrupted)
    assert sorted(losses) == list(range(1, 21))
    assert losses[20] < losses[1] - 0.5
    assert sorted(rows(uninterrupted, "eval/loss")) == [0, 8, 16, 20]
    for name in ("config.yaml", "log.txt", "loss.png", "checkpoints/20", "bptjax_tokenizer.json"):
        assert (uninterrupted / name).exists(), name
    last = list(read_metrics(uninterrupted / "metrics.jsonl"))[-2]
    assert last["train/tokens_seen"] > 0 and last["throughput/tokens_per_second"] > 0
    log = (uninterrupted / "log.txt").read_text()
    for part in ("attention: scan\n", "  not loop: ", "bits per byte", "sample:"):
        assert part in log, part
    before, after = log.split("step 0: eval/loss")
    for name, count in (("training", 18), ("held-out", 2)):
        for told in (before, after):
            assert re.search(rf" {name} data: {count} records, [\d,]+ tokens, 100.0% of th", told)
    lines = [line[20:] for line in log.splitlines()]
    heads = r"attention:|  not |compiled in|model:|a step holds|(training|held-out) data:|  "
    short = [line for line in lines if re.match(heads, line)]
    assert len(short) > 12 and max(map(len, short)) <= 80


def stop_at(step, number, monkeypatch):
    """Sends the signal while the metrics of `step` are being written."""
    from bptjax.metrics import JsonlWriter

    write = JsonlWriter.write

    def signalled(self, at, metrics):
        write(self, at, metrics)
        if at == step and "train/loss" in metrics:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(JsonlWriter, "write", signalled)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_stop_and_resume_is_exact(
    arguments, uninterrupted, tmp_path, monkeypatch, number, code, capsys
):
    run_dir = tmp_path / "run"
    command = [*arguments, "--run_dir", str(run_dir)]
    on_disk = []
    with monkeypatch.context() as patch:
        stop_at(9, number, patch)
        log = Progress.log

        def logged(self, line):
            log(self, line)
            if line.startswith("saved step"):
                on_disk.append((run_dir / "checkpoints" / "10" / "manifest.json").exists())

        patch.setattr(Progress, "log", logged)
        assert main(command) == code
    saved = sorted(p.name for p in (run_dir / "checkpoints").iterdir())
    assert saved == ["10", "6"]
    name, log = signal.Signals(number).name, (run_dir / "log.txt").read_text()
    assert f"{name}: saving step 10, then stopping" in log
    line = f"saved step 10 in {run_dir / 'checkpoints' / '10'}; the same command continues from th"
    assert line in log and line in capsys.readouterr().out.replace("\n", "")
    assert on_disk == [True]
    # Where the moments are is no other experiment.
    assert main([*command, "--optimizer.state_memory_kind", "pinned_host"]) == 0
    assert rows(run_dir) == rows(uninterrupted)
    assert rows(run_dir, "eval/loss") == rows(uninterrupted, "eval/loss")
    assert rows(run_dir, "train/tokens_seen") == rows(uninterrupted, "train/tokens_seen")
    assert "resumed at step 10" in (run_dir / "log.txt").read_text()


def test_a_complete_run_is_left_alone(arguments, uninterrupted, capsys):
    before = (uninterrupted / "metrics.jsonl").read_text()
    assert main([*arguments, "--run_dir", str(uninterrupted)]) == 0
    assert (uninterrupted / "metrics.jsonl").read_text() == before
    assert "bits per byte" in capsys.readouterr().out


def test_a_finished_run_is_extended(arguments, uninterrupted, tmp_path, capsys):
    run_dir = shutil.copytree(uninterrupted, tmp_path / "run")
    command = [*arguments, f"--run_dir={run_dir}", "--train.sample_tokens=0"]
    before = (run_dir / "config.yaml").read_bytes()
    assert main([*command, "--train.max_steps=19"]) == 2
    message = f"train.max_steps=19: must not end the run in {run_dir} before its step 20; set more"
    assert message in capsys.readouterr().err
    assert (run_dir / "config.yaml").read_bytes() == before
    assert main([*command, "--train.max_steps=22"]) == 0
    out = capsys.readouterr().out
    assert (
        "schedule: cosine over 22 steps, learning rate 0.01, decay to 0.001 in the last 22; " in out
    )
    rates = rows(run_dir, "train/learning_rate")
    assert sorted(rates) == list(range(1, 23))
    line = f"22 steps in place of 20: the learning rate of step 21 is {rates[21]:.4g} in place of "
    assert line + "0.001" in out and rates[21] > 0.001
    assert {**rows(run_dir), **rows(uninterrupted)} == rows(run_dir)
    assert "max_steps: 22" in (run_dir / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("kind", "start", "jumps"),
    [("constant", 20, False), ("wsd", 18, False), ("wsd", 20, True), ("linear", 20, True)],
)
def test_what_an_extended_run_says_of_its_learning_rate(kind, start, jumps):
    config = OptimizerConfig(learning_rate=1e-2, lr_scheduler_type=kind)
    task = SimpleNamespace(config=SimpleNamespace(optimizer=config), steps=40)
    rate = float(learning_rate(config, 40)(start))
    text = f"40 steps in place of 20: the learning rate of step {start + 1} is {rate:.4g}"
    wanted = f"{text} in place of 0.001" if jumps else f"{text}, as before"
    assert _extended(task, start, 20) == wanted
    assert ("does not change the" in describe_schedule(config, 20)) == (kind != "linear")


def test_epochs(arguments, tmp_path, capsys, monkeypatch):
    """Every record is counted, however long that takes."""
    monkeypatch.setattr("bptjax.data.check.FIRST_SECONDS", 0)
    lines = "".join(json.dumps({"input_ids": [7] * n}) + "\n" for n in (11, 21, 33, 34) * 3)
    (tmp_path / "ids.jsonl").write_text(lines)
    command = [*arguments, f"--data.path={tmp_path / 'ids.jsonl'}", "--data.packing=none"]
    command += ["--data.eval_fraction=0", "--train.max_steps=null", "--train.sample_tokens=0"]
    command.append(f"--run_dir={tmp_path / 'run'}")
    assert main([*command, "--train.epochs=0.5"]) == 0
    line = "train.epochs=0.5: 4 steps of 2 sequences, 142 tokens; "
    line += "an epoch is 15 sequences, 285 tokens"
    assert line in capsys.readouterr().out
    assert sorted(rows(tmp_path / "run")) == [1, 2, 3, 4]
    saved = (tmp_path / "run" / "config.yaml").read_text()
    assert "epochs: 0.5" in saved and "max_steps: null" in saved
    assert main([*command, "--train.epochs=0.4"]) == 2
    assert "train.epochs=0.4: must not end the run in" in capsys.readouterr().err
    assert main([*command, "--train.epochs=0.6"]) == 0
    assert "5 steps in place of 4: the learning rate of step 5" in capsys.readouterr().out
    assert sorted(rows(tmp_path / "run")) == [1, 2, 3, 4, 5]


@pytest.fixture
def losses(monkeypatch):
    """Sets eval/loss by step, with which evaluations return at once."""
    found = {}

    def evaluator(task):
        return lambda model, batches, progress: found[loop[0].done]

    loop, start = [], _Loop.__init__

    def started(self, *arguments):
        loop[:] = [self]
        start(self, *arguments)

    monkeypatch.setattr(_Loop, "__init__", started)
    monkeypatch.setattr(Task, "evaluator", evaluator)
    return found


def test_early_stopping_and_the_best_checkpoint(
    arguments, tmp_path, monkeypatch, capsys, losses, caplog
):
    """Also stopped between, resumed, and resumed again when it is complete."""
    losses |= {0: 1.0, 2: 5.0, 4: 3.0, 6: 4.0, 8: 3.0, 10: 2.0, 12: math.nan, 14: 3.0, 16: 2.0}
    command = [*arguments, "--train.eval_steps=2", "--train.early_stopping_patience=3"]
    command += ["--checkpoint.keep_best=true", "--checkpoint.save_total_limit=1"]
    command += ["--train.sample_tokens=0"]
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert main([*command, f"--run_dir={whole}"]) == 0
    line = "early stopping at step 16: eval/loss not below 2.0000, the value of step 10, in 3 ev"
    out = capsys.readouterr().out
    assert line in out
    best = f"best:       {whole / 'checkpoints' / '10'}, eval/loss 2.0000; generate, evaluate and"
    assert best in out
    with monkeypatch.context() as patch:
        stop_at(13, signal.SIGTERM, patch)
        assert main([*command, f"--run_dir={run_dir}"]) == 143
    assert saved_steps(run_dir) == [10, 14]
    losses[0] = 0.0  # Not evaluated again.
    assert main([*command, f"--run_dir={run_dir}"]) == 0
    assert line in capsys.readouterr().out
    for directory in (whole, run_dir):
        assert saved_steps(directory) == [10, 16]
        assert json.loads((directory / "best.json").read_text()) == {"step": 10, "eval/loss": 2.0}
    assert rows(run_dir) == rows(whole) and max(rows(whole)) == 16
    assert main([*command, f"--run_dir={run_dir}"]) == 0
    assert max(rows(run_dir)) == 16 and line in capsys.readouterr().out
    # With more patience it goes on.
    losses |= {18: 1.5, 20: 1.6}
    command = [flag.replace("patience=3", "patience=4") for flag in command]
    assert main([*command, f"--run_dir={run_dir}"]) == 0
    assert max(rows(run_dir)) == 20 and saved_steps(run_dir) == [18, 20]
    assert json.loads((run_dir / "best.json").read_text())["step"] == 18
    assert not caplog.text


def saved_steps(run_dir):
    return sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir())


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


def test_kill_9_loses_at_most_the_steps_since_the_last_checkpoint(
    arguments, uninterrupted, tmp_path
):
    """A real process, killed twice wherever it happens to be."""
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "bptjax.train", *arguments, "--run_dir", str(run_dir)]
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


@pytest.mark.parametrize("broken", [True, False], ids=["parameters", "loss alone"])
def test_an_evaluation_that_is_not_finite(arguments, tmp_path, monkeypatch, capsys, broken):
    """Ends the run where parameters are broken. Else, as after an overflow of float16 in the
    forward pass, the run goes on and its report says so."""
    run_dir = tmp_path / "run"
    extra = ["--train.eval_steps=null", "--train.sample_tokens=0"]
    extra.append(f"--train.max_steps={1 if broken else 2}")
    if broken:
        extra += ["--optimizer.learning_rate=1e38", "--optimizer.weight_decay=1e38"]
    else:
        nans = iter([2.0, math.nan])
        monkeypatch.setattr(Task, "evaluator", lambda task: lambda *_: next(nans))
    assert main([*arguments, f"--run_dir={run_dir}", *extra]) == (1 if broken else 0)
    values = [r["eval/loss"] for r in read_metrics(run_dir / "metrics.jsonl") if "eval/loss" in r]
    assert values[0] > 0 and values[1:] == [None]
    out, err = capsys.readouterr()
    if broken:
        assert err.count("\n") == 1 and "step 1: eval/loss nan, parameters not finite" in err
        assert not (run_dir / "checkpoints" / "1").exists()
    else:
        assert "step 2: eval/loss nan: not finite, while all parameters are" in out
        assert "warning: held-out loss rose from 2.0000 before training to nan" in out


def test_a_loss_that_got_worse_is_said(arguments, tmp_path, capsys):
    command = [*arguments, f"--run_dir={tmp_path / 'run'}", "--train.max_steps=2"]
    assert main([*command, "--optimizer.learning_rate=3.0"]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("warning"))
    assert "held-out loss rose from 5." in line and "lower optimizer.learning_rate=3" in line


def test_start_and_evaluation_say_what_they_do(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    command = [*arguments, f"--run_dir={tmp_path / 'run'}", "--train.max_steps=1"]
    command.append("--logging.report_to=[wandb]")
    assert main([*command, "--train.eval_batches=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    wanted = (
        "starting: loading libraries",
        "reading data",
        "checking the records",
        "model: initializing",
        "step 0: evaluating on 1 of ",
        "compiling the step for 1 × 2 sequences of 32 tokens",
        "compiled in ",
    )
    found = [next(i for i, line in enumerate(lines) if line.startswith(w)) for w in wanted]
    assert found == sorted(found)
    assert " batches; train.eval_batches: null takes all" in lines[found[4]]
    assert any(line.startswith("held-out nats per token (first 1 batches): ") for line in lines)
    (warning,) = [line for line in lines if line.startswith("warning")]
    assert "wandb failed (" in warning and warning.endswith("; the run goes on without it")
    # What is left out is not reported as bits per byte of all.
    assert not any("bits per byte" in line for line in lines)


BAD = {
    "unknown key": (
        ["--train.max_stepz", "3"],
        "flag --train.max_stepz; nearest: --train.max_steps",
    ),
    "wrong type": (["--train.max_steps", "many"], "train.max_steps=many: must be an integer"),
    "wrong choice": (["--model.norm", "batch"], "model.norm=batch: must be one of rms, layer"),
    "wrong choice of an optional key": (
        ["--optimizer.state_dtype", "int4"],
        "error: optimizer.state_dtype=int4: must be one of float32, bfloat16, int8 or null\n",
    ),
    "layers that do not make groups": (
        ["--execution.remat", "nested(2)"],
        "nested(2) with 1 layers",
    ),
    "hidden by the schedule": (
        ["--execution.schedule", "fused", "--execution.save", "[query, key]"],
        "execution.save=query needs execution.schedule=split",
    ),
    "hidden by chunks": (
        ["--execution.save", "[query, gate]"],
        "execution.save=gate needs execution.ffn_chunk of at least train.seq_len=32",
    ),
    "not in the model": (
        ["--execution.save", "[gate]", "--execution.ffn_chunk", "32", "--model.gated", "false"],
        "execution.save=gate: the model's layers have none",
    ),
    "no such scaling": (
        ["--model.rope_parameters", "{rope_type: yarm, rope_theta: 1.0}"],
        "rope_type='yarm' is not known",
    ),
    "no such factor": (
        ["--model.rope_parameters", "{rope_type: linear, factor: -4.0, rope_theta: 1.0e+4}"],
        "rope_parameters.factor=-4.0 is not positive",
    ),
    "no average": (["--optimizer.adam_beta1", "1.5"], "optimizer.adam_beta1=1.5 is not in [0, 1)"),
    "no share": (["--optimizer.min_lr_ratio", "5"], "optimizer.min_lr_ratio=5.0 is not in [0, 1]"),
    "no seed": (["--seed", "99999999999999999999"], "seed=99999999999999999999 is not in"),
    "two open axes": (["--parallel.dp", "-1"], "one axis is -1 (fsdp, where it is not set)"),
    "no port": (
        ["--parallel.coordinator=h:99999", "--parallel.num_processes=2", "--parallel.process_id=0"],
        "parallel.coordinator=h:99999 is not host:port",
    ),
    "no such checkpoint": (["--model.name_or_path", "/nowhere"], "/nowhere is no directory"),
    "missing config": (["--config", "nowhere.yaml"], "nowhere.yaml"),
    "missing file": (["--data.path", "/nowhere.txt"], "/nowhere.txt"),
    "no heads": (["--model.num_heads", "3"], "num_heads=3"),
    "too few tokens": (["--train.seq_len", "100000"], "100000"),
    "no gpu": (["--device", "gpu"], 'pip install -e ".[gpu]"'),
    "offload from a CPU": (
        ["--execution.offload", "0.5"],
        "execution.offload=0.5 moves from a GPU",
    ),
    "no such attention": (["--execution.attention_implementation", "quick"], "'quick'"),
    "no cap": (
        ["--model.logits_softcap", "0"],
        "error: model.logits_softcap=0.0: must be positive; leave it out for none\n",
    ),
    "no key heads": (["--model.num_kv_heads", "0"], "model.num_kv_heads=0 is not positive"),
    "negative z-loss": (["--train.z_loss", "-1"], "train.z_loss=-1.0: must not be negative"),
    "no batches to evaluate on": (["--train.eval_batches", "0"], "train.eval_batches=0 is less"),
    "no such mesh": (
        ["--parallel.fsdp", "1", "--parallel.sp", "1", "--parallel.dp", "3"],
        "dp=3",
    ),
    "vocabulary": (["--model.vocab_size", "100"], "model.vocab_size=100"),
    "positions": (
        ["--model.position_embedding", "learned", "--model.max_position_embeddings", "8"],
        "model.max_position_embeddings=8",
    ),
    "steps and epochs": (
        ["--train.epochs", "2"],
        "train.epochs=2.0: must not be set beside train.max_steps=20; set one of them",
    ),
    "no epochs": (["--train.epochs", "0"], "train.epochs=0.0: must be positive"),
    "warm-up beyond the run": (
        ["--optimizer.warmup_steps", "21"],
        "optimizer.warmup_steps=21: the warm-up must end within the 20 steps of the run",
    ),
    "patience without evaluations": (
        ["--train.early_stopping_patience=2", "--train.eval_steps=null"],
        "train.early_stopping_patience=2 needs evaluations while the run trains; set train.eval_st",
    ),
    "the best of nothing": (
        ["--checkpoint.keep_best=true", "--data.eval_fraction=0"],
        "checkpoint.keep_best=true needs held-out data; set data.eval_fraction or data.eval_path",
    ),
    "no such tracker": (
        ["--logging.report_to=[comet]"],
        "logging.report_to=comet: must be a list, each item one of tensorboard, wandb",
    ),
    "not writable": (["--run_dir", "/proc/run"], "run_dir=/proc/run cannot be written"),
}


@pytest.mark.parametrize(("extra", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_exit_2_and_no_trace(
    arguments, tmp_path, monkeypatch, capsys, extra, message
):
    monkeypatch.undo()
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        from bptjax.parallel import mesh

        choose = mesh.select_devices
        patch.setattr(
            "bptjax.run.select_devices",
            lambda device: choose(device)[:1],
        )
        where = [] if "--run_dir" in extra else ["--run_dir", str(run_dir)]
        assert main([*([] if "--config" in extra else arguments), *where, *extra]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert not run_dir.exists()


def test_a_number_does_not_stand_for_a_group(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("train: 3\n")
    assert main(["--config", str(tmp_path / "config.yaml")]) == 2
    assert capsys.readouterr().err == "error: train=3: must be a group of keys\n"


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_config_is_read(file):
    assert parse(["--config", str(file)], "").run_dir == f"runs/{file.stem}"


def test_an_empty_data_set_is_refused(arguments, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    command = [*arguments, "--data.path", str(tmp_path / "empty.jsonl")]
    assert main([*command, "--run_dir", str(tmp_path / "run")]) == 2
    assert "holds no documents" in capsys.readouterr().err


def test_another_config_does_not_write_over_a_run(arguments, uninterrupted, capsys):
    before = {p: p.read_bytes() for p in uninterrupted.glob("*.*")}
    assert main([*arguments, "--run_dir", str(uninterrupted), "--model.num_layers", "2"]) == 2
    assert "model.num_layers=1, and this one has 2" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in uninterrupted.glob("*.*")} == before


def test_a_damaged_config_of_a_run_is_said(arguments, tmp_path, capsys):
    for text in ("", "train: ["):
        (tmp_path / "config.yaml").write_text(text)
        assert main([*arguments, "--run_dir", str(tmp_path)]) == 2
        assert "config.yaml is damaged" in capsys.readouterr().err


def test_what_is_reported_does_not_depend_on_the_text(arguments, tmp_path):
    """Held-out documents without a byte, or beside token ids; characters without a line's end."""
    files = {
        "empty": [{"text": ""}] * 3,
        "mixed": [{"text": "a text"}, {"input_ids": [1, 2, 3]}],
        "lines": [{"text": "abc " * 100}],
    }
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    short = ["--train.max_steps=1", "--run_dir"]
    for name in ("empty", "mixed"):
        held_out = f"--data.eval_path={tmp_path / name}.jsonl"
        assert main([*arguments, *short, str(tmp_path / f"{name} run"), held_out]) == 0
    own = [f"--data.path={tmp_path / 'lines.jsonl'}", "--data.tokenizer=char"]
    own += ["--data.eval_fraction=0"]
    assert main([*arguments, *short, str(tmp_path / "lines run"), *own]) == 0
    assert "sample: " in (tmp_path / "lines run" / "log.txt").read_text()


def test_ctrl_c_before_the_first_step(arguments, tmp_path, monkeypatch, capsys):
    def interrupted(config):
        raise KeyboardInterrupt

    monkeypatch.setattr("bptjax.run_data.open_split", interrupted)
    assert main([*arguments, "--run_dir", str(tmp_path / "run")]) == 130
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().err == "interrupted before training; no step is lost\n"


def test_a_refused_start_leaves_the_config_as_it_was(arguments, uninterrupted, capsys):
    """Another number of rows, or a run that another process is at."""
    before = (uninterrupted / "config.yaml").read_bytes()
    command = [*arguments, "--run_dir", str(uninterrupted)]
    assert main([*command, "--train.gradient_accumulation_steps", "3"]) == 2
    assert "rows, and here" in capsys.readouterr().err
    handle = os.open(uninterrupted, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert main([*command, "--execution.ffn_chunk", "7"]) == 2
    os.close(handle)
    assert "another process is running in" in capsys.readouterr().err
    assert (uninterrupted / "config.yaml").read_bytes() == before


def test_two_processes_do_not_share_a_run(arguments, tmp_path, capsys):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    handle = os.open(run_dir, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert main([*arguments, "--run_dir", str(run_dir)]) == 2
    assert "another process is running in" in capsys.readouterr().err
    os.close(handle)


def test_a_run_of_an_older_version_goes_on_with_the_defaults_of_new_keys(arguments, tmp_path):
    command = [*arguments, f"--run_dir={tmp_path}"]
    old = to_yaml(parse(command)).replace("  shards: 1\n", "").replace("  warmup_ratio: null\n", "")
    (tmp_path / "config.yaml").write_text(old)
    claim(tmp_path, parse(command))
    for key, found in (("data.num_shards=2", "=1"), ("optimizer.warmup_ratio=0.5", "=None")):
        name, _, value = key.partition("=")
        with pytest.raises(ValueError, match=f"run with {name}{found}, and this one has {value}"):
            claim(tmp_path, parse([*command, f"--{key}"]))
    # Fine-tuning had the defaults of pre-training.
    (tmp_path / "config.yaml").write_text(old.replace("name_or_path: null", "name_or_path: x"))
    tuned = [*command, "--model.name_or_path=x", "--train.compute_dtype=float32"]
    tuned.append("--optimizer.warmup_steps=0")
    with pytest.raises(ValueError, match="weight_decay=0.1, and this one has 0.0"):
        claim(tmp_path, parse(tuned))
    claim(tmp_path, parse([*tuned, "--optimizer.weight_decay=0.1"]))
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


PRE_TRAINING = {
    "optimizer.learning_rate": 3e-4,
    "optimizer.warmup_steps": 0,
    "optimizer.warmup_ratio": None,
    "optimizer.weight_decay": 0.1,
    "train.compute_dtype": "float32",
}
FINE_TUNING = PRE_TRAINING | {
    "optimizer.learning_rate": 2e-5,
    "optimizer.warmup_steps": None,
    "optimizer.warmup_ratio": 0.03,
    "optimizer.weight_decay": 0.0,
}
CHECKPOINT = "--model.name_or_path=somewhere"


@pytest.mark.parametrize(
    ("flags", "platform", "wanted"),
    [
        ([], "cpu", PRE_TRAINING),
        ([], "gpu", PRE_TRAINING),
        ([CHECKPOINT], "cpu", FINE_TUNING),
        ([CHECKPOINT], "gpu", FINE_TUNING | {"train.compute_dtype": "bfloat16"}),
        (
            [CHECKPOINT, "--adapter.type=lora"],
            "cpu",
            FINE_TUNING | {"optimizer.learning_rate": 2e-4},
        ),
        (
            [CHECKPOINT, "--adapter.type=qlora", "--optimizer.warmup_steps=7"],
            "cpu",
            FINE_TUNING
            | {"optimizer.learning_rate": 2e-4}
            | {"optimizer.warmup_steps": 7, "optimizer.warmup_ratio": None},
        ),
        (
            ["--optimizer.warmup_ratio=0.1", "--train.compute_dtype=float16"],
            "gpu",
            PRE_TRAINING
            | {"optimizer.warmup_steps": None, "optimizer.warmup_ratio": 0.1}
            | {"train.compute_dtype": "float16"},
        ),
    ],
)
def test_defaults_follow_the_work(flags, platform, wanted, tmp_path):
    config = parse(flags).on(platform)
    assert {key: flatten(config)[key] for key in wanted} == wanted
    # What a run writes, read again, is the same on any platform.
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = parse(["--config", str(tmp_path / "config.yaml")])
    assert again == config == again.on("cpu") == again.on("gpu")


def test_a_fine_tuning_run_says_its_defaults_and_keeps_them(
    arguments, uninterrupted, tmp_path, capsys
):
    text = Path(arguments[1]).read_text().replace("model: {", "model: {}\n_: {")
    lines = [line for line in text.splitlines() if not line.startswith(("_", "optimizer"))]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    command = [f"--config={tmp_path / 'config.yaml'}", f"--model.name_or_path={uninterrupted}"]
    command += [f"--run_dir={tmp_path / 'run'}", "--train.max_steps=2"]
    command += ["--train.eval_steps=null", "--train.sample_tokens=0"]
    assert main(command) == 0
    line = (
        "optimizer.learning_rate=2e-05, optimizer.weight_decay=0.0, optimizer.warmup_ratio=0.03, "
    )
    assert f"fine-tuning defaults: {line}train.compute_dtype=float32" in capsys.readouterr().out
    saved = (tmp_path / "run" / "config.yaml").read_text()
    for text in ("learning_rate: 2.0e-05", "warmup_ratio: 0.03", "dtype: float32"):
        assert text in saved
    assert rows(tmp_path / "run", "train/learning_rate")[1] == pytest.approx(2e-5)
    # On a GPU the dtype would be another; the run keeps its own.
    config = parse(command)
    assert _with_defaults(config, "gpu").train.compute_dtype == "float32"
    other = replace(config, run_dir=str(tmp_path / "other"))
    assert _with_defaults(other, "gpu").train.compute_dtype == "bfloat16"


def test_a_directory_with_something_else_is_not_taken(arguments, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("dear reader")
    assert main([*arguments, "--run_dir", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_out_of_memory_says_what_took_it(arguments, tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")

    monkeypatch.setattr("bptjax.trainer.Task.compile_step", refuse)
    assert main([*arguments, "--run_dir", str(tmp_path / "run")]) == 1
    message = capsys.readouterr().err
    assert "out of memory: parameters take" in message and "execution.remat=" in message


def test_saved_config_is_the_resolved_one(uninterrupted, arguments):
    saved = parse(["--config", str(uninterrupted / "config.yaml")], "")
    assert saved == parse([*arguments, "--run_dir", str(uninterrupted)], "")
    assert json.dumps(saved.train.max_steps) == "20"


def test_a_bad_record_deep_in_the_data(arguments, tmp_path, capsys, monkeypatch):
    """Refused at the start if found in time; else the run saves, ends, and can go on without it."""
    lines = [json.dumps({"text": "the quick brown fox " * 2})] * 400
    lines[20] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    command = [*arguments, f"--data.path={tmp_path / 'a.jsonl'}", "--data.shuffle=false"]
    command += ["--data.eval_fraction=0.01", "--train.eval_steps=null", "--train.sample_tokens=0"]
    assert main([*command, f"--run_dir={tmp_path / 'run'}"]) == 2
    assert "a.jsonl, record 21: " in capsys.readouterr().err and not (tmp_path / "run").exists()
    # The data are too many to be checked beforehand: the iterator meets the record.
    monkeypatch.setattr("bptjax.data.check.FIRST_SECONDS", 0)
    monkeypatch.setattr("bptjax.data.packing.BUFFER_TOKENS", 0)
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
    assert "bad records were skipped" in log or "sequences an epoch" in log
    # The check on its thread is ahead of the iterator.
    lines[20], lines[380] = lines[0], "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    capsys.readouterr()
    assert main([*command, f"--run_dir={tmp_path / 'third'}"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "saved: " in error and "record 381: " in error
    assert list((tmp_path / "third" / "checkpoints").iterdir())
