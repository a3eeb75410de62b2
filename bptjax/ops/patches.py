"""Cuts images into patches, the tokens of an image encoder."""

from typing import Any

from jax import Array
from jaxtyping import Shaped
from numpy import ndarray


def cut_patches(
    images: Shaped[Array | ndarray, "*batch C height width"], size: tuple[int, int]
) -> Any:
    """Cuts images into n patches of `size` (h, w), a divisor of height and width, from left to
    right and top to bottom: `[*batch, n, C · h · w]`."""
    *batch, C, height, width = images.shape
    (h, w), n = size, len(batch)
    cut = images.reshape(*batch, C, height // h, h, width // w, w)
    axes = (n + axis for axis in (1, 3, 0, 2, 4))
    return cut.transpose(*range(n), *axes).reshape(*batch, -1, C * h * w)
