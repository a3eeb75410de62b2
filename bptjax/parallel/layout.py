"""Where the sequences and tokens of a batch lie on the devices of a mesh."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from bptjax.ops.attention.contract import SequenceSplit
from bptjax.parallel.mesh import num_shards, partition_spec
from bptjax.parallel.ring import zigzag
from bptjax.parallel.sequence import STRATEGIES, choose_strategy

# Values of padding; all other fields are padded with 0.
FILL = {"labels": -100}


@dataclass(frozen=True)
class Layout:
    """Sequences are sharded over the data axes of the mesh, their tokens over its sequence axis.

    Attributes:
      heads: query heads of the model.
      sequence: sequence strategy, or auto.

    Raises:
      ValueError: tp does not divide the heads, or no such strategy.
      NotImplementedError: the strategy cannot divide the heads.
    """

    mesh: Mesh
    heads: int
    sequence: str = "auto"

    def __post_init__(self):
        if self.heads % num_shards(self.mesh, "heads"):
            raise ValueError(
                f"parallel.tp={num_shards(self.mesh, 'heads')}: must divide the model's "
                f"{self.heads} heads"
            )
        _ = self.strategy

    @property
    def _local_heads_and_shards(self) -> tuple[int, int]:
        """Query heads on a device, and devices that share a sequence."""
        return self.heads // num_shards(self.mesh, "heads"), num_shards(self.mesh, "sequence")

    @cached_property
    def strategy(self) -> tuple[str, str]:
        """The name of the sequence strategy, and the reason for it."""
        return choose_strategy(self.sequence, *self._local_heads_and_shards)

    @property
    def split(self) -> SequenceSplit:
        """How the devices that share a sequence divide heads and tokens."""
        return STRATEGIES[self.strategy[0]].split(*self._local_heads_and_shards)

    @property
    def multiple(self) -> int:
        """Sequences are padded to a multiple of this number of tokens."""
        shards = num_shards(self.mesh, "sequence")
        return shards if self.split.tokens == 1 else math.lcm(shards, 2 * self.split.tokens)

    def order(self, T: int) -> np.ndarray | None:
        """Returns the positions of a sequence's tokens in the order of the devices, or None where
        the tokens keep their order. T is a multiple of `multiple`."""
        shards = self.split.tokens
        return None if shards == 1 else zigzag(T, shards).astype(np.int32)

    def here(self, rows: int) -> set[int]:
        """Returns the indices in a batch of `rows` sequences that lie on this process's devices."""
        where = NamedSharding(self.mesh, partition_spec(("batch",)))
        slices = where.addressable_devices_indices_map((rows,)).values()
        return {row for x in slices if x for row in range(*x[0].indices(rows))}

    def put(self, batch: dict[str, Any], micro_batches: int = 1) -> dict[str, Any]:
        """Moves a batch `[B, T]` to the devices, as `[micro_batches, B / micro_batches, T]`.

        T is padded to a `multiple`, and the tokens are in `order`. Sequence i goes to micro-batch
        i % micro_batches, so the sequences of a device do not depend on the number of
        micro-batches. Each process passes a complete batch; sequences that lie on none of its
        devices may be blank.
        """
        where = NamedSharding(self.mesh, partition_spec((None, "batch", "sequence")))
        placed = {}
        for name, x in batch.items():
            padding = -x.shape[1] % self.multiple
            x = np.pad(x, ((0, 0), (0, padding)), constant_values=FILL.get(name, 0))
            order = self.order(x.shape[1])
            x = x if order is None else x[:, order]
            x = x.reshape(-1, micro_batches, x.shape[1]).swapaxes(0, 1)
            placed[name] = jax.make_array_from_process_local_data(where, x, x.shape)
        return placed
