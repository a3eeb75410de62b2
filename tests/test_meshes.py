"""A mesh is one device: loss, gradients and evaluation of packed documents. All factorisations of
eight devices, and every strategy on each, are in scripts/meshes.py."""

import pytest
from meshes import EXPERTS, MESHES, MODEL, ONE, errors, model_of, results

from bptjax.parallel.mesh import ParallelConfig, axis_sizes

SOME = [
    ParallelConfig(*sizes)
    for sizes in (
        (8, 1, 1, 1, 1),
        (1, 8, 1, 1, 1),
        (1, 1, 8, 1, 1),
        (1, 1, 1, 8, 1),
        (1, 1, 1, 1, 8),
        (2, 2, 2, 1, 1),
        (2, 1, 2, 2, 1),
        (1, 2, 2, 2, 1),
        (2, 1, 1, 2, 2),
        (2, 1, 1, 3, 1),
        (1, 1, 2, 3, 1),
    )
]


@pytest.fixture(scope="module")
def wanted():
    return {model: results(model, ONE) for model in (MODEL, EXPERTS)}


@pytest.mark.parametrize("mesh", SOME, ids=lambda m: " ".join(map(str, axis_sizes(m).values())))
def test_a_mesh_is_one_device(mesh, wanted):
    model = model_of(mesh)
    assert max(errors(results(model, mesh), wanted[model]).values()) <= 2e-6


def test_all_there_are():
    assert len(MESHES) == 39 and len(set(MESHES)) == 39 and set(SOME) <= set(MESHES)
