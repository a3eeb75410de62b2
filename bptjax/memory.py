"""What is kept for the backward pass, and what is computed again."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
from jax import checkpoint_policies as policies

from bptjax.models.config import Execution
from bptjax.ops.attention import SAVED

# What each policy keeps of a layer beside its input. None keeps all of it: no remat.
REMAT: dict[str, Callable | None] = {
    "none": None,
    "full": policies.nothing_saveable,
    "dots": policies.dots_with_no_batch_dims_saveable,
    "save_attention": policies.save_only_these_names(*SAVED),
}


@dataclass(frozen=True)
class MemoryConfig(Execution):
    """How the step is laid out in memory.

    Attributes:
      remat: what is kept of each layer for the backward pass. none: everything; dots: the results
        of weight matmuls; save_attention: attention's output, so that its kernel does not run
        again; full: the layer's input alone. Attention and feed-forward keep only what they need
        under each of them.
      ce_chunk: tokens whose logits exist at once.
    """

    remat: Literal["none", "dots", "save_attention", "full"] = "save_attention"
    ce_chunk: int = 2048

    def __post_init__(self):
        super().__post_init__()
        if self.ce_chunk < 1:
            raise ValueError(f"memory.ce_chunk={self.ce_chunk} is not positive")


def remat(name: str) -> Callable[[Callable], Callable]:
    """The wrapper of one layer's function that policy `name` stands for."""
    policy = REMAT[name]
    if policy is None:
        return lambda f: f
    # Inside a scan XLA cannot merge the recomputation with the first run; nothing need hinder it.
    return partial(jax.checkpoint, policy=policy, prevent_cse=False)
