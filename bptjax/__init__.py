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
    from bptjax.generate import generate
    from bptjax.loading import load
    from bptjax.ops.attention import attention
    from bptjax.ops.blockwise import blockwise, blockwise_transformer
    from bptjax.ops.landmark_attention import landmark_attention
    from bptjax.ops.loss import linear_cross_entropy
    from bptjax.ops.mask import Mask
    from bptjax.train import train

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
    "generate": "generate",
    "landmark_attention": "ops.landmark_attention",
    "linear_cross_entropy": "ops.loss",
    "load": "loading",
    "train": "train",
}


# Importing jax takes most of a second, which `bptjax --help` does not need.
def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("bptjax")
    if name not in MODULES:
        raise AttributeError(f"module 'bptjax' has no attribute {name!r}")
    module = import_module(f"bptjax.{MODULES[name]}")
    # `bptjax.train` and `bptjax.generate` are modules that can be called.
    return module if MODULES[name] == name else getattr(module, name)
