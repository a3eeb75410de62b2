"""Runs learn, stop, resume exactly, survive kills, and say clearly what stopped them."""

import json
import math
import re
import shutil
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from tiers import fast

from bptjax.cli.train import main
from bptjax.cost.devices import KINDS, DeviceKind
from bptjax.data.tokenizer import ByteTokenizer
from bptjax.optim.optimizer import OptimizerConfig
from bptjax.optim.schedule import describe_schedule, learning_rate
from bptjax.run.metrics import JsonlWriter, RunProgress, read_metrics
from bptjax.training.loop import TrainLoop
from bptjax.training.resume import describe_extension
from training.runs import rows, saved_steps, stop_at


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
    heads = "attention:|compiled in|model:|a step holds|schedule:|(training|held-out) data:|  "
    short = [line for line in lines if re.match(heads, line)]
    assert len(short) > 12 and max(map(len, short)) <= 80


@pytest.mark.parametrize(
    ("number", "code"), fast([(signal.SIGTERM, 143), (signal.SIGINT, 130)], [(signal.SIGTERM, 143)])
)
def test_stop_and_resume_is_exact(
    arguments, uninterrupted, tmp_path, monkeypatch, number, code, capsys
):
    run_dir = tmp_path / "run"
    command = [*arguments, "--run_dir", str(run_dir)]
    if number == signal.SIGTERM:
        command += ["--checkpoint.local_dir", str(tmp_path / "fast")]
    on_disk = []
    with monkeypatch.context() as patch:
        stop_at(9, number, patch)
        log = RunProgress.log

        def logged(self, line):
            log(self, line)
            if line.startswith("saved step"):
                on_disk.append((run_dir / "checkpoints" / "10" / "manifest.json").exists())

        patch.setattr(RunProgress, "log", logged)
        assert main(command) == code
    saved = {p.name for p in (run_dir / "checkpoints").iterdir()}
    # The checkpoint of step 6 may have come too late to be copied from the local directory.
    assert saved - {"6", ".local"} == {"10"} and (number == signal.SIGTERM or "6" in saved)
    assert not list(tmp_path.glob("fast/*"))
    name, log = signal.Signals(number).name, (run_dir / "log.txt").read_text()
    assert f"{name}: saving step 10, then stopping" in log
    line = f"saved step 10 in {run_dir / 'checkpoints' / '10'}; the same command continues from th"
    assert line in log and line in capsys.readouterr().out.replace("\n", "")
    assert on_disk == [True]
    assert "<p>saved step 10 in " in (run_dir / "report.html").read_text()
    # Where the moments are is no other experiment.
    assert main([*command, "--optimizer.state_memory_kind", "pinned_host"]) == 0
    assert rows(run_dir) == rows(uninterrupted)
    assert rows(run_dir, "eval/loss") == rows(uninterrupted, "eval/loss")
    assert rows(run_dir, "train/tokens_seen") == rows(uninterrupted, "train/tokens_seen")
    report = (run_dir / "report.html").read_text()
    assert "<p>finished 20 steps" in report and 'aria-label="loss' in report
    log = (run_dir / "log.txt").read_text()
    assert "resumed at step 10" in log and log.count("attention: scan\n") == 2
    assert log.count(" sequences of 32 tokens; the last compilation took ") == 1


def test_a_complete_run_is_left_alone(arguments, uninterrupted, capsys):
    before = (uninterrupted / "metrics.jsonl").read_text()
    assert main([*arguments, "--run_dir", str(uninterrupted)]) == 0
    assert (uninterrupted / "metrics.jsonl").read_text() == before
    assert "bits per byte" in capsys.readouterr().out


@pytest.mark.thorough
def test_gradients_move_to_host_memory_in_a_resumed_run(arguments, uninterrupted, tmp_path):
    """The place of the gradients changes no result, and no checkpoint holds them."""
    runs = []
    for name, flags in (("device", []), ("host", ["--optimizer.in_backward=true"])):
        run_dir = shutil.copytree(uninterrupted, tmp_path / name)
        assert main([*arguments, f"--run_dir={run_dir}", "--train.max_steps=22", *flags]) == 0
        runs.append(run_dir)
    losses = [[*rows(run_dir).values()] for run_dir in runs]
    assert len(losses[0]) == 22
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    log = " ".join(line[20:].strip() for line in (runs[1] / "log.txt").read_text().splitlines())
    assert "moves gradients to host memory, because optimizer.clip=exact and" in log
    saved = [json.loads((run_dir / "checkpoints/22/meta/metadata").read_text()) for run_dir in runs]
    assert saved[0]["leaves"] == saved[1]["leaves"]


@pytest.mark.thorough
def test_a_finished_run_is_extended(arguments, uninterrupted, tmp_path, capsys):
    run_dir = shutil.copytree(uninterrupted, tmp_path / "run")
    command = [*arguments, f"--run_dir={run_dir}", "--train.sample_tokens=0"]
    before = (run_dir / "config.yaml").read_bytes()
    assert main([*command, "--train.max_steps=19"]) == 2
    message = f"train.max_steps=19: must not end the run in {run_dir} before its step 20; set a"
    assert message in capsys.readouterr().err
    assert (run_dir / "config.yaml").read_bytes() == before
    assert main([*command, "--train.max_steps=22"]) == 0
    out = capsys.readouterr().out
    schedule = (
        "schedule: cosine over 22 steps, learning rate 0.01",
        "  decay to 0.001 in the last 22",
    )
    assert "\n".join(schedule) in out
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
def test_learning_rate_of_an_extended_run(kind, start, jumps):
    config = OptimizerConfig(learning_rate=1e-2, lr_scheduler_type=kind)
    spec = SimpleNamespace(config=SimpleNamespace(optimizer=config), steps=40)
    rate = float(learning_rate(config, 40)(start))
    text = f"40 steps in place of 20: the learning rate of step {start + 1} is {rate:.4g}"
    wanted = f"{text} in place of 0.001" if jumps else f"{text}, as before"
    assert describe_extension(spec, start, 20) == wanted
    *_, extension = describe_schedule(config, 20)
    assert ("does not change the" in extension) == (kind != "linear")


@pytest.fixture
def losses(monkeypatch):
    """Sets eval/loss by step, with which evaluations return at once, or None where they fail."""
    found = {}

    def evaluate(model, batches, progress):
        if (loss := found[loop[0].done]) is None:
            raise OSError("changed")
        return {"eval/loss": loss}

    def evaluator(spec):
        return evaluate

    loop, start = [], TrainLoop.__init__

    def started(self, *arguments):
        loop[:] = [self]
        start(self, *arguments)

    monkeypatch.setattr(TrainLoop, "__init__", started)
    monkeypatch.setattr("bptjax.training.loop.evaluator", evaluator)
    return found


@pytest.mark.thorough
def test_early_stopping_and_the_best_checkpoint(
    arguments, tmp_path, monkeypatch, capsys, losses, caplog
):
    """Also stopped between, resumed, and resumed again when it is complete. A failed evaluation is
    made up for."""
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
    losses[10] = None
    assert main([*command, f"--run_dir={run_dir}"]) == 1
    assert "step 10: evaluating: changed; step 10 is saved" in capsys.readouterr().err
    losses[10], write = 2.0, JsonlWriter.write

    def killed(self, step, metrics):
        if step == 11:
            raise OSError("killed")
        write(self, step, metrics)

    with monkeypatch.context() as patch:
        # The checkpoint from before the evaluation is still the newest one.
        patch.setattr(JsonlWriter, "write", killed)
        assert main([*command, f"--run_dir={run_dir}"]) == 1
        patch.setattr(JsonlWriter, "write", write)
        stop_at(13, signal.SIGTERM, patch)
        assert main([*command, f"--run_dir={run_dir}"]) == 143
    assert saved_steps(run_dir) == [10, 14]
    losses[0] = 0.0  # Not evaluated again.
    assert main([*command, f"--run_dir={run_dir}"]) == 0
    assert line in capsys.readouterr().out
    both = whole, run_dir
    for directory in both:
        assert saved_steps(directory) == [10, 16]
        assert json.loads((directory / "best.json").read_text()) == {"step": 10, "eval/loss": 2.0}
    assert rows(run_dir) == rows(whole) and max(rows(whole)) == 16
    evaluated = [[r for r in read_metrics(x / "metrics.jsonl") if "eval/loss" in r] for x in both]
    assert evaluated[0] == evaluated[1] and len(evaluated[0]) == 9
    assert main([*command, f"--run_dir={run_dir}"]) == 0
    assert max(rows(run_dir)) == 16 and line in capsys.readouterr().out
    # With more patience it goes on.
    losses |= {18: 1.6, 20: None}
    command = [flag.replace("patience=3", "patience=4") for flag in command]
    assert main([*command, f"--run_dir={run_dir}"]) == 1
    assert json.loads((run_dir / "best.json").read_text())["step"] == 18
    losses[20] = 1.5
    assert main([*command, f"--run_dir={run_dir}"]) == 0
    assert max(rows(run_dir)) == 20 and saved_steps(run_dir) == [18, 20]
    assert json.loads((run_dir / "best.json").read_text())["step"] == 20
    assert not caplog.text


@pytest.mark.thorough
def test_trackers_get_a_last_evaluation_that_is_repeated(arguments, tmp_path, monkeypatch, losses):
    sent = []
    wandb = SimpleNamespace(Settings=dict, log=sent.append, finish=lambda: None)
    wandb.setup = lambda: SimpleNamespace(settings=SimpleNamespace(mode="offline"))
    wandb.init, wandb.define_metric = (lambda **_: wandb), (lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    losses |= {0: 1.0, 2: None}
    command = [*arguments, f"--run_dir={tmp_path / 'run'}", "--train.max_steps=2"]
    command += ["--logging.report_to=[wandb]", "--train.sample_tokens=0"]
    assert main(command) == 1
    losses[2] = 3.0
    assert main(command) == 0
    evaluated = [(x["step"], x["eval/loss"]) for x in sent if "eval/loss" in x]
    assert evaluated == [(0, 1.0), (2, 3.0)]


@pytest.mark.thorough
def test_a_repeated_evaluation_is_not_repeated_again(
    arguments, tmp_path, monkeypatch, capsys, losses
):
    """But for the best one, if the run was killed before it named its checkpoint."""
    run_dir, write = tmp_path / "run", JsonlWriter.write
    losses |= {0: 1.0, 1: 4.0, 2: None}
    command = [*arguments, f"--run_dir={run_dir}", "--train.max_steps=2", "--train.eval_steps=1"]
    command += ["--checkpoint.keep_best=true", "--train.sample_tokens=0"]
    assert main(command) == 1
    losses[2] = 3.0

    def killed(self, step, metrics):
        write(self, step, metrics)
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(JsonlWriter, "write", killed)
        assert main(command) == 1
    assert json.loads((run_dir / "best.json").read_text())["step"] == 1
    assert main(command) == 0
    best, records = (run_dir / name for name in ("best.json", "metrics.jsonl"))
    assert json.loads(best.read_text()) == {"step": 2, "eval/loss": 3.0}
    text, losses[2] = records.read_text(), None
    capsys.readouterr()
    assert main(command) == 0
    assert "step 2: evaluating" not in capsys.readouterr().out and records.read_text() == text
    assert rows(run_dir, "eval/loss") == {0: 1.0, 1: 4.0, 2: 3.0}


@pytest.mark.thorough
def test_start_and_evaluation_log_their_work(arguments, tmp_path, capsys, monkeypatch):
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
        "step 0: evaluating on 1 batch, a sample of ",
        "compiling the step for 1 × 2 sequences of 32 tokens",
        "compiled in ",
    )
    found = [next(i for i, line in enumerate(lines) if line.startswith(w)) for w in wanted]
    assert found == sorted(found)
    assert " documents; train.eval_batches: null evaluates all" in lines[found[4]]
    assert any(line.startswith("held-out nats per token (sample of 1 batch): ") for line in lines)
    (warning,) = [line for line in lines if line.startswith("warning")]
    assert "wandb failed (" in warning and warning.endswith("; the run continues without it")
    # What is left out is not reported as bits per byte of all.
    assert not any("bits per byte" in line for line in lines)


@pytest.mark.thorough
def test_utilization_is_model_flops_over_the_peak(arguments, tmp_path, monkeypatch):
    """On documents that fill their sequences."""
    monkeypatch.setitem(KINDS, "cpu", DeviceKind("cpu", 0, 1e9, 0))
    (tmp_path / "ids.jsonl").write_text((json.dumps({"input_ids": [7] * 33}) + "\n") * 8)
    command = [*arguments, f"--data.path={tmp_path / 'ids.jsonl'}", "--data.packing=none"]
    command += ["--data.eval_fraction=0", "--train.max_steps=3", "--train.sample_tokens=0"]
    assert main([*command, f"--run_dir={tmp_path / 'run'}"]) == 0
    *_, last = read_metrics(tmp_path / "run" / "metrics.jsonl")
    # Two sequences of 32 tokens; one layer of width 16 and feed-forward 64, two heads, tied bytes.
    assert last["train/tokens_seen"] == 3 * 64
    parameters = 4 * 16 * 16 + 3 * 16 * 64 + 3 * 16 + ByteTokenizer.vocab_size * 16
    flops = 6 * parameters * 64 + 12 * (2 * 32 * 33 / 2) * 16
    seconds = last["throughput/step_time"]
    assert last["throughput/mfu"] == pytest.approx(flops / seconds / 1e9)
