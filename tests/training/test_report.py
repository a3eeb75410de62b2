"""The files and the summary of a run."""

import itertools
import json
from types import SimpleNamespace
from typing import cast

import jax
import numpy as np
import pytest

from bptjax.cli.train import main
from bptjax.data.tokenizer import ByteTokenizer
from bptjax.run.progress import FIRST
from bptjax.training.report import predict_answers
from bptjax.training.setup import TrainingRun
from bptjax.training.state import TrainState


@pytest.mark.thorough
def test_a_loss_that_got_worse_is_said(arguments, tmp_path, capsys):
    command = [*arguments, f"--run_dir={tmp_path / 'run'}", "--train.max_steps=2"]
    assert main([*command, "--optimizer.learning_rate=3.0"]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("warning"))
    assert "held-out loss rose from 5." in line and "lower optimizer.learning_rate=3" in line


@pytest.mark.thorough
def test_the_report_takes_any_held_out_data(arguments, tmp_path):
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


@pytest.mark.parametrize("end", [[], [256]], ids=["endless", "ended"])
def test_complete_answers_are_compared(monkeypatch, end):
    """By the reference's length only where no stop token can end an answer."""
    tokenizer = ByteTokenizer()
    prompts = [
        (tokenizer.encode("?"), np.r_[tokenizer.encode(text), end], "?")
        for text in ("no.", "never.")
    ]
    spec = SimpleNamespace(mesh=jax.make_mesh((1,), ("dp",)), compute_dtype="float32")
    run = SimpleNamespace(eval_prompts=prompts, tokenizer=tokenizer, spec=spec)
    written = np.stack([tokenizer.encode(text) for text in ("no. On", "never.")], 1)
    monkeypatch.setattr("bptjax.training.report.generate", lambda *a, **k: iter(written))
    clock = itertools.count(0.0, FIRST)
    monkeypatch.setattr("bptjax.run.progress.monotonic", lambda: next(clock))
    state, shown = cast(TrainState, SimpleNamespace(model=None)), []
    found = predict_answers(cast(TrainingRun, run), state, shown.append)
    # The first piece of work gives no estimate.
    assert shown[0] == f"answering: {1 / len(max((x for _, x, _ in prompts), key=len)):.0%}"
    assert shown[1].endswith(" left")
    assert [one["prediction"] for one in found] == ["no. On" if end else "no.", "never."]
