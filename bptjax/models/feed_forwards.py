"""Feed-forward networks, by name."""

from jax import Array
from jax.typing import DTypeLike

from bptjax.models.config import ModelConfig
from bptjax.models.experts import Experts
from bptjax.models.feed_forward import FeedForward, Mlp

FEED_FORWARDS: dict[str, type[FeedForward]] = {"mlp": Mlp, "experts": Experts}


def new_feed_forward(config: ModelConfig, key: Array, dtype: DTypeLike) -> FeedForward:
    """Makes the network that `config.feed_forward` names."""
    return FEED_FORWARDS[config.feed_forward](config, key, dtype)
