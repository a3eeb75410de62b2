"""Times attention on this machine's GPU: causal, ALiBi, soft cap, packed documents of equal and of
ragged lengths, the same by ends, a prompt with two answers, windows, a window with global tokens,
an eighth of the causal blocks, dropout, sinks.

    python scripts/attention.py --lengths 32768 --head_sizes 128 64 --out rows.json

One sequence, by default of 32 query and 8 key heads, bfloat16, random data. TFLOP/s count only
allowed query-key pairs: 4 · H FLOPs per pair, and 2.5 times that for the backward pass. A time is
the mean of several calls in a row.
"""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from timing import add_row, milliseconds, needs

from bptjax import Mask, attention
from bptjax.ops.position import alibi_slopes
from bptjax.parallel.mesh import select_devices

DOCUMENTS, RAGGED, WINDOW, SMALL_WINDOW, BLOCK = 8, 40, 4096, 128, 128


def ragged_lengths(T: int, number: int) -> np.ndarray:
    """Returns lengths of documents that are cut from T tokens at random places."""
    cuts = np.random.default_rng(0).choice(np.arange(1, T), number - 1, replace=False)
    return np.diff(np.sort(cuts), prepend=0, append=T)


def cases(T: int, N: int) -> dict[str, tuple[dict, float]]:
    """Returns options of `attention` and the number of allowed pairs by case, for N query heads.
    Documents are traced, as in training."""
    causal, square = Mask(causal=True), T * T / 2
    documents = np.repeat(np.arange(1, DOCUMENTS + 1, dtype=np.int32), T // DOCUMENTS)[None]
    lengths = ragged_lengths(T, RAGGED)
    ragged = np.repeat(np.arange(1, RAGGED + 1, dtype=np.int32), lengths)[None]
    chains = np.repeat(T // DOCUMENTS * np.arange(1, DOCUMENTS + 1, dtype=np.int32), T // DOCUMENTS)
    ragged_chains = np.repeat(lengths.cumsum().astype(np.int32), lengths)
    answer = T // 16
    pair = np.repeat(np.asarray([T, T - answer, T], np.int32), [T - 2 * answer, answer, answer])
    seen, small = (window * T - window**2 / 2 for window in (WINDOW, SMALL_WINDOW))
    sinks = np.zeros(N, np.float32)
    first = np.arange(T) < BLOCK
    blocks = np.tril(np.random.default_rng(0).random((T // BLOCK, T // BLOCK)) < 1 / 8)
    live = (blocks.sum() - blocks.trace() / 2) * BLOCK**2
    return {
        "causal": (dict(mask=causal), square),
        "alibi": (dict(mask=causal, alibi=alibi_slopes(N)), square),
        "softcap": (dict(mask=causal, softcap=50.0), square),
        "8 documents": (dict(mask=replace(causal, segments=documents)), square / DOCUMENTS),
        "40 ragged documents": (
            dict(mask=replace(causal, segments=ragged)),
            (lengths.astype(float) ** 2).sum() / 2,
        ),
        f"{DOCUMENTS} chains": (dict(mask=replace(causal, ends=chains[None])), square / DOCUMENTS),
        f"{RAGGED} ragged chains": (
            dict(mask=replace(causal, ends=ragged_chains[None])),
            (lengths.astype(float) ** 2).sum() / 2,
        ),
        "pair of 1/16": (dict(mask=replace(causal, ends=pair[None])), square - answer**2),
        "window 4096": (dict(mask=replace(causal, window=WINDOW)), seen),
        f"window {WINDOW}, {BLOCK} global": (
            dict(mask=replace(causal, window=WINDOW, global_tokens=first)),
            seen + (T - WINDOW) * BLOCK,
        ),
        "1/8 of the blocks": (
            dict(mask=replace(causal, block_mask=blocks, block_size=BLOCK)),
            live,
        ),
        "dropout": (dict(mask=causal, dropout=0.1, dropout_key=jax.random.key(0)), square),
        "sinks": (dict(mask=causal, sinks=sinks), square),
        f"window {SMALL_WINDOW}, sinks": (
            dict(mask=replace(causal, window=SMALL_WINDOW), sinks=sinks),
            small,
        ),
    }


def call(f, traced, q, k, v):
    return f(q, k, v, mask=replace(f.keywords["mask"], **traced)) if traced else f(q, k, v)


def gradients(f, traced, dout, *qkv):
    return jax.vjp(partial(call, f, traced), *qkv)[1](dout)


def cudnn(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32_768])
    parser.add_argument("--head_sizes", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="of queries, of keys")
    parser.add_argument("--impls", nargs="+", default=["triton", "auto"])
    parser.add_argument("--cases", nargs="+", choices=cases(WINDOW, 32))
    parser.add_argument("--calls", type=int, default=5, help="in a row, without a wait")
    parser.add_argument("--seconds", type=float, default=20, help="for a time, at most")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    select_devices("auto")  # With the XLA flag of fa4.
    rows, (N, K) = [], args.heads
    how = dict(calls=args.calls, seconds=args.seconds)
    for H in args.head_sizes:
        for T in args.lengths:
            keys = jax.random.split(jax.random.key(0), 4)
            shapes = (1, T, N, H), (1, T, K, H), (1, T, K, H), (1, T, N, H)
            q, k, v, dout = (
                jax.random.normal(key, shape, jnp.bfloat16)
                for key, shape in zip(keys, shapes, strict=True)
            )

            work: dict[tuple[str, str], tuple[Any, float]] = {
                (impl, name): (partial(attention, impl=impl, **options), pairs)
                for impl in args.impls
                for name, (options, pairs) in cases(T, N).items()
                if args.cases is None or name in args.cases
            }
            work["jax.nn cudnn", "causal"] = cudnn, T * T / 2
            for (impl, name), (f, pairs) in work.items():
                mask = getattr(f, "keywords", {}).get("mask", Mask())
                fields = {name: getattr(mask, name) for name in ("segments", "ends")}
                traced = {name: jnp.asarray(x) for name, x in fields.items() if x is not None}
                one = jax.jit(partial(call, f)).lower(traced, q, k, v).compile()
                both = jax.jit(partial(gradients, f)).lower(traced, dout, q, k, v).compile()
                forward, *_ = milliseconds(one, traced, q, k, v, **how)
                step, least, most = milliseconds(both, traced, dout, q, k, v, **how)
                flops = 4 * N * H * pairs
                add_row(
                    rows,
                    args.out,
                    implementation=impl,
                    case=name,
                    T=T,
                    H=H,
                    heads=[N, K],
                    calls=args.calls,
                    forward_ms=forward,
                    forward_tflops=flops / forward / 1e9,
                    step_ms=step,
                    fastest_ms=least,
                    slowest_ms=most,
                    step_tflops=3.5 * flops / step / 1e9,
                    temporary_gib=needs(both)["temporary_gib"],
                    dtype="bfloat16",
                )


if __name__ == "__main__":
    main()
