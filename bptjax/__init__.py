"""Long-context training in JAX: blockwise attention, feed-forward and loss, and a trainer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bptjax.ops.attention import attention
    from bptjax.ops.attention.landmark import landmark_attention
    from bptjax.ops.block import block
    from bptjax.ops.feed_forward import feed_forward
    from bptjax.ops.loss import linear_cross_entropy
    from bptjax.ops.mask import Mask

__all__ = [
    "Mask",
    "attention",
    "block",
    "feed_forward",
    "landmark_attention",
    "linear_cross_entropy",
]

MODULES = {
    "Mask": "ops.mask",
    "attention": "ops.attention",
    "block": "ops.block",
    "feed_forward": "ops.feed_forward",
    "landmark_attention": "ops.attention.landmark",
    "linear_cross_entropy": "ops.loss",
}


# Importing jax takes most of a second, which `bptjax --help` does not need.
def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("bptjax")
    if name not in MODULES:
        raise AttributeError(f"module 'bptjax' has no attribute {name!r}")
    return getattr(import_module(f"bptjax.{MODULES[name]}"), name)
