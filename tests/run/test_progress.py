"""Progress of long work: silent if short, a line now and then off a terminal, a bar on one; and
announcements of compilations."""

import os
import pty
import subprocess
import sys

import pytest

from bptjax.run import progress
from bptjax.run.progress import Compilations, Progress


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    return now


def test_lines_off_a_terminal(clock, capsys):
    with Progress("writing", 100) as shown:
        for clock[0] in range(1, 26):
            shown.advance(4)
    assert capsys.readouterr().err.splitlines() == [
        "writing: 20%, 0:00:20 left",
        "writing: 60%, 0:00:10 left",
    ]


def test_the_first_piece_of_work_is_not_in_the_estimate(clock, capsys):
    """It may compile for minutes. 1 %, then 99 % at 2 s each."""
    with Progress("evaluating", 100) as shown:
        for clock[0] in (300.0, 302.0, *range(304, 500, 2)):
            shown.advance()
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["evaluating: 1%", "evaluating: 6%, 0:03:08 left"]


def test_lines_of_a_caller(clock, capsys):
    """Also on a terminal, where a run has a bar of its own."""
    lines = []
    with Progress("evaluating", 4, lines.append) as shown:
        for clock[0] in (3.0, 6.0, 9.0, 12.0):
            shown.advance()
    assert lines == ["evaluating: 50%, 0:00:06 left"] and capsys.readouterr() == ("", "")


def test_a_total_that_was_too_low(clock, capsys):
    with Progress("evaluating", 1) as shown:
        for clock[0] in (10.0, 20.0):
            shown.advance()
    assert capsys.readouterr().err == ""


def test_compilations_tell_the_duration_of_the_last_one(clock):
    lines = []
    compilations = Compilations(lines.append)
    for text, seconds in (("first", 41.6), ("second", 3.0)):
        with compilations.announce(text):
            clock[0] += seconds
    assert lines == ["first", "second; the last compilation took 42 s"]
    assert compilations.seconds == pytest.approx(3.0)
    with Compilations(lines.append, 7.0).announce("third"):
        pass
    assert lines[2] == "third; the last compilation took 7 s"


def test_short_work_is_silent(clock, capsys):
    with Progress("writing", 0) as shown:
        shown.describe("more")
        shown.advance(0)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("seconds", [0.0, 6.0])
def test_a_bar_on_a_terminal_of_80_columns(seconds):
    code = (
        "import sys; from bptjax.run import progress\n"
        "now = iter([0.0] + [float(sys.argv[1])] * 99)\n"
        "progress.monotonic = lambda: next(now)\n"
        "with progress.Progress('writing tensors', 4) as p: p.advance(2)"
    )
    leader, follower = pty.openpty()
    command = [sys.executable, "-c", code, str(seconds)]
    subprocess.run(command, stderr=follower, check=True, env=os.environ | {"COLUMNS": "80"})
    os.close(follower)
    try:
        text = os.read(leader, 10_000).decode()
    except OSError:  # Nothing was written.
        text = ""
    os.close(leader)
    assert ("writing tensors" in text and " 50%" in text) == (seconds > 1)
