"""The layout of a batch's sequences and tokens on the devices of a mesh."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Int

from bptjax.data.examples import padding
from bptjax.ops.attention.contract import SequenceSplit
from bptjax.parallel.mesh import num_shards, partition_spec
from bptjax.parallel.ring import zigzag
from bptjax.parallel.sequence import STRATEGIES, choose_strategy


@dataclass(frozen=True)
class Layout:
    """Layout of batches on a mesh: data axes shard the sequences, and the sequence axis shards
    their tokens.

    Attributes:
      heads: number of query heads of the model.
      sequence: sequence strategy, or auto.

    Raises:
      ValueError: tp does not divide the heads, or an unknown strategy.
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
        """Number of query heads on a device, and number of devices that share a sequence."""
        return self.heads // num_shards(self.mesh, "heads"), num_shards(self.mesh, "sequence")

    @cached_property
    def strategy(self) -> tuple[str, str]:
        """Name of the sequence strategy, and why it was chosen."""
        return choose_strategy(self.sequence, *self._local_heads_and_shards)

    @property
    def split(self) -> SequenceSplit:
        """How the devices that share a sequence divide heads and tokens."""
        return STRATEGIES[self.strategy[0]].split(*self._local_heads_and_shards)

    @property
    def multiple(self) -> int:
        """Padded sequence lengths are a multiple of this number of tokens."""
        shards = num_shards(self.mesh, "sequence")
        return shards if self.split.tokens == 1 else math.lcm(shards, 2 * self.split.tokens)

    @property
    def sharding(self) -> NamedSharding:
        """Sharding of arrays `[micro_batches, B, T, ...]`."""
        return NamedSharding(self.mesh, partition_spec((None, "batch", "sequence")))

    def order(self, T: int) -> Int[np.ndarray, "{T}"] | None:
        """Returns the positions of a sequence's tokens in device order, or None if the tokens keep
        their order. T is a multiple of `multiple`."""
        shards = self.split.tokens
        return None if shards == 1 else zigzag(T, shards).astype(np.int32)

    def addressable_indices(self, batch_size: int) -> set[int]:
        """Returns the indices of the sequences in a batch that are on this process's devices."""
        where = NamedSharding(self.mesh, partition_spec(("batch",)))
        slices = where.addressable_devices_indices_map((batch_size,)).values()
        return {index for x in slices if x for index in range(*x[0].indices(batch_size))}

    def put(self, batch: dict[str, Any], micro_batches: int = 1) -> dict[str, Any]:
        """Moves a batch `[B, T, ...]` to the devices, as
        `[micro_batches, B / micro_batches, T, ...]`.

        Pads T to a multiple of `multiple`, and puts the tokens in `order`. Sequence i goes to
        micro-batch i % micro_batches, so a device gets the same sequences for any number of
        micro-batches. Each process passes a complete batch; sequences that are not on its devices
        may be blank.
        """
        placed = {}
        for name, x in batch.items():
            widths = np.zeros((x.ndim, 2), int)
            widths[1, 1] = -x.shape[1] % self.multiple
            x = np.pad(x, widths, constant_values=padding(name))
            order = self.order(x.shape[1])
            x = x if order is None else x[:, order]
            x = x.reshape(-1, micro_batches, *x.shape[1:]).swapaxes(0, 1)
            placed[name] = jax.make_array_from_process_local_data(self.sharding, x, x.shape)
        return placed
