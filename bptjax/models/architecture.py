"""Builds the module that a config describes."""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from bptjax.models.config import ModelConfig
from bptjax.models.decoder import Decoder
from bptjax.models.encoder import Encoder
from bptjax.models.transformer import Transformer


def new_model(config: ModelConfig, key: Array, dtype: DTypeLike = jnp.float32) -> Transformer:
    """Makes a decoder or an encoder with new parameters; see `Transformer`."""
    return (Decoder if config.causal else Encoder)(config, key, dtype)
