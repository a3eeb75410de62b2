"""Attention for wide heads as large matrix products: `scan` with tiles of thousands of tokens.

A fused kernel keeps the logits of a tile on the chip. For heads of 512 the chip only has room for
small tiles, and reloading keys and values for each tile takes longer than storing the logits of
large tiles in GPU memory. O(T) memory: the results and a few arrays of one tile's logits. Documents
far shorter than a tile leave most of it masked.
"""

import math
from dataclasses import replace

from jax import Array
from jaxtyping import Float

import bptjax.ops.attention.scan as scan
from bptjax.ops.attention.contract import QKV, AttentionSpec, AttentionState

# Maximum logits per tile, over all heads and sequences, and bounds of the tokens per tile. For 16
# heads this gives tiles of 2,048 tokens, the fastest of five sizes on an H200
# (scripts/results/attention_wide_h200.json).
LOGITS, LARGEST, SMALLEST = 2**26, 4096, 256


def unsupported(x: QKV, spec: AttentionSpec) -> str | None:
    """Returns None: the scan honors every argument."""
    return None


def forward(x: QKV, spec: AttentionSpec) -> AttentionState:
    """Runs `scan.forward` with larger chunks."""
    return scan.forward(x, _with_chunks(x, spec))


def backward(
    x: QKV, state: AttentionState, dout: Float[Array, "B T N H"], spec: AttentionSpec
) -> QKV:
    """Runs `scan.backward` with larger chunks."""
    return scan.backward(x, state, dout, _with_chunks(x, spec))


def _with_chunks(x: QKV, spec: AttentionSpec) -> AttentionSpec:
    B, _, N, _ = x.q.shape
    chunk = 2 ** int(math.log2(LOGITS / (B * N)) / 2)
    chunk = min(max(chunk, SMALLEST), LARGEST)
    return replace(spec, q_chunk=chunk, k_chunk=chunk)
