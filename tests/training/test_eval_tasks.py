"""train.eval_tasks: scores during a run, and checkpoint.best_metric, which may follow them."""

import json

import pytest

from bptjax.cli.train import main
from bptjax.run.checkpoint import Best
from bptjax.run.metrics import read_metrics
from bptjax.tasks import scores
from bptjax.training.eval_tasks import describe_tasks
from training.runs import rows, saved_steps

TASKS = ["--train.eval_tasks=[passkey, niah_single]", "--train.eval_task_lengths=[600]"]
TASKS += ["--train.eval_task_samples=2", "--train.max_steps=6", "--train.eval_steps=2"]
TASKS += ["--data.eval_fraction=0", "--train.sample_tokens=0", "--checkpoint.save_steps=6"]
BEST = ["--checkpoint.keep_best=true", "--checkpoint.best_metric=eval/tasks/passkey/600"]


@pytest.mark.thorough
def test_a_run_keeps_the_checkpoint_with_the_best_score(arguments, tmp_path, monkeypatch, capsys):
    """Without held-out data. The right answers are those of steps 0 and 4."""
    asked = []

    def answers(model, tokenizer, prompts, **options):
        *_, texts = real(model, tokenizer, prompts, **{**options, "new_tokens": 2})
        evaluation = len(asked) // 4
        asked.extend(tokenizer.decode(prompt.tolist()) for prompt in prompts)
        keys = [prompt.partition("key is ")[2][:5] for prompt in asked[-len(prompts) :]]
        yield keys if evaluation in (0, 2) else texts

    real = scores.continuations
    monkeypatch.setattr(scores, "continuations", answers)
    run = tmp_path / "run"
    assert main([*arguments, *TASKS, *BEST, f"--run_dir={run}"]) == 0
    assert rows(run, "eval/tasks/passkey/600") == {0: 1.0, 2: 0.0, 4: 1.0, 6: 0.0}
    assert rows(run, "eval/tasks") == {0: 0.5, 2: 0.0, 4: 0.5, 6: 0.0}
    assert asked[:4] == asked[-4:]
    assert saved_steps(run) == [4, 6]
    best = {"step": 4, "eval/tasks/passkey/600": 1.0}
    assert json.loads((run / "best.json").read_text()) == best
    kept = list(read_metrics(run / "tasks.jsonl"))
    assert [(r["step"], r["task"]) for r in kept[:3]] == [
        (0, "passkey"),
        (0, "niah_single"),
        (2, "passkey"),
    ]
    out, report = capsys.readouterr().out, (run / "report.html").read_text()
    fell = "warning: passkey in 600 tokens fell by more than its interval: 1.00 (0.34–1.00) before"
    for text in (out, report):
        assert fell in " ".join(text.split())
    assert "mean score of tasks" in report and "<td>0.00 (0.00–0.66)</td>" in report
    assert f"best:       {run / 'checkpoints' / '4'}, eval/tasks/passkey/600 1.0000" in out


def test_a_line_tells_of_scores_that_fell():
    def row(step, score, low, high, length=600):
        return dict(step=step, task="record", length=length, score=score, low=low, high=high)

    apart = [row(3, 0.9, 0.8, 1.0), row(9, 0.5, 0.3, 0.7)]
    one_end = [row(0, 0.9, 0.8, 1.0), row(9, 0.7, 0.4, 0.9)]
    other_length = [row(0, 0.9, 0.8, 1.0), row(9, 0.5, 0.3, 0.7, 900)]
    line, fell = describe_tasks(apart)
    assert line == ("record, 600 tokens: 0.90 (0.80–1.00) at step 3, 0.50 (0.30–0.70) at step 9")
    assert fell.startswith("warning: record in 600 tokens fell by more than its interval")
    assert len([*describe_tasks(one_end)]) == len([*describe_tasks(other_length)]) == 1


def test_the_best_has_the_direction_of_its_metric():
    for metric, best in (("eval/loss/a", 1.0), ("eval/tasks", 3.0)):
        found = Best(metric)
        for step, value in ((2, 2.0), (4, 3.0), (6, 1.0)):
            found.add(step, value)
        assert found.value == best
    older = {"step": 4, "loss": 1.5, "since": 2}
    assert Best.continued("eval/loss", older) == Best("eval/loss", 4, 1.5, 2)
    assert Best.continued("eval/tasks", older) == Best("eval/tasks")
