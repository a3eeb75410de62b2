"""KTO: its loss and gradients, in any layout, with the KL of the global batch."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bptjax.cli.train import main
from bptjax.data.config import DataConfig
from bptjax.data.unpaired import with_another
from bptjax.ops.labels import IGNORED
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.run.metrics import read_metrics
from bptjax.training.state import split_trained
from bptjax.training.step import evaluator, train_step
from bptjax.weights.lora import join, without_adapters
from training.specs import assert_same, gradient_sums, with_optimizer
from training.test_objectives import UNPAIRED, T, batches
from training.test_preferences import lora_spec, moved

BETA, GOOD, BAD = 0.5, 1.5, 0.7
KEYS = dict(beta=BETA, desirable_weight=GOOD, undesirable_weight=BAD)


def spec_and_state(**objective):
    """A spec, and adapters with a positive KL."""
    spec = lora_spec(KEYS | objective, kind="kto")
    state = moved(spec, 1)
    (batch,) = batches(spec, UNPAIRED, "best_fit", 8)
    assert batch["answers"].max() > 3
    return spec, state, batch


def rows_of(cross: bool):
    """Tokens, labels and segments of each answer alone, `[records, T]`, from bytes."""
    n = len(UNPAIRED)
    tokens, labels, segments = (np.full((n, T), x, np.int32) for x in (0, IGNORED, 0))
    for i in range(n):
        own = with_another(DataConfig().seed, UNPAIRED, i)
        chat = own.other.chat if cross else own.chat
        prompt, answer = (
            each.messages[place]["content"].encode() for each, place in ((own.chat, 0), (chat, -1))
        )
        ids = [256, *prompt, *answer, 256]
        tokens[i, : len(ids) - 1] = ids[:-1]
        labels[i, len(prompt) : len(ids) - 1] = ids[len(prompt) + 1 :]
        segments[i, : len(ids) - 1] = 1
    return tokens, labels, segments


def oracle(spec, state):
    """Mean loss and gradients, and KL, from all logits of each answer in a row of its own."""
    trained, frozen = split_trained(spec, state.model)
    good = np.array([each.desirable for each in UNPAIRED])

    def gains(model, cross):
        tokens, labels, segments = rows_of(cross)

        def logps(model):
            hidden, _ = model(tokens, segments=segments)
            logs = jax.nn.log_softmax(model.logits(hidden))
            each = jnp.take_along_axis(logs, np.maximum(labels, 0)[..., None], -1)[..., 0]
            return jnp.where(labels == IGNORED, 0.0, each).sum(1)

        return logps(model) - jax.lax.stop_gradient(logps(without_adapters(model)))

    @jax.jit
    def loss(trained):
        model = join(trained, frozen)
        kl = jnp.maximum(jax.lax.stop_gradient(gains(model, True)).mean(), 0.0)
        own = gains(model, False)
        above = BETA * jnp.where(good, own - kl, kl - own)
        return (jnp.where(good, GOOD, BAD) * (1 - jax.nn.sigmoid(above))).mean(), kl

    return jax.value_and_grad(loss, has_aux=True)(trained)


def assert_close(found, wanted, scale=1.0):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a) * scale, np.asarray(b)
        assert np.linalg.norm(a - b) <= 1e-5 * max(np.linalg.norm(b), 1e-2)


@pytest.mark.thorough
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
def test_equals_separate_rows(shared):
    spec, state, batch = spec_and_state(share_prompt=shared)
    sums, grads, count = gradient_sums(spec, batch, state=state)
    (loss, kl), wanted = oracle(spec, state)
    assert int(count) == len(UNPAIRED) and kl > 0.01
    means = spec.objective.means(*jax.device_get((sums.metrics, count)))
    np.testing.assert_allclose(sums.loss / int(count), loss, rtol=1e-5)
    np.testing.assert_allclose(means["kl"], kl, rtol=1e-5)
    assert_close(grads, wanted, 1 / int(count))
    margin = means["rewards/chosen"] - means["rewards/rejected"]
    np.testing.assert_allclose(means["rewards/margins"], margin, rtol=1e-5)


@pytest.mark.thorough
def test_the_first_loss_is_a_half():
    spec = lora_spec(kind="kto")
    (batch,) = batches(spec, UNPAIRED, "concat", 16)
    sums, _, count = gradient_sums(spec, batch)
    assert abs(float(sums.loss) / int(count) - 0.5) < 1e-6


@pytest.mark.thorough
def test_kl_is_of_the_global_batch():
    """Micro-batches, meshes, steps inside the backward pass and evaluations have the KL of all
    records together."""
    spec, state, batch = spec_and_state()
    wanted = gradient_sums(spec, batch, state=state)
    assert wanted[0].metrics["kl"] > 0
    assert_same(gradient_sums(spec, batch, 4, state=state), wanted, 2e-5)
    parallel = ParallelConfig(fsdp=2, sp=2)
    config = replace(spec.config, parallel=parallel)
    on_mesh = replace(spec, config=config, mesh=make_mesh(parallel, jax.devices()[:4]))
    assert_same(gradient_sums(on_mesh, batch, 2, state=moved(on_mesh, 1)), wanted, 2e-5)
    means = spec.objective.means(*jax.device_get((wanted[0].metrics, wanted[2])))
    means["loss"] = np.divide(wanted[0].loss, wanted[2])
    found = evaluator(spec)(state.model, {"": batches(spec, UNPAIRED, "best_fit", 2)})
    for name, x in means.items():
        np.testing.assert_allclose(found[f"eval/{name}"], x, rtol=1e-5, atol=1e-6)
    each = []
    for in_backward in (False, True):
        other = with_optimizer(spec, in_backward=in_backward, max_grad_norm=0.0)
        with jax.set_mesh(spec.mesh):
            step = jax.jit(partial(train_step, other))
            _, metrics = step(moved(other, 1), spec.layout.put(batch, 4))
        each.append([metrics[f"train/{name}"] for name in ("loss", "kl", "grad_norm")])
    np.testing.assert_allclose(*each, rtol=1e-5)
    np.testing.assert_allclose(each[0][:2], [means["loss"], means["kl"]], rtol=1e-5)


RUN = """
device: cpu
model: {{hidden_size: 16, num_layers: 1, num_heads: 2}}
objective: {{type: kto}}
data: {{path: {0}/records.jsonl, eval_fraction: 0.2}}
train: {{max_steps: 4, seq_len: 48, per_device_train_batch_size: 2, eval_steps: 2}}
optimizer: {{learning_rate: 1.0e-2}}
execution: {{q_chunk: 16, k_chunk: 16, ffn_chunk: 16}}
"""


def run(folder, records, *flags):
    (folder / "config.yaml").write_text(RUN.format(folder))
    (folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    return main([f"--config={folder / 'config.yaml'}", f"--run_dir={folder / 'run'}", *flags])


RECORDS = [
    {"prompt": f"{a}+{b}=", "completion": str(a + b + 3 * (a % 2)), "label": not a % 2}
    for a in range(5)
    for b in range(4)
]


@pytest.mark.thorough
def test_a_run(tmp_path, monkeypatch):
    """It begins at one half, from cached log-probabilities of both answers of each record."""
    monkeypatch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:1])
    flags = ["--train.num_eval_generations=2", "--objective.share_prompt=false"]
    assert run(tmp_path, RECORDS, *flags) == 0
    found = read_metrics(tmp_path / "run" / "metrics.jsonl")
    start = next(each for each in found if "eval/loss" in each)
    assert abs(start["eval/loss"] - 0.5) < 1e-5 and abs(start["eval/kl"]) < 1e-5
    end = [each for each in found if "eval/loss" in each][-1]
    assert end["eval/loss"] != start["eval/loss"] and end["eval/kl"] > 0
    # All four held-out answers are good.
    assert end["eval/rewards/chosen"] > 0 and end["eval/rewards/margins"] is None
    assert "by reward margin" not in (tmp_path / "run" / "report.html").read_text()
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "objective: kto, beta 0.1, reference log-probabilities from" in log
    assert "reference: scored 20 different records once" in log
    answers = (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()
    good = {row["prompt"]: row["completion"] for row in RECORDS if row["label"]}
    assert all(good[x["prompt"]] == x["reference"] for x in map(json.loads, answers))


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["--data.packing=none", "--train.per_device_train_batch_size=1"],
            "global batch size: 1 with data.packing=none: must be at least 2 with objective.type",
        ),
        (["--objective.desirable_weight=-1"], "objective.desirable_weight=-1.0: must be finite"),
        (["--objective.loss=sigmoid"], "objective.loss=sigmoid: requires objective.type=dpo"),
        (
            # No record is bad.
            ["--objective.type=auto", "--data.bad_records=skip"],
            "'label' marks good and bad answers: set objective.type=kto, which reads it, or "
            "data.format=self_instruct to take bad answers as good\n",
        ),
        (["--data.format=preference"], "data.format=preference: must be unpaired_preference with"),
    ],
)
def test_refusals(flags, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:1])
    assert run(tmp_path, RECORDS, *flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_one_record_is_refused(tmp_path, capsys):
    assert run(tmp_path, RECORDS[:1], "--data.eval_fraction=0") == 2
    error = capsys.readouterr().err
    assert "record 1: must not be the only valid record" in error and "bad_records" not in error
