"""The contract of attention, its kernels, and the strategies that shard a sequence.

A `Kernel` computes attention from some queries to some keys. Its `backward` takes the output and
log-sum-exp over *all* keys, so the gradients of several key blocks add up. This lets a ring, an
all-to-all, a window of a cache or an attention sink use any kernel unchanged.

Shapes: B batch, T query tokens, S key tokens, N query heads, K key heads, H head size.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jax import Array
from jaxtyping import Float

from bptjax.ops.mask import Mask
from bptjax.ops.softmax import AttentionState

__all__ = [
    "AttentionSpec",
    "AttentionState",
    "Kernel",
    "PreparedKernel",
    "QKV",
    "SequenceSplit",
    "SequenceStrategy",
    "Shards",
    "SinkKernel",
]

# Name of the arrays in `AttentionSpec.prepared`, by which remat policies save them.
PREPARED = "prepared"


class QKV(NamedTuple):
    """Queries, keys and values, or their gradients."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionSpec:
    """The steps from q·k to a weight, in order: scale, soft cap, ALiBi, mask, softmax, dropout.

    Attributes:
      mask: which query may attend to which key.
      scale: factor on q·k.
      softcap: logits become softcap · tanh(logits / softcap).
      dropout: probability of dropping a weight; the others are scaled by 1 / (1 - dropout).
      q_chunk, k_chunk: tokens per block, for kernels that do not choose block sizes.
      alibi: float32 `[N]` slopes; -alibi · |p - s| is added, where p and s are the mask's depths,
        or without depths its positions. Has no gradient.
      landmark_block: tokens per block whose last token is a landmark; see `landmark_attention`.
        k_chunk is a multiple of it. None for plain attention.
      dropout_key: uint32 `[2]` key data.
      first_sequence, first_head: int32 scalars, offsets of these arrays in the batch and the heads.
        Dropout is seeded by sequence and head, so a shard needs both.
      prepared: arrays that `prepare` of the kernel computed from the mask; None without a call of
        it. Must be None for a kernel that is called with another mask.
    """

    mask: Mask
    scale: float = field(metadata={"static": True})
    softcap: float | None = field(default=None, metadata={"static": True})
    dropout: float = field(default=0.0, metadata={"static": True})
    q_chunk: int = field(default=512, metadata={"static": True})
    k_chunk: int = field(default=512, metadata={"static": True})
    landmark_block: int | None = field(default=None, metadata={"static": True})
    alibi: Array | np.ndarray | None = None
    dropout_key: Array | None = None
    first_sequence: Array | None = None
    first_head: Array | None = None
    prepared: Any = None


@runtime_checkable
class Kernel(Protocol):
    """An attention implementation with its backward pass: a module, or an object with state.

    Kernels take arrays of any length, grouped heads, and float32, bfloat16 and float16, unless
    `unsupported` says otherwise. They sum over keys, heads of a group and queries in float32. A
    kernel that calls another on some of the keys slices the mask with `Mask.keys`, because
    `mask.KEY_FIELDS` have one entry per key.
    """

    def unsupported(self, x: QKV, spec: AttentionSpec) -> str | None:
        """Returns why the kernel cannot honor these arguments, or None if it can. Reads only the
        shapes and dtypes of `x`."""
        ...

    def forward(self, x: QKV, spec: AttentionSpec) -> AttentionState:
        """Attends from x.q to x.k and x.v. `out` has the dtype of x.q, and `lse` is float32. A
        query that attends to no key has `out` 0 and `lse` -inf, never NaN."""
        ...

    def backward(
        self, x: QKV, state: AttentionState, dout: Float[Array, "B T N H"], spec: AttentionSpec
    ) -> QKV:
        """Returns these keys' share of the gradients, in the dtypes of x. `state` may cover more
        keys than x.k. A query that attends to no key, in `state` or here, has gradient 0."""
        ...


@runtime_checkable
class SinkKernel(Kernel, Protocol):
    """A kernel that can also attend to sinks."""

    def forward_with_sinks(
        self, x: QKV, spec: AttentionSpec, sinks: Float[Array, "N"]
    ) -> AttentionState:
        """Attends from x.q to x.k, x.v and the float32 sinks; see `attention`."""
        ...


@runtime_checkable
class PreparedKernel(Kernel, Protocol):
    """A kernel that reads arrays which depend on the mask only."""

    def prepare(self, spec: AttentionSpec) -> AttentionSpec:
        """Returns the spec with `prepared`, whose arrays are named `PREPARED`, so that the backward
        passes of layers do not compute them again. Not called on a mesh of several devices."""
        ...


@dataclass(frozen=True)
class Shards:
    """The devices that share a sequence, seen from one of them inside `shard_map`.

    Attributes:
      axis: mesh axis.
      size: number of shards.
      stride: distance between neighboring shards along the axis.
      positions: `[T]` and `[S]`, positions of the queries and keys of the full sequence in shard
        order. NumPy arrays where static.
    """

    axis: str
    size: int
    stride: int = 1
    positions: tuple[Any, Any] = (None, None)

    @property
    def index(self) -> Array:
        """This device's index among the shards."""
        return jax.lax.axis_index(self.axis) // self.stride % self.size

    @property
    def groups(self) -> list[list[int]]:
        """All groups of devices along the axis that share a sequence, each in order."""
        span, devices = self.size * self.stride, jax.lax.axis_size(self.axis)
        return [
            [first + offset + i * self.stride for i in range(self.size)]
            for first in range(0, devices, span)
            for offset in range(self.stride)
        ]


class SequenceSplit(NamedTuple):
    """Division of a sequence over `sp` devices while a kernel runs: groups of `heads` devices
    exchange heads, and the tokens stay sharded over `tokens` groups. heads · tokens = sp."""

    heads: int
    tokens: int


@runtime_checkable
class SequenceStrategy(Protocol):
    """Attention across the shards of a sequence, with any kernel per device."""

    def unsupported(self, heads: int, shards: int) -> str | None:
        """Returns why `shards` devices cannot divide `heads` query heads, or None if they can."""
        ...

    def split(self, heads: int, shards: int) -> SequenceSplit:
        """Returns how `shards` devices divide the heads and the tokens."""
        ...

    def forward(
        self, kernel: Kernel, x: QKV, spec: AttentionSpec, shards: Shards
    ) -> AttentionState:
        """Attends from this shard's queries to the keys of all shards."""
        ...

    def backward(
        self,
        kernel: Kernel,
        x: QKV,
        state: AttentionState,
        dout: Float[Array, "B T N H"],
        spec: AttentionSpec,
        shards: Shards,
    ) -> QKV:
        """Returns the gradients of this shard's queries, keys and values."""
        ...
