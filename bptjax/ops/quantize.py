"""Quantization: block-wise codes with a codebook, rounded to nearest or stochastically, and
bfloat16, rounded stochastically."""

import math
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, UInt8, UInt16, UInt32

# Elements that share one absolute maximum: in optimizer state and statistics, and in weights.
BLOCK, WEIGHT_BLOCK = 256, 64
# 2³² divided by the golden ratio: an increment that makes another word.
GOLDEN = np.uint32(0x9E3779B9)
# Values of a weight's codes, ascending, as fractions of the block's absolute maximum.
CODEBOOKS: dict[str, np.ndarray] = {
    # Quantiles of the normal distribution: Dettmers et al. 2023, arXiv 2305.14314, Appendix E.
    "nf4": np.asarray(
        [
            -1.0,
            -0.6961928009986877,
            -0.5250730514526367,
            -0.39491748809814453,
            -0.28444138169288635,
            -0.18477343022823334,
            -0.09105003625154495,
            0.0,
            0.07958029955625534,
            0.16093020141124725,
            0.24611230194568634,
            0.33791524171829224,
            0.44070982933044434,
            0.5626170039176941,
            0.7229568362236023,
            1.0,
        ],
        np.float32,
    ),
    # One sign bit, two exponent bits and one mantissa bit, as in bitsandbytes; zero occurs twice.
    "fp4": np.asarray(
        [
            *(-1.0, -2 / 3, -0.5, -1 / 3, -0.25, -1 / 6, -1 / 192, 0.0),
            *(0.0, 1 / 192, 1 / 6, 0.25, 1 / 3, 0.5, 2 / 3, 1.0),
        ],
        np.float32,
    ),
    "int8": ((np.arange(256) - 128) / 127).astype(np.float32),
}


@runtime_checkable
class Codebook(Protocol):
    """Ascending values within [-1, 1] that codes stand for, as fractions of a block's absolute
    maximum."""

    def below(self, x: Float[Array, "*b"]) -> Array:
        """Returns the index of the greatest value up to `x`, or of a value next to it that differs
        from `x` by float32 rounding. Never the last index, so that a next value exists."""
        ...

    def decode(self, index: Array) -> Float[Array, "*b"]:
        """Returns the values of these indices, which may have any dtype."""
        ...


@dataclass(frozen=True, eq=False)
class TableCodebook(Codebook):
    """A codebook of any `2**n` values, n ≤ 8."""

    values: np.ndarray

    def below(self, x):
        half = len(self.values) // 2
        index = jnp.where(x >= self.values[half], half, 0)
        while half := half // 2:
            index = jnp.where(x >= self.decode(index + half), index + half, index)
        return jnp.minimum(index, len(self.values) - 2)

    def decode(self, index):
        return jnp.asarray(self.values).at[index.astype(jnp.int32)].get(mode="promise_in_bounds")


@dataclass(frozen=True)
class DynamicCodebook(Codebook):
    """The 256 values of dynamic (tree) quantization, up to 1. Each decade from 1e-7 to 1 is divided
    into n intervals of the same width, whose centers are values. The next decade has 2n.

    The values lie on a convex curve of straight lines, one per decade, so the curve is the maximum
    of the lines and its inverse the minimum of their inverses. This needs no gathers, and differs
    from a table of the same values by up to one ulp.

    Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861, Section
    1.3; the unsigned codebook uses the sign bit as an extra fraction bit (Section 2.2).
    """

    signed: bool

    @property
    def _origin(self) -> int:
        """Index from which the lines count. Codes below it are negative values."""
        return 127 if self.signed else -1

    @property
    def _decades(self) -> list[tuple[int, float]]:
        """Each decade's number of values n, and the factor of its line: counted from the origin,
        its values have the indices i = n to 2n - 1, and are factor × (18 i + 9 - 16 n)."""
        counts = [2 ** (decade + (not self.signed)) for decade in range(7)]
        return [(n, 10.0 ** (decade - 7) / (2 * n)) for decade, n in enumerate(counts)]

    def below(self, x):
        size = jnp.abs(x) if self.signed else x
        lines = [size * (1 / (18 * factor)) + (16 * n - 9) / 18 for n, factor in self._decades]
        i = reduce(jnp.minimum, lines)
        if self.signed:
            i = jnp.where(x < 0, -i, i)
        # The index stays float32, because `decode` would convert it back.
        return jnp.minimum(jnp.maximum(jnp.floor(i) + self._origin, 0), 254)

    def decode(self, index):
        i = index.astype(jnp.float32) - self._origin
        # All but the last product is exact.
        steps = 18 * jnp.abs(i) + 9
        lines = [(steps - 16 * n) * factor for n, factor in self._decades]
        # At the index of the value 0 all lines are below 0, and at the last index one is above 1.
        value = jnp.minimum(reduce(jnp.maximum, lines, 0.0), 1)
        return jnp.where(i < 0, -value, value) if self.signed else value


def quantize(
    x: Float[Array, "*b S"],
    codebook: Codebook,
    noise: UInt16[Array, "*b S"] | None = None,
    *,
    block: int = BLOCK,
) -> tuple[UInt8[Array, "*b S"], Float[Array, "*b C"]]:
    """Returns the codes of `x`, and the absolute maximum of each of the C = ⌈S / block⌉ blocks
    along the last axis. The last block may be shorter.

    Args:
      noise: uniform random bits for stochastic rounding, which makes `x` the expected result of
        `dequantize`. None rounds to the nearest value.
    """
    absmax = block_maxima(x, block=block)
    return encode(x, absmax, codebook, noise, block=block), absmax


def block_maxima(x: Float[Array, "*b S"], *, block: int = BLOCK) -> Float[Array, "*b C"]:
    """Returns the absolute maximum of each block of `quantize`, in float32."""
    x = jnp.abs(x.astype(jnp.float32))
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block)])
    return x.reshape(*x.shape[:-1], -1, block).max(-1)


def encode(
    x: Float[Array, "*b S"],
    absmax: Float[Array, "*b C"],
    codebook: Codebook,
    noise: UInt16[Array, "*b S"] | None = None,
    *,
    block: int = BLOCK,
) -> UInt8[Array, "*b S"]:
    """Returns the codes of `quantize`, given its maxima."""
    x = x.astype(jnp.float32)
    x = x / _each(jnp.where(absmax > 0, absmax, 1.0), x.shape[-1], block)
    below = codebook.below(x)
    low, high = codebook.decode(below), codebook.decode(below + 1)
    threshold = 0.5 if noise is None else (noise.astype(jnp.float32) + 0.5) / 2**16
    codes = jnp.where(x - low > threshold * (high - low), below + 1, below)
    return codes.astype(jnp.uint8)


def dequantize(
    codes: UInt8[Array, "*b S"], absmax: Float[Array, "*b C"], codebook: Codebook
) -> Float[Array, "*b S"]:
    """Inverts `quantize` with blocks of 256, up to rounding. Returns float32."""
    return codebook.decode(codes) * _each(absmax, codes.shape[-1], BLOCK)


def _each(blocks: Float[Array, "*b C"], size: int, block: int) -> Float[Array, "*b S"]:
    """Repeats each block's number for every element of the block, `size` elements in total."""
    return jnp.repeat(blocks, block, axis=-1)[..., :size]


class QuantizedMatrix(NamedTuple):
    """A quantized weight `[I, *o]` with I inputs.

    Attributes:
      codes: uint8 `[I, *o]`; with 4 bits `[⌈I / 2⌉, *o]`, two codes per byte, the first in the high
        bits.
      absmax: absolute maximum per 64 inputs of an output, `[⌈I / 64⌉, *o]`, float32; with double
        quantization, uint8 codes.
      second: float32, with double quantization: absolute maximum per 256 values of `absmax` minus
        `mean`, ordered by output.
      mean: float32 scalar, with double quantization: mean of `absmax`.
    """

    codes: Array
    absmax: Array
    second: Array | None = None
    mean: Array | None = None


def quantize_matrix(w: Float[Array, "I *o"], kind: str, double: bool) -> QuantizedMatrix:
    """Quantizes `w` with the codebook `kind`, rounding to the nearest value. With `double`, the
    absolute maxima are quantized to 8 bits too (double quantization).

    Dettmers et al. 2023, arXiv 2305.14314, Section 3. Blocks and order equal bitsandbytes' for a
    weight `[outputs, inputs]` whose inputs are a multiple of 64.
    """
    I, *outputs = w.shape  # noqa: E741
    book = CODEBOOKS[kind]
    codes, absmax = quantize(w.reshape(I, -1).T, TableCodebook(book), block=WEIGHT_BLOCK)
    second = mean = None
    if double:
        mean = absmax.mean()
        absmax_codes, second = quantize((absmax - mean).reshape(-1), DynamicCodebook(signed=True))
        absmax = absmax_codes.reshape(absmax.shape)
    codes = codes.T
    if len(book) == 16:
        codes = jnp.pad(codes, ((0, I % 2), (0, 0)))
        codes = codes[::2] << 4 | codes[1::2]
    return QuantizedMatrix(
        codes.reshape(-1, *outputs), absmax.T.reshape(-1, *outputs), second, mean
    )


def largest_magnitude(matrix: QuantizedMatrix) -> Float[Array, ""]:
    """Returns an upper bound of the magnitudes of the dequantized weight, because fractions of the
    absolute maxima are within [-1, 1]. With double quantization, the bound is at most the larger of
    the largest absolute maximum and twice their mean."""
    if matrix.second is None or matrix.mean is None:
        return matrix.absmax.max()
    return matrix.second.max() + matrix.mean


def dequantize_matrix(matrix: QuantizedMatrix, kind: str, inputs: int) -> Float[Array, "I *o"]:
    """Inverts `quantize_matrix` for a weight with I = `inputs`, up to rounding. Returns float32."""
    codes, absmax, second, mean = matrix
    C, *outputs = absmax.shape
    if second is not None and mean is not None:
        rows = absmax.reshape(C, -1).T
        absmax = dequantize(rows.reshape(-1), second, DynamicCodebook(signed=True)) + mean
        absmax = absmax.reshape(rows.shape).T.reshape(C, *outputs)
    if len(CODEBOOKS[kind]) == 16:
        halves = jnp.asarray([4, 0], jnp.uint8).reshape(1, 2, *(1 for _ in outputs))
        codes = ((codes[:, None] >> halves) & 15).reshape(-1, *outputs)[:inputs]
    each = jnp.repeat(absmax, WEIGHT_BLOCK, axis=0)[:inputs]
    return TableCodebook(CODEBOOKS[kind]).decode(codes) * each


def rounding_key(key: Array) -> UInt32[Array, "2"]:
    """Returns a key for `random_bits` and `fold_in`, from one of `jax.random`. Programs with these
    functions compile faster than with `jax.random.fold_in` and `jax.random.bits`."""
    return jax.random.bits(key, (2,))


def fold_in(key: UInt32[Array, "2"], number: ArrayLike) -> UInt32[Array, "2"]:
    """Returns another key for each number of 32 bits."""
    first = _mix(key[0] ^ jnp.asarray(number).astype(jnp.uint32)) + key[1]
    return jnp.stack([first, _mix(first + GOLDEN) ^ key[0]])


def random_bits(
    key: UInt32[Array, "2"], shape: tuple[int, ...]
) -> tuple[UInt32[Array, "*b"], UInt32[Array, "*b"]]:
    """Returns two random words per element, at a tenth of the cost of `jax.random.bits`. Good
    enough for rounding, not for sampling.

    Applies Murmur3's finalizer (Appleby 2011) to the element's index and the key. The index has 32
    bits, so elements 2³² apart get the same words.
    """
    index = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
    first = _mix(_mix(index ^ key[0]) + key[1])
    return first, _mix(first + GOLDEN)


def _mix(x: UInt32[Array, "*b"]) -> UInt32[Array, "*b"]:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def stochastic_round(x: Float[Array, "*b"], noise: UInt16[Array, "*b"]) -> Float[Array, "*b"]:
    """Rounds float32 up or down to bfloat16 at random, so that the expected result is `x`.

    Args:
      noise: uniform random bits.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    bits = (bits + noise.astype(jnp.uint32)) >> 16
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
