"""The tokens of a device as pieces of a sequence, for operations that carry a state from token to
token.

Attention balances its work by zigzag order, which gives each device two pieces of the sequence that
are far apart. An operation that carries a state runs on each piece as on a separate sequence, and
then receives the states of the earlier pieces. So tokens stay where attention needs them, and only
states travel.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int, Shaped

from bptjax.ops.documents import last_segment
from bptjax.parallel.sequence import SEQUENCE_AXIS


@dataclass(frozen=True)
class Pieces:
    """Equally long runs of consecutive tokens, seen from one device inside `shard_map`.

    Attributes:
      ranks: `[shards, pieces]`, index of each piece in its sequence.
    """

    ranks: Int[np.ndarray, "shards pieces"]

    @classmethod
    def of(cls, order: Int[np.ndarray, "T"], shards: int) -> "Pieces":
        """Finds the pieces of a sequence that is sharded in this order.

        Args:
          order: position of each token in its sequence.

        Raises:
          ValueError: a device's tokens do not form one or two pieces.
        """
        for pieces in (1, 2)[:shards]:
            if len(order) % (shards * pieces) == 0:
                runs = order.reshape(shards * pieces, -1)
                if (np.diff(runs, axis=1) == 1).all():
                    return cls(np.argsort(np.argsort(runs[:, 0])).reshape(shards, pieces))
        raise ValueError(
            f"order: must put one or two runs of consecutive tokens, equally long, on each of "
            f"{shards} devices"
        )

    def fold(self, x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "pieces_B t *rest"]:
        """Reshapes the tokens so that each piece is a separate sequence."""
        B, pieces = x.shape[0], self.ranks.shape[1]
        x = x.reshape(B, pieces, -1, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(pieces * B, *x.shape[2:])

    def unfold(self, x: Shaped[Array, "pieces_B t *rest"]) -> Shaped[Array, "B T *rest"]:
        """Inverts `fold`."""
        pieces = self.ranks.shape[1]
        x = x.reshape(pieces, -1, *x.shape[1:]).swapaxes(0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def gather(self, x: Shaped[Array, "pieces_B *rest"]) -> Shaped[Array, "all B *rest"]:
        """Gathers an array per piece, in sequence order."""
        x = x.reshape(self.ranks.shape[1], -1, *x.shape[1:])
        x = jax.lax.all_gather(x, SEQUENCE_AXIS)
        return x.reshape(-1, *x.shape[2:])[np.argsort(self.ranks.reshape(-1))]

    def own(self, x: Shaped[Array, "all B *rest"]) -> Shaped[Array, "pieces_B *rest"]:
        """Returns the arrays of this device's pieces from the result of `gather`."""
        x = x[jnp.asarray(self.ranks)[jax.lax.axis_index(SEQUENCE_AXIS)]]
        return x.reshape(-1, *x.shape[2:])

    def owners(
        self, segments: Int[Array, "pieces_B t"], previous: Int[Array, "B"]
    ) -> tuple[Int[Array, "all B"], Int[Array, "B"]]:
        """Returns the segment of the document before each piece, and after the last piece."""

        def step(owner, last):
            return jnp.where(last == 0, owner, last), owner

        nothing = jnp.zeros(len(segments), segments.dtype)
        last = self.gather(last_segment(segments, nothing))
        after, before = jax.lax.scan(step, previous.astype(segments.dtype), last)
        return before, after


def axis_devices(axes: Any) -> int:
    """Returns the number of devices along the mesh axes in one entry of a partition spec."""
    mesh = jax.sharding.get_abstract_mesh()
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(mesh.shape[name] for name in names)
