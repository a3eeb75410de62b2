"""Losses of pairs of answers: values, gradients, layouts, references and whole runs."""

import json
import math
import re
import shutil
import signal
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import fast

from bptjax.cli import evaluate
from bptjax.cli.train import main
from bptjax.models.config import ModelConfig
from bptjax.models.groups.linear_attention import LinearAttentionConfig
from bptjax.objectives import ObjectiveConfig, choose
from bptjax.objectives.dpo import DPO, LOSSES
from bptjax.objectives.orpo import ORPO
from bptjax.objectives.preferences import Pairs
from bptjax.objectives.simpo import SimPO
from bptjax.ops.labels import IGNORED
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.run.metrics import read_metrics
from bptjax.training import references
from bptjax.training.histogram import histogram
from bptjax.training.state import split_trained
from bptjax.training.step import compile_step, evaluator, random_batch
from bptjax.weights.lora import AdapterConfig, LoraKernel, join, without_adapters
from training.specs import gradient_sums, initial_state
from training.test_objectives import PAIRS, SIZES, T, batches, make_spec

BETA = 0.1
MODEL = ModelConfig(**SIZES, logits_softcap=5.0, head_bias=True, init_std=0.3)
LINEAR = replace(
    MODEL,
    layer_types=["linear_attention", "full_attention"],
    num_layers=2,
    linear_attention=LinearAttentionConfig(2, 4, 8, 4),
)


# The formulas of TRL 1.16, of sums and means of log-probabilities in float64: gains of the answers,
# and their numbers of tokens.
def sigma(x):
    return 1 / (1 + np.exp(-x))


FORMULAS = {
    "sigmoid": lambda c, r, nc, nr, e: -np.log(sigma(BETA * (c - r))),
    "robust": lambda c, r, nc, nr, e: (
        (-(1 - e) * np.log(sigma(BETA * (c - r))) + e * np.log(sigma(-BETA * (c - r))))
        / (1 - 2 * e)
    ),
    "hinge": lambda c, r, nc, nr, e: np.maximum(0, 1 - BETA * (c - r)),
    "ipo": lambda c, r, nc, nr, e: (c / nc - r / nr - 1 / (2 * BETA)) ** 2,
    "sigmoid_norm": lambda c, r, nc, nr, e: -np.log(sigma(BETA * (c / nc - r / nr))),
    "apo_zero": lambda c, r, nc, nr, e: 1 - sigma(BETA * c) + sigma(BETA * r),
}
# The same of means of log-probabilities.
WITHOUT_REFERENCE = {
    ORPO(): lambda c, r: (
        -c - BETA * np.log(sigma((c - r) - (np.log1p(-np.exp(c)) - np.log1p(-np.exp(r)))))
    ),
    SimPO(): lambda c, r: -np.log(sigma(2 * (c - r) - 0.5)),
}
AT_THE_REFERENCE = dict(
    sigmoid=math.log(2),
    robust=math.log(2),
    hinge=1.0,
    ipo=25.0,
    sigmoid_norm=math.log(2),
    apo_zero=1.0,
)


def pairs_of(gains, tokens):
    gains = jnp.asarray(gains, jnp.float32)[None]
    tokens = jnp.broadcast_to(jnp.asarray(tokens, jnp.float32), gains.shape)
    return Pairs(gains, gains / tokens, gains, gains / tokens)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_their_gradients(name):
    """Against the formulas in float64, and central differences of them."""
    rng = np.random.default_rng(0)
    gains, tokens = rng.normal(0, 4, (6, 2)), rng.integers(1, 9, (6, 2))
    smoothing, formula = 0.1 * (name == "robust"), FORMULAS[name]

    def ours(gains):
        return LOSSES[name].of(pairs_of(gains, tokens), BETA, smoothing)[0]

    def exact(gains):
        (chosen, rejected), (of_chosen, of_rejected) = gains.T, tokens.T
        return formula(chosen, rejected, of_chosen, of_rejected, smoothing)

    np.testing.assert_allclose(ours(gains), exact(gains), rtol=1e-5)
    step = 1e-5 * np.eye(2)
    wanted = [(exact(gains + d) - exact(gains - d)) / 2e-5 for d in step]
    found = jax.grad(lambda x: ours(x).sum())(jnp.asarray(gains, jnp.float32))
    np.testing.assert_allclose(found, np.stack(wanted, -1), rtol=1e-4, atol=1e-6)
    at_zero = LOSSES[name].of(pairs_of(np.zeros((1, 2)), tokens[:1]), BETA, smoothing)
    np.testing.assert_allclose(at_zero, [[AT_THE_REFERENCE[name]]], rtol=1e-6)


@pytest.mark.parametrize("objective, formula", WITHOUT_REFERENCE.items(), ids=["orpo", "simpo"])
def test_losses_without_a_reference(objective, formula):
    """They read means per token, not sums."""
    rng = np.random.default_rng(2)
    means, tokens = -rng.exponential(1, (6, 2)), rng.integers(2, 9, (6, 2))
    means[0] = -1e-3, -12.0

    def ours(means):
        means = means[None]
        scaled = means * tokens[None].astype(np.float32)
        return objective.pair_loss(Pairs(scaled, means, scaled, means))[0]

    np.testing.assert_allclose(ours(jnp.asarray(means, jnp.float32)), formula(*means.T), rtol=1e-4)
    step = 1e-6 * np.eye(2)
    wanted = [(formula(*(means + d).T) - formula(*(means - d).T)) / 2e-6 for d in step]
    found = jax.grad(lambda x: ours(x).sum())(jnp.asarray(means, jnp.float32))
    np.testing.assert_allclose(found, np.stack(wanted, -1), rtol=1e-3, atol=1e-6)
    # Sequences have fewer pairs than their arrays have room for.
    nothing = jnp.zeros((1, 3, 2))
    gradient = jax.grad(lambda x: objective.pair_loss(Pairs(x, x, x, x)).sum())(nothing)
    assert jnp.isfinite(gradient).all()


def test_smoothing_exchanges_answers():
    """Conservative DPO is the mean of the losses of both orders; TRL ignores it."""
    gains = np.random.default_rng(1).normal(0, 4, (5, 2))
    for name in ("sigmoid", "sigmoid_norm"):
        own = LOSSES[name].of
        there, back = (own(pairs_of(x, 1.0), BETA, 0.0) for x in (gains, gains[:, ::-1]))
        mixed = own(pairs_of(gains, 1.0), BETA, 0.2)
        np.testing.assert_allclose(mixed, 0.8 * there + 0.2 * back, rtol=1e-5)
    for name, row in LOSSES.items():
        if not row.smoothed:
            with pytest.raises(ValueError, match=f"smoothing=0.1: must be 0 with .*loss={name}"):
                DPO(loss_=name, label_smoothing=0.1)


def lora_spec(objective=None, model=MODEL, kind="dpo"):
    spec = make_spec(model, kind)
    config = replace(spec.config, adapter=AdapterConfig(type="lora", r=2))
    if objective:
        config = replace(config, objective=replace(config.objective, **objective))
    return replace(spec, config=config)


def moved(spec, seed=0):
    """The state with adapters that change the model."""
    state = initial_state(spec)

    def move(leaf):
        if not isinstance(leaf, LoraKernel):
            return leaf
        b = leaf.b.get_value()
        noise = jax.random.normal(jax.random.key(leaf.number + 100 * seed), b.shape, b.dtype)
        return replace(leaf, b=leaf.b.replace(noise))

    model = jax.tree.map(move, state.model, is_leaf=lambda x: isinstance(x, LoraKernel))
    return replace(state, model=model)


def rows_of(documents):
    """Tokens, labels and segments of each answer alone, `[2 · pairs, T]`, from bytes."""
    rows = np.zeros((2 * len(documents), T), np.int32), np.full((2 * len(documents), T), IGNORED)
    for i, document in enumerate(documents):
        for k, chat in enumerate(document.chats):
            prompt, answer = (message["content"].encode() for message in chat.messages)
            ids = [256, *prompt, *answer, 256]
            rows[0][2 * i + k, : len(ids) - 1] = ids[:-1]
            rows[1][2 * i + k, len(prompt) : len(ids) - 1] = ids[len(prompt) + 1 :]
    lengths = (rows[1] != IGNORED).shape[1] - np.argmax(rows[1][:, ::-1] != IGNORED, 1)
    return *rows, (np.arange(T) < lengths[:, None]).astype(np.int32)


def logps(model):
    """Log-probabilities of the answers of `PAIRS`, from one sequence per answer."""
    tokens, labels, segments = rows_of(PAIRS)
    hidden, _ = model(tokens, segments=segments)
    logs = jax.nn.log_softmax(model.logits(hidden))
    each = jnp.take_along_axis(logs, np.maximum(labels, 0)[..., None], -1)[..., 0]
    return jnp.where(labels == IGNORED, 0.0, each).sum(1).reshape(-1, 2)


def oracle(spec, state, formula, sft_weight=0.0):
    """Mean loss and gradients, from all logits and one sequence per answer."""
    labels = rows_of(PAIRS)[1]
    trained, frozen = split_trained(spec, state.model)
    counts = jnp.asarray((labels != IGNORED).sum(1).reshape(-1, 2), jnp.float32)

    @jax.jit
    @jax.value_and_grad
    def loss(trained):
        model = join(trained, frozen)
        policy = logps(model)
        gains = policy - jax.lax.stop_gradient(logps(without_adapters(model)))
        sft = -sft_weight * policy[:, 0] / counts[:, 0]
        return (formula(gains, counts) + sft).mean()

    return loss(trained)


@pytest.mark.parametrize(
    "objective, formula",
    [
        ({}, lambda x, n: -jax.nn.log_sigmoid(BETA * (x[:, 0] - x[:, 1]))),
        pytest.param(
            dict(share_prompt=False),
            lambda x, n: -jax.nn.log_sigmoid(BETA * (x[:, 0] - x[:, 1])),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            dict(loss="ipo", sft_weight=0.5),
            lambda x, n: (x[:, 0] / n[:, 0] - x[:, 1] / n[:, 1] - 5) ** 2,
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_equals_separate_rows(objective, formula):
    """A packed row gives the loss and the gradients of separate rows with all logits."""
    spec = lora_spec(objective=objective)
    state = moved(spec)
    (batch,) = batches(spec, PAIRS, "best_fit", 8)
    assert batch["answers"].max() > 2
    sums, grads, count = gradient_sums(spec, batch, state=state)
    loss, wanted = oracle(spec, state, formula, objective.get("sft_weight", 0.0))
    assert int(count) == len(PAIRS)
    np.testing.assert_allclose(sums.loss / int(count), loss, rtol=1e-5)
    leaves = zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True)
    for found, exact in leaves:
        scale, difference = np.linalg.norm(exact), np.asarray(found) / int(count) - exact
        assert scale and np.linalg.norm(difference) <= 1e-5 * max(scale, 1e-2)
    margins = sums.metrics["rewards/margins"] / int(count)
    chosen, rejected = (sums.metrics[f"rewards/{x}"] / int(count) for x in ("chosen", "rejected"))
    np.testing.assert_allclose(margins, chosen - rejected, rtol=1e-4)


@pytest.mark.thorough
def test_the_margins_of_an_evaluation_are_those_of_separate_rows():
    """On one device and several, packed and not, from several batches with blank sequences."""
    one, parallel = lora_spec(), ParallelConfig(fsdp=2, sp=2)
    config, mesh = replace(one.config, parallel=parallel), make_mesh(parallel, jax.devices()[:4])
    model = moved(one).model
    log_probabilities = jax.jit(logps)
    reference = log_probabilities(without_adapters(model))
    gains = np.asarray(log_probabilities(model) - reference, np.float64)
    margins = BETA * (gains[:, 0] - gains[:, 1])
    wanted = histogram(margins)
    assert np.abs(margins / wanted["width"] - np.rint(margins / wanted["width"])).min() > 1e-3
    for spec, packing in (
        (one, "none"),
        (one, "best_fit"),
        (replace(one, config=config, mesh=mesh), "best_fit"),
    ):
        parts = {"a": PAIRS[:3], "b": PAIRS[3:]}
        sources = {name: batches(one, own, packing, 2) for name, own in parts.items()}
        assert sum(map(len, sources.values())) > 2
        found = evaluator(spec)(moved(spec).model, sources)
        assert found["margins"] == wanted
        assert np.isclose(found["eval/rewards/margins"], margins.mean(), rtol=1e-4)


MESHES = [dict(dp=2, sp=2, fsdp=2), dict(sp=4, tp=2)]


@pytest.mark.parametrize("packing", fast(["none", "concat", "shared"], ["shared"]))
def test_the_first_loss_is_ln_2(packing):
    spec = lora_spec(dict(share_prompt=packing == "shared"))
    packing = "best_fit" if packing == "shared" else packing
    (batch,) = batches(spec, PAIRS, packing, 16)
    sums, _, count = gradient_sums(spec, batch)
    assert abs(float(sums.loss) / int(count) - math.log(2)) < 1e-6


@pytest.mark.thorough
@pytest.mark.parametrize(
    "shared, model, axes",
    [(False, MODEL, MESHES[0]), (True, MODEL, MESHES[1]), (True, LINEAR, MESHES[0])],
    ids=["apart", "shared", "shared, linear attention"],
)
def test_meshes(shared, model, axes):
    """The first loss is ln 2; later losses and gradients are those of one device."""
    one, parallel = lora_spec(dict(share_prompt=shared), model), ParallelConfig(**axes)
    mesh = make_mesh(parallel, jax.devices()[: math.prod(axes.values())])
    spec = replace(one, config=replace(one.config, parallel=parallel), mesh=mesh)
    (batch,) = batches(one, PAIRS, "best_fit", 16)
    wanted = gradient_sums(one, batch, state=moved(one))
    sums, _, count = gradient_sums(spec, batch, 2)
    assert abs(float(sums.loss) / int(count) - math.log(2)) < 1e-6
    found = gradient_sums(spec, batch, 2, state=moved(spec))
    np.testing.assert_allclose(found[0].loss, wanted[0].loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted[1]), strict=True):
        assert np.linalg.norm(np.asarray(a) - b) <= 2e-5 * max(np.linalg.norm(b), 1e-2)


@pytest.mark.thorough
def test_memory_of_a_step():
    """A step holds no logits and little more than one on as many tokens of chats."""
    big = ModelConfig(vocab_size=4096, hidden_size=64, num_layers=2, num_heads=2)

    def temporaries(objective):
        spec = lora_spec(model=big)
        train = replace(spec.config.train, seq_len=4096, per_device_train_batch_size=1)
        config = replace(spec.config, train=train, objective=objective or spec.config.objective)
        spec = replace(spec, config=config)
        with jax.set_mesh(spec.mesh):
            compiled = compile_step(spec, initial_state(spec), random_batch(spec))
        return compiled.memory_analysis().temp_size_in_bytes

    dpo, sft = temporaries(None), temporaries(ObjectiveConfig(type="next_token"))
    assert dpo <= 1.05 * sft, (dpo, sft)


RUN = """
device: cpu
model: {{hidden_size: 16, num_layers: 1, num_heads: 2}}
objective: {{type: dpo}}
data: {{path: {0}/pairs.jsonl, eval_fraction: 0.2}}
train: {{max_steps: 6, seq_len: 48, per_device_train_batch_size: 2, eval_steps: 3}}
optimizer: {{learning_rate: 1.0e-2}}
execution: {{q_chunk: 16, k_chunk: 16, ffn_chunk: 16}}
checkpoint: {{save_steps: 3}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with a config, its data, and the finished run."""
    folder = tmp_path_factory.mktemp("preferences")
    (folder / "config.yaml").write_text(RUN.format(folder))
    pairs = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 3)}
        for a in range(5)
        for b in range(4)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:1])
        assert run(folder, folder / "run") == 0
    return folder


def run(folder, run_dir, *flags):
    return main(["--config", str(folder / "config.yaml"), f"--run_dir={run_dir}", *flags])


def losses(run_dir):
    return {
        (each["step"], name): each[name]
        for each in read_metrics(run_dir / "metrics.jsonl")
        for name in each
        if name.startswith(("train/loss", "train/rewards", "eval/", "margins"))
    }


@pytest.mark.thorough
def test_a_run(folder):
    """Its reference is the model at its start: log-probabilities are scored once."""
    found = losses(folder / "run")
    for key in ((0, "eval/loss"), (1, "train/loss")):
        assert abs(found[key] - math.log(2)) < 1e-5
    assert found[6, "train/loss"] < found[1, "train/loss"]
    assert {"eval/rewards/accuracies", "eval/rewards/margins"} <= {name for _, name in found}
    log = (folder / "run" / "log.txt").read_text()
    assert "objective: dpo, beta 0.1, one copy of each prompt, loss sigmoid, reference" in log
    assert "learning rate 0.01" in log and "reference: scored 20 different pairs once" in log
    report = (folder / "run" / "report.html").read_text()
    assert "reward margin by optimizer step" in report and "eval/rewards/accuracies" in report
    assert {step for step, name in found if name == "margins"} == {0, 3, 6}
    assert sum(found[6, "margins"]["counts"]) == 4
    assert re.findall(r'label="(held-out .*?)"', report) == [
        "held-out pairs by reward margin, step 6"
    ]


@pytest.mark.thorough
def test_a_resumed_run_reads_its_references(folder, tmp_path, capsys):
    """It equals one that was not stopped; without the file, or with other data, it is refused."""
    run_dir = tmp_path / "run"
    assert (
        run(folder, run_dir, "--train.max_steps=3", "--optimizer.lr_scheduler_type=constant") == 0
    )
    more = "--optimizer.lr_scheduler_type=constant"
    assert run(folder, tmp_path / "whole", more) == 0
    file = run_dir / "reference.npz"
    shutil.move(file, tmp_path / "kept.npz")
    assert run(folder, run_dir, more) == 2
    assert f"{file}: must be there to resume step 3" in capsys.readouterr().err
    shutil.copy(tmp_path / "kept.npz", file)
    assert run(folder, run_dir, more, "--objective.share_prompt=false") == 2
    assert "share_prompt=True, and this run has False" in capsys.readouterr().err
    # Defaults may be named.
    named = "--objective.share_prompt=true", "--objective.beta=0.1", "--objective.reference=cached"
    assert run(folder, run_dir, more, *named) == 0
    whole, found = losses(tmp_path / "whole"), losses(run_dir)
    assert {k: x for k, x in whole.items() if k in found} == found
    assert (6, "train/loss") in found
    pairs = folder / "pairs.jsonl"
    text = pairs.read_text()
    for treatment in ("error", "skip"):
        pairs.write_text(text.translate(str.maketrans("0123456789", "1234567890")))
        capsys.readouterr()
        code = run(folder, run_dir, more, f"--data.bad_records={treatment}", "--train.max_steps=9")
        pairs.write_text(text)
        error = capsys.readouterr().err
        # 2 if the position in the data needs the record, 1 if a later step does.
        assert code in (1, 2) and error.count("\n") == 1 and f"{pairs}, record " in error
        assert "the data or the tokenizer have changed; restore them, or" in error
        assert "bad_records" not in error and "version" not in error


@pytest.mark.thorough
def test_a_signal_ends_the_scoring(folder, tmp_path, monkeypatch):
    """Nothing is stored, and the same command scores all answers."""
    run_dir, batches = tmp_path / "run", references._batches

    def interrupted(run):
        for batch in batches(run):
            signal.raise_signal(signal.SIGTERM)
            yield batch

    monkeypatch.setattr(references, "_batches", interrupted)
    assert run(folder, run_dir) == 143
    assert not (run_dir / "reference.npz").exists()
    assert (
        "SIGTERM: stopping; the next start scores all answers" in (run_dir / "log.txt").read_text()
    )
    monkeypatch.undo()
    assert run(folder, run_dir) == 0 and (run_dir / "reference.npz").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("reference", ["cached", "adapters_off"])
def test_an_evaluation_of_a_finished_run(folder, tmp_path, capsys, reference):
    """`evaluate --data` gives the last values of the run, from the reference that it had; held-out
    pairs are answered too."""
    run_dir, out = tmp_path / "run", tmp_path / "out"
    held_out, others = tmp_path / "held_out.jsonl", tmp_path / "others.jsonl"
    held_out.write_text("".join((folder / "pairs.jsonl").read_text().splitlines(True)[:7]))
    others.write_text('{"prompt": "q", "chosen": "yes", "rejected": "no"}\n')
    flags = [f"--data.eval_path={held_out}", "--data.eval_fraction=0"]
    flags.append("--train.num_eval_generations=3")
    config = (folder / "config.yaml").read_text()
    if reference == "adapters_off":
        flags += ["--adapter.type=lora", f"--model.name_or_path={folder / 'run'}"]
        config = re.sub("model:.*", "", config)
    (tmp_path / "config.yaml").write_text(config)
    assert run(tmp_path, run_dir, *flags) == 0
    assert (run_dir / "reference.npz").exists() == (reference == "cached")
    measured = [x for x in read_metrics(run_dir / "metrics.jsonl") if "eval/loss" in x][-1]
    capsys.readouterr()
    command = [f"--model={run_dir}", "--device=cpu", f"--out={out}"]
    assert evaluate.main([*command, f"--data={held_out}"]) == 0
    (row,) = json.loads((out / "held_out.json").read_text())
    assert row["loss"] == pytest.approx(measured["eval/loss"], rel=1e-5)
    assert abs(row["loss"] - math.log(2)) > 1e-3 and "perplexity" not in row
    for name in ("eval/rewards/accuracies", "eval/rewards/margins"):
        assert row[name] == pytest.approx(measured[name], rel=1e-4)
    answers = [json.loads(x) for x in (run_dir / "predictions.jsonl").read_text().splitlines()]
    known = {x["prompt"]: x["chosen"] for x in map(json.loads, held_out.read_text().splitlines())}
    assert len(answers) % 3 == 0 and all(known[x["prompt"]] == x["reference"] for x in answers)
    capsys.readouterr()
    code = evaluate.main([*command, f"--data={others}"])
    if reference == "adapters_off":
        assert code == 0
        return
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1
    assert "others.jsonl, record 1: no log-probabilities in reference.npz" in error
    assert "evaluate those, or start a run that holds this file out" in error


def test_prompts_are_shared_where_layers_read_trees():
    """By default; a named value is kept."""
    pattern = dict(type="strided", block_size=2, local=2, stride=3)
    strided = replace(MODEL, attention_pattern=pattern)
    for model, shared in ((MODEL, True), (LINEAR, False), (strided, False)):
        for kind in ("dpo", "kto"):
            chosen = choose(ObjectiveConfig(type=kind), model)
            assert chosen.share_prompt is shared
            assert ("ends" in chosen.encoding(model).fields) is shared
            for value in (True, False):
                config = ObjectiveConfig(type=kind, share_prompt=value)
                assert choose(config, model).share_prompt is value


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--objective.reference=adapters_off"], "adapters_off: must be auto or cached with"),
        (["--objective.reference=none"], "objective.reference=none: must be one of auto, adapters"),
        (["--objective.loss=ipos"], "objective.loss=ipos: must be one of sigmoid, robust, hinge"),
        (["--objective.beta=0"], "objective.beta=0.0: must be positive"),
        (["--data.too_long=truncate_right"], "data.too_long=truncate_right: must be drop or error"),
        (["--train.z_loss=0.1"], "train.z_loss=0.1: must be 0.0 with objective.type=dpo"),
    ],
)
def test_refusals(flags, message, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(RUN.format(tmp_path))
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 9)
    assert run(tmp_path, tmp_path / "run", *flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()
