"""A mesh is one device: loss, gradients and evaluation of packed documents. All factorisations of
eight devices, and every strategy on each, are in scripts/meshes.py."""

import functools
from dataclasses import replace

import pytest
from meshes import EXPERTS, MESHES, MODEL, ONE, errors, model_of, results
from tiers import fast

from bptjax.models.groups.full_attention import FullAttentionConfig, SharedKvConfig
from bptjax.models.groups.layer_embedding import LayerEmbeddingConfig
from bptjax.models.groups.norms import NormsConfig
from bptjax.parallel.mesh import ParallelConfig, axis_sizes

SOME = [
    ParallelConfig(*sizes)
    for sizes in (
        (1, 1, 8, 1, 1),
        (1, 1, 1, 8, 1),
        (1, 1, 1, 1, 8),
        (2, 2, 2, 1, 1),
        (2, 1, 2, 2, 1),
        (2, 1, 1, 2, 2),
        (1, 1, 2, 3, 1),
    )
]


# Layers with heads of two sizes, of which one key head that tp does not divide.
HEADS = replace(
    MODEL,
    num_layers=4,
    layer_types=2 * ["sliding_attention", "full_attention"],
    sliding_window=6,
    full_attention=FullAttentionConfig(head_dim=8, kv_heads=1),
    shared_kv=SharedKvConfig(layers=2),
    layer_embedding=LayerEmbeddingConfig(size=8),
    layer_scale=True,
    norms=NormsConfig(position="sandwich"),
)
NORMED = replace(
    EXPERTS,
    experts=replace(EXPERTS.experts, norms=True, shared_size=16),
    norms=NormsConfig(position="sandwich"),
    num_kv_heads=4,
)


@functools.cache
def wanted(model):
    return results(model, ONE)


# Other fast tests have meshes with fsdp and tp.
FEW = [ParallelConfig(2, 1, 1, 2, 2)]


@pytest.mark.parametrize(
    "mesh", fast(SOME, FEW), ids=lambda m: " ".join(map(str, axis_sizes(m).values()))
)
def test_a_mesh_is_one_device(mesh):
    model = model_of(mesh)
    assert max(errors(results(model, mesh), wanted(model)).values()) <= 2e-6


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "sizes"),
    [(HEADS, (1, 2, 2, 2, 1)), (NORMED, (1, 2, 1, 2, 2))],
    ids=["heads", "norms"],
)
def test_other_models(model, sizes):
    mesh = ParallelConfig(*sizes)
    assert max(errors(results(model, mesh), results(model, ONE)).values()) <= 2e-6


def test_all_there_are():
    assert len(MESHES) == 39 and len(set(MESHES)) == 39 and set(SOME) <= set(MESHES)
