"""The supervisor of runs, on processes that only pretend to train, and its command."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from bptjax.cli import train
from bptjax.run.heartbeat import BEAT, DIRECTORY, beat
from bptjax.run.supervise import Limits, Watch, supervise

FAST = Limits(pause=0.01, poll=0.02, end=0.2, stacks=2.0)
# A run: counts its starts in the file `starts` of the run directory.
HEAD = """
import os, signal, sys, time
from pathlib import Path
from bptjax.run.heartbeat import beat, dump_stacks_on_signal, record_error, record_run_dir
dump_stacks_on_signal()
run = Path(sys.argv[1])
start = len(list(run.glob("start*")))
(run / f"start{start}").touch()
record_run_dir(run)
def save(step):
    (run / "checkpoints" / str(step)).mkdir(parents=True)
"""


def command(run_dir, code):
    return [sys.executable, "-c", HEAD + textwrap.dedent(code), str(run_dir)]


def starts(run_dir):
    return len(list(run_dir.glob("start*")))


@pytest.fixture
def run(tmp_path, capfd):
    """Supervises code; returns the exit code, the number of starts and the lines told, which are
    also those of the log."""

    def run(code, **limits):
        limits = FAST.__class__(**{**vars(FAST), **limits})
        code = supervise(command(tmp_path, code), limits)
        told = capfd.readouterr().err.splitlines()
        log = tmp_path / "log.txt"
        assert told == [x[20:] for x in log.read_text().splitlines()] if told else not log.exists()
        return code, starts(tmp_path), told

    return run


def test_a_crash_is_followed_by_a_restart(run):
    code, number, told = run(
        """
        if start == 0:
            record_error("a peer process is lost")
            sys.exit(1)
        if start == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        if start == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if start == 3:
            os.kill(os.getpid(), 40)
    """,
        restarts=4,
    )
    assert (code, number) == (0, 5)
    first, second, third, fourth = told
    assert first == (
        "supervisor: restarting after exit code 1: a peer process is lost (restart 1 of 8 without "
        "a new checkpoint)"
    )
    assert "the run was killed by SIGSEGV (restart 2 of 4" in second
    assert "by SIGKILL, probably by the kernel because the host ran out of memory (" in third
    assert "the run was killed by signal 40 (restart 4 of 4" in fourth  # A real-time signal.


@pytest.mark.parametrize("work", ["saving step 3", "compiling"])
def test_a_stopped_run_is_restarted(run, work):
    """Long before a run that only works for long."""
    code, number, told = run(
        f"""
        if start == 0:
            save(3)
            beat("{work}")
            os.kill(os.getpid(), signal.SIGSTOP)
    """,
        stop=0.2,
    )
    host = socket.gethostname()
    assert (code, number) == (0, 2) and len(told) == 1
    assert f"after a process on {host} was stopped by a signal for 0 s while {work}" in told[0]


def test_a_process_that_fails_gives_up_before_those_that_lose_it(run):
    code, number, told = run("""
        record_error("a peer process is lost: no answer from host1")
        sys.exit(1)
    """)
    assert (code, number) == (1, 7)
    assert "(restart 6 of 6 without a new checkpoint)" in told[-2]
    assert told[-1].endswith("not restarted, as 6 restarts brought no new checkpoint")


def test_a_return_of_processes_is_no_failure(run):
    assert run("sys.exit(75 if start < 5 else 0)") == (0, 6, [])


@pytest.mark.parametrize("code", [0, 2, 130, 143])
def test_codes_that_no_restart_would_change(run, code):
    assert run(f"sys.exit({code})") == (code, 1, [])


@pytest.mark.parametrize("nohup", [False, True])
def test_the_run_ends_with_its_terminal(tmp_path, nohup):
    kind = signal.SIG_IGN if nohup else signal.SIG_DFL
    before = signal.signal(signal.SIGHUP, kind)
    code = "os.kill(os.getppid(), signal.SIGHUP); time.sleep(0.5 if nohup else 60)"
    try:
        wanted = 0 if nohup else 128 + signal.SIGHUP
        assert supervise(command(tmp_path, f"nohup = {nohup}; {code}"), FAST) == wanted
        assert signal.getsignal(signal.SIGHUP) == kind and starts(tmp_path) == 1
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_to_the_run_alone_is_a_request_to_stop(run):
    assert run("os.kill(os.getpid(), signal.SIGTERM)") == (143, 1, [])


def test_restarts_without_a_new_checkpoint_are_counted(run):
    """A checkpoint that was there before is none that is new."""
    code, number, told = run("""
        if start in (0, 2):
            save(10 * (start + 1))
        os.kill(os.getpid(), signal.SIGKILL) if start == 5 else sys.exit(1)
    """)
    assert (code, number) == (137, 6)
    assert ["restart 1 of 3" in line for line in told] == [True, False, True, False, False, False]
    assert told[-1].endswith("memory; not restarted, as 3 restarts brought no new checkpoint")


def test_a_hang_leaves_its_stacks(run, tmp_path):
    """Even of a process that ignores SIGTERM, and only once it has shown how long a step takes."""
    code, number, told = run(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        def stuck():
            time.sleep(1000)
        if start == 0:
            for step in range(5):
                beat("training", step)
                time.sleep(0.05)
            stuck()
        """,
        step=0.5,
    )
    assert (code, number) == (0, 2)
    (line,) = told
    assert "restarting after no new step for " in line and " after step 4, stacks in " in line
    (file,) = (tmp_path / "stacks").iterdir()
    assert str(file) in line and "in stuck" in file.read_text()


def test_a_hang_at_other_work_ends_the_run_after_the_last_restart(run):
    code, number, told = run("beat('loading weights'); time.sleep(1000)", restarts=0, work=0.5)
    assert (code, number) == (1, 1)
    assert "no heartbeat for " in told[0] and " s while loading weights, stacks in" in told[0]


def test_slow_work_between_steps_is_no_hang(run):
    assert run(
        """
        for step in range(3):
            beat("training", step)
            time.sleep(0.05)
        beat("evaluating")
        time.sleep(1)
        """,
        step=0.4,
    ) == (0, 1, [])


def test_the_limit_follows_the_median_step(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    watch, now = Watch(tmp_path, Limits()), 0.0
    monkeypatch.setattr("time.monotonic_ns", lambda: int(now * 1e9))
    limits = []
    for step, seconds in enumerate((0, 20, 20, 900, 20)):
        now += seconds
        beat("training", step)
        watch.poll()
        limits.append(watch.limit)
    assert limits == [3600, 200, 200, 200, 200]
    beat("saving step 4")
    watch.poll()
    assert watch.limit == 3600
    # A step of a run that has rolled back takes no negative time.
    now += 1
    beat("training", 1)
    watch.poll()
    assert watch.limit == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on(tmp_path, number):
    """Once, and after them there is no restart."""
    child = command(
        tmp_path,
        """
        def note(number, frame):
            (run / "got").open("a").write(f"{number} ")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, note)
        (run / "ready").touch()
        while not (run / "got").exists():
            time.sleep(0.02)
        time.sleep(0.2)
        sys.exit(1)
        """,
    )
    code = f"import sys; from bptjax.run.supervise import supervise; sys.exit(supervise({child}))"
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(60) == 1 and starts(tmp_path) == 1
    assert (tmp_path / "got").read_text() == f"{int(number)} "


def test_without_a_supervisor_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(DIRECTORY, raising=False)
    monkeypatch.chdir(tmp_path)
    beat("training", 1)
    assert not list(tmp_path.rglob(BEAT))


def test_signs_of_life_that_cannot_be_written_leave_no_file_open(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    (tmp_path / BEAT).symlink_to("/dev/full")
    before = os.listdir("/proc/self/fd")
    beat("training", 1)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_the_command_passes_its_flags_on(tmp_path, capfd):
    assert train.main(["--supervise", f"--config={tmp_path / 'none.yaml'}"]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "none.yaml" in error


def test_the_supervisor_does_not_import_jax():
    code = "import sys, bptjax.cli.train, bptjax.run.supervise; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
