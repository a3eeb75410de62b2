"""Writes the tables of measurements in the documents from the rows in scripts/results.

    python scripts/tables.py

A table stands below a line `<!-- table: NAME -->`, NAME being one of `TABLES`.
"""

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import tables_benchmarks
import tables_preferences
import tables_recipes
import tables_serving
from measurements import (
    ADAPTERS,
    Row,
    gib,
    in_less_memory,
    longest,
    peer_name,
    read,
    speed,
    table,
    tokens,
)

ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    ROOT / "README.md",
    *(
        ROOT / f"docs/{name}.md"
        for name in (
            "benchmarks",
            "data",
            "distributed",
            "hugging_face",
            "long_context",
            "lora",
            "preferences",
            "recipes",
            "reliability",
            "serving",
        )
    ),
    ROOT / "CONTRIBUTING.md",
)
GPUS = {
    "rtx4090": "24 GB (RTX 4090)",
    "l40s": "48 GB (L40S)",
    "h100": "80 GB (H100)",
    "h200": "141 GB (H200)",
    "h100:8": "8 × 80 GB (H100)",
}
SIZES = {
    "Llama-3.2 1B": "1b",
    "Llama-3.1 8B": "8b",
    "Qwen3 14B": "14b",
    "Qwen3 32B": "32b",
    "Llama-3.1 70B": "70b",
}
# No longer sequence was planned.
LONGEST_PLANNED = 4_194_304


def headline() -> str:
    body = []
    for name, row, peer in [*in_less_memory(), *longest()]:
        cells = [name, tokens(row), str(row.get("devices", 1))]
        cells += [f"{row['tokens_per_second']:,.0f}", gib(row)]
        if peer:
            cells += [f"{peer_name(peer)}: {speed(peer):,.0f}", gib(peer)]
            cells += [f"{speed(row) / speed(peer):.2f}"]
        body.append([*cells, "", "", ""][:8])
    head = ["", "tokens", "GPUs", "bptjax, tokens/s", "memory per GPU"]
    return table([*head, "strongest peer, tokens/s", "memory", "ratio"], body)


def parity() -> str:
    """The largest difference of each family from transformers."""
    measures = "hidden", "loss", "gradients"
    body = [
        [
            f"`{row['family']}`",
            str(row["configurations"]),
            *(f"{row[name]:.0e}".replace("0e+00", "0") if name in row else "" for name in measures),
        ]
        for row in read("parity.json")
    ]
    head = ["family", "configurations", "hidden states and logits", "loss", "gradients"]
    return table(head, body)


def strength() -> str:
    """The change of the held-out loss by the scale of adapters, in nats per token."""
    rows = read("adapter_strength_h100.jsonl")
    rates = sorted({row["learning_rate"] for row in rows})
    body: dict[tuple[str, float], dict[float, str]] = {}
    for row in sorted(rows, key=lambda row: row["scale"]):
        cells = body.setdefault((row["data"], row["scale"]), {})
        cells[row["learning_rate"]] = f"{row['change']:.3f}"
    lines = [
        [data, f"{scale:g}", *(cells[rate] for rate in rates)]
        for (data, scale), cells in sorted(body.items())
    ]
    return table(["data", "scale", *(f"{rate:.0e}".replace("e-0", "e-") for rate in rates)], lines)


def recipes() -> str:
    """The recipe for one 24 GB GPU, by model and method."""
    body = [
        [
            row["model"],
            ADAPTERS[row["method"]],
            f"{row['T']:,}",
            f"`{row['execution']['remat']}`",
            f"{row['peak_gib']:.1f} GiB",
            f"{row['host_gib']:.1f} GiB" if row["host_gib"] else "",
        ]
        for row in read("recipes_planned.jsonl")
    ]
    names = ["model", "method", "tokens", "`execution.remat`", "GPU memory", "host memory"]
    return table(names, body)


def moments(states: str) -> str:
    """Formats the moments of a planned row, if they are not in bfloat16 on the GPU."""
    names = {"bfloat16": "", "int8": "int8: ", "int8 in host memory": "int8, host: "}
    return names[states]


def by_gpu(cell: Callable[[Row], str]) -> str:
    """Returns a table of the planned rows, with a column for each kind of GPU."""
    rows = {(r["model"], r["method"], r["devices"]): r for r in read("settings_planned.jsonl")}
    body = []
    for model, methods in itertools.groupby(dict.fromkeys(k[:2] for k in rows), lambda k: k[0]):
        for n, (_, method) in enumerate(methods):
            texts = [cell(rows[model, method, gpus]) for gpus in GPUS]
            body.append(["" if n else model, method, *texts])
    return table(["model", "method", *GPUS.values()], body)


def passes() -> str:
    rows = read("passes.json")
    found: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        case = (
            f"`{row['packing']}`".replace(", ", "`, `"),
            f"{row['seq_len']:,}",
            str(row["shards"]),
        )
        text = f"{row['texts']:.2f} / {row['chats']:.2f}, {row['padding']:.1%}"
        found.setdefault(case, []).append(text)
    shares = [f"{share:.0%} chats" for share in dict.fromkeys(row["share"] for row in rows)]
    return table(
        ["packing", "`train.seq_len`", "shards", *shares], [[*k, *v] for k, v in found.items()]
    )


def expected(row: Row, key: str) -> str:
    """Formats tokens/s, with ~ and fewer digits if the rates of the GPU have not been measured."""
    measured = row["devices"] in ("h100", "h200")
    return "~" * (not measured) + f"{float(f'{row[key]:.{2 + measured}g}'):,.0f}"


def longest_planned() -> str:
    """The longest sequence that fits, and the expected speed of its step."""

    def cell(row: Row) -> str:
        if "T" not in row:
            return "–"
        more = "≥ " * (row["T"] >= LONGEST_PLANNED)
        text = f"{more}{row['T']:,} ({expected(row, 'tokens_per_second')}/s)"
        text = moments(row["states"]) + text
        return text if row["compiled"] else f"*{text}*"

    return by_gpu(cell)


def speeds_planned() -> str:
    """The expected speed of steps on 8,192 tokens, and the measured one."""
    found = {
        (r["decoder"], gpu): r["tokens_per_second"]
        for gpu in ("h100", "h200")
        for r in read(f"auto_{gpu}.json")
        if r["T"] == 8192
        and r.get("system", "bptjax") == "bptjax"
        and not r["settings"].keys() & {"memory.budget_gib", "adapter.type"}
    }

    def cell(row: Row) -> str:
        if "tokens_per_second_8k" not in row:
            return "–"
        text = moments(row["states_8k"]) + expected(row, "tokens_per_second_8k")
        measured = found.get((SIZES[row["model"]], row["devices"]))
        if measured and row["method"] == "full":
            text += f", measured: **{measured:,.0f}**"
        return text

    return by_gpu(cell)


def faults() -> str:
    """Which tier of tests found the seeded faults of each room."""
    body: dict[str, list[int]] = {}
    for row in read("seeded_faults.jsonl"):
        for room in (f"`{row['room'].removeprefix('bptjax/')}`", "all"):
            counts = body.setdefault(room, [0] * 3)
            counts[("fast", "thorough").index(row["tier"]) if row["found"] else 2] += 1
    ordered = sorted(body, key=lambda room: (room == "all", room))
    cells = [[room, *(str(n) if n else "" for n in body[room])] for room in ordered]
    return table(["", "fast tier", "thorough tier", "no test"], cells)


def missed_faults() -> str:
    """The seeded faults that the fast tier did not find."""
    body = []
    for row in read("seeded_faults.jsonl"):
        if not row["found"] or row["tier"] != "fast":
            test = f"`{row['found']}`" if row["found"] else f"no test: {row['reason']}"
            line = f"`{row['after'].strip()}`".replace("|", "\\|")
            file = row["file"].removeprefix("bptjax/")
            body.append([f"`{file}`, {row['kind']}", line, test])
    return table(["fault", "the line", "found by"], body)


def host_events() -> str:
    """The events of runs on several hosts by outcome, with the seconds of the longest."""
    rows = read("host_events_cpu.jsonl")
    outcomes = [
        *("continued", "restarted by supervisors", "refused with one line, then continued"),
        *("saved and stopped on all hosts, then continued",),
        *("given up by all supervisors, then continued",),
    ]
    body = []
    for event in sorted({row["event"] for row in rows}):
        own = [row for row in rows if row["event"] == event]
        good = [row["outcome"] for row in own if "fault" not in row]
        numbers = [*map(good.count, outcomes), len(own) - len(good)]
        cells = [str(number) if number else "" for number in numbers]
        hosts = ", ".join(map(str, sorted({row["hosts"] for row in own})))
        body.append([event, hosts, *cells, f"{max(row['seconds'] for row in own):.0f}"])
    return table(["event", "hosts", *outcomes, "in a run that failed", "longest, s"], body)


def host_starts() -> str:
    """The runs on several hosts by their start, with the greatest difference of losses."""
    body = []
    # The documentation's text tells of the run that saved to each host's own disk.
    for row in (row for row in read("hosts_cpu.jsonl") if not row.get("local")):
        mesh = " ".join(f"{axis}={size}" for axis, size in row["mesh"].items())
        name = "loopback" if row["loopback"] else "its address"
        count = f"{row['hosts']} × {row['processes'] // row['hosts']}"
        used = max(row["received"], key=row["received"].get)
        off = "a run that failed" if "fault" in row else f"{row['difference']:.1e}"
        body.append([row["start"], f"IPv{row['ip']}", used, name, count, mesh, off])
    heads = ["start", "IP", "interface used", "own name resolves to", "hosts × processes", "mesh"]
    return table([*heads, "relative difference of losses"], body)


TABLES: dict[str, Callable[[], str]] = {
    "headline": headline,
    "parity": parity,
    "recipes": recipes,
    "strength": strength,
    "longest_planned": longest_planned,
    "speeds_planned": speeds_planned,
    "passes": passes,
    "faults": faults,
    "missed_faults": missed_faults,
    "host_events": host_events,
    "host_starts": host_starts,
    **tables_benchmarks.TABLES,
    **tables_recipes.TABLES,
    **tables_preferences.TABLES,
    **tables_serving.TABLES,
}
MARK = re.compile(r"(<!-- table: (\w+) -->\n)((?:\|.*\n)*)")


def written(text: str) -> str:
    """Returns a document's text with its tables made anew from the rows.

    Raises:
      ValueError: a mark names no table.
    """

    def fill(found: re.Match[str]) -> str:
        mark, name, _ = found.groups()
        if name not in TABLES:
            raise ValueError(f"<!-- table: {name} -->: must be one of {', '.join(TABLES)}")
        return mark + TABLES[name]()

    return MARK.sub(fill, text)


def main() -> None:
    for document in DOCUMENTS:
        document.write_text(written(document.read_text()))


if __name__ == "__main__":
    main()
