"""Every objective: its name stays in its room, and its sums do not depend on how a batch is laid
out."""

import ast
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from tiers import fast

import bptjax
from bptjax.cli.train import main
from bptjax.config import Config, TrainConfig
from bptjax.config_parser import parse
from bptjax.data.branches import Branches
from bptjax.data.chat import ANSWER, Chat
from bptjax.data.config import DataConfig
from bptjax.data.encoding import Encoding
from bptjax.data.landmarks import Landmarks
from bptjax.data.loader import eval_loader, train_loader
from bptjax.data.preferences import read_preference
from bptjax.data.tokenizer import ByteTokenizer
from bptjax.data.unpaired import read_unpaired
from bptjax.models.config import ModelConfig
from bptjax.models.execution import ExecutionConfig
from bptjax.models.groups.encoder import EncoderConfig
from bptjax.objectives import OBJECTIVES, ObjectiveConfig, choose
from bptjax.objectives.classes import Labeled
from bptjax.objectives.next_token import NextToken
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.training.spec import TrainSpec
from bptjax.training.state import abstract_state
from bptjax.training.step import abstract_batch, evaluator, gradients, random_batch
from training.runs import rows
from training.specs import assert_same, gradient_sums, initial_state

T, TEXTS = 32, [chr(97 + n) * n for n in (3, 9, 14, 2, 30, 7, 11, 5, 6, 20)]
SIZES: dict[str, Any] = dict(vocab_size=257, hidden_size=16, num_layers=1, num_heads=2)


@dataclass(frozen=True)
class Case:
    """A model of an objective, documents, and how they may be packed beside separately."""

    model: ModelConfig
    documents: Sequence[Any]
    packings: Sequence[str] = ("best_fit", "none")


PAIRS = [
    read_preference(
        {
            "prompt": "p" * (1 + n % 4),
            "chosen": "abcde"[: 1 + n % 5],
            "rejected": "xyzvw"[: 5 - n % 4],
        },
        "text",
        f"pair {n}",
    )
    for n in range(10)
]
UNPAIRED = [
    read_unpaired(
        {
            "prompt": "p" * (1 + n % 4),
            "completion": "abcdexyzvw"[n : n + 1 + n % 5],
            "label": n % 3 > 0,
        },
        "text",
        f"record {n}",
    )
    for n in range(10)
]
QUESTIONS = [
    [
        Chat(
            ({"role": "user", "content": "q" * (1 + n % 4)}, {"role": ANSWER, "content": answer}),
            f"record {n}",
            form="bare",
        )
        for answer in ("abcde"[: 1 + n % 5], "xyzvw"[: 5 - n % 4])
    ]
    for n in range(10)
]
CASES = {
    "next_token": Case(ModelConfig(**SIZES), TEXTS),
    "masked_tokens": Case(
        ModelConfig(**SIZES, causal=False, encoder=EncoderConfig(masked_head=True)), TEXTS
    ),
    "class": Case(
        ModelConfig(**SIZES, causal=False, encoder=EncoderConfig(classes=3)),
        [Labeled("here", text, n % 3) for n, text in enumerate(TEXTS)],
    ),
    "dpo": Case(ModelConfig(**SIZES), PAIRS),
    "orpo": Case(ModelConfig(**SIZES), PAIRS),
    "simpo": Case(ModelConfig(**SIZES), PAIRS),
    "kto": Case(ModelConfig(**SIZES), UNPAIRED),
    "branched": Case(
        ModelConfig(**SIZES), [Branches(each[0].where, tuple(each)) for each in QUESTIONS]
    ),
}


def make_spec(model: ModelConfig, objective: str = "auto", parallel: ParallelConfig | None = None):
    execution = ExecutionConfig(q_chunk=8, k_chunk=8, ffn_chunk=16, ce_chunk=32)
    config = Config(
        objective=ObjectiveConfig(objective),
        train=TrainConfig(seq_len=T, max_steps=1, per_device_train_batch_size=2),
        execution=execution,
    ).on("cpu")
    devices = jax.devices()[: 4 if parallel else 1]
    return TrainSpec(config, model, make_mesh(parallel or ParallelConfig(), devices))


def batches(spec: TrainSpec, documents: Sequence[Any], packing: str, batch_size: int):
    """Returns all documents. Tokens are not masked at random, which would depend on the packing."""
    how: dict[str, Any] = dict(seq_len=T, encoding=replace(spec.encoding, masking=None))
    config = DataConfig(packing=packing)
    return list(eval_loader(documents, ByteTokenizer(), config, **how, batch_size=batch_size))


def assert_layouts_agree(case: Case, name: str):
    """Sums over one batch, over micro-batches with blank sequences, and on a mesh are the same; so
    are those of packed and of separate documents, and those that an evaluation divides."""
    spec = make_spec(case.model, name)
    (separate,) = batches(spec, case.documents, "none", 16)
    documents = separate["segments"].max()
    state, wanted = initial_state(spec), gradient_sums(spec, separate)
    assert int(wanted[2]) == int(spec.objective.count(jax.tree.map(np.asarray, separate))) > 0
    assert set(wanted[0].metrics) == set(spec.objective.sums)
    means = spec.objective.means(*jax.device_get((wanted[0].metrics, wanted[2])))
    assert set(means) == set(spec.objective.metrics)
    means["loss"] = np.divide(wanted[0].loss, wanted[2])
    sums, on_mesh = [], make_spec(case.model, name, ParallelConfig(fsdp=2, sp=2))
    # Here, so that both packings run the same programs.
    evaluate = evaluator(spec)
    of_records = [(x, initial_state(x), evaluator(x, by_record=True)) for x in (spec, on_mesh)]
    for packing in case.packings:
        (batch,) = batches(spec, case.documents, packing, 16)
        assert (batch["segments"].max() > documents) == (packing != "none")
        assert_same(gradient_sums(spec, batch, 4), wanted)
        assert_same(gradient_sums(on_mesh, batch, 2), wanted)
        found = evaluate(state.model, {"": batches(spec, case.documents, packing, 2)})
        assert found.keys() - {"margins"} == {f"eval/{name}" for name in means}
        assert ("margins" in found) == (case.documents is PAIRS)
        for name_, x in means.items():
            np.testing.assert_allclose(found[f"eval/{name_}"], x, rtol=1e-5, atol=1e-6)
        for one, own_state, evaluate_records in of_records:
            sources = {"": batches(one, case.documents, packing, 2)}
            found = evaluate_records(own_state.model, sources)
            np.testing.assert_allclose(found["eval/loss"], means["loss"], rtol=1e-5)
            sums.append(found["records"][:, found["records"][0].argsort()])
            assert sums[-1].shape == (2, len(case.documents))
            np.testing.assert_allclose(sums[-1], sums[0], rtol=1e-4)
            loss, count = sums[-1].sum(1)
            np.testing.assert_allclose(loss / count, means["loss"], rtol=1e-5)


def assert_shapes_agree(case: Case, name: str):
    """The step is compiled for the arrays that the loader makes, before it has made any. Its sums
    are float32."""
    spec = make_spec(case.model, name)
    config = DataConfig(packing="none")
    how: dict[str, Any] = dict(seq_len=T, batch_size=2, encoding=spec.encoding)
    loader = train_loader(case.documents, ByteTokenizer(), config, **how)
    found = spec.layout.put(next(loader))
    loader.close()
    for batch in (found, random_batch(spec)):
        shapes = {name: (x.shape, x.dtype) for name, x in batch.items()}
        assert shapes == {name: (x.shape, x.dtype) for name, x in abstract_batch(spec).items()}
    with jax.set_mesh(spec.mesh):
        sums, _, _ = jax.eval_shape(partial(gradients, spec), abstract_state(spec), found)
    assert {x.dtype for x in jax.tree.leaves(sums)} == {np.dtype("float32")}


@pytest.mark.thorough
# SimPO is ORPO with another loss of a pair, which tests/training/test_preferences.py checks.
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "simpo"])
def test_layouts_agree(name):
    assert_layouts_agree(CASES[name], name)


def test_branches_are_separate_records():
    """The loss of records with two branches, its gradients and its divisor are half of the sums
    over all branches as records of their own."""
    model, documents = CASES["branched"].model, CASES["branched"].documents
    chats = [chat for each in QUESTIONS for chat in each]
    (found, gradients, count), (wanted, others, labels) = (
        gradient_sums(spec, batches(spec, own, "best_fit", 16)[0])
        for spec, own in ((make_spec(model, "branched"), documents), (make_spec(model), chats))
    )
    assert count == labels / 2
    np.testing.assert_allclose(found.loss, wanted.loss / 2, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True):
        a, b = np.asarray(a), np.asarray(b) / 2
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


@pytest.mark.parametrize("name", fast(OBJECTIVES, ["masked_tokens", "class", "kto", "branched"]))
def test_shapes_agree(name):
    assert_shapes_agree(CASES[name], name)


def test_names_stay_in_the_room():
    root, found = Path(bptjax.__file__).parent, set()
    for path in root.rglob("*.py"):
        if path.parent.name != "objectives":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and node.value in OBJECTIVES:
                    found.add((str(path.relative_to(root)), node.value))
    assert found == {("training/notes.py", "class")}  # A word of a line about images.


def test_auto_takes_the_objective_of_the_model():
    for name, case in CASES.items():
        own = "next_token" if case.model.causal else name
        assert choose(ObjectiveConfig(), case.model) == OBJECTIVES[own]
        chosen = choose(ObjectiveConfig(name), case.model)
        assert chosen == OBJECTIVES[name].of_model(case.model)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--objective.type=class"],
            "objective.type=class: requires an encoder that has model.",
        ),
        (
            ["--objective.type=masked_tokens"],
            "objective.type=masked_tokens: requires an encoder",
        ),
        (
            ["--objective.type=dance"],
            "objective.type=dance: must be one of auto, next_token, masked",
        ),
        (["--model.causal=false"], "model.causal=false: requires masked_head or classes in"),
        (
            ["--data.format=label"],
            "data.format=label: requires objective.type=class",
        ),
        (
            ["--data.path=null", "--data.sources=[{path: README.md, format: label}]"],
            "data.sources: format=label: requires objective.type=class",
        ),
    ],
)
def test_refusals(arguments, flags, message, tmp_path, capsys):
    assert main([*arguments, f"--run_dir={tmp_path / 'run'}", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
def test_a_run_of_before_is_resumed(arguments, uninterrupted, tmp_path):
    """Its config.yaml has no objective."""
    run_dir = tmp_path / "run"
    shutil.copytree(uninterrupted, run_dir)
    saved = yaml.safe_load((run_dir / "config.yaml").read_text())
    objective = saved.pop("objective")
    assert objective.pop("type") == "auto" and not any(objective.values())
    (run_dir / "config.yaml").write_text(yaml.safe_dump(saved))
    assert main([*arguments, f"--run_dir={run_dir}", "--train.max_steps=21"]) == 0
    assert {n: x for n, x in rows(run_dir).items() if n <= 20} == rows(uninterrupted)
    assert 21 in rows(run_dir)


@dataclass(frozen=True)
class Scaled(NextToken):
    """An objective with a key of its own.

    Attributes:
      factor: factor.
    """

    name = "scaled"
    factor: float = 1.0


@dataclass(frozen=True)
class WithScaled(ObjectiveConfig):
    factor: float | None = None


@dataclass(frozen=True)
class ScaledConfig(Config):
    objective: WithScaled = field(default_factory=WithScaled)


def test_an_objective_has_keys_of_its_own(monkeypatch):
    flags = ["--objective.type=scaled", "--objective.factor=2"]
    with pytest.raises(ValueError, match="objective.type=scaled: must be one of auto"):
        parse(flags, kind=ScaledConfig)
    monkeypatch.setitem(OBJECTIVES, "scaled", Scaled())
    config, model = parse(flags, kind=ScaledConfig), CASES["next_token"].model
    assert choose(config.objective, model) == Scaled(2.0)
    assert choose(WithScaled(), model) == NextToken()
    with pytest.raises(ValueError, match="objective.factor=2.0: requires objective.type=scaled"):
        parse(flags[1:], kind=ScaledConfig)
    with pytest.raises(ValueError, match="unknown flag --objective.factors"):
        parse(["--objective.factors=2"], kind=ScaledConfig)


def test_landmarks_have_no_other_fields():
    with pytest.raises(ValueError, match="landmark: requires an objective whose examples have"):
        Encoding(fields=("tokens", "labels", "weights"), landmarks=Landmarks(4, 256))
