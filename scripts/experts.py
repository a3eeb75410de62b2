"""Times the matrix products of a mixture of experts on this machine's GPU, beside PyTorch's grouped
product if PyTorch is installed.

    python scripts/experts.py --out rows.json

Forward and backward pass of two products in a row, of each token's experts, bfloat16 and random
data: tokens spread evenly over the experts, and half of them on 8 experts. TFLOP/s count the rows
of tokens alone. A time is the mean of five calls in a row.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from timing import add_row, milliseconds, needs

from bptjax.ops.grouped_matmul import dispatch, group, grouped_matmul

CALLS, FAVORED = 5, 8


def choices(T: int, k: int, experts: int, skewed: bool) -> np.ndarray:
    """Returns k different experts of each token, int32 `[T, k]`."""
    rng = np.random.default_rng(0)
    keys = rng.random((T, experts))
    if skewed:
        keys[: T // 2, :FAVORED] -= 1
    return np.argsort(keys, axis=1)[:, :k].astype(np.int32)


@jax.jit
def products(x, up, down, dy, experts):
    def forward(x, up, down):
        return grouped_matmul(grouped_matmul(x, up, experts), down, experts)

    y, pull = jax.vjp(forward, x, up, down)
    return y, *pull(dy)


def torch_milliseconds(x, up, down, dy, ends) -> float:
    """Returns PyTorch's time for the same work on rows without gaps. `ends` are the ends of the
    experts' rows."""
    import torch

    x, up, down, dy = (
        torch.from_dlpack(jnp.asarray(a)).clone().requires_grad_() for a in (x, up, down, dy)
    )
    offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")

    def run() -> None:
        hidden = torch._grouped_mm(x, up, offs=offsets)
        torch._grouped_mm(hidden, down, offs=offsets).backward(dy.detach())
        for a in (x, up, down):
            a.grad = None

    def calls() -> np.ndarray:
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()
        return np.zeros(())

    return milliseconds(calls)[0] / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--experts", type=int, nargs=2, default=[128, 8], help="all, of a token")
    parser.add_argument("--sizes", type=int, nargs=2, default=[2048, 768], help="outer, inner")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    (X, k), (D, F), T, rows = args.experts, args.sizes, args.tokens, []
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (T, D), (X, D, F), (X, F, D), (T, D)
    x, up, down, dy = (
        jax.random.normal(key, shape, jnp.bfloat16) / shape[-2] ** 0.5
        for key, shape in zip(keys, shapes, strict=True)
    )
    flops = 3 * 2 * 2 * T * k * D * F
    for skewed in (False, True):
        chosen = choices(T, k, X, skewed)
        groups = group(jnp.asarray(chosen), X)
        operands = dispatch(x, groups), up, down, dispatch(dy, groups), groups.experts
        common = dict(
            case="half on 8 experts" if skewed else "even",
            tokens=T,
            experts=X,
            per_token=k,
            sizes=[D, F],
        )
        compiled = products.lower(*operands).compile()
        ms, least, most = milliseconds(compiled, *operands, calls=CALLS)
        add_row(
            rows,
            args.out,
            implementation="bptjax",
            **common,
            padded_rows=len(operands[0]),
            step_ms=ms,
            fastest_ms=least,
            slowest_ms=most,
            step_tflops=flops / ms / 1e9,
            temporary_gib=needs(compiled)["temporary_gib"],
        )
        if not (find_spec("torch") and jax.default_backend() == "gpu"):
            continue
        import torch

        tokens = np.argsort(chosen.reshape(-1), kind="stable") // k
        ends = np.cumsum(np.bincount(chosen.reshape(-1), minlength=X))
        ms = torch_milliseconds(x[tokens], up, down, dy[tokens], ends)
        add_row(
            rows,
            args.out,
            implementation=f"torch {torch.__version__}",
            **common,
            step_ms=ms,
            step_tflops=flops / ms / 1e9,
        )


if __name__ == "__main__":
    main()
