"""How rows of tokens lie on the devices of a mesh."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bptjax.ops.attention.contract import SequenceSplit
from bptjax.parallel.mesh import spec
from bptjax.parallel.ring import zigzag
from bptjax.parallel.sequence import STRATEGIES, choose_strategy

# What fills a row up; the others are 0.
FILL = {"labels": -100}


@dataclass(frozen=True)
class Layout:
    """Rows over dp and fsdp, their tokens over sp.

    Attributes:
      mesh: of the axes dp, fsdp, tp and sp.
      heads: query heads of the model.
      sequence: the strategy, or auto.

    Raises:
      ValueError: tp does not divide the heads, or there is no such strategy.
      NotImplementedError: the strategy cannot cut them.
    """

    mesh: Mesh
    heads: int
    sequence: str = "auto"

    def __post_init__(self):
        tp = self.mesh.shape["tp"]
        if self.heads % tp:
            raise ValueError(f"parallel.tp={tp} does not divide the model's {self.heads} heads")
        _ = self.strategy

    @cached_property
    def strategy(self) -> tuple[str, str]:
        """How the sequence is cut, and why so."""
        sizes = self.mesh.shape
        return choose_strategy(self.sequence, self.heads // sizes["tp"], sizes["sp"])

    @property
    def split(self) -> SequenceSplit:
        """How the devices along sp divide heads and tokens."""
        sizes = self.mesh.shape
        return STRATEGIES[self.strategy[0]].split(self.heads // sizes["tp"], sizes["sp"])

    @property
    def multiple(self) -> int:
        """What rows are filled up to a multiple of, with padding."""
        sp, shards = self.mesh.shape["sp"], self.split.tokens
        return sp if shards == 1 else math.lcm(sp, 2 * shards)

    def order(self, T: int) -> np.ndarray | None:
        """The places of a row's tokens in the order in which devices have them, T being a multiple
        of `multiple`; None where they stand as they were."""
        shards = self.split.tokens
        return None if shards == 1 else zigzag(T, shards).astype(np.int32)

    def here(self, rows: int) -> set[int]:
        """Which of so many rows devices of this process have."""
        where = NamedSharding(self.mesh, PartitionSpec(*spec(("batch",))))
        parts = where.addressable_devices_indices_map((rows,)).values()
        return {row for part in parts if part for row in range(*part[0].indices(rows))}

    def put(self, batch: dict[str, Any], micro_batches: int = 1) -> dict[str, Any]:
        """A batch `[rows, T]` on the devices, as `[micro_batches, rows / micro_batches, T]`: T
        filled up to a `multiple` and in `order`, row i in micro-batch i % micro_batches, so that a
        device has the same rows in however many. Each process has all rows, or blank ones where its
        devices have none, and gives them their part."""
        where = NamedSharding(self.mesh, PartitionSpec(None, *spec(("batch", "sequence"))))
        placed = {}
        for name, x in batch.items():
            short = -x.shape[1] % self.multiple
            x = np.pad(x, ((0, 0), (0, short)), constant_values=FILL.get(name, 0))
            order = self.order(x.shape[1])
            x = x if order is None else x[:, order]
            x = x.reshape(-1, micro_batches, x.shape[1]).swapaxes(0, 1)
            placed[name] = jax.make_array_from_process_local_data(where, x, x.shape)
        return placed
