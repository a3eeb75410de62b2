"""Times the gated delta rule on this machine's GPU, beside flash-linear-attention if installed.

    python scripts/delta_rule.py --out rows.json

Forward pass, and forward and backward pass, in bfloat16, of random data: keys of length 1, and log
decays and shares of writes in float32. A time is the mean of five calls in a row. Errors are the
largest relative error of the output and the gradients against float32, on 2,048 tokens.

On Hopper, flash-linear-attention refuses to run its backward pass with Triton 3.4 to 3.7.0, with
which it may be wrong. The refusal is switched off: the time is of the same kernels.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from timing import add_row, milliseconds, needs

from bptjax.ops.delta_rule import gated_delta_rule
from bptjax.ops.norm import l2_norm

CALLS, SHORT = 5, 2048


def operands(T: int, heads: list[int], size: int) -> list[jax.Array]:
    """Returns q, k, v, g, beta and the gradient of the output."""
    K, N = heads
    shapes = (K, size), (K, size), (N, size), (N,), (N,), (N, size)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    q, k, v, g, beta, dout = (
        jax.random.normal(key, (1, T, *shape)) for key, shape in zip(keys, shapes, strict=True)
    )
    g, beta = -jnp.exp(g - 2.0), jax.nn.sigmoid(beta)
    q, k, v, dout = (x.astype(jnp.bfloat16) for x in (l2_norm(q), l2_norm(k), v, dout))
    return [q, k, v, g, beta, dout]


@partial(jax.jit, static_argnums=0)
def forward(impl, q, k, v, g, beta, dout):
    return gated_delta_rule(q, k, v, g, beta, impl=impl)[0]


@partial(jax.jit, static_argnums=0)
def step(impl, *x):
    out, pull = jax.vjp(lambda *x: gated_delta_rule(*x, impl=impl)[0], *x[:5])
    return out, *pull(x[5])


def fla() -> tuple[Callable, Callable]:
    """Returns the same two functions by flash-linear-attention, of a list of torch's tensors."""
    os.environ.pop("TRITON_CACHE_DIR", None)  # jax-triton leaves it empty.
    import torch

    chunk_gated_delta_rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    vars(import_module("fla.ops.common.chunk_o"))["IS_NVIDIA_HOPPER"] = False

    def forward(x):
        with torch.no_grad():
            return chunk_gated_delta_rule(*x[:5])[0]

    def step(x):
        out = chunk_gated_delta_rule(*x[:5])[0]
        return out, *torch.autograd.grad(out, x[:5], x[5])

    return forward, step


def tensors(x: list[jax.Array]) -> list[Any]:
    import torch

    made = [torch.from_dlpack(y).clone() for y in x]
    return [y.requires_grad_() for y in made[:5]] + made[5:]


def largest_error(got: Any, wanted: Any) -> float:
    """Returns the largest relative error ‖a - b‖ / ‖b‖ of the arrays."""
    arrays = ((np.asarray(a, np.float32), np.asarray(b)) for a, b in zip(got, wanted, strict=True))
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--heads", type=int, nargs=2, default=[16, 32], help="of keys, of values")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--implementations", nargs="+", default=["triton", "scan", "fla"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    x, few = (operands(T, args.heads, args.size) for T in (args.tokens, SHORT))
    wanted = step("scan", *(y.astype(jnp.float32) for y in few))
    rows: list[dict[str, Any]] = []
    for name in args.implementations:
        common = dict(tokens=args.tokens, heads=args.heads, size=args.size)
        if name != "fla":
            common |= dict(implementation=name, error=largest_error(step(name, *few), wanted))
            compiled = step.lower(name, *x).compile()
            common["temporary_gib"] = needs(compiled)["temporary_gib"]
            runs = [(partial(forward, name), x), (partial(step, name), x)]
        elif find_spec("fla"):
            import torch

            f, both = fla()
            common["implementation"] = f"flash-linear-attention {version('fla-core')}"
            common |= dict(torch=torch.__version__)
            got = [y.detach().float().cpu() for y in both(tensors(few))]
            common["error"] = largest_error(got, wanted)
            there = [tensors(x)]
            runs = [(f, there), (both, there)]
        else:
            continue
        for kind, (f, given) in zip(("forward", "step"), runs, strict=True):
            ms, least, most = timed(f, given, name == "fla")
            common |= {f"{kind}_ms": ms, f"{kind}_fastest_ms": least, f"{kind}_slowest_ms": most}
        add_row(rows, args.out, **common, triton=version("triton"))


def timed(f: Callable, given: list, torch_waits: bool) -> tuple[float, float, float]:
    """Returns the median, the least and the greatest time of a call in milliseconds."""
    if not torch_waits:
        return milliseconds(f, *given, calls=CALLS)
    import torch

    def calls() -> np.ndarray:
        for _ in range(CALLS):
            f(*given)
        torch.cuda.synchronize()
        return np.zeros(())

    ms, least, most = milliseconds(calls)
    return ms / CALLS, least / CALLS, most / CALLS


if __name__ == "__main__":
    main()
