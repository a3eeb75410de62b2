"""Every mesh is one device: loss, gradients and evaluation of packed documents."""

from dataclasses import astuple

import pytest
from meshes import MESHES, ONE, errors, results


@pytest.fixture(scope="module")
def wanted():
    return results(ONE)[1]


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: "{} {} {} {}".format(*astuple(m)))
def test_a_mesh_is_one_device(mesh, wanted):
    _, got = results(mesh)
    assert max(errors(got, wanted).values()) <= 2e-6


def test_all_there_are():
    assert len(MESHES) == 24 and len(set(MESHES)) == 24
