"""Names by which a remat policy selects activations to save on the device or in host memory."""

import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

ON_HOST = "_on_host"


def checkpoint_named(x: Array, name: str, offload: float = 0.0) -> Array:
    """Names the first `offload` share of x's tokens `[B, T, ...]` `name + ON_HOST`, the rest
    `name`."""
    split = round(offload * x.shape[1])
    if split == 0:
        return checkpoint_name(x, name)
    if split == x.shape[1]:
        return checkpoint_name(x, name + ON_HOST)
    first, rest = checkpoint_name(x[:, :split], name + ON_HOST), checkpoint_name(x[:, split:], name)
    return jnp.concatenate([first, rest], 1)
