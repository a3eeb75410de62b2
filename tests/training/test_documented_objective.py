"""The objective that docs/extending.md prints trains, and passes what other objectives do."""

import pytest
from documented import example

from bptjax.models.config import ModelConfig
from bptjax.objectives import OBJECTIVES
from training.runs import rows
from training.test_objectives import SIZES, TEXTS, Case, assert_layouts_agree, assert_shapes_agree

NAME = "weighted_texts"


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documented")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        names = example("An objective")
    return names | {"folder": folder}


@pytest.fixture
def case(names, monkeypatch):
    monkeypatch.setitem(OBJECTIVES, NAME, names["WeightedTexts"]())
    documents = [names["Weighted"]("here", text, 1 + n % 3) for n, text in enumerate(TEXTS)]
    return Case(ModelConfig(**SIZES), documents)


@pytest.mark.thorough
def test_it_trains(names):
    losses = rows(names["folder"] / "runs" / "run")
    assert list(losses) == [1, 2, 3] and losses[3] < losses[1]


@pytest.mark.thorough
def test_layouts_agree(case):
    assert_layouts_agree(case, NAME)
    assert_shapes_agree(case, NAME)
