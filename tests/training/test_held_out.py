"""Evaluations of several sources: samples, losses by source, answered chats."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from bptjax.cli.train import main
from bptjax.config import Config
from bptjax.data.config import DataConfig, SourceConfig
from bptjax.run.metrics import read_metrics
from bptjax.training.html_report import FILE
from bptjax.training.setup import setup
from bptjax.training.state import init_state
from bptjax.training.step import evaluator
from training.runs import rows, stop_at


@pytest.fixture
def sources(tmp_path):
    """Many texts, and few chats of another language."""
    rng = random.Random(0)
    text = [{"text": "".join(rng.choices("abcdef ", k=rng.randrange(40, 90)))} for _ in range(300)]
    chat = [
        {"prompt": f"{i} + {i}?", "answer": "".join(rng.choices("0123456789", k=20))}
        for i in range(90)
    ]
    for name, records in (("text", text), ("chat", chat)):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    return [{"path": str(tmp_path / f"{name}.jsonl")} for name in ("text", "chat")]


def command(arguments, sources, run_dir):
    found = [*arguments, "--data.path=null", f"--data.sources={json.dumps(sources)}"]
    found += ["--data.eval_fraction=0.3", "--train.max_steps=10", "--train.eval_steps=5"]
    return [*found, "--train.eval_batches=12", "--train.seq_len=64", f"--run_dir={run_dir}"]


@pytest.mark.thorough
def test_losses_by_source_of_a_limited_evaluation(
    arguments, sources, tmp_path, monkeypatch, capsys
):
    """The same sample in a run that is stopped and resumed."""
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert main(command(arguments, sources, whole)) == 0
    out = capsys.readouterr().out
    assert "step 0: evaluating on 12 batches, a sample of " in out
    records = [r for r in read_metrics(whole / "metrics.jsonl") if "eval/loss" in r]
    for record in records:
        text, chat = record["eval/loss/text.jsonl"], record["eval/loss/chat.jsonl"]
        assert min(text, chat) < record["eval/loss"] < max(text, chat)
    last = records[-1]
    assert last["eval/loss/text.jsonl"] < last["eval/loss/chat.jsonl"] - 0.1
    line = f"  chat.jsonl: {records[0]['eval/loss/chat.jsonl']:.4f} before training, "
    assert line + f"{last['eval/loss/chat.jsonl']:.4f} after" in out
    assert f"step 10: eval/loss {last['eval/loss']:.4f}, eval/loss/text.jsonl " in out
    assert "eval/loss/chat.jsonl" in (whole / FILE).read_text()
    with monkeypatch.context() as patch:
        stop_at(3, 15, patch)
        assert main(command(arguments, sources, run_dir)) == 143
    assert main(command(arguments, sources, run_dir)) == 0
    for name in ("eval/loss", "eval/loss/text.jsonl", "eval/loss/chat.jsonl"):
        assert rows(run_dir, name) == rows(whole, name)


def small(sources, tmp_path, **train):
    config = Config(run_dir=str(tmp_path / "run"), device="cpu")
    own = [SourceConfig(str(source["path"])) for source in sources]
    model = replace(config.model, hidden_size=16, num_layers=1, num_heads=2)
    train = replace(config.train, seq_len=64, max_steps=1, **train)
    return replace(config, model=model, train=train, data=DataConfig(sources=own))


@pytest.mark.parametrize("limit", [None, 8])
def test_a_mean_over_all_sources_is_one_of_tokens(sources, tmp_path, limit):
    run = setup(small(sources, tmp_path, eval_batches=limit))
    run.batches.close()
    model, evaluate = init_state(run.spec).model, evaluator(run.spec)
    found = evaluate(model, run.evaluation.sources)
    assert evaluate(model, {"": run.evaluation}) == {"eval/loss": found["eval/loss"]}
    counts = [
        sum(int((batch["labels"] != -100).sum()) for batch in batches)
        for batches in run.evaluation.sources.values()
    ]
    each = [found[f"eval/loss/{name}.jsonl"] for name in ("text", "chat")]
    assert found["eval/loss"] == pytest.approx(np.average(each, weights=counts), rel=1e-12)


def test_answered_chats_are_a_sample_of_all_sources(sources, tmp_path):
    other = tmp_path / "more.jsonl"
    other.write_text('{"prompt": "x", "answer": "y"}\n' * 60)
    run = setup(small([*sources, {"path": other}], tmp_path, num_eval_generations=12))
    run.batches.close()
    answers = [run.tokenizer.decode(answer) for _, answer, _ in run.eval_prompts]
    same = np.mean([answer.strip().startswith("y") for answer in answers])
    assert len(answers) == 12 and 0 < same < 1
