"""A mesh is one device: loss, gradients and evaluation of packed documents. All factorisations of
eight devices, and every strategy on each, are in scripts/meshes.py."""

from dataclasses import astuple

import pytest
from meshes import MESHES, ONE, errors, results

from bptjax.parallel.mesh import ParallelConfig

SOME = [
    ParallelConfig(*sizes)
    for sizes in (
        (8, 1, 1, 1),
        (1, 8, 1, 1),
        (1, 1, 8, 1),
        (1, 1, 1, 8),
        (2, 2, 2, 1),
        (2, 1, 2, 2),
        (1, 2, 2, 2),
        (2, 1, 1, 3),
        (1, 1, 2, 3),
    )
]


@pytest.fixture(scope="module")
def wanted():
    return results(ONE)[1]


@pytest.mark.parametrize("mesh", SOME, ids=lambda m: "{} {} {} {}".format(*astuple(m)))
def test_a_mesh_is_one_device(mesh, wanted):
    _, got = results(mesh)
    assert max(errors(got, wanted).values()) <= 2e-6


def test_all_there_are():
    assert len(MESHES) == 24 and len(set(MESHES)) == 24 and set(SOME) <= set(MESHES)
