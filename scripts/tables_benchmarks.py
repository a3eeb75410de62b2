"""The tables of docs/benchmarks.md: speed and memory."""

import re
from collections.abc import Callable

from measurements import (
    ADAPTERS,
    CASES,
    DECODERS,
    IN_BACKWARD,
    SYSTEMS,
    Row,
    attention_rows,
    budget,
    gib,
    pairs,
    peer_name,
    read,
    settings,
    speed,
    table,
    tokens,
)

# Layers of mixtures of experts of which only some were measured.
CUT = 12


def steps(name: str) -> str:
    body = []
    for row, peer in pairs(name):
        cells = [DECODERS[row["decoder"]], tokens(row), with_clip(row)]
        cells += [f"{row['tokens_per_second']:,.0f}, {gib(row)}"]
        if peer:
            theirs, ratio = beside(peer, row)
            tiled = ", offload, tiled" if "tiled" in peer["system"] else ""
            theirs = f"{peer_name(peer)}{tiled}: {theirs}"
            cells += [theirs, ratio + " (two runs)" * ("note" in peer)]
        body.append([*cells, "", ""][:6])
    return table(["", "tokens", "settings", "bptjax", "strongest peer", "ratio"], body)


def attention() -> str:
    body = {case: [said] for case, said in CASES.items()}
    for (case, _), rows in attention_rows().items():
        speeds = {
            name: f"{row['step_tflops']:.0f}" if "step_tflops" in row else f": {row['failed']}"
            for name, row in rows.items()
        }
        ours = [speeds.pop(name, "") for name in ("auto", "triton")]
        peers = [f"{SYSTEMS[name]} {speeds[name]}" for name in SYSTEMS if name in speeds]
        body[case] += [*ours, ", ".join(peers).replace(" :", ":")]
    head = [[f"`auto`, H = {H}", "`triton`", "PyTorch"] for H in (128, 64)]
    return table(["", *head[0], *head[1]], list(body.values()))


def kernels() -> str:
    """The speed of FlashAttention-4 beside the other kernels, in one run."""
    names = {
        "fa4": "`fa4`",
        "cudnn": "`cudnn`",
        "triton": "`triton`",
        "jax.nn cudnn": "`jax.nn`",
        "torch flex_attention": "flex_attention",
    }
    found: dict[tuple[int, str], Row] = {}
    for row in read("attention_fa4_h200.json"):
        if (row["T"], row.get("calls")) == (32_768, 5):
            speeds = found.setdefault((row["H"], row["case"]), {})
            speeds[row["implementation"]] = row["step_tflops"]
    cases = CASES | {"40 ragged documents": "40 packed documents of 16 to 3,076 tokens"}
    body = [
        [cases[case], str(H), *(f"{of[n]:.0f}" if n in of else "" for n in names)]
        for (H, case), of in found.items()
    ]
    return table(["", "H", *names.values()], body)


def wide() -> str:
    """The speed of attention with heads of 512, in one run."""
    names = ("products", "torch flex_attention", "torch SDPA efficient")
    found: dict[tuple[int, int, int], dict[str, float]] = {}
    for row in read("attention_wide_h200.json"):
        if row["run"] == "b":
            case = row["T"], *row["heads"]
            found.setdefault(case, {})[row["implementation"]] = row["step_tflops"]
    body = [
        [
            f"{T:,}",
            f"{N} / {K}",
            *(f"{speeds[n]:.0f}" if n in speeds else "" for n in names),
            f"{speeds[names[0]] / max(speeds.get(n, 0.0) for n in names[1:]):.2f}",
        ]
        for (T, N, K), speeds in sorted(found.items(), reverse=True)
    ]
    head = ["tokens", "heads", "`products`", "flex_attention", "SDPA, efficient", "ratio"]
    return table(head, body)


def windows() -> str:
    """The speed of attention with narrow windows."""
    names = ("triton", "fa4", "cudnn")
    found: dict[tuple[int, int, bool], dict[str, Row]] = {}
    for row in read("windows_h200.json"):
        if row.get("implementation") in names:
            case = row["H"], row["window"], row["sinks"]
            found.setdefault(case, {})[row["implementation"]] = row
    body = [
        [
            f"{window:,}" + ", sinks" * sinks,
            str(H),
            "{} / {}".format(*rows["triton"]["heads"]),
            *(f"{rows[n]['forward_tflops']:.0f} / {rows[n]['step_tflops']:.0f}" for n in names),
        ]
        for (H, window, sinks), rows in found.items()
    ]
    return table(["window", "H", "heads", *(f"`{n}`" for n in names)], body)


def shapes(name: str) -> str:
    """Steps of the models of a file, beside the peer of the same run."""
    rows = read(name)
    peers = {(r.get("run"), r["layers"], r["T"]): r for r in rows if r["system"] != "bptjax"}
    body = []
    for row in rows:
        if row["system"] == "bptjax":
            kind = ADAPTERS.get(row["settings"].get("adapter.type"), "full fine-tuning")
            work = kind + f", {CUT} layers" * (row["layers"] == CUT)
            ours = f"{row['tokens_per_second']:,.0f}, {gib(row)}"
            cells = [DECODERS[row["decoder"]], work, tokens(row), settings(row), ours]
            if peer := peers.get((row.get("run"), row["layers"], row["T"])):
                theirs, ratio = beside(peer, row)
                cells += [f"{peer_name(peer)}: {theirs}", ratio]
            body.append([*cells, "", ""][:7])
    head = ["", "", "tokens", "settings", "bptjax", "peer", "ratio"]
    return table(head, body)


def rules() -> str:
    """The gated delta rule's implementations, in one run."""
    rows = read("delta_rule_h200.json")
    ours = rows[0]["step_ms"]
    body = [
        [
            row["implementation"],
            f"{row['forward_ms']:.2f} ms",
            f"{row['step_ms']:.2f} ms",
            f"{row['step_ms'] / ours:.2f}",
            f"{row['temporary_gib']:.2f} GiB" if "temporary_gib" in row else "",
            f"{row['error']:.1e}",
        ]
        for row in rows
    ]
    head = ["", "forward", "forward and backward", "ratio", "temporary memory", "error"]
    return table(head, body)


def sequence() -> str:
    unordered = {
        "ulysses": "`ulysses`",
        "torch allgather": "PyTorch, all-gather",
        "torch alltoall": "PyTorch, all-to-all",
    }
    ways = {"gather": "`gather`", "ring": "`ring`", **unordered}
    body: dict[tuple[int, int], dict[str, str]] = {}
    for row in read("scaling_attention_h200x2.csv") + read("scaling_attention_h200x4.csv"):
        if row["order"] == "zigzag" or row["strategy"] in unordered:
            said = f"{float(row['tflops_a_device']):.0f}, {gib(row)}"
            at = int(row["devices"]), int(row["T"])
            body.setdefault(at, {})[row["strategy"]] = said
    lines = [
        [str(n), f"{T:,}", *(body[n, T].get(way, "") for way in ways)] for n, T in sorted(body)
    ]
    return table(["GPUs", "tokens", *ways.values()], lines)


def several() -> str:
    rows = [r for r in read("step_h200.json") if r.get("devices", 1) > 1]
    body = [
        [
            tokens(r),
            settings(r),
            f"{r['tokens_per_second']:,.0f}",
            f"{r['tokens_per_second'] / r['devices']:,.0f}",
            gib(r),
        ]
        for r in sorted(rows, key=lambda r: r["T"])
    ]
    return table(["tokens", "settings", "tokens/s", "tokens/s per GPU", "memory per GPU"], body)


def compare() -> str:
    ways = {"loop": "Python loop", "scan": "`scan`", "fused": "`fused`", "triton": "`triton`"}
    body: dict[int, dict[str, str]] = {}
    for row in read("compare_h200.json"):
        body.setdefault(row["T"], {})[row["implementation"]] = f"{row['step_ms']:,.1f} ms"
    lines = [[f"{T:,}", *(body[T][way] for way in ways)] for T in sorted(body)]
    return table(["tokens", *ways.values()], lines)


def loss() -> str:
    """The fused loss by chunk, beside Liger's kernels."""
    body: dict[tuple[int, int, int], dict[str, str]] = {}
    rows = [row for row in read("loss_h200.json") if "run" not in row]
    for row in rows:
        cell = f"{row['ms']:.1f} ms, {row['extra_gib']:.2f} GiB"
        body.setdefault((row["T"], row["D"], row["V"]), {})[row["loss"]] = cell
    ways = list(dict.fromkeys(row["loss"] for row in rows))
    lines = [
        [f"{T:,}", f"{D:,}", f"{V:,}", *(cells[way] for way in ways)]
        for (T, D, V), cells in body.items()
    ]
    chunks = [re.sub(r"chunk (\d+)", r"`ce_chunk: \1`", way) for way in ways]
    return table(["tokens", "width", "vocabulary", *chunks], lines)


def plans() -> str:
    """The predicted memory of steps, and the measured one."""
    body = []
    for row in read("plans.json"):
        planned, measured = row["planned_gib"], row["measured_gib"]
        others = [
            f"`{key.partition('.')[2]}: {value}`"
            for key, value in row["settings"].items()
            if key in ("adapter.type", "optimizer.clip", "parallel.sp", "parallel.ep")
        ]
        others += [f"{row['layers']} layers"] if row.get("layers") == CUT else []
        body.append(
            [
                DECODERS[row["decoder"]],
                f"{row['T']:,}",
                "{1} × {0}".format(*row["devices"].upper().split(":")),
                ", ".join([text for text in (settings(row),) if text] + others),
                f"{planned:.2f} GiB",
                f"{measured:.2f} GiB" + " (compiled there)" * (not row["ran"]),
                # Adding 0 turns -0 into 0.
                f"{round(100 * (planned / measured - 1), 2) + 0.0:+.2f} %",
            ]
        )
    head = ["model", "tokens", "GPUs", "settings", "planned", "measured", "difference"]
    return table(head, body)


def auto(name: str) -> str:
    """Steps whose settings were chosen, beside the fastest of the peer's ways."""
    body = []
    for row, peer in sorted(pairs(name), key=lambda pair: budget(pair[0]) is not None):
        work = DECODERS[row["decoder"]]
        work += ", QLoRA" if row["settings"].get("adapter.type") == "qlora" else ""
        limit = f"{budget(row)} GiB" if budget(row) else ""
        ours = f"{row['tokens_per_second']:,.0f}, {gib(row)}"
        cells = [work, tokens(row), limit, f"`{row['attention']}`", with_clip(row)]
        cells += [f"{row['choice_s']:.0f} s" if "choice_s" in row else "", ours]
        body.append([*cells, *beside(peer, row), "", ""][:9])
    head = ["", "tokens", "budget", "attention", "chosen settings", "time to choose"]
    return table([*head, "bptjax", "PyTorch", "ratio"], body)


def with_clip(row: Row) -> str:
    """Formats settings, and how gradients are clipped if that is set."""
    clip = row["settings"].get("optimizer.clip")
    return ", ".join([settings(row), *([f"`clip: {clip}`"] if clip else [])])


def beside(peer: Row | None, row: Row) -> list[str]:
    """Formats the speed and the memory of a peer, and the ratio of the speeds, if there is one."""
    if peer is None:
        return []
    return [f"{speed(peer):,.0f}, {gib(peer)}", f"{speed(row) / speed(peer):.2f}"]


def in_backward(name: str) -> str:
    """Steps of an 8B whose layers are updated after or inside the backward pass."""
    body, rows = [], read(name)
    layers = max(row["layers"] for row in rows)
    for row in (row for row in rows if row["layers"] == layers):
        if "system" in row:
            name = ", ".join([peer_name(row), *row.get("flags", ())])
            body.append([tokens(row | {"settings": {}}), name, "", ""])
        else:
            inside = "optimizer.clip" in row["settings"]
            host = row["settings"].get("optimizer.state_memory_kind")
            text = settings(row) + ", `state_memory_kind: pinned_host`" * bool(host)
            body.append([tokens(row), "inside" if inside else "after", row["attention"], text])
        body[-1] += [f"{speed(row):,.0f}", gib(row)]
    return table(["tokens", "updates", "attention", "settings", "tokens/s", "memory"], body)


TABLES: dict[str, Callable[[], str]] = {
    "step": lambda: steps("step_h200.json"),
    "auto": lambda: auto("auto_h200.json"),
    "auto_h100": lambda: auto("auto_h100.json"),
    "in_backward": lambda: in_backward("in_backward_h100.jsonl"),
    "in_backward_h200": lambda: in_backward(IN_BACKWARD),
    "qlora": lambda: steps("qlora_h200.json"),
    "sequence": sequence,
    "several": several,
    "attention": attention,
    "kernels": kernels,
    "windows": windows,
    "wide": wide,
    "mixtures": lambda: shapes("mixture_h200.json"),
    "rules": rules,
    "hybrids": lambda: shapes("hybrid_h200.json"),
    "compare": compare,
    "plans": plans,
    "loss": loss,
}
