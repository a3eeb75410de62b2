"""report.html: content, escaping, no network, its width on a phone, runs that fail."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from types import SimpleNamespace

import jax
import pytest

from bptjax.run.json_files import REPORT_FACTS as FACTS
from bptjax.training import html_report
from bptjax.training.html_report import FILE, reporting, write_report
from bptjax.training.line_chart import POINTS, line_chart

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "</pre><script>alert(1)</script><img src=https://example.org/x.png> & \"'"


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, file):
        super().__init__()
        self.tags, self.attributes, self.text = set(), [], ""
        self.feed(file.read_text())

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def hostile(uninterrupted, tmp_path):
    """A copy of the finished tiny run with HTML in each of its texts, its report written again."""
    run = tmp_path / "<b>run"
    shutil.copytree(uninterrupted, run, ignore=shutil.ignore_patterns("checkpoints"))
    facts = json.loads((run / FACTS).read_text())
    facts |= {name: HOSTILE for name in ("data", "end", "sample", "template")}
    facts |= {"notes": [HOSTILE], "results": [HOSTILE + "long" * 99], "kernels": [HOSTILE]}
    facts["examples"][0] |= {"source": HOSTILE, "spans": [[HOSTILE, True], [HOSTILE, False]]}
    (run / FACTS).write_text(json.dumps(facts))
    answer = dict.fromkeys(("question", "prompt", "prediction", "reference"), HOSTILE)
    lines = (json.dumps({"step": step} | answer) + "\n" for step in (0, 20))
    (run / "predictions.jsonl").write_text("".join(lines))
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(
        re.sub(r"path: .*", f"path: {json.dumps('x' * 400 + HOSTILE)}", config, count=1)
    )
    (run / "log.txt").write_text(HOSTILE)
    (run / "<i>file").write_text("")
    write_report(run)
    return run


def test_a_report_tells_of_the_whole_run(uninterrupted):
    page = Page(uninterrupted / FILE)
    for part in (
        "finished 20 steps",
        "training data: 18 records",
        "First example of training data",
        "bits per byte",
        "predicted peak",
        "attention: scan",
        f"jax{jax.__version__}",
        "metrics.jsonl",
        "schedule: cosine over 20 steps",
    ):
        assert part in page.text.replace("\n", ""), part
    changed, _, others = page.text.partition("Changed keys")[2].partition("All other keys")
    for key, value in (("model.hidden_size", "16"), ("train.max_steps", "20")):
        assert f"{key}{value}" in changed and key not in others
    assert "data.seed" in others and "data.seed" not in changed
    assert {"svg", "polyline", "mark"} <= page.tags
    assert not list(uninterrupted.glob(".*.tmp"))


@pytest.mark.parametrize("name", ["plain", "hostile"])
def test_a_report_needs_no_network_and_escapes_texts(name, uninterrupted, request):
    run = uninterrupted if name == "plain" else request.getfixturevalue(name)
    page = Page(run / FILE)
    assert not page.tags & {"script", "img", "link", "iframe", "object", "embed", "form", "i"}
    assert not [n for n, _ in page.attributes if n.startswith("on") or n in ("src", "href")]
    assert not re.search(r"url\(|@import", re.sub(r"&[^;]*;", "", (run / FILE).read_text()))
    assert page.text.count(HOSTILE) == (0 if name == "plain" else 17)
    if name == "hostile":
        assert "Answer before training" in page.text


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_a_report_fits_a_phone(hostile, tmp_path):
    """In an iframe, because a window has a least width."""
    (tmp_path / "frame.html").write_text(f"""
<iframe src="{(hostile / FILE).as_uri()}" style="width: 375px"
  onload="const page = this.contentDocument.documentElement;
    page.querySelectorAll('details').forEach(x => x.open = true);
    document.title = page.clientWidth + ' ' + page.scrollWidth"></iframe>""")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    flags += [f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom"]
    command = [CHROMIUM, *flags, (tmp_path / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r"<title>(\d+) (\d+)</title>", done.stdout)
    assert found and int(found[2]) <= int(found[1]) <= 375, done.stdout[:200]


def test_a_report_that_cannot_be_written_does_not_fail_the_run(tmp_path, monkeypatch, capsys):
    def broken(directory):
        raise OSError("disk full")

    monkeypatch.setattr(html_report, "describe", lambda run: {})
    monkeypatch.setattr(html_report, "write_report", broken)
    run = SimpleNamespace(directory=tmp_path)
    with reporting(run) as facts:
        facts["end"] = "finished"
    assert "report.html is not written: OSError('disk full')" in capsys.readouterr().out
    with pytest.raises(ValueError, match="refused"), reporting(run):
        raise ValueError("refused before the first step")
    assert json.loads((tmp_path / FACTS).read_text()) == {"failed": False, "end": "finished"}


def test_a_long_line_shows_its_spikes():
    points = [(step, 9.0 if step == 777 else 1.0) for step in range(10 * POINTS)]
    chart = line_chart("loss", {"a": points, "b": []}, levels={"most": 12.0}, from_zero=True)
    (line,) = chart.lines
    assert len(line["points"]) == POINTS and len(line["band"]) == 2 * POINTS
    spike, *rest = sorted(y for _, y in line["band"])
    assert spike < rest[0] - 50
    (_, level), (top, label) = chart.levels[0], chart.y_ticks[-1]
    assert top <= level < spike and float(label) >= 12
    # A constant has an axis, too.
    chart = line_chart("rate", {"a": [(3, 0.0)]}, levels={}, from_zero=False)
    assert [label for _, label in chart.y_ticks][0] == "0" and chart.lines[0]["dots"]


def test_answers_stand_beside_those_before_training():
    one, two = ({"step": step, "prompt": "a", "prediction": str(step)} for step in (0, 7))
    assert list(html_report._answers([one, two])) == [two | {"before": "0"}]
    assert list(html_report._answers([one])) == [one | {"before": None}]
    assert list(html_report._answers([])) == []


def test_the_adapter_scale_is_a_figure():
    line = "adapter: lora, rank 8, alpha 4: adapter scale 0.5; adapter.alpha=8, the default, gives"
    assert list(html_report._adapter([line])) == [("adapter scale; lora, rank 8, alpha 4", "0.5")]
