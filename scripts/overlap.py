"""Shows how much of attention's communication over several GPUs overlaps with its computation.

    python scripts/overlap.py --out DIRECTORY --devices 4 --length 131072

Profiles one forward and backward pass of each strategy. Prints the time in which an NCCL kernel
runs on the first GPU and the part of it in which another kernel runs too, and plots both over time.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scaling import attention_work, mesh_of
from timing import add_row

Spans = list[tuple[float, float]]
# Gaps up to this many ms are closed in the plot.
GAP = 0.05


def spans(profile: Path) -> tuple[Spans, Spans]:
    """Returns the spans in which the first GPU communicates and computes, in ms from its first
    kernel.

    Raises:
      ValueError: no GPU in the profile.
    """
    (file,) = profile.rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(file))
    plane = next((p for p in data.planes if p.name == "/device:GPU:0"), None)
    if plane is None:
        raise ValueError("no GPU in the profile")
    found: tuple[Spans, Spans] = [], []
    for line in plane.lines:
        if line.name.startswith("Stream"):
            for e in line.events:
                found["nccl" not in e.name.lower()].append((e.start_ns, e.end_ns))
    first = min(a for of in found for a, _ in of)
    communication, computation = (
        [((a - first) / 1e6, (b - first) / 1e6) for a, b in sorted(of)] for of in found
    )
    return union(communication), union(computation)


def union(spans: Spans, gap: float = 0.0) -> Spans:
    """Returns sorted spans, merged where they overlap or are up to `gap` apart."""
    joined: Spans = []
    for a, b in spans:
        if joined and a <= joined[-1][1] + gap:
            a, b = joined[-1][0], max(b, joined.pop()[1])
        joined.append((a, b))
    return joined


def total(spans: Spans) -> float:
    return sum(b - a for a, b in spans)


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1 + len(rows)), layout="constrained")
    axes = figure.subplots()
    for at, row in enumerate(rows):
        kinds = ("computes", at, "tab:blue"), ("communicates", at + 0.4, "tab:orange")
        for name, y, colour in kinds:
            axes.broken_barh([(a, b - a) for a, b in row[name]], (y, 0.35), color=colour)
    axes.set_yticks(np.arange(len(rows)) + 0.4, [row["strategy"] for row in rows])
    about = f"{rows[0]['T']:,} tokens, {rows[0]['devices']} GPUs"
    title = f"attention, forward and backward, {about}: the first one computes and communicates"
    axes.set(xlabel="ms", title=title)
    axes.invert_yaxis()
    FigureCanvasAgg(figure).print_png(file)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--length", type=int, default=131_072)
    parser.add_argument("--strategies", nargs="+", default=["gather", "ring", "ulysses"])
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="queries', keys'")
    parser.add_argument("--head_size", type=int, default=128)
    parser.add_argument(
        "--out", type=Path, required=True, help="directory of the rows and the plot"
    )
    args = parser.parse_args(argv)
    rows, n = [], args.devices
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.strategies:
        order = "plain" if name == "ulysses" else "zigzag"
        with jax.set_mesh(mesh_of("sp", n)), tempfile.TemporaryDirectory() as profile:
            how = args.heads, args.head_size, "bfloat16", "auto", args.length, n, name, order
            both, operands, _ = attention_work(*how)
            both = jax.jit(both, out_shardings=operands[0].sharding)
            for _ in range(2):
                jax.block_until_ready(both(*operands))
            with jax.profiler.trace(profile):
                jax.block_until_ready(both(*operands))
            communication, computation = spans(Path(profile))
        either = total(union(sorted(communication + computation)))
        figures = dict(communication_ms=total(communication), computation_ms=total(computation))
        figures |= dict(ms=either, beside_ms=sum(figures.values()) - either)
        about = dict(strategy=name, T=args.length, devices=n)
        # Spans for the plot.
        when = dict(computes=union(computation, GAP), communicates=union(communication, GAP))
        add_row(rows, args.out / "overlap.json", **about, **figures, **when)
    draw(rows, args.out / "overlap.png")


if __name__ == "__main__":
    main()
