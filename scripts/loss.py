"""Times linear layer + cross-entropy, forward and both gradients, on this machine's GPU.

    python scripts/loss.py --chunks 1024 2048 4096 --out rows.json

Random bfloat16 hidden states and head. Memory is the compiler's figure for the call without its
operands; it includes the gradients.
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from timing import add_row, milliseconds

from bptjax import linear_cross_entropy


def plain(hidden, head, labels):
    """Computes the loss from float32 logits of all tokens at once."""
    logits = jnp.einsum("btd,vd->btv", hidden, head, preferred_element_type=jnp.float32)
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - picked).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=int, nargs=3, default=[32_768, 4096, 128_256])
    parser.add_argument("--chunks", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    T, D, V = args.shape
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (1, T, D), jnp.bfloat16)
    head = 0.02 * jax.random.normal(keys[1], (V, D), jnp.bfloat16)
    labels = jax.random.randint(keys[2], (1, T), 0, V)
    work = {f"chunk {c}": partial(linear_cross_entropy, chunk=c) for c in args.chunks}
    rows = []
    for name, f in (work | {"plain": plain}).items():
        mean = jax.jit(jax.grad(lambda h, w, y, f=f: f(h, w, y) / T, (0, 1)))
        step = mean.lower(hidden, head, labels).compile()
        needs = step.memory_analysis()
        assert needs is not None
        extra = needs.temp_size_in_bytes + needs.output_size_in_bytes
        ms, *_ = milliseconds(step, hidden, head, labels, repeats=5)
        add_row(rows, args.out, loss=name, T=T, D=D, V=V, ms=ms, extra_gib=extra / 2**30)


if __name__ == "__main__":
    main()
