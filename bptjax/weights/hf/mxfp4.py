"""MXFP4 weights in gpt-oss checkpoints: 4-bit floats in blocks of 32 that share a scale.

Open Compute Project 2023, OCP Microscaling Formats (MX) Specification 1.0, Section 5.
"""

import ml_dtypes
import numpy as np

BLOCKS, SCALES = "_blocks", "_scales"
# E2M1 values by code: a sign bit, two exponent bits, one mantissa bit.
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# Bias of E8M0, a block's exponent.
BIAS = 127


def shape(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape `[*b, inputs, outputs]` of weights with blocks of shape
    `[*b, outputs, n, bytes]`."""
    *batch, outputs, n, size = blocks
    return *batch, 2 * n * size, outputs


def decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decodes weights to bfloat16, which holds them exactly, as transformers does.

    Args:
      blocks: `[*b, outputs, n, bytes]` uint8, two codes per byte, the first in the low bits.
      scales: `[*b, outputs, n]` uint8.

    Returns:
      `[*b, inputs, outputs]`, not contiguous.
    """
    out = np.empty((*blocks.shape[:-1], 2 * blocks.shape[-1]), ml_dtypes.bfloat16)
    # One matrix at a time, because the float32 values need twice the memory of the result.
    for index in np.ndindex(blocks.shape[:-3]):
        exponents = scales[index].astype(np.int32)[..., None] - BIAS
        out[index][..., 0::2] = np.ldexp(VALUES[blocks[index] & 15], exponents)
        out[index][..., 1::2] = np.ldexp(VALUES[blocks[index] >> 4], exponents)
    return out.reshape(*blocks.shape[:-2], -1).swapaxes(-1, -2)
