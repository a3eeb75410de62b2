"""Chat templates that read the date or draw random values, in runs, previews and generation."""

import io
import json
import random
import signal
from datetime import datetime

import pytest
from chats import CHATML, loaded, raw_tokenizer
from rich.console import Console

from bptjax.cli.generate import generate
from bptjax.cli.preview import PreviewConfig, preview
from bptjax.config_parser import parse
from bptjax.data.renderer import Renderer
from bptjax.run.metrics import read_metrics
from bptjax.training.loop import train
from bptjax.training.setup import setup
from training.runs import stop_at

DATED = (
    "<|im_start|>system\nToday is {{ strftime_now('%d %b %Y, %H:%M:%S') }}.<|im_end|>\n" + CHATML
)
DRAWN = "{{ ['Hi', 'Good day', 'Hello there'] | random }}. {{ lipsum(n=1, min=2, max=5) }}" + CHATML
FIRST, LATER = datetime(2026, 11, 25, 23, 59, 58), datetime(2027, 1, 3, 8, 0, 0)
LOGGED = ("step", "train/loss", "train/grad_norm", "train/tokens_seen", "eval/loss")


@pytest.fixture
def start(tmp_path, arguments):
    """Returns a function that starts or resumes a run on a day; returns its exit code."""
    rng = random.Random(0)
    rows = [
        [
            {"role": "user", "content": "".join(rng.choices("abc ", k=rng.randrange(3, 30)))},
            {"role": "assistant", "content": "".join(rng.choices("xyz ", k=rng.randrange(3, 30)))},
        ]
        for _ in range(60)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": x}) + "\n" for x in rows))

    def start(name, day, template=DATED, *, steps=12):
        if not (tmp_path / name).exists():
            loaded(raw_tokenizer("bytes", template), tmp_path / f"{name}-tokenizer")
        argv = [*arguments, f"--data.path={tmp_path / 'a.jsonl'}", "--train.sample_tokens=0"]
        argv += [f"--data.tokenizer={tmp_path}/{name}-tokenizer", f"--train.max_steps={steps}"]
        argv += ["--train.seq_len=128", "--train.num_eval_generations=2"]
        return train(setup(parse([*argv, f"--run_dir={tmp_path / name}"]), day))

    return start


def logged(run_dir):
    records = read_metrics(run_dir / "metrics.jsonl")
    predictions = list(read_metrics(run_dir / "predictions.jsonl"))
    return [{name: r.get(name) for name in LOGGED} for r in records], predictions


@pytest.mark.thorough
@pytest.mark.parametrize("template", [DATED, DRAWN], ids=["date", "random"])
def test_a_run_resumed_on_another_day_trains_on_the_same_tokens(
    start, tmp_path, monkeypatch, template
):
    assert start("whole", FIRST, template) == 0
    with monkeypatch.context() as patch:
        stop_at(5, signal.SIGTERM, patch)
        assert start("run", FIRST, template) == 143
    before = (tmp_path / "run" / "start.json").read_text()
    assert start("run", LATER, template) == 0
    assert logged(tmp_path / "run") == logged(tmp_path / "whole")
    assert (tmp_path / "run" / "start.json").read_text() == before
    log = (tmp_path / "run" / "log.txt").read_text()
    line = "chats: the chat template reads the date: 2026-11-25 23:59:58, the start of the run"
    if template == DRAWN:
        line = "chats: the chat template draws random values, the same for equal chats"
    assert log.count(line) == 2
    if template == DATED:
        assert start("later", LATER) == 0
        assert logged(tmp_path / "later") != logged(tmp_path / "whole")


@pytest.mark.thorough
def test_a_missing_date_is_said_and_a_damaged_one_refused(start, tmp_path, monkeypatch):
    assert start("run", FIRST, steps=2) == 0
    file = tmp_path / "run" / "start.json"
    for text in ('{"date": "yesterday"}', '{"date": 5}', "[]", "{"):
        file.write_text(text)
        with pytest.raises(ValueError, match="start.json"):
            start("run", LATER, steps=2)
    file.unlink()
    assert start("run", LATER, steps=3) == 0
    wanted = "warning: start.json of this run is missing, with the date that its chats read; from "
    assert (
        wanted + "here on they read 2027-01-03T08:00:00"
        in (tmp_path / "run" / "log.txt").read_text()
    )


@pytest.mark.thorough
def test_a_preview_reads_the_date_of_its_run(start, tmp_path, capsys):
    assert start("run", FIRST, steps=1) == 0
    argv = [f"--data.path={tmp_path / 'a.jsonl'}", f"--data.tokenizer={tmp_path}/run-tokenizer"]
    argv += ["--train.seq_len=128", "--shown_tokens=2000"]
    for name, found in (("run", True), ("none", False)):
        out = io.StringIO()
        capsys.readouterr()
        config = parse([*argv, f"--run_dir={tmp_path / name}"], "", PreviewConfig, "preview")
        preview(config, Console(file=out, width=200))
        assert ("Today is 25 Nov 2026, 23:59:58." in out.getvalue()) == found
        line = "reads the date: " + ("2026-11-25 23:59:58" if found else "now")
        assert line in out.getvalue()


def test_generation_reads_the_present_date_and_says_so(caplog):
    import jax

    from bptjax.models.config import ModelConfig
    from bptjax.models.decoder import Decoder

    tokenizer = loaded(raw_tokenizer("bytes", DATED))
    sizes = dict(hidden_size=16, num_layers=1, num_heads=2, vocab_size=tokenizer.vocab_size)
    model = Decoder(ModelConfig(**sizes), jax.random.key(0))
    generate(model, tokenizer, "Hi", chat=True, max_new_tokens=1)
    assert "chats: the chat template reads the date: now" in caplog.text


def test_renderers_agree():
    """In every process: the order of sets, random values in all parts, seconds since 1970."""
    keys = {f"key{n}": "" for n in range(20)}
    messages = [{"role": "user", "content": "Hi", **keys}] * 2
    template = (
        "{{ (messages[0].keys() - ['role']) | list }} {{ range(99) | random }} {{ lipsum() }} "
        "{{ range(9) | map('string') | list | random }} {{ strftime_now('%s %Z') }}"
    )
    parts = [(1, False), (2, False), (2, True)]
    now = FIRST.isoformat()
    found = [Renderer().render(template, messages, {}, parts, False, now) for _ in range(3)]
    assert found[0] == found[1] == found[2] and len({text for text, _ in found[0]}) == 1
    other = [{"role": "user", "content": "Ho", **keys}] * 2
    assert Renderer().render(template, other, {}, parts, False, now) != found[0]
