"""Draws pictures of the rows in scripts/results.

python scripts/pictures.py
"""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from measurements import (
    CASES,
    DECODERS,
    RESULTS,
    SYSTEMS,
    attention_rows,
    gib,
    in_less_memory,
    memory_gib,
    pairs,
    peer_name,
    read,
    speed,
    tokens,
)

from bptjax.evaluation.context import draw_scores
from bptjax.evaluation.perplexity import draw_perplexity


def draw(file: Path, names: list[str], panels: dict[str, list[dict[str, float]]]) -> None:
    """Draws a panel for each title, with a group of bars for each name."""
    figure = Figure(figsize=(12, 6), layout="constrained")
    for axes, (title, bars) in zip(
        figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True
    ):
        labels = list(dict.fromkeys(label for group in bars for label in group))
        for i, label in enumerate(labels):
            there = {n + i / (len(labels) + 1): x[label] for n, x in enumerate(bars) if label in x}
            drawn = axes.barh(
                list(there), list(there.values()), 1 / (len(labels) + 1), label=label, align="edge"
            )
            axes.bar_label(drawn, fmt="{:,.0f}", padding=2, fontsize="x-small")
        axes.set_yticks([n + 0.4 for n in range(len(names))], names)
        axes.set(xlabel=title)
        axes.margins(x=0.12)
        axes.legend(fontsize="x-small")
    figure.axes[0].invert_yaxis()
    FigureCanvasAgg(figure).print_png(file)


def draw_in_less_memory(file: Path) -> None:
    """Draws the speed and memory of each pair of `in_less_memory`, with the peer's speed as 1."""
    found = in_less_memory()
    figure = Figure(figsize=(10, 0.9 * len(found) + 1.2), layout="constrained")
    axes = figure.add_subplot(
        title="Training steps on one H200 within the GPU memory of the strongest peer",
        xlabel="tokens/s, peer = 1",
    )
    for n, (_, row, peer) in enumerate(found):
        for system, by, r, at, color in (
            ("bptjax", "", row, n, "tab:blue"),
            ("strongest peer", f"{peer_name(peer)}: ", peer, n + 0.4, "0.7"),
        ):
            ratio = r["tokens_per_second"] / peer["tokens_per_second"]
            axes.barh(at, ratio, 0.38, align="edge", color=color, label=None if n else system)
            text = f"{by}{speed(r):,.0f} tokens/s in {gib(r)}"
            axes.text(ratio + 0.05, at + 0.19, text, va="center", fontsize=9)
    names = [f"{name}\n{tokens(row)} tokens" for name, row, _ in found]
    axes.set_yticks([n + 0.4 for n in range(len(found))], names)
    axes.invert_yaxis()
    axes.margins(x=0.35)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right")
    FigureCanvasAgg(figure).print_png(file)


def draw_memory_curves(file: Path, T: int = 32_768) -> None:
    """Draws the speed over the memory of steps on T tokens: ours within several budgets, and the
    peer's."""
    rows = read("auto_h200.json") + read("memory_speed_h200.json")
    rows = [r for r in rows if r["T"] == T and "qlora" not in r["run"]]
    figure = Figure(figsize=(11, 4), layout="constrained")
    decoders = list(dict.fromkeys(r["decoder"] for r in rows))
    for axes, decoder in zip(figure.subplots(1, len(decoders)), decoders, strict=True):
        for number, system in enumerate(dict.fromkeys(r["system"] for r in rows)):
            of = sorted(
                (r for r in rows if (r["decoder"], r["system"]) == (decoder, system)),
                key=memory_gib,
            )
            if not of:
                continue
            axes.plot(
                [memory_gib(r) for r in of],
                [speed(r) for r in of],
                "o-" if system == "bptjax" else "s",
                color=f"C{number}",
                label=peer_name(of[0]) if "torch.compile" in system else system,
            )
        axes.set(
            title=f"{DECODERS[decoder]}, {T:,} tokens",
            xlabel="GPU memory of the step, GiB",
            ylabel="tokens/s",
        )
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    FigureCanvasAgg(figure).print_png(file)


def draw_extension(file: Path, rows: list[dict], models: dict[str, str]) -> None:
    """Draws the plots of `bptjax evaluate` side by side: perplexity by position, and the share of
    pass keys found by length. Of models without perplexities, pass keys only.

    Args:
      models: label of each model by its name in the rows.
    """
    rows = [dict(model=models[r["variant"]]) | r for r in rows if r["variant"] in models]
    length = {name: "trained" if name == "before" else "length_trained" for name in models}
    trained = {r["model"]: r[length[r["variant"]]] for r in rows}
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_perplexity(left, [r for r in rows if r["measure"] == "perplexity"], trained)
    draw_scores(right, [r for r in rows if r["measure"] == "passkey"], trained)
    FigureCanvasAgg(figure).print_png(file)


def draw_beside_peer(file: Path, name: str) -> None:
    """Draws the held-out loss over the time of the steps at their median speed: without compilation
    and evaluations."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for row, color in zip(read(name), ("tab:blue", "0.5"), strict=True):
        minutes = row["sequences"] * row["T"] / row["tokens_per_second"] / 60
        at = [minutes * int(step) for step in row["held_out"]]
        label = f"{row['implementation']}: {row['tokens_per_second']:,} tokens/s"
        axes.plot(at, list(row["held_out"].values()), "o-", color=color, label=label)
    axes.set(
        xlabel="minutes of training steps on one H200", ylabel="held-out loss (nats per token)"
    )
    axes.set_title("100 steps on the same packed sequences of 32,768 tokens")
    axes.legend()
    FigureCanvasAgg(figure).print_png(file)


def draw_preferences(file: Path, name: str) -> None:
    """Draws the share of right greedy answers before and after training on preferences, and the
    accuracy and margin of held-out rewards during it."""
    rows, figure = read(name), Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for n, (when, color) in enumerate((("before", "0.6"), ("after", "tab:blue"))):
        own = [r for r in rows if r["when"] == when]
        at = [i + (n - 0.5) * 0.38 for i in range(len(own))]
        around = [[r["score"] - r["low"], r["high"] - r["score"]] for r in own]
        around = list(zip(*around, strict=True))
        scores = [r["score"] for r in own]
        left.bar(at, scores, 0.36, yerr=around, color=color, label=when, capsize=3)
        left.set_xticks(range(len(own)), [f"{r['length']:,}" for r in own])
    left.set(xlabel="prompt length (tokens)", ylabel="share of right greedy answers", ylim=(0, 1))
    left.set_title("Held-out questions, with 95 % intervals")
    left.legend()
    during = [r for r in rows if r["when"] == "during"]
    for key in ("accuracies", "margins"):
        values = [r[f"eval/rewards/{key}"] for r in during]
        right.plot([r["step"] for r in during], values, "o-", label=f"eval/rewards/{key}")
    right.set(xlabel="optimizer step", ylim=(0, 1))
    right.set_title("Held-out pairs")
    right.legend()
    FigureCanvasAgg(figure).print_png(file)


def draw_clipping(file: Path, name: str) -> None:
    """Draws the losses of a run with exact and with delayed clipping, and their differences, also
    where the norm of no step is limited."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    runs = {(r["optimizer.clip"], r["optimizer.max_grad_norm"]): r for r in read(name)}
    highest = min(norm for _, norm in runs)
    for clip in ("exact", "delayed"):
        left.plot(runs[clip, highest]["losses"], label=f"optimizer.clip: {clip}", linewidth=1)
    for norm in sorted({norm for _, norm in runs}, reverse=True):
        exact, delayed = (np.array(runs[clip, norm]["losses"]) for clip in ("exact", "delayed"))
        limited = f"max_grad_norm: {norm:g}" if norm == highest else "no norm limited"
        right.plot(delayed - exact, label=limited, linewidth=1)
    left.set(xlabel="optimizer step", title="Loss", yscale="log")
    right.set(xlabel="optimizer step", title="Loss with delayed less loss with exact clipping")
    for axes in (left, right):
        axes.legend()
    FigureCanvasAgg(figure).print_png(file)


def main() -> None:
    draw_clipping(RESULTS / "clip_losses_h200.png", "clip_losses_h200.json")
    draw_preferences(RESULTS / "preferences_h200.png", "preferences_h200.jsonl")
    h200, h100 = read("extension_h200.jsonl"), read("extension_h100.jsonl")
    models = {"before": "before", "theta": "after"}
    draw_extension(RESULTS / "extension_h200.png", h200, models)
    keys = [r for r in h200 if (r["variant"], r["measure"]) == ("before", "passkey")]
    longer = [r for r in h100 if r["length_trained"] == 131_072]
    models = {"before": "before", "fewer_steps": "after"}
    draw_extension(RESULTS / "extension_128k_h100.png", longer + keys, models)
    draw_beside_peer(RESULTS / "extension_peer_h200.png", "extension_peer_h200.json")
    draw_in_less_memory(RESULTS / "less_memory_h200.png")
    draw_memory_curves(RESULTS / "memory_speed_h200.png")
    speeds: dict[str, list[dict[str, float]]] = {}
    for (_, H), rows in attention_rows().items():
        of = {SYSTEMS[n]: r["step_tflops"] for n, r in rows.items() if "step_tflops" in r}
        speeds.setdefault(f"TFLOP/s, H = {H}", []).append(of)
    draw(RESULTS / "attention_h200.png", list(CASES.values()), speeds)
    both = [(row, peer) for row, peer in pairs("step_h200.json") if peer]
    panels = {"tokens/s": "tokens_per_second", "GPU memory, GiB": "peak_gib"}
    draw(
        RESULTS / "step_h200.png",
        [f"{DECODERS[row['decoder']]}, {tokens(row)}" for row, _ in both],
        {
            title: [{"bptjax": row[key], "transformers + Liger": peer[key]} for row, peer in both]
            for title, key in panels.items()
        },
    )


if __name__ == "__main__":
    main()
