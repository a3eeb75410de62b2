"""The global batch of a run without some of its processes."""

from dataclasses import replace

import jax
import pytest

from bptjax.config import Config, TrainConfig
from bptjax.models.config import ModelConfig
from bptjax.parallel.launch import ProcessInfo
from bptjax.parallel.members import Complete, Members, Plan
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.run.heartbeat import DIRECTORY
from bptjax.training.fewer_processes import describe_missing, join, keep_global_batch
from bptjax.training.spec import TrainSpec

PROCESS = ProcessInfo("localhost:1234", 2, 1, None)


def config(batch=1, accumulate=2, **parallel):
    train = TrainConfig(
        per_device_train_batch_size=batch, gradient_accumulation_steps=accumulate, seq_len=32
    )
    return Config(train=train, parallel=ParallelConfig(**parallel))


def without_one(tmp_path, sequences):
    """Members of a start without one of two processes, each with all devices."""
    members = Members(tmp_path, PROCESS, lambda complete, present: list(present), 600.0)
    devices = jax.device_count()
    members.complete = Complete(["host0", "host1"], [devices, devices], sequences, sequences // 2)
    members.plan = Plan([1], ["x"], "host1:1234")
    return members


@pytest.mark.parametrize(
    "given, accumulate",
    [
        (dict(), 4),
        (dict(tp=2), 8),
        (dict(batch=2), 2),
        (dict(dp=-1, fsdp=1), 4),
        (dict(dp=1, fsdp=1, sp=-1), 32),
    ],
)
def test_the_global_batch_is_kept(tmp_path, given, accumulate):
    given = config(**given)
    members = without_one(tmp_path, 32)
    kept = keep_global_batch(given, members)
    assert kept.train.gradient_accumulation_steps == accumulate
    spec = TrainSpec(kept, ModelConfig(vocab_size=64, num_heads=8), make_mesh(given.parallel))
    assert spec.global_batch_size == 32
    (line,) = describe_missing(given, spec, members)
    wanted = f"gradient_accumulation_steps={accumulate} in place of 2 keeps the 32 sequences of a "
    assert wanted in line or accumulate == 2
    assert line.startswith("without host0: 1 of 2 processes, ") and line.endswith("to rounding")


def test_dropout_is_named(tmp_path):
    given, members = config(), without_one(tmp_path, 32)
    model = ModelConfig(vocab_size=64, residual_dropout=0.1)
    spec = TrainSpec(keep_global_batch(given, members), model, make_mesh(given.parallel))
    (line,) = describe_missing(given, spec, members)
    assert line.endswith("up to rounding, but dropout draws other random numbers")


def test_processes_that_wait_are_named(tmp_path):
    given, members = config(), without_one(tmp_path, 32)
    members.plan = Plan([1], ["x"], "host1:1234", [0])
    kept, model = keep_global_batch(given, members), ModelConfig(vocab_size=64)
    spec = TrainSpec(kept, model, make_mesh(given.parallel))
    (line,) = describe_missing(given, spec, members)
    assert "; host0 can only wait, as more processes do not divide them; results" in line


def test_a_batch_that_the_devices_do_not_divide_is_refused(tmp_path):
    with pytest.raises(ValueError, match="8 devices without host0: must divide the 20 sequences"):
        keep_global_batch(config(), without_one(tmp_path, 20))


def test_a_run_with_all_processes_keeps_its_config(tmp_path):
    members = without_one(tmp_path, 20)
    members.plan = None
    assert keep_global_batch(config(), members) == config() == keep_global_batch(config(), None)
    assert describe_missing(config(), None, members) == []


def test_runs_that_need_all_processes(tmp_path, monkeypatch):
    """Without a supervisor, without an open axis, with parallel.host_wait_s=null, or alone."""
    given = replace(config(), run_dir=str(tmp_path))
    monkeypatch.delenv(DIRECTORY, raising=False)
    assert join(given, PROCESS) == (PROCESS, None)
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    for parallel in (ParallelConfig(fsdp=2), ParallelConfig(host_wait_s=None)):
        assert join(replace(given, parallel=parallel), PROCESS) == (PROCESS, None)
    assert join(given, None) == (None, None)
    process, members = join(given, PROCESS)  # The first start.
    assert process == PROCESS and members is not None and members.complete is None
