"""Rollbacks after spikes: the batches left out, exact resumption, the end after the last one."""

import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bptjax.cli.train import main
from bptjax.config import SpikeConfig
from bptjax.data.batches import Batches
from bptjax.models.transformer import Transformer
from bptjax.run.checkpoint import Checkpoints
from bptjax.run.metrics import JsonlWriter, read_metrics
from bptjax.training.spikes import Spikes
from training.runs import rows, write_config

ROLLS_BACK = ["--train.on_spike.max_rollbacks=3", "--train.on_spike.factor=1.3"]
ROLLS_BACK += ["--train.on_spike.window=4"]


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Command of a run whose batches 15 to 17 have letters that no other batch has."""
    folder = tmp_path_factory.mktemp("odd")
    arguments = write_config(folder)
    letters = random.Random(1).choices(range(0x4E00, 0x9FFF), k=60)
    (folder / "texts" / "04.txt").write_text("".join(map(chr, letters)))
    flags = ["--data.shuffle=false", "--data.packing=concat", "--data.eval_fraction=0"]
    return [*arguments, *flags, "--train.eval_steps=null", "--train.sample_tokens=0"]


@pytest.fixture(scope="module")
def undisturbed(command, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run") / "run"
    with pytest.MonkeyPatch.context() as patch:
        one_device(patch)
        assert main([*command, *ROLLS_BACK, f"--run_dir={run_dir}"]) == 0
    return run_dir


def one_device(patch):
    patch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:1])


def arrays(run_dir):
    checkpoints = Checkpoints(run_dir)
    return {name: checkpoints.read(20, name) for name in checkpoints.specs(20)}


def assert_equal_runs(left, right):
    for name in ("train/loss", "train/grad_norm", "train/tokens_seen"):
        assert rows(left, name) == rows(right, name)
    left, right = arrays(left), arrays(right)
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], strict=True)


@pytest.mark.thorough
def test_a_run_without_the_batches_that_are_left_out(command, undisturbed, tmp_path, monkeypatch):
    """All rollbacks start from the same checkpoint."""
    log = (undisturbed / "log.txt").read_text()
    first, second, third = [line for line in log.splitlines() if "rolling back" in line]
    assert " step 15: loss 5." in first and " is more than 1.3 × 3." in first
    assert (
        "median of 4 steps; rolling back to step 12, without batches 13 to 15 of the data" in first
    )
    assert first.endswith("(rollback 1 of 3)")
    assert " step 13: loss 5." in second and "to step 12, without batches 13 to 16 of" in second
    assert third.endswith("without batches 13 to 17 of the data (rollback 3 of 3)")
    records = list(read_metrics(undisturbed / "metrics.jsonl"))
    assert [record["step"] for record in records] == list(range(1, 21))
    assert [record["train/rollbacks"] for record in records] == [0] * 12 + [3] * 8
    assert max(record["train/loss"] for record in records[4:]) < 5.0

    draw, drawn = Batches.__next__, []

    def leave_out(self):
        batch = draw(self)
        drawn.append(batch)
        while 13 <= len(drawn) <= 17:
            batch = draw(self)
            drawn.append(batch)
        return batch

    monkeypatch.setattr(Batches, "__next__", leave_out)
    assert main([*command, f"--run_dir={tmp_path / 'run'}"]) == 0
    assert len(drawn) == 25
    assert_equal_runs(undisturbed, tmp_path / "run")


@pytest.mark.thorough
def test_a_gradient_that_is_not_finite_after_the_layers_are_updated(command, tmp_path, monkeypatch):
    """The loss is finite, and so are the gradients of all layers. The run is as without these
    batches; with no rollbacks left it ends, and saves nothing."""
    look_up = Transformer._look_up

    @jax.custom_vjp
    def spoil(x, odd):
        return x

    spoil.defvjp(lambda x, odd: (x, odd), lambda odd, g: (jnp.where(odd, jnp.nan, g), None))

    def spoiled(self, tokens, dtype, positions=None):
        x = look_up(self, tokens, dtype, positions)
        tokens = jnp.asarray(tokens)
        # Bytes of the odd letters.
        return spoil(x, ((tokens >= 0x80) & (tokens < 0x100)).any())

    monkeypatch.setattr(Transformer, "_look_up", spoiled)
    delayed = [*command, "--optimizer.clip=delayed"]
    flags = ["--train.on_spike.max_rollbacks=9", "--train.on_spike.factor=1e9"]
    assert main([*delayed, *flags, f"--run_dir={tmp_path / 'spoiled'}"]) == 0
    log = (tmp_path / "spoiled" / "log.txt").read_text()
    assert log.count("gradient norm nan") == 4 and "loss nan" not in log
    assert main([*delayed, f"--run_dir={tmp_path / 'ended'}"]) == 1
    assert Checkpoints(tmp_path / "ended").newest() == 12

    draw, drawn = Batches.__next__, []

    def leave_out(self):
        drawn.append(draw(self))
        while 13 <= len(drawn) <= 17:
            drawn.append(draw(self))
        return drawn[-1]

    monkeypatch.setattr(Batches, "__next__", leave_out)
    assert main([*delayed, f"--run_dir={tmp_path / 'run'}"]) == 0
    assert_equal_runs(tmp_path / "spoiled", tmp_path / "run")


@pytest.mark.thorough
@pytest.mark.parametrize("step", [14, 19], ids=["before its next checkpoint", "after it"])
def test_a_run_killed_after_a_rollback(command, undisturbed, tmp_path, monkeypatch, step):
    run_dir, write = tmp_path / "run", JsonlWriter.write

    def killed(self, at, metrics):
        if at == step and metrics["train/rollbacks"] == 3:
            raise RuntimeError("killed")
        write(self, at, metrics)

    with monkeypatch.context() as patch:
        patch.setattr(JsonlWriter, "write", killed)
        assert main([*command, *ROLLS_BACK, f"--run_dir={run_dir}"]) == 1
    saved = Checkpoints(run_dir)
    rollbacks = {12: [], 18: [[13, 17]]}
    newest = max(steps for steps in rollbacks if steps < step)
    assert saved.newest() == newest
    assert saved.extra(newest)["spikes"]["skipped"] == rollbacks[newest]
    assert main([*command, *ROLLS_BACK, f"--run_dir={run_dir}"]) == 0
    assert_equal_runs(run_dir, undisturbed)
    assert rows(run_dir, "train/rollbacks") == rows(undisturbed, "train/rollbacks")


@pytest.mark.thorough
def test_the_last_rollback_is_followed_by_the_end(command, tmp_path, capsys):
    """Here of a run without a checkpoint, which goes back to step 0."""
    rate = ["--optimizer.learning_rate=1e38", "--train.on_spike.max_rollbacks=2"]
    assert main([*command, *rate, f"--run_dir={tmp_path / 'run'}"]) == 1
    out, error = capsys.readouterr()
    told = [line for line in out.splitlines() if "rolling back" in line]
    first, second = (line.partition("rolling back to ")[2] for line in told)
    assert first == "step 0, without batches 1 to 2 of the data (rollback 1 of 2)"
    assert second == "step 0, without batches 1 to 4 of the data (rollback 2 of 2)"
    assert error.count("\n") == 1 and error.startswith("error: step 2: loss ")
    assert "last good checkpoint: none yet in " in error and "optimizer.learning_rate" in error
    assert "or go on with the same command and a larger train.on_spike.max_rollbacks or" in error
    records = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert [record["step"] for record in records] == [1, 2]


def metrics(loss, norm=1.0, **others):
    return {"train/loss": loss, "train/grad_norm": norm, "train/learning_rate": 0.1, **others}


def test_what_is_a_spike():
    config = SpikeConfig(max_rollbacks=1, factor=2.0, window=3)
    spikes, off = Spikes(config, {}), Spikes(SpikeConfig(window=3), {})
    for values in (metrics(9.0), metrics(1.0), metrics(1.0)):
        assert not spikes.find(values) and not off.find(values)
    assert spikes.find(metrics(2.1)) == "loss 2.1 is more than 2 × 1, the median of 3 steps"
    assert spikes.find(metrics(2.0, 2.1)).startswith("gradient norm 2.1 is more than 2 × 1, the")
    assert not spikes.find(metrics(2.0, 2.0)) and not off.find(metrics(99.0, 99.0))
    for each in (spikes, off):
        for loss, norm in ((math.nan, 1.0), (1.0, math.inf)):
            assert each.find(metrics(loss, norm)).endswith("learning rate 0.1")
        # float16 lowers its loss scale after an overflow, which counts only when it can do no more.
        overflow = metrics(1.0, math.inf)
        assert not each.find(overflow | {"train/loss_scale": 1024.0})
        assert each.find(overflow | {"train/loss_scale": 2.0**-25}).endswith("loss scale 2.98e-08")
    again = Spikes(config, spikes.state())
    assert again.state() == spikes.state()
    assert list(again.state()["recent"]["gradient norm"]) == [1.0, 1.0, 2.0]


@pytest.mark.parametrize("values", [{"max_rollbacks": -1}, {"factor": 1.0}, {"window": 0}])
def test_bad_values_are_refused(values):
    with pytest.raises(ValueError, match=r"train\.on_spike\.\w+=[-\d.]+: must "):
        SpikeConfig(**values)
