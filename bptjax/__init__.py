"""Long-context training in JAX: blockwise attention, feed-forward and loss, and a trainer."""

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
