"""Long-context training in JAX: blockwise attention, feed-forward and loss, and a trainer.

Letters of shapes, in all modules:

    B  sequences in a batch             D  model width, hidden_size
    T  tokens, of queries in attention  F  feed-forward width, intermediate_size
    S  key tokens                       V  vocabulary
    N  query heads                      E  embedding width, D in most models
    K  key and value heads              L  layers
    H  head size                        A  micro-batches of a step
    P, R  block rows and columns of a block mask

Queries are [B, T, N, H], keys and values [B, S, K, H]. Parameters of layers are stacked on axis 0.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bptjax.cli.generate import generate
    from bptjax.cli.train import train
    from bptjax.ops.attention import attention
    from bptjax.ops.blockwise import blockwise, blockwise_transformer
    from bptjax.ops.landmark_attention import landmark_attention
    from bptjax.ops.loss import linear_cross_entropy
    from bptjax.ops.mask import Mask
    from bptjax.weights.loading import load

__all__ = [
    "Mask",
    "__version__",
    "attention",
    "blockwise",
    "blockwise_transformer",
    "generate",
    "landmark_attention",
    "linear_cross_entropy",
    "load",
    "train",
]
__version__: str

MODULES = {
    "Mask": "ops.mask",
    "attention": "ops.attention",
    "blockwise": "ops.blockwise",
    "blockwise_transformer": "ops.blockwise",
    "generate": "cli.generate",
    "landmark_attention": "ops.landmark_attention",
    "linear_cross_entropy": "ops.loss",
    "load": "weights.loading",
    "train": "cli.train",
}


# Importing jax takes most of a second, which `bptjax --help` does not need.
def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("bptjax")
    if name not in MODULES:
        raise AttributeError(f"module 'bptjax' has no attribute {name!r}")
    return getattr(import_module(f"bptjax.{MODULES[name]}"), name)
