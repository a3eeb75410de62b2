"""Times torch's flex_attention, with its Triton kernels and with flash-attn-4's, for comparison.

    python scripts/attention_peer.py --head_sizes 128 64 --out rows.jsonl

Needs torch and a GPU, and flash-attn-4 for FLASH. The cases, the work and the counted FLOPs are
those of scripts/attention.py: 32 query and 8 key heads, bfloat16, the mean of five calls in a row.
Appends a row for each case to `--out`; a case that fails says why.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attention import DOCUMENTS, RAGGED, WINDOW, ragged_lengths
from timing import append_row
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bptjax.ops.position import alibi_slopes

N, K, CALLS = 32, 8, 5
# Tokens per block of the mask, of queries and of keys; the first that the kernels accept is used.
BLOCKS = {"FLASH": [(128, 128), (256, 128)], "TRITON": [(128, 128)]}


def cases(T: int) -> dict[str, tuple[Callable, Callable | None, float]]:
    """Returns a mask, a change of scores and the number of allowed pairs by case."""
    lengths = ragged_lengths(T, RAGGED)
    ragged = torch.from_numpy(np.repeat(np.arange(RAGGED), lengths)).cuda()
    document = torch.arange(T, device="cuda") // (T // DOCUMENTS)
    slopes = torch.from_numpy(alibi_slopes(N)).cuda()
    square = T * T / 2

    def causal(b, h, i, j):
        return i >= j

    return {
        "causal": (causal, None, square),
        "8 documents": (
            lambda b, h, i, j: (i >= j) & (document[i] == document[j]),
            None,
            square / DOCUMENTS,
        ),
        "40 ragged documents": (
            lambda b, h, i, j: (i >= j) & (ragged[i] == ragged[j]),
            None,
            (lengths.astype(float) ** 2).sum() / 2,
        ),
        "alibi": (causal, lambda score, b, h, i, j: score + slopes[h] * (j - i), square),
        "softcap": (causal, lambda score, b, h, i, j: 50 * torch.tanh(score / 50), square),
        "window 4096": (
            lambda b, h, i, j: (i >= j) & (i - j < WINDOW),
            None,
            WINDOW * T - WINDOW**2 / 2,
        ),
    }


def milliseconds(function: Callable) -> float:
    """Returns the median of seven means of `CALLS` calls, after a warm-up."""
    times = []
    for i in range(9):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            function()
        torch.cuda.synchronize()
        if i > 1:
            times.append((time.perf_counter() - start) / CALLS)
    return 1e3 * float(np.median(times))


def measure(backend: str, block: tuple[int, int], mask: Any, score: Any, T: int, H: int) -> dict:
    """Returns the times of a case."""
    torch._dynamo.reset()
    draw = dict(device="cuda", dtype=torch.bfloat16)
    q, g = (torch.randn(1, N, T, H, **draw) for _ in range(2))
    k, v = (torch.randn(1, K, T, H, **draw) for _ in range(2))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    flex: Any = torch.compile(flex_attention, dynamic=False)
    blocks = create_block_mask(mask, None, None, T, T, device="cuda", BLOCK_SIZE=block)
    options: dict[str, Any] = dict(score_mod=score, block_mask=blocks, enable_gqa=True)
    options["kernel_options"] = {"BACKEND": backend}

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return flex(*inputs, **options)

    def both() -> Any:
        return torch.autograd.grad(flex(*inputs, **options), inputs, g)

    return dict(block=block, forward_ms=milliseconds(forward), step_ms=milliseconds(both))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=32_768)
    parser.add_argument("--head_sizes", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    T = args.length
    for H in args.head_sizes:
        for backend, sizes in BLOCKS.items():
            for name, (mask, score, pairs) in cases(T).items():
                row: dict[str, Any] = dict(implementation=f"torch flex_attention {backend}")
                row |= dict(case=name, T=T, H=H, heads=[N, K], calls=CALLS)
                for block in sizes:
                    try:
                        found = measure(backend, block, mask, score, T, H)
                    except Exception as error:  # Of the compiler, or of the kernels.
                        row["failed"] = str(error).splitlines()[0] if str(error) else repr(error)
                        continue
                    row.pop("failed", None)
                    flops = 4 * N * H * pairs / 1e9
                    row |= found | dict(forward_tflops=flops / found["forward_ms"])
                    row["step_tflops"] = 3.5 * flops / found["step_ms"]
                    break
                row |= dict(device=torch.cuda.get_device_name(), torch=torch.__version__)
                append_row(args.out, row)


if __name__ == "__main__":
    main()
