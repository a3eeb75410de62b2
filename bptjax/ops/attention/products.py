"""Attention for wide heads as large matrix products: the tiles of `scan`, of thousands of tokens.

A fused kernel keeps the logits of a tile on the chip. With heads of 512 the chip has room for
small tiles only, and to load keys and values again for each of them takes more time than to store
the logits of large tiles in the GPU's memory. O(T) memory: besides the results, a few arrays of the
logits of a tile. Documents far shorter than a tile leave most of the tile masked.
"""

import math
from dataclasses import replace

from jax import Array
from jaxtyping import Float

import bptjax.ops.attention.scan as scan
from bptjax.ops.attention.contract import QKV, AttentionSpec, AttentionState

# Most logits in a tile, over all heads and sequences, and bounds of the tokens in it. The tiles of
# 2,048 tokens that this gives to 16 heads were the fastest of five on an H200
# (scripts/results/attention_wide_h200.json).
LOGITS, LARGEST, SMALLEST = 2**26, 4096, 256


def unsupported(x: QKV, spec: AttentionSpec) -> str | None:
    """Returns None: the scan honors every argument."""
    return None


def forward(x: QKV, spec: AttentionSpec) -> AttentionState:
    """As `scan`, in chunks of its own."""
    return scan.forward(x, _with_chunks(x, spec))


def backward(
    x: QKV, state: AttentionState, dout: Float[Array, "B T N H"], spec: AttentionSpec
) -> QKV:
    """As `scan`, in chunks of its own."""
    return scan.backward(x, state, dout, _with_chunks(x, spec))


def _with_chunks(x: QKV, spec: AttentionSpec) -> AttentionSpec:
    B, _, N, _ = x.q.shape
    chunk = 2 ** int(math.log2(LOGITS / (B * N)) / 2)
    chunk = min(max(chunk, SMALLEST), LARGEST)
    return replace(spec, q_chunk=chunk, k_chunk=chunk)
