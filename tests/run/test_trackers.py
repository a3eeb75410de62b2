"""Trackers get every number, and their failures never affect the run."""

import json
import sys
import threading
from types import SimpleNamespace

import pytest

from bptjax.run.metrics import JsonlWriter, read_metrics
from bptjax.run.trackers import WAITING, Trackers


class Wandb:
    """A module `wandb` that fails in the function `at`."""

    Settings = dict

    def __init__(self, at=None, mode="online", key=True):
        self.at, self.mode, self.key = at, mode, key
        self.logged, self.opened, self.finished = [], [], 0
        self.hang = threading.Event()

    def fail(self, name):
        if self.at == name:
            raise OSError(f"{name}: no route\nto host")

    def setup(self):
        self.fail("setup")
        return SimpleNamespace(settings=SimpleNamespace(mode=self.mode))

    def login(self, prompt):
        assert not prompt
        return self.key

    def init(self, **options):
        self.fail("init")
        self.opened.append(options)
        return self

    def define_metric(self, *_, **__):
        pass

    def log(self, record):
        if self.at == "hang":
            self.hang.wait()
        if len(self.logged) == 2:
            self.fail("log")
        self.logged.append(record)

    def finish(self):
        self.fail("finish")
        self.finished += 1


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Writes records through trackers. Returns the logged lines."""

    def write(module, steps, names=("wandb",), resume_step=None):
        monkeypatch.setitem(sys.modules, "wandb", module)
        said = []
        writer = JsonlWriter(tmp_path, resume_step=resume_step)
        both = Trackers(writer, list(names), tmp_path, {"seed": 3}, resume_step, said.append)
        for step in steps:
            both.write(step, {"train/loss": step / 2, "note": "text", "x": float("nan"), "of": {}})
        both.close()
        found = [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")]
        assert found[-len(steps) :] == list(steps)
        return said

    return write


def test_wandb_gets_every_number_and_a_resumed_run_goes_on_in_the_same(run, tmp_path):
    first, second = Wandb(), Wandb(mode="offline", key=False)
    assert run(first, range(1, 5)) == [] and run(second, range(3, 6), resume_step=2) == []
    assert first.logged == [{"step": n, "train/loss": n / 2} for n in range(1, 5)]
    assert [record["step"] for record in second.logged] == [3, 4, 5]
    (one,), (other,) = first.opened, second.opened
    assert one["id"] == other["id"] and one["name"] == tmp_path.name
    assert one["config"] == {"seed": 3} and first.finished == second.finished == 1
    third = Wandb()
    run(third, [1])
    assert third.opened[0]["id"] != one["id"], "another run in the same directory"


def test_a_rollback_continues_as_a_resumed_run(tmp_path, monkeypatch):
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    both = Trackers(JsonlWriter(tmp_path), ["wandb"], tmp_path, {}, None, print)
    for step in (1, 2, 3):
        both.write(step, {"x": step})
    both.rewind(1)
    both.write(2, {"x": 2.5})
    both.close()
    assert [record["x"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2.5]
    assert [record["x"] for record in module.logged] == [1, 2, 3, 2.5]
    first, second = module.opened
    assert first["id"] == second["id"] and module.finished == 2


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Wandb(key=False), "no API key; run `wandb login`, or set WANDB_MODE=offline"),
        *[(Wandb(at), f"({at}: no route to host)") for at in ("setup", "init", "log", "finish")],
        pytest.param(Wandb("hang"), "it did not finish within 10 s", marks=pytest.mark.thorough),
    ],
    ids=["key", "setup", "init", "log", "finish", "hang"],
)
def test_a_tracker_that_fails_is_one_warning(run, module, reason):
    (line,) = run(module, range(1, 20), ["wandb", "wandb"])
    assert line.startswith("warning: logging.report_to: wandb failed (") and reason in line
    assert line.endswith("; the run continues without it") and "\n" not in line
    if module:
        module.hang.set()


def test_a_tracker_that_hangs_does_not_fill_the_memory(run):
    module = Wandb("hang")
    (line,) = run(module, range(1, WAITING + 50))
    assert f"wandb failed ({WAITING} records wait for it)" in line
    module.hang.set()


def test_tensorboard_files(run, tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    assert run(None, range(1, 4), ["tensorboard"]) == []
    assert run(None, range(3, 5), ["tensorboard"], resume_step=2) == []
    one, other = sorted((tmp_path / "tensorboard").iterdir(), key=lambda p: p.stat().st_mtime_ns)

    def events(file):
        data, at = file.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            yield Event.FromString(data[at + 12 : at + 12 + size])
            at += size + 16

    def losses(file):
        return [
            (e.step, v.simple_value)
            for e in events(file)
            for v in e.summary.value
            if v.tag == "train/loss"
        ]

    assert losses(one) == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert losses(other) == [(3, 1.5), (4, 2.0)]
    starts = [e.step for e in events(other) if e.session_log.status == SessionLog.START]
    assert starts == [3]


def test_a_full_disk_is_one_warning(run, tmp_path):
    pytest.importorskip("tensorboardX")
    (tmp_path / "tensorboard").write_text("in the way")
    (line,) = run(None, range(1, 4), ["tensorboard"])
    assert "tensorboard failed (" in line and "File exists" in line
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1
