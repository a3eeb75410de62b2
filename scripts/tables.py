"""Writes the README's tables of measurements from the rows in scripts/results, and draws some.

    python scripts/tables.py

A table is one of `TABLES`, and stands in the README behind a line `<!-- table: NAME -->`.
"""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
README = Path(__file__).parents[1] / "README.md"
RESULTS = Path(__file__).parent / "results"
SYSTEMS = {
    "auto": "auto",
    "triton": "triton",
    "torch SDPA cudnn": "cuDNN",
    "torch flex_attention": "flex_attention",
}
DECODERS = {"bloom-560m": "BLOOM-560m's shape", "1b": "1B", "8b": "8B"}
CASES = {
    "causal": "causal",
    "alibi": "ALiBi",
    "softcap": "soft cap 50",
    "8 documents": "8 packed documents, five calls in a row",
    "window 4096": "window 4,096",
    "window 4096, 128 global": "that, 128 global tokens",
    "dropout": "dropout",
}


def read(name: str) -> list[Row]:
    with (RESULTS / name).open(newline="") as file:
        return json.load(file) if name.endswith(".json") else list(csv.DictReader(file))


def table(head: list[str], body: list[list[str]]) -> str:
    lines = head, ["---"] * len(head), *body
    return "".join("|" + "|".join(f" {x} " if x else " " for x in cells) + "|\n" for cells in lines)


def gib(row: Row) -> str:
    # A process' peak may be of what came before the step.
    size = float(row.get("program_gib") or row["peak_gib"])
    return f"{size:#.3g}".rstrip(".") + " GiB"


def settings(row: Row) -> str:
    """As a config says it, but for a chunk of the feed-forward that is the whole row."""
    said = []
    for key, value in row["settings"].items():
        group, name = key.split(".")
        if group == "execution" and (name, value) != ("ffn_chunk", row["T"]):
            said.append(f"`{name}: {value}`".replace("'", ""))
        elif key == "optimizer.state_dtype":
            said.append(f"moments `{value}`")
    return ", ".join(said)


def pairs(name: str) -> list[tuple[Row, Row | None]]:
    """The steps of whole decoders that one GPU ran, and the peer's of the same run on as many
    tokens."""
    rows = sorted(read(name), key=lambda r: (list(DECODERS).index(r["decoder"]), r["T"]))
    peers = {(r["run"], r["decoder"], r["T"]): r for r in rows if r["system"] != "bptjax"}
    ours = [r for r in rows if r["system"] == "bptjax" and r.get("devices", 1) == 1]
    whole = {r["decoder"]: r["layers"] for r in sorted(ours, key=lambda r: r["layers"])}
    ran = [r for r in ours if "step_s" in r and r["layers"] == whole[r["decoder"]]]
    return [(r, peers.get((r["run"], r["decoder"], r["T"]))) for r in ran]


def tokens(row: Row) -> str:
    """Micro-batches of a step × rows in each × tokens in a row."""
    train = "train.gradient_accumulation_steps", "train.per_device_train_batch_size"
    counts = [str(row["settings"][key]) for key in train if key in row["settings"]]
    return " × ".join([*counts, f"{row['T']:,}"])


def steps(name: str, peer_name: str) -> str:
    body = []
    for row, peer in pairs(name):
        cells = [DECODERS[row["decoder"]], tokens(row), settings(row)]
        cells += [f"{row['tokens_per_second']:,.0f}, {gib(row)}"]
        if peer:
            tiled = "offload, tiled: " if "tiled" in peer["system"] else ""
            cells += [f"{tiled}{peer['tokens_per_second']:,.0f}, {gib(peer)}"]
            cells += [f"{row['tokens_per_second'] / peer['tokens_per_second']:.2f}"]
            cells[-1] += " (two runs)" if "note" in peer else ""
        body.append([*cells, "", ""][:6])
    return table(["", "tokens", "settings", "bptjax", peer_name, "ratio"], body)


def attention_rows() -> dict[tuple[str, int], dict[str, Row]]:
    """By case and head size the rows of a run, by implementation; documents, whose kernels are
    short, by five calls in a row."""
    found: dict[tuple[str, int], dict[str, Row]] = {(c, H): {} for c in CASES for H in (128, 64)}
    for row in read("attention_h200.json"):
        run = ("c", 5) if row["case"] == "8 documents" else ("a", None)
        if (row["run"], row.get("calls_in_a_row")) == run and row["implementation"] in SYSTEMS:
            found[row["case"], row["H"]][row["implementation"]] = row
    return found


def attention() -> str:
    body = {case: [said] for case, said in CASES.items()}
    for (case, _), rows in attention_rows().items():
        speeds = {
            name: f"{row['step_tflops']:.0f}" if "step_tflops" in row else f": {row['failed']}"
            for name, row in rows.items()
        }
        ours = [speeds.pop(name) for name in ("auto", "triton")]
        peers = [f"{SYSTEMS[name]} {speeds[name]}" for name in SYSTEMS if name in speeds]
        body[case] += [*ours, ", ".join(peers).replace(" :", ":")]
    head = [[f"`auto`, H = {H}", "`triton`", "PyTorch"] for H in (128, 64)]
    return table(["", *head[0], *head[1]], list(body.values()))


def sequence() -> str:
    whole = {"ulysses": "`ulysses`", "torch allgather": "PyTorch, all-gather"}
    ways = {"gather": "`gather`", "ring": "`ring`", **whole}
    body: dict[int, dict[str, str]] = {}
    for row in read("scaling_attention_h200x4.csv"):
        if row["order"] == "zigzag" or row["strategy"] in whole:
            said = f"{float(row['tflops_a_device']):.0f}, {gib(row)}"
            body.setdefault(int(row["T"]), {})[row["strategy"]] = said
    lines = [[f"{T:,}", *(body[T][way] for way in ways)] for T in sorted(body)]
    return table(["tokens", *ways.values()], lines)


def several() -> str:
    rows = [r for r in read("step_h200.json") if r.get("devices", 1) > 1]
    body = [
        [
            tokens(r),
            settings(r),
            f"{r['tokens_per_second']:,.0f}",
            f"{r['tokens_per_second'] / r['devices']:,.0f}",
            gib(r) + (f", {r['host_gib']:.0f} of the host's" if r["host_gib"] else ""),
        ]
        for r in sorted(rows, key=lambda r: r["T"])
    ]
    return table(["tokens", "settings", "tokens a second", "a GPU", "memory a GPU"], body)


def compare() -> str:
    ways = {"loop": "Python loop", "scan": "`scan`", "fused": "`fused`", "triton": "`triton`"}
    body: dict[int, dict[str, str]] = {}
    for row in read("compare_h200.json"):
        body.setdefault(row["T"], {})[row["implementation"]] = f"{row['step_ms']:,.1f} ms"
    lines = [[f"{T:,}", *(body[T][way] for way in ways)] for T in sorted(body)]
    return table(["tokens", *ways.values()], lines)


TABLES: dict[str, Callable[[], str]] = {
    "qlora": lambda: steps("qlora_h200.json", "transformers + PEFT"),
    "compare": compare,
    "attention": attention,
    "step": lambda: steps("step_h200.json", "transformers + Liger"),
    "sequence": sequence,
    "several": several,
}


def written(text: str) -> str:
    """The README's text, with the tables as the rows have it."""
    for name, made in TABLES.items():
        before, mark, after = text.partition(f"<!-- table: {name} -->\n")
        if not mark:
            raise ValueError(f"the README has no <!-- table: {name} -->")
        text = before + mark + made() + after[re.match(r"(\|.*\n)*", after).end() :]
    return text


def draw(file: Path, names: list[str], panels: dict[str, list[dict[str, float]]]) -> None:
    """A panel for each title, with bars for every name, one of each label that it has."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

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


def main() -> None:
    README.write_text(written(README.read_text()))
    speeds: dict[str, list[dict[str, float]]] = {}
    for (_, H), rows in attention_rows().items():
        of = {SYSTEMS[n]: r["step_tflops"] for n, r in rows.items() if "step_tflops" in r}
        speeds.setdefault(f"TFLOP/s, H = {H}", []).append(of)
    draw(RESULTS / "attention_h200.png", list(CASES.values()), speeds)
    both = [(row, peer) for row, peer in pairs("step_h200.json") if peer]
    panels = {"tokens a second": "tokens_per_second", "GiB": "peak_gib"}
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
