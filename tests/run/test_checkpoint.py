"""Checkpoints: other meshes, damage in every file, another model, and kill -9."""

import itertools
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiers import fast

from bptjax.run.checkpoint import CheckpointConfig, Checkpoints, DamagedCheckpointError
from bptjax.run.checkpoint_files import watch_disk
from bptjax.run.output import DiskFull


def mesh(devices):
    return jax.make_mesh(
        (devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )


def make_state(step, devices=1):
    """A state that its step determines: nested, tuples, an empty node, a scalar, bfloat16, keys."""
    rows = NamedSharding(mesh(devices), PartitionSpec("x"))
    whole = NamedSharding(mesh(devices), PartitionSpec())
    rng = np.random.default_rng(step)
    return {
        "params": {"w": jax.device_put(rng.normal(size=(16, 33)).astype(np.float32), rows)},
        "optimizer": (
            (),
            None,
            [jax.device_put(jnp.asarray(rng.normal(size=8), jnp.bfloat16), rows)],
        ),
        "key": jax.device_put(jax.random.key(step), whole),
        "step": jax.device_put(jnp.int32(step), whole),
    }


def abstract(devices=1, state=None):
    state = make_state(0, devices) if state is None else state
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_same(left, right):
    def check(a, b):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    jax.tree.map(check, left, right)


def write(run, steps, limit=None):
    checkpoints = Checkpoints(run, save_total_limit=limit)
    for step in steps:
        checkpoints.save(step, make_state(step), {"cursor": step})
    checkpoints.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with steps 10 and 20, to be copied."""
    run = tmp_path_factory.mktemp("saved")
    write(run, (10, 20))
    return run


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


@pytest.mark.parametrize("devices", [1, 4, 8])
def test_restores_on_another_mesh(tmp_path, devices):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, make_state(3, 8), {"cursor": [1, 2], "config": "a: 1\n"})
    checkpoints.close()
    step, state, extra = Checkpoints(tmp_path).restore(abstract(devices))
    assert (step, extra) == (3, {"cursor": [1, 2], "config": "a: 1\n"})
    assert_same(state, make_state(3))
    jax.tree.map(lambda a, b: a.sharding == b.sharding or pytest.fail(), state, abstract(devices))


def test_nothing_to_restore_writes_nothing(tmp_path):
    assert Checkpoints(tmp_path).restore(abstract()) is None
    assert not list(tmp_path.iterdir())


def test_newest_n_kept(tmp_path):
    write(tmp_path, (1, 2, 3, 3), limit=2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]
    assert Checkpoints(tmp_path).restore(abstract())[0] == 3
    assert Checkpoints(tmp_path).restore(abstract(), step=2)[0] == 2
    with pytest.raises(ValueError, match=r"step 1: must be one of \[2, 3\]"):
        Checkpoints(tmp_path).restore(abstract(), step=1)


def test_every_nth_kept(tmp_path):
    """Beside the newest one, also by a run that is resumed."""
    for last in (10, 14):
        checkpoints = Checkpoints(tmp_path, save_total_limit=1, keep_every=4)
        found = checkpoints.restore(abstract())
        for step in range(found[0] + 2 if found else 2, last + 1, 2):
            checkpoints.save(step, make_state(step), {})
        checkpoints.close()
    names = {int(path.name) for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {4, 8, 12, 14}


def test_donation_right_after_save(tmp_path):
    """Step n+1 overwrites the buffers of step n while they are being written."""
    update = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = update(jnp.zeros(1 << 20))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": x}, {})
    for _ in range(20):
        x = update(x)
    checkpoints.close()
    _, state, _ = Checkpoints(tmp_path).restore({"x": x})
    assert (state["x"] == 1).all()


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def data_file(step):
    return max((step / "state").rglob("d/*"), key=lambda p: p.stat().st_size)


def meta_file(step):
    return step / "meta" / "metadata"


DAMAGE = {
    "array cut": lambda step: cut(data_file(step)),
    "array flipped": lambda step: flip(data_file(step)),
    "array gone": lambda step: data_file(step).unlink(),
    "state gone": lambda step: shutil.rmtree(step / "state"),
    "tree metadata cut": lambda step: cut(step / "state" / "_METADATA"),
    "meta gone": lambda step: meta_file(step).unlink(),
    "meta garbage": lambda step: meta_file(step).write_text("{]"),
    "meta valid JSON": lambda step: meta_file(step).write_text("{}"),
    "manifest gone": lambda step: (step / "manifest.json").unlink(),
    "manifest garbage": lambda step: (step / "manifest.json").write_bytes(b"\xff\x00"),
    "manifest valid JSON": lambda step: (step / "manifest.json").write_text("[]"),
    "manifest flipped": lambda step: flip(step / "manifest.json"),
    "empty": lambda step: [shutil.rmtree(step), step.mkdir()],
    "half-written": lambda step: step.rename(f"{step}.orbax-checkpoint-tmp"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_newest_is_named_and_skipped(run, caplog, damage):
    DAMAGE[damage](run / "checkpoints" / "20")
    checkpoints = Checkpoints(run, save_total_limit=2)
    step, state, extra = checkpoints.restore(abstract())
    assert (step, extra) == (10, {"cursor": 10})
    assert_same(state, make_state(10))
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    word = "half-written" if damage == "half-written" else "damaged"
    assert f"step 20 is {word}" in record.getMessage() and "using step 10" in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize("step", [None, 30])
def test_a_renamed_checkpoint_is_refused(run, step):
    (run / "checkpoints" / "20").rename(run / "checkpoints" / "30")
    with pytest.raises(
        ValueError, match="/30: must hold the checkpoint of step 30, not of step 20"
    ):
        Checkpoints(run).restore(abstract(), step)
    (run / "checkpoints" / "10").rename(run / "checkpoints" / "20")
    (run / "checkpoints" / "30").rename(run / "checkpoints" / "10")
    with pytest.raises(
        ValueError, match="/20: must hold the checkpoint of step 20, not of step 10"
    ):
        Checkpoints(run).restore(abstract())


@pytest.mark.parametrize("name", ["30", "30.orbax-checkpoint-tmp", "9" * 20, "020", "٣"])
def test_other_files_are_no_checkpoints(run, name):
    (run / "checkpoints" / name).touch()
    checkpoints = Checkpoints(run)
    assert checkpoints.restore(abstract())[0] == 20
    checkpoints.save(30, make_state(30), {})
    checkpoints.close()
    assert Checkpoints(run).restore(abstract())[0] == 30


def test_a_pipe_in_the_manifest_is_damage(run):
    os.mkfifo(run / "checkpoints" / "20" / "pipe")
    file = run / "checkpoints" / "20" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pipe": 0}))
    assert Checkpoints(run).restore(abstract())[0] == 10


@pytest.mark.parametrize("damage", ["array flipped", "empty", "half-written"])
def test_damaged_step_is_saved_again(run, caplog, damage):
    DAMAGE[damage](run / "checkpoints" / "20")
    checkpoints = Checkpoints(run, save_total_limit=2)
    checkpoints.restore(abstract())
    for step in (20, 30):
        checkpoints.save(step, make_state(step), {"cursor": step})
    checkpoints.close()
    names = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert names == (["20", "30"] if damage == "half-written" else ["20", "20.aside1", "30"])
    caplog.clear()
    assert Checkpoints(run).restore(abstract())[0] == 30
    assert Checkpoints(run).restore(abstract(), step=20)[0] == 20
    assert not caplog.records


def test_a_process_that_saved_a_damaged_step_saves_it_again(run, caplog):
    """As after a rollback past a damaged checkpoint."""
    checkpoints = Checkpoints(run, save_total_limit=2)
    checkpoints.restore(abstract())
    checkpoints.save(30, make_state(30), {})
    checkpoints.wait()
    DAMAGE["array flipped"](run / "checkpoints" / "30")
    assert checkpoints.restore(abstract())[0] == 20
    checkpoints.save(30, make_state(30), {})
    checkpoints.close()
    names = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert names == ["20", "30", "30.aside1"]
    assert "step 30 is damaged" in caplog.text


def test_damaged_does_not_push_out_a_good_one(run):
    """A damaged newer checkpoint does not count among the two kept."""
    DAMAGE["array cut"](run / "checkpoints" / "20")
    checkpoints = Checkpoints(run, save_total_limit=2)
    checkpoints.restore(abstract())
    checkpoints.save(30, make_state(30), {})
    checkpoints.close()
    names = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert names == ["10", "20.aside1", "30"]


def test_all_damaged_is_an_error(run):
    for step in ("10", "20"):
        flip(data_file(run / "checkpoints" / step))
    with pytest.raises(DamagedCheckpointError, match=r"step 20 is damaged .*; step 10 .*move the"):
        Checkpoints(run).restore(abstract())
    with pytest.raises(DamagedCheckpointError, match="step 20"):
        Checkpoints(run).restore(abstract(), step=20)


def test_only_half_written_starts_over(run, caplog):
    shutil.rmtree(run / "checkpoints" / "10")
    DAMAGE["half-written"](run / "checkpoints" / "20")
    assert Checkpoints(run).restore(abstract()) is None
    assert "step 20 is half-written; starting from step 0" in caplog.text


def wider(state):
    state["params"]["w"] = jax.ShapeDtypeStruct((16, 34), jnp.float32, sharding=None)


def narrower_dtype(state):
    state["params"]["w"] = jax.ShapeDtypeStruct((16, 33), jnp.bfloat16, sharding=None)


def more(state):
    state["params"]["w2"] = state["params"]["w"]


def fewer(state):
    del state["params"]["w"]


@pytest.mark.parametrize(
    "change, here",
    [
        (wider, r"params/w is float32\[16, 33\] in the checkpoint and float32\[16, 34\] in"),
        (
            narrower_dtype,
            r"params/w is float32\[16, 33\] in the checkpoint and bfloat16\[16, 33\] in",
        ),
        (more, r"params/w2 is absent in the checkpoint and float32\[16, 33\] in"),
        (fewer, r"params/w is float32\[16, 33\] in the checkpoint and absent in"),
    ],
)
def test_another_model_is_not_damage(run, caplog, change, here):
    state = abstract()
    change(state)
    with pytest.raises(ValueError, match=here):
        Checkpoints(run).restore(state)
    assert not caplog.records


def test_sharding_is_required(run):
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), abstract())
    with pytest.raises(ValueError, match="key: must have a sharding"):
        Checkpoints(run).restore(state)


def test_a_removed_run_directory_is_not_made_anew(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    checkpoints = Checkpoints(run, save_total_limit=1)
    checkpoints.save(1, make_state(1), {})
    checkpoints.wait()
    shutil.rmtree(run)
    with pytest.raises(FileNotFoundError, match="run: was removed"):
        checkpoints.save(2, make_state(2), {})
    assert not run.exists()
    checkpoints.close()


def test_a_clock_that_is_set_forward_ends_no_save(tmp_path, monkeypatch):
    """By an hour at each look at it."""
    looks, real = itertools.count(), time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600.0 * next(looks))
    write(tmp_path, (10, 20))
    step, state, _ = Checkpoints(tmp_path).restore(make_state(0))
    assert step == 20 and next(looks) > 10
    assert_same(state, make_state(20))


def test_failed_save_is_raised(tmp_path):
    """Files may grow to 64 KiB only, as on a full disk; afterwards the same step can be saved."""
    checkpoints = Checkpoints(tmp_path, save_total_limit=1)
    state = {"x": jnp.asarray(np.random.default_rng(0).normal(size=1 << 16))}
    checkpoints.save(1, state, {})
    checkpoints.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(
            DiskFull, match="/2: File too large; free some space, then start the same"
        ):
            checkpoints.save(2, state, {})
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore(state)[0] == 1
    checkpoints.save(2, state, {})
    checkpoints.close()
    assert Checkpoints(tmp_path).restore(state)[0] == 2


FULL = """
import gc, resource, sys, time
import jax.numpy as jnp, numpy as np
from bptjax.run.checkpoint import Checkpoints

x = np.random.default_rng(0).normal(size=(200, 1 << 14)).astype(np.float32)
state = {f"x{i}": jnp.asarray(row) for i, row in enumerate(x)}
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), -1))
checkpoints = Checkpoints(sys.argv[1])
try:
    checkpoints.save(1, state, {})
    checkpoints.close()
except OSError as error:
    print(error)
gc.collect()
time.sleep(0.5)
"""


@pytest.mark.parametrize("size", fast([1 << 10, 1 << 15], [1 << 15]))
def test_many_failed_writes_are_one_error(tmp_path, size):
    """The other writes of the save, still under way when one fails, print nothing."""
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", FULL, str(tmp_path), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{tmp_path}/checkpoints/1: File too large; free some space")


def test_config_refuses_bad_values():
    with pytest.raises(ValueError, match="save_total_limit=0: must be at least 1"):
        CheckpointConfig(save_total_limit=0)
    with pytest.raises(ValueError, match="keep_every=300: must be a multiple of .*save_steps=200"):
        CheckpointConfig(save_steps=200, keep_every=300)


CHILD = """
import sys
import jax, jax.numpy as jnp
from bptjax.run.checkpoint import Checkpoints

def state(step):
    return {"w": jnp.arange(50_000.0) * step, "step": jnp.int32(step)}

checkpoints = Checkpoints(sys.argv[1], save_total_limit=2)
found = checkpoints.restore(state(0))
step = 0
if found:
    step, restored, extra = found
    assert extra == {"cursor": step}
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), restored, state(step))), step
print("resumed", step, flush=True)
while step < int(sys.argv[2]):
    step += 1
    checkpoints.save(step, state(step), {"cursor": step})
    print("handed over", step, flush=True)
checkpoints.close()
print("closed", flush=True)
"""


@pytest.mark.parametrize("kills", fast([1, 3], [1]))
def test_kill_at_any_moment_resumes(tmp_path, kills):
    rng = random.Random(0)
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", CHILD, str(tmp_path)]
    last = 0
    for _ in range(kills):
        child = subprocess.Popen(
            [*command, "1000000"], stdout=subprocess.PIPE, text=True, env=environment
        )
        lines = [child.stdout.readline() for _ in range(rng.randrange(2, 9))]
        time.sleep(rng.random() * 0.05)
        child.send_signal(signal.SIGKILL)
        lines += child.communicate()[0].splitlines()
        resumed, *saved = [int(line.split()[-1]) for line in lines]
        # A save that returns has waited for the one before it.
        assert lines[0].startswith("resumed") and resumed >= last - 1
        last = max([resumed, *saved])
    done = subprocess.run(
        [*command, str(last + 2)], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 0 and done.stdout.endswith("closed\n"), done.stderr
    lines = [line for line in done.stderr.splitlines() if "half-written" not in line]
    assert not lines
    assert int(done.stdout.split()[1]) >= last - 1
    kept = [p for p in (tmp_path / "checkpoints").iterdir() if p.name.isdecimal()]
    assert sorted(int(p.name) for p in kept) == [last + 1, last + 2]
    assert json.loads((kept[0] / "manifest.json").read_text())


@pytest.mark.parametrize("meta", ["[]", '{"extra": [], "leaves": {}}', '{"extra": {}}'])
def test_metadata_of_other_types_are_refused(tmp_path, meta):
    file = tmp_path / "checkpoints" / "1" / "meta" / "metadata"
    file.parent.mkdir(parents=True)
    file.write_text(meta)
    with pytest.raises(ValueError, match="metadata: must hold"):
        Checkpoints(tmp_path).extra(1)


@pytest.mark.parametrize(
    "kind",
    [
        None,
        3,
        "",
        "float32",
        "float32[a]",
        "float32[-1]",
        "float32[2][2]",
        "float32[\u00b2]",
        "x[2]",
    ]
    + ["float32[" + "9" * 5000 + "]"],
)
def test_a_damaged_kind_of_a_leaf_names_its_checkpoint(tmp_path, kind):
    """It ended in "invalid literal for int()", or in a traceback."""
    file = tmp_path / "checkpoints" / "1" / "meta" / "metadata"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"extra": {}, "leaves": {"w": kind}}))
    with pytest.raises(
        ValueError, match="checkpoints/1: w=.* must be a dtype and a shape"
    ) as error:
        Checkpoints(tmp_path).specs(1)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("leaves", "name"),
    [
        ({"w": "int8[2]"}, "w"),
        ({"w": "float32[3]"}, "w"),
        ({"w": "float32[2]", "more": "float32[2]"}, "more"),
    ],
)
def test_arrays_are_those_of_the_metadata(tmp_path, leaves, name):
    """Another dtype was ignored, another shape or a missing array ended in a traceback."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": jnp.ones(2)}, {})
    checkpoints.close()
    file = tmp_path / "checkpoints" / "1" / "meta" / "metadata"
    file.write_text(json.dumps({"extra": {}, "leaves": leaves}))
    with pytest.raises(ValueError, match=f"checkpoints/1: {name} is .* must be the same"):
        Checkpoints(tmp_path).read(1, name)


def test_a_disk_that_hangs_is_reported(tmp_path, monkeypatch):
    """Not one that is slow or full: its saves report their own errors."""
    done, hangs, told = threading.Event(), threading.Event(), []
    answers = iter([nullcontext, lambda: time.sleep(0.1) or nullcontext(), lambda: open("/full/x")])

    def write(dir):
        assert dir == tmp_path
        if (answer := next(answers, None)) is not None:
            return answer()
        hangs.set()
        done.wait()  # For ever.
        return nullcontext()

    monkeypatch.setattr("bptjax.run.checkpoint_files.TemporaryFile", write)
    limits = dict(every_s=0.01, limit_s=1.0)
    thread = threading.Thread(
        target=watch_disk,
        args=(tmp_path, done, lambda x: told.append((x, done.set()))),
        kwargs=limits,
    )
    thread.start()
    assert hangs.wait(10) and not told
    thread.join(10)
    assert not thread.is_alive() and len(told) == 1
    assert str(told[0][0]).startswith(f"{tmp_path}: the disk has not answered for 1 s; mend it")


def test_files_of_a_watched_disk_do_not_stay(tmp_path):
    done = threading.Event()
    limits = dict(every_s=0.001, limit_s=60.0)
    thread = threading.Thread(target=watch_disk, args=(tmp_path, done, None), kwargs=limits)
    thread.start()
    time.sleep(0.1)
    done.set()
    thread.join(10)
    assert not thread.is_alive() and not list(tmp_path.iterdir())
