"""A resumed run whose metrics.jsonl or log.txt lost a part."""

import shutil

import pytest

from bptjax.cli.train import main
from bptjax.training.html_report import FILE
from training.runs import rows


def cut_metrics(run):
    file = run / "metrics.jsonl"
    text = file.read_text()
    file.write_text(text[: text.index('{"step": 4') + 9])


def cut_head(run):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[4:]))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (lambda run: None, None),
        (
            lambda run: (run / "metrics.jsonl").unlink(),
            "metrics.jsonl lacks 24 of 24 records up to step 20 of steps 1 to 20;",
        ),
        (
            lambda run: (run / "metrics.jsonl").write_text(""),
            "metrics.jsonl lacks 24 of 24 records up to step 20 of steps 1 to 20;",
        ),
        (cut_metrics, "metrics.jsonl lacks 20 of 24 records up to step 20 of steps 4 to 20;"),
        (cut_head, "metrics.jsonl lacks 4 of 24 records up to step 20 of steps 1 to 3;"),
        (lambda run: (run / "log.txt").unlink(), "log.txt lacks "),
    ],
    ids=["nothing", "removed", "emptied", "cut", "head", "log"],
)
def test_a_lost_history_is_said_once(arguments, uninterrupted, tmp_path, capsys, damage, wanted):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run)
    damage(run)
    kept = rows(run) if (run / "metrics.jsonl").exists() else {}
    # Fewer records from here on are no loss.
    own = ["--logging.steps=2", f"--run_dir={run}"]
    assert main([*arguments, "--train.max_steps=22", *own]) == 0
    out = capsys.readouterr().out
    lines = [x for x in out.splitlines() if " lacks " in x]
    assert [x.startswith(f"warning: {wanted}") for x in lines] == [True] * (wanted is not None)
    assert rows(run) == kept | {22: rows(run)[22]}
    if wanted is not None:
        assert f"warning: {wanted}" in (run / FILE).read_text()
    assert ("before training" in out) == (0 in rows(run, "eval/loss"))
    # Not again: the next checkpoint knows the records that are left.
    assert main([*arguments, "--train.max_steps=23", *own]) == 0
    assert " lacks " not in capsys.readouterr().out
