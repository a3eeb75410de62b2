"""The config groups `execution` and `memory`."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from bptjax.remat import TrainingExecution


@dataclass(frozen=True)
class ExecutionConfig:
    """Implementations, chunk sizes and activation memory.

    On a GPU, the keys that are not set, or all with `execution: auto`, take the fastest values that
    fit into its memory. The run prints the values and writes them to its config. On a CPU they are
    save_attention, [], 2048, 2048 and 0.

    Attributes:
      attention_implementation: fa4, cudnn, triton, scan, products, loop or reference. auto picks by
        device and supported features.
      schedule: split runs attention on the full sequence, then the feed-forward network in chunks;
        fused runs both on one chunk of queries at a time (Algorithm 1 of the paper).
      q_chunk: query tokens processed at a time by attention.
      k_chunk: key tokens processed at a time by attention.
      remat: activations of each layer that are saved for the backward pass. none saves all; dots
        saves the outputs of matrix products and attention; save_attention saves the output of
        attention, so that its kernel does not run again; full saves the input of the layer;
        nested(k) saves the input of every k-th layer and recomputes k layers at a time.
      save: activations to save in addition, by name. query, key, value, attended (the stream after
        attention), gate, up. schedule=fused has only key and value. The last three need ffn_chunk
        of at least seq_len. With parallel.ep above 1, gate and up of experts are never saved.
      ffn_chunk: tokens processed at a time by the feed-forward network.
      ce_chunk: tokens per device whose logits exist at the same time.
      offload: share of the tokens whose saved activations move to host memory, 0 to 1.
    """

    attention_implementation: str = "auto"
    schedule: Literal["split", "fused"] = "split"
    q_chunk: int = 512
    k_chunk: int = 512
    remat: str | None = None
    save: tuple[str, ...] | None = None
    ffn_chunk: int | None = None
    ce_chunk: int | None = None
    offload: float | None = None

    def __post_init__(self):
        self.complete()

    @property
    def unset(self) -> tuple[str, ...]:
        """Names of the keys that are not set."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is None)

    def complete(self, **values: Any) -> TrainingExecution:
        """Returns the execution with these values, or else the defaults, of the keys that are not
        set.

        Raises:
          ValueError: a value out of range, or values that exclude each other.
        """
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return TrainingExecution(**values | {k: v for k, v in given.items() if v is not None})


@dataclass(frozen=True)
class MemoryConfig:
    """Device memory that a run may use.

    Attributes:
      budget_gib: GiB per device that a training step may take at its peak. The keys of execution
        that are not set take the fastest values within it. If not set, all of a device's memory.
    """

    budget_gib: float | None = None

    def __post_init__(self):
        if self.budget_gib is not None and not 0 < self.budget_gib < math.inf:
            raise ValueError(f"memory.budget_gib={self.budget_gib}: must be finite and positive")
