"""The agreement of processes on which of them start, with threads in place of processes."""

import json
import threading
import time
from dataclasses import asdict

import pytest

from bptjax.parallel.distributed import PeerLost
from bptjax.parallel.launch import ProcessInfo
from bptjax.parallel.members import (
    COMPLETE,
    DIRECTORY,
    Complete,
    Members,
    Plan,
    _own_address,
    choose_members,
)
from bptjax.parallel.mesh import ParallelConfig, shards_on
from bptjax.run.heartbeat import LOST

THREE = Complete(["a", "b", "c"], [2, 2, 2], global_batch=12, micro_batch=6)


def choose_all(complete, present):
    return list(present)


@pytest.fixture
def run_dir(tmp_path):
    """The directory of a run that has started with three processes."""
    (tmp_path / DIRECTORY).mkdir()
    (tmp_path / DIRECTORY / COMPLETE).write_text(json.dumps(asdict(THREE)))
    return tmp_path


class Joining(threading.Thread):
    """A process that joins the others."""

    def __init__(self, run_dir, index, wait_s=600.0, choose=choose_all):
        super().__init__(daemon=True)
        own = ProcessInfo("localhost:1234", 3, index, [index])
        self.members = Members(run_dir, own, choose, wait_s)
        self.lines: list[str] = []
        self.info: ProcessInfo | None = None
        self.error: BaseException | None = None
        self.start()

    def run(self):
        try:
            self.info = self.members.join(self.lines.append)
        except (ValueError, SystemExit) as error:
            self.error = error

    def result(self, seconds=60.0):
        self.join(seconds)
        assert not self.is_alive()
        return self.info


def test_all_processes_start_at_once(run_dir):
    three = [Joining(run_dir, index) for index in range(3)]
    found = [each.result() for each in three]
    assert found == [ProcessInfo("localhost:1234", 3, index, [index]) for index in range(3)]
    assert [each.members.spare for each in three] == ["", "", ""]
    assert [each.members.missing for each in three] == [[], [], []]
    # The files of processes that have ended count for nothing.
    (run_dir / DIRECTORY / "1.json").write_text((run_dir / DIRECTORY / "0.json").read_text())
    alone = member(run_dir, 0)
    assert alone._look() == {} and alone._look() == {}


def member(run_dir, index, choose=choose_all, wait_s=600.0):
    return Members(run_dir, ProcessInfo("localhost:1234", 3, index, None), choose, wait_s)


def waiting(index, waited):
    """The file of a waiting process."""
    return dict(token=str(index), address=f"{index}:1234", waited=waited, plan=None)


def test_a_process_that_is_present_is_never_missed(run_dir):
    """While its file is written, too."""
    one, other, ended = member(run_dir, 0), member(run_dir, 1), threading.Event()

    def write():
        while not ended.is_set():
            other._write(plan=None)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    while not one._look():
        time.sleep(0.01)
    found = [one._look().keys() == {1} for _ in range(2000)]
    ended.set()
    thread.join()
    assert all(found), f"missed {found.count(False)} of {len(found)} times"


def test_processes_go_on_without_a_missing_one(run_dir):
    """Once one of them has waited for `wait_s`, also without process 0, whose place the next
    takes; and at once after a start without it, except for late processes."""
    one = member(run_dir, 1)
    one._own = waiting(1, 0.0)
    one._decide(0, {2: waiting(2, 599.0)}, [0], 598.0)
    assert one._newest() == 0
    one._decide(0, {2: waiting(2, 601.0)}, [0], 0.0)
    plan = one._read(1)
    assert plan == Plan([1, 2], ["1", "2"], "1:1234")
    one._decide(1, {2: waiting(2, 29.0)}, [0], 0.0)
    assert one._newest() == 1
    one._decide(1, {2: waiting(2, 31.0)}, [0], 0.0)
    assert one._newest() == 2
    one._decide(2, {}, [0, 2], 31.0)  # The start before had process 2.
    assert one._newest() == 2
    one._decide(2, {}, [0, 2], 601.0)
    assert one._read(3) == Plan([1], ["1"], "1:1234")
    one.plan = plan
    assert one.missing == ["a"] and one.is_first


def test_processes_that_cannot_keep_the_batch_refuse_together(run_dir):
    zero = member(run_dir, 0, lambda complete, present: [])
    zero._decide(0, {1: waiting(1, 601.0)}, [2], 0.0)
    error = (
        "a and b: must have devices for the axes of parallel, in a number that divides the 12 "
        "sequences of a step; start c too"
    )
    assert zero._read(1) == Plan(code=2, error=error)


@pytest.mark.thorough
def test_a_returning_process_waits_for_its_turn(run_dir):
    pair = [Joining(run_dir, index, wait_s=30.0) for index in (1, 2)]
    found = [each.result(200) for each in pair]
    assert found == [ProcessInfo("localhost:1234", 2, i, [1 + i]) for i in range(2)]
    assert pair[0].lines == ["waiting for a for up to 30 s"] and pair[1].lines == []
    first = pair[0].members
    assert first.returned() == ""
    back = Joining(run_dir, 0, wait_s=30.0)
    deadline = time.monotonic() + 100
    while not (first.returned() and back.lines) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert first.returned() == "a" and back.is_alive()
    assert back.lines == ["waiting for the next checkpoint, or the end, of the run on b and c"]
    pair[1].members.end(0)  # Of another process than the first.
    assert back.is_alive()
    first.end(143)
    back.result()
    assert isinstance(back.error, SystemExit) and back.error.code == 143


@pytest.mark.thorough
def test_a_process_that_could_not_share_the_batch_waits(run_dir):
    def choose(complete, present):
        return choose_members(complete, present, lambda devices: devices != 4)

    pair = [Joining(run_dir, index, wait_s=30.0, choose=choose) for index in (0, 2)]
    assert pair[0].result(200) == ProcessInfo("localhost:1234", 1, 0, [0])
    assert pair[0].members.missing == ["b", "c"] and pair[0].members.spare == "c"
    time.sleep(12)
    assert pair[0].members.returned() == "" and pair[1].is_alive()
    pair[0].members.end(2)
    assert pair[1].result() is None
    assert str(pair[1].error) == "the run on a was refused; its output says why"


def test_only_one_process_writes_a_plan(run_dir):
    one, other = member(run_dir, 0), member(run_dir, 1)
    one._create(1, Plan([0], ["x"], "a:1"))
    other._create(1, Plan([1], ["y"], "b:1"))
    assert one._read(1) == other._read(1) == Plan([0], ["x"], "a:1")
    assert one._newest() == 1 and one._read(2) is None
    assert not list((run_dir / DIRECTORY).glob(".*"))


def test_the_first_start_needs_all_processes(tmp_path, run_dir):
    """So does a start with another number of processes, whose facts are unknown."""
    own = ProcessInfo("localhost:1234", 4, 0, None)
    assert Members(run_dir, own, choose_all, 600.0).complete is None
    (run_dir / DIRECTORY / COMPLETE).unlink()
    members = member(run_dir, 0)
    assert members.complete is None
    members.begin(THREE)
    assert member(run_dir, 0).complete == THREE


def test_whole_hosts_are_preferred():
    complete = Complete(["a", "a", "b", "b", "c", "c"], [1] * 6, 12, 6)
    even = [1, 2, 3, 4, 5]  # A process of host a is lost.
    assert choose_members(complete, even, lambda devices: devices % 2 == 0) == [2, 3, 4, 5]
    assert choose_members(complete, even, lambda devices: devices == 5) == [2, 3, 4, 5, 1]
    assert choose_members(complete, even, lambda devices: devices > 5) == []
    # All processes fit by their own config.
    assert choose_members(complete, range(6), lambda devices: False) == list(range(6))


@pytest.mark.parametrize(
    "sizes, devices, shards",
    [
        ({}, 6, 6),
        ({"tp": 2}, 6, 3),
        ({"tp": 2}, 5, None),
        ({"dp": -1, "fsdp": 2}, 6, 6),
        ({"dp": 2, "fsdp": 1, "sp": -1}, 6, 2),
        ({"dp": 2, "fsdp": 3}, 6, None),  # No axis is open.
    ],
)
def test_shards_on_a_number_of_devices(sizes, devices, shards):
    assert shards_on(ParallelConfig(**sizes), devices) == shards


def test_the_supervisor_knows_the_loss_of_a_process():
    assert str(PeerLost()).startswith(f"{LOST}: ")


def test_the_wait_has_a_least_value():
    with pytest.raises(ValueError, match="parallel.host_wait_s=29: must be at least 30"):
        ParallelConfig(host_wait_s=29)
    assert ParallelConfig(host_wait_s=None).host_wait_s is None


def test_the_address_for_others():
    """Of process 0 as given; of others on its host the same; else the way to process 0's host."""
    assert _own_address(ProcessInfo("far:12", 2, 0, None)) == "far:12"
    assert _own_address(ProcessInfo("127.0.0.1:12", 2, 1, None)) == "127.0.0.1:12"
