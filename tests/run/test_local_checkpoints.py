"""Checkpoints in a local directory: copies, slow and full disks, and states that kills leave."""

import json
import resource
import shutil
import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from bptjax.run import local_checkpoints
from bptjax.run.checkpoint import Best, CheckpointConfig, Checkpoints, DamagedCheckpointError
from bptjax.run.checkpoint_files import HALF_WRITTEN, damage
from bptjax.run.local_checkpoints import OWNER, local_directory, make_local_directory
from bptjax.run.output import DiskFull


def state(step):
    return {"w": jnp.arange(1.0, 8.0) * step, "step": jnp.int32(step)}


def open_run(tmp_path, **options):
    """Opens the checkpoints of tmp_path/run with the local directory tmp_path/fast."""
    run, fast = tmp_path / "run", str(tmp_path / "fast")
    run.mkdir(exist_ok=True)
    make_local_directory(fast, run)
    options = {"save_total_limit": 2} | options
    return Checkpoints(run, local=local_directory(fast, run), **options)


def names(directory):
    return sorted(p.name for p in directory.iterdir() if p.name != OWNER)


def local(tmp_path):
    return local_directory(str(tmp_path / "fast"), tmp_path / "run")


def final(tmp_path):
    return tmp_path / "run" / "checkpoints"


def assert_restores(checkpoints, step):
    found, restored, extra = checkpoints.restore(state(0))
    assert (found, extra) == (step, {"cursor": step})
    np.testing.assert_array_equal(restored["w"], state(step)["w"])


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run killed after the copy of step 10, when step 20 is finished in the local directory."""
    tmp_path = tmp_path_factory.mktemp("killed")
    checkpoints = open_run(tmp_path)
    checkpoints.save(10, state(10), {"cursor": 10})
    checkpoints.wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints._copies, "_copy_next", lambda: None)
        checkpoints.save(20, state(20), {"cursor": 20}, Best("eval/loss", 20, 0.5))
        checkpoints.close()
    assert (names(final(tmp_path)), names(local(tmp_path))) == (["10"], ["20"])
    return tmp_path


@pytest.fixture
def after_kill(killed, tmp_path):
    shutil.copytree(killed / "run", tmp_path / "run")
    make_local_directory(str(tmp_path / "fast"), tmp_path / "run")
    shutil.copytree(local(killed), local(tmp_path), dirs_exist_ok=True)
    return tmp_path


def test_half_written_checkpoints_have_the_name_that_orbax_gives():
    assert ocp.path.atomicity_types.TMP_DIR_SUFFIX == HALF_WRITTEN


def test_copies_are_kept_as_without_a_local_directory(tmp_path):
    checkpoints = open_run(tmp_path, save_total_limit=1, keep_every=4)
    assert local(tmp_path).stat().st_mode & 0o777 == 0o700
    best = Best()
    for step, loss in enumerate([3.0, 2.0, 1.0, 2.0, 2.0, 2.0], 1):
        best.add(step, loss)
        checkpoints.save(step, state(step), {"cursor": step}, best)
        checkpoints.wait()
        assert names(final(tmp_path))[-1] == str(step) and not names(local(tmp_path))
    checkpoints.close()
    assert names(final(tmp_path)) == ["3", "4", "6"]
    assert json.loads((tmp_path / "run" / "best.json").read_text()) == {"step": 3, "eval/loss": 1.0}
    assert not list((tmp_path / "fast").iterdir())
    assert not (final(tmp_path) / "3" / "best.json").exists()
    assert_restores(Checkpoints(tmp_path / "run"), 6)


def test_a_slow_run_directory_holds_up_only_checkpoints_that_must_be_kept(
    tmp_path, monkeypatch, caplog
):
    go_on, copy = threading.Event(), local_checkpoints._copy_directory
    monkeypatch.setattr(
        local_checkpoints, "_copy_directory", lambda *paths: go_on.wait(60) and copy(*paths)
    )
    checkpoints = open_run(tmp_path, save_total_limit=5, keep_every=6)
    for step in range(1, 7):
        checkpoints.save(step, state(step), {"cursor": step})
    checkpoints._copies._written.result()
    # Step 1 is being copied, step 6 must be kept.
    assert (names(final(tmp_path)), names(local(tmp_path))) == ([], ["1", "6"])
    threading.Timer(0.2, go_on.set).start()
    checkpoints.save(7, state(7), {"cursor": 7})
    assert go_on.is_set() and "1" in names(final(tmp_path))
    checkpoints.close()
    assert names(final(tmp_path)) == ["1", "6", "7"]
    (record,) = caplog.records
    assert "step 2 is not copied to it, because step 3 was saved before" in record.getMessage()


def half_copied(tmp_path):
    hidden = final(tmp_path) / "20.orbax-checkpoint-tmp"
    shutil.copytree(local(tmp_path) / "20", hidden)
    (hidden / "manifest.json").unlink()


def renamed(tmp_path):
    shutil.copytree(local(tmp_path) / "20", final(tmp_path) / "20")


def half_removed(tmp_path):
    renamed(tmp_path)
    hidden = (local(tmp_path) / "20").rename(local(tmp_path) / "20.orbax-checkpoint-tmp")
    (hidden / "manifest.json").unlink()
    (tmp_path / "run" / "best.json").write_text('{"step": 20, "eval/loss": 0.5}\n')


def damaged_copy(tmp_path):
    renamed(tmp_path)
    flip(final(tmp_path) / "20")


def untouched(tmp_path):
    pass


def flip(checkpoint):
    file = max(checkpoint.rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("kill", [untouched, half_copied, renamed, half_removed, damaged_copy])
def test_a_kill_loses_nothing_and_leaves_nothing(after_kill, kill):
    kill(after_kill)
    checkpoints = open_run(after_kill)
    assert_restores(checkpoints, 20)
    best = json.loads((after_kill / "run" / "best.json").read_text())
    assert best == {"step": 20, "eval/loss": 0.5}
    checkpoints.save(30, state(30), {"cursor": 30})
    checkpoints.close()
    left = ["20", "20.aside1", "30"] if kill is damaged_copy else ["20", "30"]
    assert names(final(after_kill)) == left
    assert not list((after_kill / "fast").iterdir())


def test_a_damaged_local_checkpoint_is_named_and_skipped(after_kill, caplog):
    flip(local(after_kill) / "20")
    checkpoints = open_run(after_kill)
    assert_restores(checkpoints, 10)
    assert "step 20 is damaged (wrong checksum" in caplog.text and "using step 10" in caplog.text
    checkpoints.save(20, state(20), {"cursor": 20})
    checkpoints.close()
    assert names(final(after_kill)) == ["10", "20", "20.aside1"]


def test_a_single_damaged_local_checkpoint_is_an_error(after_kill):
    flip(local(after_kill) / "20")
    shutil.rmtree(final(after_kill) / "10")
    with pytest.raises(DamagedCheckpointError, match="step 20 is damaged"):
        open_run(after_kill).restore(state(0))


def other_machine(tmp_path):
    """The run went on without the local directory."""
    checkpoints = Checkpoints(tmp_path / "run")
    assert_restores(checkpoints, 10)
    checkpoints.save(15, state(15), {"cursor": 15})
    checkpoints.close()


def removed(tmp_path):
    shutil.rmtree(final(tmp_path))


@pytest.mark.parametrize("change, found", [(other_machine, 15), (removed, None)])
def test_local_checkpoints_of_another_run_are_not_used(after_kill, caplog, change, found):
    change(after_kill)
    checkpoints = open_run(after_kill)
    if found:
        assert_restores(checkpoints, found)
    else:
        assert checkpoints.restore(state(0)) is None
    assert names(local(after_kill)) == ["20"] and not caplog.records
    checkpoints.save(17, state(17), {"cursor": 17})
    assert "removing steps [20], which are superseded or belong to another run than" in caplog.text
    checkpoints.close()
    assert names(final(after_kill)) == (["15", "17"] if found else ["17"])
    assert not list((after_kill / "fast").iterdir())


def test_errors_of_the_copy_are_raised(tmp_path, monkeypatch):
    """A full disk, then a removed run directory. The local checkpoint is not lost."""
    checkpoints = open_run(tmp_path)
    big = {"x": jnp.asarray(np.random.default_rng(0).normal(size=1 << 16))}
    go_on, copy = threading.Event(), local_checkpoints._copy_directory
    monkeypatch.setattr(
        local_checkpoints, "_copy_directory", lambda *paths: go_on.wait(60) and copy(*paths)
    )
    checkpoints.save(1, big, {})
    checkpoints._wait_written()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        go_on.set()
        with pytest.raises(DiskFull, match="run/checkpoints/1: File too large; free some space"):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    checkpoints.close()
    assert (names(final(tmp_path)), names(local(tmp_path))) == ([], ["1"])
    checkpoints = open_run(tmp_path)
    assert checkpoints.restore(big)[0] == 1
    go_on.clear()
    checkpoints.save(2, big, {})
    checkpoints._wait_written()
    shutil.rmtree(tmp_path / "run")
    go_on.set()
    with pytest.raises(FileNotFoundError, match="run: was removed"):
        checkpoints.close()
    assert not (tmp_path / "run").exists() and not damage(local(tmp_path) / "2")


def test_bad_local_directories_are_refused(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(ValueError, match=r"local_dir=.*run/checkpoints: must be outside the"):
        make_local_directory(str(run / "checkpoints"), run)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"local_dir=.*file: must be a writable directory"):
        make_local_directory(str(tmp_path / "file"), run)
    local(tmp_path).mkdir(parents=True, mode=0o755)
    with pytest.raises(
        ValueError, match=r"local_dir=.*fast: must be private to you in .*fast/run-"
    ):
        make_local_directory(str(tmp_path / "fast"), run)
    with pytest.raises(ValueError, match="local_dir=~nosuchuser/x: must be a directory"):
        CheckpointConfig(local_dir="~nosuchuser/x")


KILL_AT = """
import json, os, signal, sys, time
from pathlib import Path

FILES = "open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"

def kill_at(operation, *places):
    "Kills this process at one of its operations on files below these places."
    left, prefixes = operation, tuple(map(str, places))
    def hook(event, arguments):
        nonlocal left
        if event in FILES and any(str(x).startswith(prefixes) for x in arguments[:2]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
"""
KILLS = """
from bptjax.run.checkpoint_files import (
    HALF_WRITTEN, clear_half_written, damage, steps_in, write_manifest
)
from bptjax.run.local_checkpoints import Copies, local_directory, make_local_directory

def write(local, step):
    hidden = local / f"{step}{HALF_WRITTEN}"
    (hidden / "state").mkdir(parents=True)
    for name in "ab":
        (hidden / "state" / name).write_text(name * step)
    write_manifest(hidden)
    hidden.rename(local / str(step))

def one(place, operation):
    run, fast = place / "run", str(place / "fast")
    run.mkdir(parents=True)
    final = run / "checkpoints"

    def train(*steps):
        make_local_directory(fast, run)
        copies = Copies(local_directory(fast, run), final, 1, 2)
        copies.recover()
        for step in steps_in(final, HALF_WRITTEN):  # As Checkpoints does.
            clear_half_written(final / str(step))
        copies.claim()
        for step in steps:
            copies.follow(lambda: write(local_directory(fast, run), step), step, False)
            copies.wait()
        copies.close()

    child = os.fork()
    if not child:
        kill_at(operation, place)
        train(1, 2, 3)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    local = local_directory(fast, run)
    complete = {*steps_in(final), *steps_in(local)}
    train()
    found = steps_in(final)
    assert max(found, default=0) == max(complete, default=0), (operation, found, complete)
    assert (2 in found) == (2 in complete) and not any(damage(final / str(n)) for n in found)
    assert not list(Path(fast).iterdir()), operation
    train(5)
    assert steps_in(final) == [2, 5][2 not in complete:], operation
    assert not steps_in(final, HALF_WRITTEN), operation
    return status == 0

number = 1
while not one(Path(sys.argv[1], str(number)), number):
    number += 1
print(number)
"""


@pytest.mark.thorough
def test_kill_at_every_file_operation(tmp_path):
    command = [sys.executable, "-c", KILL_AT + KILLS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) > 50, done.stderr


PAIR_KILLS = """
from bptjax.run.checkpoint_files import (
    HALF_WRITTEN, clear_half_written, damage, steps_in, write_manifest
)
from bptjax.run.local_checkpoints import Copies, Processes, local_directory, make_local_directory

def write(local, step, rank):
    hidden = local / f"{step}{HALF_WRITTEN}"
    part = hidden / "state" / f"ocdbt.process_{rank}"
    part.mkdir(parents=True)
    (part / "a").write_text("a" * step)
    (hidden / "state" / "shapes").mkdir()
    (hidden / "state" / "shapes" / f"process_{rank}").write_text("of a part")
    (hidden / "state" / "names").write_text("the same")
    write_manifest(hidden)
    hidden.rename(local / str(step))

def merge(state):
    found = sorted(path.name for path in state.iterdir())
    assert found == ["names", "ocdbt.process_0", "ocdbt.process_1", "shapes"]
    assert len([*(state / "shapes").iterdir()]) == 2
    (state / "merged").write_text("merged")

def train(place, rank, talk, *steps):
    run, fast, rounds = place / "run", str(place / f"fast{rank}"), iter(range(99))

    def gather(value):
        number, found = next(rounds), []
        fresh = talk / f"{number}.{rank}.new"
        fresh.write_text(json.dumps(value))
        fresh.rename(talk / f"{number}.{rank}")
        for other in range(2):
            while not (file := talk / f"{number}.{other}").exists():
                time.sleep(0.001)
            found.append(json.loads(file.read_text()))
        return found

    final = run / "checkpoints"
    make_local_directory(fast, run, rank)
    local = local_directory(fast, run, rank)
    copies = Copies(local, final, 1, 2, Processes(rank, 2, gather, merge, print))
    copies.recover()
    if rank == 0:
        for step in steps_in(final, HALF_WRITTEN):  # As Checkpoints does.
            clear_half_written(final / str(step))
    if steps:
        copies.claim()
    for step in steps:
        copies.follow(lambda: write(local, step, rank), step, False)
        copies.wait()
    copies.close()

def pair(place, name, victim, operation, *steps):
    "Runs two processes, of which one may be killed; then the other is. Returns how they ended."
    talk, children = place / f"talk{name}", []
    talk.mkdir(parents=True)
    for rank in range(2):
        child = os.fork()
        if not child:
            if rank == victim:
                kill_at(operation, place / "run", place / "fast")
            try:
                train(place, rank, talk, *steps)
            except BaseException as error:
                print(type(error), error, file=sys.stderr)
                os._exit(1)
            os._exit(0)
        children.append(child)
    ends = {}
    while children:
        child, status = os.wait()
        children.remove(child)
        ends[child] = status
        if status and children:
            os.kill(children[0], signal.SIGKILL)
    return list(ends.values())

def one(place, victim, operation, lose):
    run = place / "run"
    final = run / "checkpoints"
    run.mkdir(parents=True)
    killed = pair(place, "a", victim, operation, 1, 2, 3)
    assert set(killed) <= {0, signal.SIGKILL}, killed
    locals = [local_directory(str(place / f"fast{rank}"), run, rank) for rank in range(2)]
    if lose and locals[1].exists():
        import shutil
        shutil.rmtree(locals[1])
    found = [{*steps_in(local)} for local in locals]
    complete = {*steps_in(final)} | (found[0] & found[1])
    assert pair(place, "b", 0, 10**9) == [0, 0]
    now = steps_in(final)
    assert max(now, default=0) == max(complete, default=0), (victim, operation, now, complete)
    assert not any(damage(final / str(n)) for n in now)
    assert pair(place, "c", 0, 10**9, 5) == [0, 0]
    assert max(steps_in(final)) == 5 and not steps_in(final, HALF_WRITTEN)
    left = [x for rank in range(2) for x in (place / f"fast{rank}").iterdir()]
    assert not left, (victim, operation, left)
    return not any(killed)

victim, step = int(sys.argv[2]), int(sys.argv[3])
number = 1
while not one(Path(sys.argv[1], str(number)), victim, number, number % 2):
    number += step
print(number)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 1])
def test_kill_of_one_of_two_processes_at_file_operations(tmp_path, victim):
    """At each fifth one. The other process is killed too, as when a peer is lost. At each second of
    them, the second process also loses its local directory."""
    command = [sys.executable, "-c", KILL_AT + PAIR_KILLS, str(tmp_path), str(victim), "5"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout.split()[-1]) > 50, done.stderr
