"""MXFP4 weights of gpt-oss checkpoints: 4-bit floats in blocks of 32 that share a scale.

Open Compute Project 2023, OCP Microscaling Formats (MX) Specification 1.0, Section 5.
"""

import ml_dtypes
import numpy as np

BLOCKS, SCALES = "_blocks", "_scales"
# E2M1 values by code: a sign bit, two exponent bits, one mantissa bit.
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# Bias of E8M0, a block's exponent. Weights per block.
BIAS, BLOCK = 127, 32


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


def blocks_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the blocks of weights `[*b, inputs, outputs]`; the inverse of `shape`.

    Raises:
      ValueError: blocks do not divide the inputs.
    """
    *batch, inputs, outputs = shape
    if inputs % BLOCK:
        raise ValueError(f"inputs={inputs}: must be a multiple of {BLOCK} in MXFP4")
    return *batch, outputs, inputs // BLOCK, BLOCK // 2


def encode(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Encodes weights to the nearest values in MXFP4: each block gets the scale, of the two that
    use the largest codes, with the smaller sum of squared errors. Decoded weights are unchanged.

    Args:
      weights: `[*b, inputs, outputs]`.

    Returns:
      Blocks and scales, as in `decode`.

    Raises:
      ValueError: blocks do not divide the inputs, or a weight is not finite.
    """
    sizes = blocks_shape(weights.shape)
    blocks, scales = np.empty(sizes, np.uint8), np.empty(sizes[:-1], np.uint8)
    # One matrix at a time, because the float32 values need several times the memory of the result.
    for index in np.ndindex(sizes[:-3]):
        w = weights[index].astype(np.float32).T.reshape(*sizes[-3:-1], BLOCK)
        largest = np.abs(w).max(-1)
        if not np.isfinite(largest).all():
            raise ValueError("weights in MXFP4: must be finite")
        # The largest weight is between 4 and 8 times the first scale; codes end at 6.
        first = np.clip(np.frexp(largest)[1] - 3, -BIAS, BIAS)
        larger = np.minimum(first + 1, BIAS)
        (codes, error), (others, other) = (_codes(w, exponents) for exponents in (first, larger))
        better = other < error
        codes = np.where(better[..., None], others, codes)
        blocks[index] = codes[..., 0::2] | codes[..., 1::2] << 4
        scales[index] = np.where(better, larger, first) + BIAS
    return blocks, scales


def _codes(w: np.ndarray, exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the nearest codes of blocks `[..., 32]` with these exponents, and the sum of squared
    errors of each block."""
    codes = np.ldexp(w, -exponents[..., None]).astype(ml_dtypes.float4_e2m1fn)
    values = np.ldexp(codes.astype(np.float32), exponents[..., None])
    return codes.view(np.uint8), np.square(values - w, dtype=np.float64).sum(-1)


def rounded(weights: np.ndarray) -> np.ndarray:
    """Returns the values of weights in MXFP4."""
    return decode(*encode(weights))
