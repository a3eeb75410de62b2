"""Linear maps with 8-bit operands and one scale per tensor."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import Precision
from jax.typing import DTypeLike
from jaxtyping import Float, UInt8

# Three mantissa bits for activations and weights, two for gradients, which need more range.
VALUES, GRADIENTS = jnp.float8_e4m3fn, jnp.float8_e5m2
# Named scope of the 8-bit matrix products.
SCOPE = "float8"


class Float8(NamedTuple):
    """An array scale · codes, or a stack of such arrays.

    Attributes:
      codes: bits of float8 numbers as uint8, because XLA on a CPU may turn float8 numbers above 240
        into NaN when it copies them. Arrays are float8 only inside products.
      scale: float32 scalar.
    """

    codes: Any
    scale: Any


def quantize(x: Float[Array, "*b"], dtype: DTypeLike) -> Float8:
    """Rounds `x` to a float8 dtype, with one scale for all shards: its largest magnitude's."""
    scale = scale_of(jnp.abs(x).max(), dtype)
    return Float8(encode(x, scale, dtype), scale)


def scale_of(magnitude: Float[Array, ""], dtype: DTypeLike) -> Float[Array, ""]:
    """Returns the scale of numbers up to this magnitude.

    The scale is the smallest power of two above magnitude / (the largest float8), so no element
    overflows and the scale rounds nothing in any dtype. If the magnitude is not finite, the scale
    is infinite, and no product with the result is finite.
    """
    largest, tiny = float(jnp.finfo(dtype).max), float(jnp.finfo(jnp.float32).tiny)
    ratio = jnp.maximum(magnitude.astype(jnp.float32) / largest, tiny)
    # These bits are the largest power of two up to the ratio; infinity for NaN.
    exponent = jax.lax.bitcast_convert_type(ratio, jnp.uint32) & jnp.uint32(0x7F800000)
    return 2 * jax.lax.bitcast_convert_type(exponent, jnp.float32)


def encode(x: Float[Array, "*b"], scale: Float[Array, ""], dtype: DTypeLike) -> UInt8[Array, "*b"]:
    """Rounds x / scale to a float8 dtype. Returns the bits."""
    rounded = (x.astype(jnp.float32) / scale).astype(dtype)
    return jax.lax.bitcast_convert_type(rounded, jnp.uint8)


@jax.custom_vjp
def linear(
    x: Float[Array, "*b I"],
    codes: UInt8[Array, "O I"],
    scale: Float[Array, ""],
    kernel: Float[Array, "I O"] | None,
) -> Float[Array, "*b O"]:
    """Computes x · (scale · codes)ᵀ in x's dtype, with 8-bit operands.

    Rounds `x` here, and its cotangent in the backward pass. The saved activation is `x` in 8 bits.
    Gradients accumulate in float32, and so does the forward product, but with 14 bits on Hopper
    GPUs, as is usual for float8.

    Args:
      codes, scale: the weight, from `quantize` or `encode`; it has no gradient. Outputs come first
        because cuBLAS reads both operands along the contracted axis, and the forward pass may run
        twice.
      kernel: receives the gradient of the weight, in x's dtype; its values are not read. None for a
        frozen weight.

    Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv 2209.05433.
    """
    return _forward(x, codes, scale, kernel)[0]


def _forward(x, codes, scale, kernel):
    x8, last = quantize(x, VALUES), (x.ndim - 1,)
    operands = _floats(x8.codes, VALUES), _floats(codes, VALUES)
    y = _product(*operands, (last, (1,)), x8.scale * scale, x.dtype, Precision.DEFAULT)
    return y, (None if kernel is None else x8, Float8(codes, scale))


def _backward(residuals, dy):
    x8, weight = residuals
    dy8, tokens, last = quantize(dy, GRADIENTS), tuple(range(dy.ndim - 1)), (dy.ndim - 1,)
    floats, dkernel = _floats(dy8.codes, GRADIENTS), None
    # By default, XLA lets cuBLAS use fast 14-bit sums.
    exact = Precision.HIGHEST
    operands = floats, _floats(weight.codes, VALUES)
    dx = _product(*operands, (last, (0,)), dy8.scale * weight.scale, dy.dtype, exact)
    if x8 is not None:
        operands = _floats(x8.codes, VALUES), floats
        dkernel = _product(*operands, (tokens, tokens), x8.scale * dy8.scale, dy.dtype, exact)
    return dx, None, None, dkernel


def _floats(codes: UInt8[Array, "*b"], dtype: DTypeLike) -> Float[Array, "*b"]:
    return jax.lax.bitcast_convert_type(codes, dtype)


def _product(
    a: Array,
    b: Array,
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
    scale: Float[Array, ""],
    dtype: DTypeLike,
    precision: Precision,
) -> Array:
    """Computes scale · (a · b) over the contracted axes. XLA moves the scale into cuBLAS's product,
    before the result is rounded; the unscaled result overflows float16."""
    wide = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    with jax.named_scope(SCOPE):
        y = jax.lax.dot_general(
            a, b, (contracted, ((), ())), precision=precision, preferred_element_type=wide
        )
        return (y * scale.astype(wide)).astype(dtype)


linear.defvjp(_forward, _backward)
