"""Times Liger's linear layer + cross-entropy, forward and both gradients, for comparison.

    python scripts/loss_peer.py triton --out rows.jsonl

Needs torch, liger-kernel and a GPU. `scaled` is the loss of single tokens on Hopper GPUs in CuTe,
and needs nvidia-cutlass-dsl; with LIGER_KERNEL_IMPL=cutedsl, Liger 0.8.5's loss of a batch fails.
Shapes and the distribution of the inputs are those of scripts/loss.py. Appends a row to `--out`.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from timing import append_row

NAMES = {"triton": "Triton", "scaled": "CuTe"}


def loss_of(kernels: str) -> Any:
    """Returns a function of hidden states, head and labels that computes the mean loss."""
    if kernels == "scaled":
        from liger_kernel.ops.cutedsl.ops import fused_scaled_cross_entropy_sm90 as scaled

        return lambda *of: scaled.LigerFusedScaledCrossEntropySM90Function.apply(*of).mean()
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, head, labels: loss(head, hidden, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernels", choices=NAMES)
    parser.add_argument("--shape", type=int, nargs=3, default=[32_768, 4096, 128_256])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    T, D, V = args.shape
    loss, options = loss_of(args.kernels), dict(device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(T, D, **options).requires_grad_()
    head = (0.02 * torch.randn(V, D, **options)).requires_grad_()
    labels = torch.randint(V, (T,), device="cuda")
    times = []
    for i in range(9):
        if i == 2:
            torch.cuda.reset_peak_memory_stats()
        held, start = torch.cuda.memory_allocated(), time.perf_counter()
        torch.autograd.grad(loss(hidden, head, labels), (hidden, head))
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    row = dict(loss=f"Liger, {NAMES[args.kernels]}", T=T, D=D, V=V, system="torch")
    row |= dict(ms=statistics.median(times[2:]), torch=torch.__version__)
    row |= dict(extra_gib=(torch.cuda.max_memory_allocated() - held) / 2**30)
    append_row(args.out, row)


if __name__ == "__main__":
    main()
