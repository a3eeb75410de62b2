"""The scripts at their smallest sizes: a row has measurements or a reason, and plots are
written."""

import csv
import json
import subprocess
import sys
from dataclasses import replace

import adapter_strength
import drill
import jax
import measurements
import overlap
import pytest
import scaling
import seed_faults
import settings
import strategies
import tables
from step import DECODERS
from weights.hf.cases import config
from weights.hf.loading import random_base

from bptjax.cost.devices import KINDS
from bptjax.cost.estimate import Estimator
from bptjax.cost.memory import Plan
from bptjax.data.tokenizer import ByteTokenizer
from bptjax.models.config import ModelConfig

TINY = ModelConfig(vocab_size=64, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1)


def rows(file) -> list[dict[str, str]]:
    assert file.with_suffix(".png").stat().st_size > 10_000
    with file.open() as lines:
        return list(csv.DictReader(lines))


@pytest.mark.thorough
def test_disturbed_runs_go_on_exactly_or_say_why_not():
    """One run of the drill: a kill, a full disk and a damaged checkpoint."""
    command = [sys.executable, drill.__file__, "--seconds=0", "--seed=38264", "--runs=plain"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " events, 1 runs, 0 faults" in done.stdout


@pytest.mark.thorough
def test_the_strength_of_adapters_is_measured(tmp_path):
    """A killed measurement goes on where it was; alpha r and rsLoRA's root of r are one scale."""
    raw = config("llama")
    raw.vocab_size = ByteTokenizer.vocab_size
    ByteTokenizer().save(random_base(tmp_path / "base", raw))
    (tmp_path / "text.txt").write_text("".join(f"{i} plus one is {i + 1}. " for i in range(200)))
    out = tmp_path / "rows.jsonl"
    command = [f"--model={tmp_path / 'base'}", f"--data={tmp_path / 'text.txt'}", f"--out={out}"]
    command += ["--r=16", "--steps=2", "--train.seq_len=16", "--device=cpu"]
    command += ["--train.per_device_train_batch_size=1", "--train.eval_batches=1"]
    adapter_strength.main([*command, "--rates", "1e-2", "--cases", "8", "r"])
    first = out.read_text()
    out.write_text(first + '{"case": "rslora:')
    adapter_strength.main([*command, "--rates", "1e-2", "--cases", "8", "r", "rslora:sqrt"])
    assert out.read_text().startswith(first)
    weak, unit, root = map(json.loads, out.read_text().splitlines())
    assert (weak["scale"], unit["scale"], root["scale"], root["alpha"]) == (0.5, 1.0, 1.0, 4.0)
    assert weak["eval_loss_before"] == unit["eval_loss_before"] == root["eval_loss_before"]
    assert weak["eval_loss"] != unit["eval_loss"] == root["eval_loss"]
    assert unit["device"] and unit["commit"] and unit["versions"]["jax"]


@pytest.fixture
def scale(tmp_path):
    def run(study, *options):
        scaling.main([study, f"--out={tmp_path}", "--repeats=1", *options])
        return rows(tmp_path / f"scaling_{study}.csv")

    return run


@pytest.mark.thorough
def test_attention_is_scaled(scale):
    sizes = "--lengths=64", "--heads", "4", "2", "--head_size=8", "--devices", "1", "2"
    found = scale("attention", *sizes, "--scaling", "strong", "weak", "--strategies=ring")
    told = [(r["devices"], r["order"], r["T"]) for r in found]
    assert told[:4] == [(n, order, "64") for n in "12" for order in ("zigzag", "plain")]
    assert [row[2] for row in told[4:]] == ["64", "64", "128", "128"]
    assert all(r["status"] == "ok" and float(r["tflops_a_device"]) > 0 for r in found)


@pytest.mark.thorough
def test_overlap_is_measured(tmp_path, monkeypatch):
    seen = [(0.0, 1.0), (1.01, 2.0)], [(0.5, 5.0)]
    monkeypatch.setattr(overlap, "spans", lambda profile: seen)
    sizes = "--length=64", "--head_size=8", "--devices=2", "--strategies=ring"
    overlap.main([*sizes, f"--out={tmp_path}"])
    (row,) = json.loads((tmp_path / "overlap.json").read_text())
    assert row["ms"] == 5.0 and row["beside_ms"] == pytest.approx(1.49)
    assert row["communicates"] == [[0.0, 2.0]]
    assert (tmp_path / "overlap.png").stat().st_size > 5_000


@pytest.mark.thorough
def test_encoders_are_scaled(scale, monkeypatch):
    small = dict(hidden_size=16, num_heads=2)
    bert, vit = scaling.ENCODERS["bert"], scaling.ENCODERS["vit"]
    monkeypatch.setitem(scaling.ENCODERS, "bert", replace(bert, vocab_size=64, **small))
    monkeypatch.setitem(
        scaling.ENCODERS,
        "vit",
        replace(vit, encoder=replace(vit.encoder, image_size=(32, 32)), **small),
    )
    found = scale("encoder", "--lengths=32", "--rows=2", "--layers=1", "--devices", "2")
    assert [r["status"] for r in found] == ["ok"] * 4


@pytest.mark.thorough
def test_steps_are_scaled(scale, monkeypatch):
    monkeypatch.setitem(DECODERS, "1b", TINY)
    sizes = "--lengths=32", "--rows=2", "--devices", "2", "4", "--splits=dp"
    found = scale("step", *sizes, "--execution.ffn_chunk=16")
    assert [r["status"] for r in found] == ["ok", "refused: 2 rows do not divide among 4 devices"]
    # One head of 16 for keys and for values, two of 8 for queries; a feed-forward of 3 matrices.
    T, D, F = 32, 16, 64
    each = 6 * (64 * D + 3 * D + 2 * D * D + 2 * D * 8 + 3 * D * F) + 12 * T / 2 * D
    speed = float(found[0]["tokens_per_second_a_device"])
    assert float(found[0]["tflops_a_device"]) * 1e12 == pytest.approx(speed * each)


@pytest.mark.thorough
def test_strategies_are_weighed(tmp_path, monkeypatch):
    monkeypatch.setitem(DECODERS, "1b", TINY)
    some = "data parallel", "ZeRO-1", "ZeRO-3", "ZeRO-3 + both"
    sizes = "--decoders=1b", "--dtypes=float32", "--devices=4", "--steps=1", "--train.seq_len=32"
    strategies.main([f"--out={tmp_path}", *sizes, "--strategies", *some])
    found = rows(tmp_path / "strategies.csv")
    assert [r["strategy"] for r in found] == list(some)
    assert all(r["status"] == "ok" and float(r["epoch_s"]) > 0 for r in found)
    assert {r["batch"] for r in found} == {"4"}
    held = [float(r["held_gib"]) for r in found]
    assert held[0] > held[1] > held[2]


@pytest.mark.parametrize(
    "wrong, message",
    [("--devices=16", "--devices 16: must be at most 8"), ("--train.seqlen=8", "train.seqlen")],
)
@pytest.mark.parametrize("study", [["step"], []])
def test_bad_input_is_one_line_and_exit_2(study, wrong, message, capsys, tmp_path):
    main = scaling.main if study else strategies.main
    with pytest.raises(SystemExit, match="2"):
        main([*study, f"--out={tmp_path / 'out'}", wrong])
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_the_tables_of_the_documents_match_the_rows():
    texts = [document.read_text() for document in tables.DOCUMENTS]
    names = [name for text in texts for _, name, _ in tables.MARK.findall(text)]
    assert sorted(names) == sorted(tables.TABLES)
    for text in texts:
        assert tables.written(text) == text
    assert tables.written(texts[1].replace("| causal | 5", "| causal | 6")) == texts[1]
    with pytest.raises(ValueError, match="table: steps -->: must be one of headline, parity, "):
        tables.written(texts[1].replace("<!-- table: step -->", "<!-- table: steps -->"))


def test_the_picture_of_the_readme_shows_no_more_memory_than_the_peer():
    found = measurements.in_less_memory()
    assert len(found) > 2
    for _, row, peer in found:
        assert row["run"] == peer["run"]
        assert measurements.memory_gib(row) <= measurements.memory_gib(peer)


@pytest.fixture
def room_for(monkeypatch, tmp_path):
    """Plans a row of scripts/settings.py, with compilations that give the estimated workspace times
    a factor."""

    def run(factor, model, method, devices="h100", most=3):
        def plan(spec, name, available, platform):
            estimator = Estimator(spec)
            found = estimator(spec.execution)
            more = int(estimator.gradients + found.saved + factor * found.workspace)
            length = spec.config.train.seq_len
            return Plan(name, length, estimator.held, 0, 0, 0, more, found.host, 0, available)

        count = int(devices.partition(":")[2] or 1)
        present = KINDS["h100"], jax.devices()[:count]
        monkeypatch.setattr(settings, "absent_devices", lambda text: present)
        monkeypatch.setattr(settings, "plan", plan)
        return settings.row(model, method, devices, [], tmp_path / "log", most)

    return run


@pytest.mark.thorough
@pytest.mark.parametrize("factor", [0.8, 1.2])
def test_the_longest_planned_length_fits_and_the_next_does_not(factor, room_for):
    found = room_for(factor, "Llama-3.1 8B", "full")
    at = settings.LENGTHS.index(found["T"])
    assert found["peak_gib"] <= found["room_gib"]
    assert found["states"] == "int8 in host memory"
    again = settings.Case("Llama-3.1 8B", "full", "h100", settings.STATES[found["states"]], factor)
    assert again.peak(settings.LENGTHS[at + 2]) > again.limit.device
    assert found["tokens_per_second"] > 0 and len(found["compiled"]) <= settings.MOST_COMPILED


@pytest.mark.thorough
def test_sequences_are_sharded_over_eight_gpus(room_for):
    found = room_for(1.0, "Llama-3.1 8B", "LoRA", "h100:8", 0)
    assert found["T"] and not found["compiled"]
    assert (found["mesh"], found["mesh_8k"]) == ("fsdp=1 sp=8", "fsdp=8 sp=1")


@pytest.mark.thorough
def test_nothing_is_compiled_for_state_that_does_not_fit(room_for):
    assert "T" not in room_for(1.0, "Llama-3.1 70B", "full")


FAULTS = {
    "if x < n: return f(x, y=1, z=2)": {
        ("comparison", "if x <= n: return f(x, y=1, z=2)"),
        ("skipped branch", "if False: return f(x, y=1, z=2)"),
        ("dropped argument", "if x < n: return f(x, z=2)"),
        ("dropped argument", "if x < n: return f(x, y=1)"),
        ("off by one", "if x < n: return f(x, y=2, z=2)"),
        ("off by one", "if x < n: return f(x, y=1, z=3)"),
    },
    "return -x // n + jnp.float32": {
        ("sign", "return x // n + jnp.float32"),
        ("sign", "return -x * n + jnp.float32"),
        ("sign", "return -x // n - jnp.float32"),
        ("dtype", "return -x // n + jnp.float16"),
    },
    "return jax.lax.psum(x.astype(n), axes)": {
        ("missing reduction", "return x.astype(n)"),
        ("dtype", "return jax.lax.psum(x, axes)"),
    },
    "raise ValueError(f'{x + 1} < {n}')": set(),
    "x: Float[Array, 3] = n": set(),
}


@pytest.mark.parametrize("line", FAULTS)
def test_faults_of_a_line(line):
    source = f"def g(x, n):\n    {line}\n"
    found = list(seed_faults.faults("bptjax/ops/a.py", source))
    assert {(fault.kind, fault.after.strip()) for fault in found} == FAULTS[line]
    assert {fault.room for fault in found} <= {"bptjax/ops"}
    for fault in found:
        assert seed_faults.changes(fault, source)
        assert seed_faults.apply(source, fault) == f"def g(x, n):\n{fault.after}\n"


def test_the_tests_of_a_module_run_first():
    tests = seed_faults.relevant("bptjax/ops/mask.py")
    named = "tests/ops/test_dropout.py", "tests/parallel/test_sequence.py"
    room, other = "tests/ops/test_norm.py", "tests/optim/test_schedule.py"
    assert tests[0] == "tests/ops/test_mask.py" and len(tests) == len(set(tests))
    places = [max(map(tests.index, named)), tests.index(room), tests.index(other)]
    assert places == sorted(places)
