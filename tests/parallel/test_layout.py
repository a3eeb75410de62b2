"""Rows on the devices of a mesh."""

import jax
import numpy as np

from bptjax.parallel.layout import Layout
from bptjax.parallel.mesh import ParallelConfig, make_mesh


def test_a_device_has_the_same_rows_in_however_many_micro_batches():
    layout = Layout(make_mesh(ParallelConfig(2, 2, 1, 2), jax.devices()), heads=2)
    batch = {"labels": np.arange(16, dtype=np.int32)[:, None].repeat(4, 1)}
    for micro_batches in (1, 2, 4):
        placed = layout.put(batch, micro_batches)["labels"]
        assert placed.shape == (micro_batches, 16 // micro_batches, 4)
        rows = [sorted(set(part.data.ravel().tolist())) for part in placed.addressable_shards]
        assert rows == [[*range(i, i + 4)] for i in (0, 0, 4, 4, 8, 8, 12, 12)]
    assert layout.addressable_indices(16) == set(range(16))
