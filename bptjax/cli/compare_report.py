"""The report of `bptjax compare`: a table, conclusions, a plot."""

from pathlib import Path
from typing import Any

from rich.table import Table

from bptjax.cost.profile_report import plain_table


def table(rows: list[dict[str, Any]]) -> Table:
    """Returns a table of up to 80 columns, with one line per row."""
    columns = {
        "": lambda r: r["implementation"],
        "tokens": lambda r: f"{r['T']:,}",
        "chunks": lambda r: f"{r['q_chunk']}/{r['k_chunk']}",
        "step\nms": _step,
        "spread\n%": lambda r: f"{100 * (r['slowest_ms'] / r['fastest_ms'] - 1):.0f}",
        "memory\nMiB": lambda r: f"{r['temp_bytes'] / 2**20:,.{int(r['temp_bytes'] < 1e9)}f}",
        "trace\ns": lambda r: f"{r['trace_s']:.1f}",
        "compile\ns": lambda r: f"{r['compile_s']:.1f}",
        "HLO": lambda r: f"{r['hlo_instructions']:,}",
        "grad.\nerror": lambda r: f"{r['gradient_error']:.0e}",
    }
    shown = plain_table("One transformer layer, forward + backward", *columns)
    for row in rows:
        cells = []
        for cell in columns.values():
            try:
                cells.append(cell(row))
            except KeyError:
                cells.append("")
        shown.add_row(*cells)
    return shown


def _step(row: dict[str, Any]) -> str:
    return f"{row['step_ms']:,.1f}" if "step_ms" in row else row["status"].split(":")[0]


def conclusions(rows: list[dict[str, Any]]) -> list[str]:
    """Returns sentences on the fastest implementation and on the one that needs the least memory.

    At each length, each implementation is compared with its fastest chunks.
    """
    lines = []
    for T in dict.fromkeys(r["T"] for r in rows):
        fastest = _fastest([r for r in rows if r["T"] == T])
        by_time = sorted(fastest, key=lambda r: r["step_ms"])
        by_memory = sorted((r for r in fastest if "temp_bytes" in r), key=lambda r: r["temp_bytes"])
        if len(by_time) == 1:
            lines.append(
                f"At {T:,} tokens {_name(by_time[0])} takes {by_time[0]['step_ms']:,.1f} ms."
            )
        elif by_time:
            best, *others = by_time
            ratios = [f"{_times_as(r['step_ms'] / best['step_ms'])} {_name(r)}" for r in others]
            lines.append(f"At {T:,} tokens {_name(best)} is fastest: {_list(ratios)}.")
        if len(by_memory) > 1 and by_memory[0]["temp_bytes"]:
            least, *others = by_memory
            shares = [f"{_share(least, r)} {_name(r)}" for r in others]
            lines.append(
                f"At {T:,} tokens {_name(least)} takes the least temporary memory: {_list(shares)}."
            )
    # These reasons are too long for the table.
    refused = {f"{_name(r)}: {r['status']}." for r in rows if r["status"].startswith("refused")}
    return lines + sorted(refused)


def best_chunks(rows: list[dict[str, Any]]) -> list[str]:
    """Returns a sentence on the fastest chunks of each implementation at each length."""
    lines = []
    for T in dict.fromkeys(r["T"] for r in rows):
        for best in _fastest([r for r in rows if r["T"] == T]):
            implementation = best["implementation"]
            same = [r for r in rows if (r["T"], r["implementation"]) == (T, implementation)]
            worst = max((r for r in same if "step_ms" in r), key=lambda r: r["step_ms"])
            lines.append(
                f"Best chunks of {implementation} at {T:,} tokens: q_chunk={best['q_chunk']} "
                f"k_chunk={best['k_chunk']}, {best['step_ms']:,.1f} ms; "
                f"{_times_as(worst['step_ms'] / best['step_ms'])} "
                f"{worst['q_chunk']}/{worst['k_chunk']}, the slowest."
            )
    return lines


def _fastest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the fastest measured row of each implementation."""
    fastest: dict[str, dict[str, Any]] = {}
    for r in rows:
        best = fastest.get(r["implementation"], r)
        if "step_ms" in r and r["step_ms"] <= best["step_ms"]:
            fastest[r["implementation"]] = r
    return list(fastest.values())


def _name(row: dict[str, Any]) -> str:
    return "the Python loop" if row["implementation"] == "loop" else row["implementation"]


def _times_as(ratio: float) -> str:
    if ratio < 1.05:
        return "as fast as"
    return f"{ratio:.0f} × the speed of" if ratio >= 10 else f"{ratio:.1f} × the speed of"


def _share(row: dict[str, Any], other: dict[str, Any]) -> str:
    ratio = other["temp_bytes"] / row["temp_bytes"]
    if ratio < 1.05:
        return "as much as"
    return f"1/{ratio:.0f} of" if ratio >= 1.95 else f"{1 / ratio:.0%} of"


def _list(texts: list[str]) -> str:
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if texts[1:] else texts)


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Plots step time and temporary memory: against length, or as bars if there is one length."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lengths = sorted({r["T"] for r in rows})
    several = len({(r["q_chunk"], r["k_chunk"]) for r in rows}) > 1
    lines: dict[str, list[dict[str, Any]]] = {}
    for r in rows:
        chunks = f" {r['q_chunk']}/{r['k_chunk']}" if several else ""
        lines.setdefault(r["implementation"] + chunks, []).append(r)
    height = 4.5 if len(lengths) > 1 else max(4.5, 1.5 + 0.25 * len(lines))
    figure = Figure(figsize=(11, height), layout="constrained")
    about = ", ".join(str(rows[0][key]) for key in ("device", "dtype") if key in rows[0])
    if not several:
        about += f", chunks of {rows[0]['q_chunk']:,}"
    figure.suptitle(f"One transformer layer, forward + backward ({about})")
    panels = (("step_ms", 1.0, "step (ms)"), ("temp_bytes", 2.0**-20, "temporary memory (MiB)"))
    for axes, (name, unit, title) in zip(figure.subplots(1, 2), panels, strict=True):
        measured = {n: [r for r in shown if name in r] for n, shown in lines.items()}
        if len(lengths) == 1:
            values = [sum(r[name] * unit for r in shown) for shown in measured.values()]
            bars = axes.barh(list(lines), values)
            texts = [
                f"{v:,.4g}" if shown else "not measured"
                for v, shown in zip(values, measured.values(), strict=True)
            ]
            axes.bar_label(bars, texts, padding=3)
            axes.set(xlabel=f"{title}, {lengths[0]:,} tokens")
            axes.margins(x=0.2)
            axes.grid(axis="x", alpha=0.3)
            axes.set_axisbelow(True)
            axes.invert_yaxis()
            continue
        for number, (label, shown) in enumerate(measured.items()):
            if shown:
                points = [(r["T"], r[name] * unit) for r in shown]
                # Ten colors, then another marker and line.
                style = ("o-", "s--", "^:", "D-.")[number // 10 % 4]
                axes.plot(*zip(*points, strict=True), style, color=f"C{number % 10}", label=label)
        axes.set(xscale="log", yscale="log", xlabel="sequence length (tokens)", ylabel=title)
        axes.set_xticks(lengths, [f"{T:,}" for T in lengths], minor=False)
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    if len(lengths) > 1:
        legend = figure.axes[0].get_legend_handles_labels()
        figure.legend(
            *legend,
            title="q_chunk/k_chunk" if several else None,
            loc="outside right upper",
            fontsize="small",
        )
    FigureCanvasAgg(figure).print_png(file)
