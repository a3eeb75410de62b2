"""Progress of long work: silent if short, a line now and then off a terminal, a bar on one."""

import os
import pty
import subprocess
import sys

import pytest

from bptjax import progress
from bptjax.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_off_a_terminal(clock, capsys):
    with Progress("writing", 200) as shown:
        for clock[0] in range(1, 101):
            shown.advance(2)
    assert capsys.readouterr().err.splitlines() == [
        "writing: 30%, 0:01:10 left",
        "writing: 60%, 0:00:40 left",
        "writing: 90%, 0:00:10 left",
    ]


def test_short_work_is_silent(clock, capsys):
    with Progress("writing", 0) as shown:
        shown.describe("more")
        shown.advance(0)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("seconds", [0.0, 5.0])
def test_a_bar_on_a_terminal_of_80_columns(seconds):
    code = (
        "import sys; from bptjax import progress; progress.SILENT = 1.0\n"
        "now = iter([0.0] + [float(sys.argv[1])] * 99)\n"
        "progress.time.monotonic = lambda: next(now)\n"
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
