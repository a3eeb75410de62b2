"""Resumed and non-finite records, the bar on and off a terminal, throughput, the plot."""

import io
import json
import os
import pty
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from bptjax.run.metrics import (
    JsonlWriter,
    RunProgress,
    Throughput,
    lost_records,
    plot_loss,
    read_metrics,
)

SEEN = {"train/loss": 2.5, "throughput/tokens_per_second": 12345.6, "run/eta_seconds": 3725.4}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_resume_drops_the_steps_taken_again(tmp_path):
    writer = JsonlWriter(tmp_path)
    for step in (48, 49, 50, 51, 57):
        writer.write(step, {"train/loss": step / 10})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 58, "train/lo')
    writer = JsonlWriter(tmp_path, resume_step=50)
    writer.write(51, {"train/loss": 1.0})
    assert [row["step"] for row in rows(tmp_path)] == [48, 49, 50, 51]
    assert rows(tmp_path)[-1] == {"step": 51, "train/loss": 1.0}
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    # An evaluation after the save.
    JsonlWriter(tmp_path, resume_step=50, saved=2).close()
    assert [row["step"] for row in rows(tmp_path)] == [48, 49]


def test_half_written_line_of_a_kept_step(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2, "x": \xe2\x82')
    writer = JsonlWriter(tmp_path, resume_step=9)
    writer.write(3, {})
    writer.close()
    assert rows(tmp_path) == [{"step": 1}, {"step": 3}]


def test_no_resume_starts_empty(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    JsonlWriter(tmp_path).close()
    assert rows(tmp_path) == []


def test_values_become_valid_json(tmp_path):
    writer = JsonlWriter(tmp_path)
    values = {"nan": float("nan"), "inf": jnp.float32(jnp.inf), "-inf": np.float64(-np.inf)}
    writer.write(1, values | {"a": jnp.bfloat16(0.5), "n": np.int64(7), "big": 1 << 40})
    text = (tmp_path / "metrics.jsonl").read_text()  # flushed, not closed
    writer.close()
    assert json.loads(text, parse_constant=pytest.fail) == {
        **{"step": 1, "nan": None, "inf": None, "-inf": None},
        **{"a": 0.5, "n": 7, "big": 1 << 40},
    }


def test_throughput_leaves_out_the_compiling_step():
    clock = Clock()
    throughput = Throughput(window=2, clock=clock)
    assert throughput.metrics(10) == {}
    throughput.resume()
    for seconds, tokens in ((60.0, 1000), (8.0, 1), (1.0, 100), (3.0, 500)):
        clock.now += seconds
        throughput.step(tokens)
    wanted = {
        "throughput/tokens_per_second": 600 / 4.0,
        "throughput/step_time": 2.0,
        "run/eta_seconds": 20.0,
    }
    assert throughput.metrics(10) == wanted
    clock.now += 1000  # an evaluation
    throughput.resume()
    clock.now += 1.0
    throughput.step(100)
    assert throughput.metrics(10) == wanted


def test_plain_lines_off_a_terminal(tmp_path):
    clock, out = Clock(), io.StringIO()
    console = Console(file=out, width=20)
    with RunProgress(tmp_path, 1000, console=console, clock=clock) as progress:
        for step in range(1, 25):
            progress.update(step, SEEN)
            clock.now += 1.0
        progress.log("eval [red]loss[/red] :smile: 1.5 " + "x" * 100)
    assert out.getvalue().splitlines() == [
        "step 1/1000  loss 2.5000  12,346 tokens/s  1:02:05 left",
        "step 11/1000  loss 2.5000  12,346 tokens/s  1:02:05 left",
        "step 21/1000  loss 2.5000  12,346 tokens/s  1:02:05 left",
        "eval [red]loss[/red] :smile: 1.5 " + "x" * 100,
        "step 24/1000  loss 2.5000  12,346 tokens/s  1:02:05 left",
    ]
    assert (tmp_path / "log.txt").read_text().endswith("1.5 " + "x" * 100 + "\n")


def test_a_step_may_be_left_out_of_the_throughput():
    clock = Clock()
    throughput = Throughput(clock=clock)
    for seconds, skipped in ((60.0, False), (1.0, False), (60.0, True), (3.0, False)):
        clock.now += seconds
        if skipped:
            throughput.skip()
        throughput.step(100)
    assert throughput.metrics(0)["throughput/step_time"] == 2.0


def test_last_step_is_printed_once(tmp_path):
    out = io.StringIO()
    with RunProgress(tmp_path, 2, console=Console(file=out)) as progress:
        for step in (1, 2):
            progress.update(step, {"train/loss": jnp.float32(jnp.nan)})
    assert out.getvalue() == "step 1/2  loss nan\nstep 2/2  loss nan\n"


CHILD = """
import sys
from bptjax.run.metrics import RunProgress
with RunProgress(sys.argv[1], 9) as progress:
    progress.update(3, {"train/loss": 2.5, "throughput/tokens_per_second": 12345.6,
        "run/eta_seconds": 3725.4})
    progress.log("above the bar")
    if len(sys.argv) > 2:
        raise KeyboardInterrupt
"""


def test_a_pipe_sees_no_control_characters(tmp_path):
    environment = os.environ | {"FORCE_COLOR": "1", "TERM": "xterm"}
    command = [sys.executable, "-W", "error", "-c", CHILD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    lines = "step 3/9  loss 2.5000  12,346 tokens/s  1:02:05 left\nabove the bar\n"
    assert (done.stdout, done.stderr) == (lines, "")


def test_bar_on_a_terminal_is_taken_down_by_an_exception(tmp_path):
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-W", "error", "-c", CHILD, str(tmp_path), "fail"]
    child = subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    out = b""
    try:
        while block := os.read(ours, 1 << 16):
            out += block
    except OSError:  # Linux: the other end is closed
        pass
    os.close(ours)
    assert child.wait() != 0
    text = out.decode()
    for shown in ("step 3/9", "loss 2.5000", "12,346 tokens/s", "1:02:05 left", "above the bar"):
        assert shown in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again


@pytest.mark.parametrize("x", ["train/tokens_seen", "other"])
def test_plot(tmp_path, x):
    writer = JsonlWriter(tmp_path)
    for step in range(1, 6):
        writer.write(step, {"train/loss": 5.0 / step if step != 3 else np.nan, x: step * 1000})
        writer.write(step, {"eval/loss": 4.0 / step})
    writer.close()
    figure = plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png", "$x_{ 跑 $")
    (axes,) = figure.axes
    assert axes.get_title() == "$x_{ 跑 $"
    assert axes.get_xlabel() == ("tokens seen" if x.startswith("train") else "optimizer steps")
    assert axes.get_ylabel() == "loss (nats per token)"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["train/loss (training)", "eval/loss (held-out data)"]
    train, held_out = axes.lines
    assert (train.get_marker(), held_out.get_marker()) == ("None", "o")
    seen = [1000, 2000, 3000, 4000, 5000] if x.startswith("train") else [1, 2, 3, 4, 5]
    assert list(held_out.get_xdata()) == seen
    assert all(line.get_visible() for line in axes.get_xgridlines() + axes.get_ygridlines())
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(read_metrics(tmp_path / "metrics.jsonl"))) == 10
    assert "matplotlib.pyplot" not in sys.modules


def test_plot_without_records(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("kept", "every", "saved", "wanted"),
    [
        (range(1, 21), 1, 20, None),
        (range(0), 1, 20, "20 of 20 records up to step 20 of steps 1 to 20;"),
        (range(8), 1, 20, "13 of 20 records up to step 20 of steps 8 to 20;"),
        (range(6, 21), 1, 20, "5 of 20 records up to step 20 of steps 1 to 5;"),
        ([*range(1, 4), *range(5, 21)], 1, 20, "1 of 20 records up to step 20 of steps 4;"),
        ([1, 5, 6, 9, 12, 20], 1, 20, "of steps 2 to 4, 7 to 8, 10 to 11 and 1 more;"),
        (range(3, 21), 3, 6, None),
        ([3, 6, 12, 18], 3, 6, "2 of 6 records up to step 20 of steps 7 to 11, 13 to 17;"),
        (range(20, 21), 1, None, None),
        (range(0), 1, None, "the records up to step 20 of steps 1 to 20;"),
        (range(0), 1, 0, None),
    ],
)
def test_lost_records_are_named(tmp_path, kept, every, saved, wanted):
    file = tmp_path / "metrics.jsonl"
    if len(kept):
        lines = (json.dumps({"step": n, "train/loss": 1.0}) for n in kept if n and n % every == 0)
        # Later steps do not count, and neither does half a line.
        file.write_text("\n".join(lines) + '\n{"step": 21, "train/loss": 1}\n{"step": 20, "tr')
    found = lost_records(file, 20, saved)
    assert found is None if wanted is None else wanted in (found or "")
