"""`bptjax profile`: the files and tables of a step on the CPU."""

import csv

import jax
import pytest
from jax._src import compilation_cache

from bptjax.cli import profile
from bptjax.cli.main import main
from bptjax.cost import step_profile
from bptjax.cost.timeline import KINDS, PHASES, without_cache
from bptjax.training.state import abstract_state

FLAGS = [
    *("--model.vocab_size=512", "--model.hidden_size=64", "--model.num_layers=2"),
    *("--model.num_heads=2", "--train.seq_len=128", "--train.max_steps=1", "--device=cpu"),
]


def read(file):
    with file.open() as lines:
        return list(csv.DictReader(lines))


def test_a_program_in_the_cache_is_compiled_again():
    """Also after other compilations, before which JAX has looked at its settings."""
    (client,) = {device.client for device in jax.devices()}
    jax.jit(lambda x: x + 1)(1)
    assert compilation_cache.is_cache_used(client)
    with without_cache():
        assert not compilation_cache.is_cache_used(client)
    assert compilation_cache.is_cache_used(client)


# jaxlib 0.12 aborts the process if this warning is an error.
@pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")
def test_a_step_is_profiled(tmp_path, capsys, monkeypatch):
    made = []

    def compile_with_timeline(*args):
        made.extend([args[0], *original(*args)])
        return made[1:]

    original = step_profile.compile_with_timeline
    monkeypatch.setattr(step_profile, "compile_with_timeline", compile_with_timeline)
    monkeypatch.setattr(profile, "select_devices", lambda device: jax.devices()[:1])
    assert main(["profile", *FLAGS, f"--run_dir={tmp_path}"]) == 0
    out, written = capsys.readouterr().out, tmp_path / "profile"
    assert "Memory of a step per device" in out and "Time of a step" in out
    spec, compiled, _, timeline = made

    rows = read(written / "memory.csv")
    bytes_of = {kind: [int(row[kind]) for row in rows] for kind in KINDS}
    needs = compiled.memory_analysis()
    results = needs.output_size_in_bytes - needs.alias_size_in_bytes
    needed = needs.argument_size_in_bytes + needs.temp_size_in_bytes + results
    assert timeline.reserved == needed
    most = max(sum(int(row[kind]) for kind in KINDS) for row in rows)
    assert most == pytest.approx(needed, rel=0.01)
    state = abstract_state(spec)
    sizes = [4 * sum(x.size for x in jax.tree.leaves(t)) for t in (state.model, state.opt_state)]
    for kind, size in zip(("parameters", "optimizer state"), sizes, strict=True):
        assert bytes_of[kind] == pytest.approx([size] * len(rows), rel=1e-3)
    # All gradients exist when the update starts, and no saved activations.
    phases = [row["phase"] for row in rows]
    assert phases == sorted(phases, key=PHASES.index) and set(phases) == set(PHASES)
    update = phases.index("update")
    assert 0.99 * sizes[0] < bytes_of["gradients"][update] < 1.5 * sizes[0]
    assert bytes_of["saved activations"][update + 1] == 0 < max(bytes_of["saved activations"])
    assert max(bytes_of["loss and logits"]) > 0
    progress = [float(row["progress"]) for row in rows]
    assert progress[0] == 0 and progress == sorted(progress) and progress[-1] <= 1

    times = read(written / "time.csv")
    assert {"attention", "matrix products", "loss", "optimizer", "idle"} <= {
        r["part"] for r in times
    }
    assert {"forward", "recomputation", "backward", "update"} <= {row["pass"] for row in times}
    for name in ("memory.png", "time.png"):
        assert (written / name).stat().st_size > 10_000
    assert list((written / "trace").rglob("*.xplane.pb"))
