"""A run that profiles a step: the same losses and checkpoints, and no failure by the profile."""

import shutil

import jax
import numpy as np
import pytest

from bptjax.cli.train import main
from bptjax.cost import profile_report, step_profile
from bptjax.cost.step_profile import ProfiledStep
from bptjax.run.checkpoint import Checkpoints
from training.runs import rows


# jaxlib 0.12 aborts the process if this warning is an error.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")
def test_a_profile_changes_no_losses_and_no_checkpoints(arguments, tmp_path):
    """In a resumed run with gradient accumulation, which ends before its third step."""
    plain, run = tmp_path / "plain", tmp_path / "run"
    command = [*arguments, "--train.gradient_accumulation_steps=2", "--train.max_steps=6"]
    command += ["--train.eval_steps=null", "--train.sample_tokens=0", "--checkpoint.save_steps=4"]
    assert main([*command, f"--run_dir={plain}"]) == 0
    assert not (plain / "profile").exists()
    shutil.copytree(plain, run)
    shutil.rmtree(run / "checkpoints" / "6")
    assert main([*command, f"--run_dir={run}", "--profile"]) == 0
    for name in ("memory.csv", "memory.png", "time.csv", "time.png"):
        assert (run / "profile" / name).stat().st_size > 0
    assert list((run / "profile" / "trace").rglob("*.xplane.pb"))
    log = (run / "log.txt").read_text()
    parts = (
        "resumed at step 4 of 6",
        "compiling the step again, for the profile of step 6; the last compilation took ",
        f"profile: {run / 'profile'}\n",
        "Memory of a step per device, GiB\n",
        "the step needs ",
        "Time of a step, ms\n",
    )
    found = [log.index(part) for part in parts]
    assert found == sorted(found) and "no profile" not in log

    assert rows(run) == rows(plain) and len(rows(run)) == 6
    wanted, got = Checkpoints(plain), Checkpoints(run)
    assert got.specs(6) == wanted.specs(6)
    for name in wanted.specs(6):
        np.testing.assert_array_equal(got.read(6, name), wanted.read(6, name))
    # The log of a resumed run is longer.
    own = {"config": wanted.extra(6)["config"].replace(str(plain), str(run))}
    own["logged"] = got.extra(6)["logged"]
    assert got.extra(6) == wanted.extra(6) | own


class Profile:
    """Stands in for a `StepProfile`, whose method `failing` fails."""

    def __init__(self, failing):
        self.failing, self.open = failing, False

    def step(self, state, batch):
        self._do("step")
        return "profiled", state

    def trace(self):
        return self

    def __enter__(self):
        self._do("start")
        self.open = True

    def __exit__(self, *_):
        self.open = False
        self._do("stop")

    def write_memory(self):
        self._do("memory")
        return ["memory"]

    def write_time(self):
        self._do("time")
        return ["time"]

    def _do(self, name):
        if name == self.failing and (name != "step" or self.open):
            raise RuntimeError(f"no {name}")


@pytest.mark.parametrize("failing", [None, "start", "stop", "memory", "time"])
def test_the_third_call_is_traced(failing, monkeypatch):
    profile, lines = Profile(failing), []
    monkeypatch.setattr(step_profile, "StepProfile", lambda *_: profile)
    step = ProfiledStep(lambda state, batch: ("own", state), None, 0, 0, "out", 3, lines.append)
    results = []
    for n in range(5):
        results.append(step(n, 0))
        assert not profile.open
        assert bool(lines) == (n > 1)
    assert results == [*(("profiled", n) for n in range(3)), ("own", 3), ("own", 4)]
    wanted = ["profile: out", "memory", "time"]
    assert lines == (
        [f"warning: no profile: no {failing}; the run continues"] if failing else wanted
    )


def test_an_error_of_the_step_itself_is_raised(monkeypatch):
    profile, lines = Profile("step"), []
    monkeypatch.setattr(step_profile, "StepProfile", lambda *_: profile)
    step = ProfiledStep(lambda *_: None, None, 0, 0, "out", 1, lines.append)
    with pytest.raises(RuntimeError, match="no step"):
        step(0, 0)
    assert not profile.open and not lines


def test_a_failed_compilation_is_one_line(monkeypatch):
    def refuse(*_):
        raise RuntimeError("no ink\nleft")

    monkeypatch.setattr(step_profile, "StepProfile", refuse)
    lines = []
    step = ProfiledStep(lambda *_: "own", None, 0, 0, "out", 1, lines.append)
    assert step(0, 0) == "own"
    assert lines == ["warning: no profile: no ink left; the run continues"]


def test_all_processes_run_one_program(monkeypatch):
    """The compilation has failed in another process."""
    monkeypatch.setattr(step_profile, "StepProfile", lambda *_: Profile(None))
    monkeypatch.setattr(step_profile, "all_gather_json", lambda error: [error, "no ink"])
    lines = []
    step = ProfiledStep(lambda *_: "own", None, 0, 0, "out", 1, lines.append)
    assert step(0, 0) == "own" and lines == ["no ink"]


def test_other_processes_do_not_trace(monkeypatch):
    monkeypatch.setattr(step_profile, "StepProfile", lambda *_: Profile("start"))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    lines = []
    step = ProfiledStep(lambda *_: "own", None, 0, 0, "out", 1, lines.append)
    assert [step(0, 0), step(0, 0)] == [("profiled", 0), "own"] and not lines


def test_table_lines_hold_the_table():
    rows = [dict(phase="forward", host=0) | dict.fromkeys(profile_report.COLORS, 2**30)]
    lines = profile_report.table_lines(profile_report.memory_table(rows))
    assert lines[-1].split() == ["device", "7.00", "7.00"] and lines[0] == lines[0].rstrip()
