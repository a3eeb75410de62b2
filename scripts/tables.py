"""Writes the tables of measurements in the documents from the rows in scripts/results.

    python scripts/tables.py

A table stands below a line `<!-- table: NAME -->`, NAME being one of `TABLES`.
"""

import itertools
import re
from collections.abc import Callable
from pathlib import Path

from measurements import (
    CASES,
    DECODERS,
    IN_BACKWARD,
    SYSTEMS,
    Row,
    attention_rows,
    budget,
    gib,
    in_less_memory,
    longest,
    pairs,
    peer_name,
    read,
    settings,
    speed,
    tokens,
)

from bptjax.tasks import TASKS

ROOT = Path(__file__).parents[1]
EXTENSION = "extension_h200.jsonl", "extension_h100.jsonl"
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
# Layers of a mixture of experts that was trained in full.
CUT = 12
# No longer sequence was planned.
LONGEST_PLANNED = 4_194_304
ADAPTERS = {"lora": "LoRA", "qlora": "QLoRA"}


def table(head: list[str], body: list[list[str]]) -> str:
    lines = head, ["---"] * len(head), *body
    return "".join("|" + "|".join(f" {x} " if x else " " for x in cells) + "|\n" for cells in lines)


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


def steps(name: str) -> str:
    body = []
    for row, peer in pairs(name):
        cells = [DECODERS[row["decoder"]], tokens(row), settings(row)]
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


def shapes(name: str, peer_name: str) -> str:
    """Steps of the models of a file, beside the peer's."""
    rows = read(name)
    peers = {(r["layers"], r["T"]): r for r in rows if r["system"] != "bptjax"}
    body = []
    for row in rows:
        if row["system"] == "bptjax":
            full = f"full fine-tuning, {row['layers']} layers"
            work = ADAPTERS.get(row["settings"].get("adapter.type"), full)
            ours = f"{row['tokens_per_second']:,.0f}, {gib(row)}"
            peer = beside(peers.get((row["layers"], row["T"])), row)
            cells = [DECODERS[row["decoder"]], work, tokens(row), settings(row), ours, *peer]
            body.append([*cells, "", ""][:7])
    head = ["", "", "tokens", "settings", "bptjax", peer_name, "ratio"]
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
    """The fused loss by chunk, beside Liger's."""
    body: dict[tuple[int, int], dict[str, str]] = {}
    rows = [row for row in read("loss_h200.json") if "run" not in row]
    for row in rows:
        cell = f"{row['ms']:.1f} ms, {row['extra_gib']:.2f} GiB"
        body.setdefault((row["T"], row["D"]), {})[row["loss"]] = cell
    ways = list(dict.fromkeys(row["loss"] for row in rows))
    lines = [
        [f"{T:,}", f"{D:,}", *(cells.get(w, "") for w in ways)] for (T, D), cells in body.items()
    ]
    chunks = [re.sub(r"chunk (\d+)", r"`ce_chunk: \1`", way) for way in ways]
    return table(["tokens", "width", *chunks], lines)


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


def plans() -> str:
    """Predicted beside measured memory."""
    body = []
    for row in read("plans.json"):
        planned, measured = row["planned_gib"], row["measured_gib"]
        others = [
            f"`{key.partition('.')[2]}: {value}`"
            for key, value in row["settings"].items()
            if key in ("adapter.type", "parallel.sp", "parallel.ep")
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
        cells = [work, tokens(row), limit, f"`{row['attention']}`", settings(row)]
        cells += [f"{row['choice_s']:.0f} s", ours]
        body.append([*cells, *beside(peer, row), "", ""][:9])
    head = ["", "tokens", "budget", "attention", "chosen settings", "time to choose"]
    return table([*head, "bptjax", "PyTorch", "ratio"], body)


def beside(peer: Row | None, row: Row) -> list[str]:
    """Formats the speed and the memory of a peer, and the ratio of the speeds, if there is one."""
    if peer is None:
        return []
    return [f"{speed(peer):,.0f}, {gib(peer)}", f"{speed(row) / speed(peer):.2f}"]


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
        text = "int8: " * (row["state_dtype"] == "int8") + text
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
        text = expected(row, "tokens_per_second_8k")
        measured = found.get((SIZES[row["model"]], row["devices"]))
        if measured and row["method"] == "full":
            text += f", measured: **{measured:,.0f}**"
        return text

    return by_gpu(cell)


def in_backward(name: str) -> str:
    """Steps of an 8B whose layers are updated after or inside the backward pass."""
    body = []
    for row in read(name):
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


def gguf_families() -> str:
    """Random models of each family in llama.cpp."""
    found: dict[str, list[Row]] = {}
    for row in read("gguf.jsonl"):
        if row["kind"] == "family":
            found.setdefault(row["family"], []).append(row)
    body = []
    for family, rows in sorted(found.items()):
        compared = [row for row in rows if "tokens" in row]
        equal, tokens = (sum(row[key] for row in compared) for key in ("tokens_equal", "tokens"))
        off = max(row["largest_difference"] for row in compared if row["type"] == "f32")
        reasons = [f"failed: {row['failed']}" for row in rows if "failed" in row]
        for row in rows:
            # The keys, or else the tensor, that the line of the refusal names.
            line = row.get("refused", "").replace("DIR/model: ", "")
            keys = re.findall(r"([a-z][\w.]*)=", line) or re.findall(r"^[\w.]+", line)
            reasons += [f"`{key.removeprefix('model.')}`" for key in keys]
        cases = str(len({row["case"] for row in compared}))
        cells = [f"`{family}`", cases, f"{equal} of {tokens}", f"{off:.0e}"]
        body.append([*cells, ", ".join(dict.fromkeys(reasons))])
    head = ["family", "configurations", "tokens equal", "largest difference", "refused for"]
    return table(head, body)


def gguf_types() -> str:
    """The perplexity of a model by type."""
    rows = [row for row in read("gguf.jsonl") if row["kind"] == "perplexity"]
    body = [["bptjax, float32", "", f"{rows[0]['perplexity']:.3f}"]]
    for row in rows:
        size, found = f"{row['bytes'] / 1e6:.0f} MB", f"{row['perplexity_llamacpp']:.3f}"
        body.append([f"`{row['type']}`", size, found])
    return table(["type", "file", "perplexity"], body)


def gguf_loop() -> str:
    """A real model imported, trained, exported and run by llama.cpp."""
    names = {"none": "all weights trained", "lora": "adapter trained"}
    files = {"model": "merged, f16", "lora": "base model in f16 and adapter"}
    body = []
    for row in read("gguf.jsonl"):
        if row["kind"] == "loop" and row["step"] == "import":
            off = f"logits {row['logits_off']:.0e} off, relative to the largest"
            body.append(["imported", "", off])
        elif row["kind"] == "loop":
            name = names.get(row.get("adapter", ""), "imported")
            file = files["lora"] if row.get("file") == "lora" else "f16"
            file = files["model"] if (row.get("adapter"), file) == ("lora", "f16") else file
            equal = f"{row['tokens_equal']} of {row['tokens']} tokens equal"
            body.append([name, file, equal])
    return table(["model", "file", "result"], body)


def perplexity(name: str) -> str:
    """The perplexity of models by position."""
    rows = read(name)
    models = list(dict.fromkeys(row["model"] for row in rows))
    found = {(row["start"], row["end"], row["model"]): row["perplexity"] for row in rows}
    body = [
        [f"{start:,} to {end:,}", *(f"{found[start, end, model]:.1f}" for model in models)]
        for start, end in dict.fromkeys((row["start"], row["end"]) for row in rows)
    ]
    return table(["positions", *(f"`{model}`" for model in models)], body)


def extension_perplexity() -> str:
    """The perplexity by position of a model before and after its context was extended."""
    rows = [r for r in read(EXTENSION[0]) if r["measure"] == "perplexity"]
    before, after = ([r for r in rows if r["variant"] == x] for x in ("before", "theta"))
    short = f"after, last {after[0]['short_context']:,} tokens only"
    body = [
        [
            f"{x['start']:,} to {x['end']:,}",
            f"{x['perplexity']:,.2f}",
            f"{y['perplexity']:.2f}",
            f"{y['short_perplexity']:.2f}",
        ]
        for x, y in zip(before, after, strict=True)
    ]
    return table(["positions", "before", "after", short], body)


def extension_rows() -> list[Row]:
    """Returns the rows of all ways to extend a context."""
    return [row for name in EXTENSION for row in read(name)]


def extension_scores() -> str:
    """The scores of a model's tasks by length, before and after its context was extended."""
    models = {
        ("before", 65536): "before",
        ("theta", 65536): "after",
        ("fewer_steps", 65536): "after 50 steps",
        ("fewer_steps", 131072): "after 50 steps of 131,072",
        ("chats_25", 65536): "after 50 steps, a quarter chats",
        ("smaller_theta_200_steps", 65536): "after, theta 1.6 million",
    }
    rows = [r for r in extension_rows() if "task" in r]
    found = {(r["task"], (r["variant"], r["length_trained"]), r["length"]): r for r in rows}
    lengths = sorted({r["length"] for r in rows})
    form = "{score:.2f} ({low:.2f}–{high:.2f})"
    body = [
        [task, models[of]]
        + [form.format(**row) if (row := found.get((task, of, n))) else "" for n in lengths]
        for task, of in sorted(
            {(task, of) for task, of, _ in found if of in models},
            key=lambda x: (list(TASKS).index(x[0]), list(models).index(x[1])),
        )
    ]
    return table(["task", "model", *(f"{n:,}" for n in lengths)], body)


def extension_ways() -> str:
    """Ways to extend a context: held-out loss, perplexity and pass keys."""
    names = {"yarn_50": "YaRN", "chats_25": "a quarter chats"}
    ways: dict[tuple[str, int, str], list[Row]] = {}
    for name in EXTENSION:
        for row in read(name):
            ways.setdefault((row["variant"], row["length_trained"], name), []).append(row)
    body = []
    for (variant, length, _), rows in ways.items():
        if variant == "before":
            continue
        (run,) = (r for r in rows if r["measure"] == "train")
        ranges = [r for r in rows if r["measure"] == "perplexity"]
        keys = {r["length"]: r for r in rows if r["measure"] == "passkey"}
        form = "{score:.2f} ({low:.2f}–{high:.2f})"
        if not ranges:
            continue
        body.append(
            [
                f"{length:,}",
                names.get(variant, f"theta {run['rope_theta'] / 1e6:.1f} million"),
                f"{list(run['held_out'])[-1]}: {run['tokens'] / 1e6:.1f} million",
                f"{run['seconds'] / 60:.1f}, {run['device'].split()[1]}",
                *(f"{r['perplexity']:.2f}" for r in (ranges[0], ranges[-1])),
                f"{ranges[-1]['perplexity'] / ranges[-1]['short_perplexity']:.2f}",
                *(
                    form.format(**keys[n]) if n in keys else ""
                    for n in (length // 4, length // 2, length)
                ),
            ]
        )
    return table(
        [
            "length",
            "way",
            "steps: tokens",
            "minutes",
            "perplexity, first eighth",
            "perplexity, last eighth",
            "ratio to a short context only",
            *(f"pass keys, {part} length" for part in ("quarter of the", "half the", "whole")),
        ],
        body,
    )


def extension_chats() -> str:
    """The loss on chats that the model wrote before its context was extended."""
    names = {
        ("before", 65536): "before",
        ("fewer_steps", 65536): "after 50 steps",
        ("fewer_steps", 131072): "after 50 steps of 131,072",
        ("chats_25", 65536): "after 50 steps, a quarter chats",
    }
    found = {
        (r["variant"], r["length_trained"]): r["loss"]
        for r in extension_rows()
        if r["measure"] == "chats"
    }
    before = found["before", 65536]
    body = [
        [name, f"{found[of]:.3f}", f"{found[of] - before:+.3f}" if of[0] != "before" else ""]
        for of, name in names.items()
    ]
    return table(["model", "loss (nats per token)", "change"], body)


def trees() -> str:
    """The speed of attention with trees of tokens, beside documents of the same lengths."""
    found = {(r["implementation"], r["case"], r["H"]): r for r in read("trees_h200.json")}
    body = []
    for case, other in (
        ("8 chains", "8 documents"),
        ("40 ragged chains", "40 ragged documents"),
        ("pair of 1/16", "causal"),
    ):
        for H in (128, 64):
            cells = [case, str(H)]
            for name in ("fa4", "triton"):
                tree, same = (found[name, x, H]["step_tflops"] for x in (case, other))
                cells += [f"{tree:.0f}", f"{same:.0f}", f"{tree / same:.2f}"]
            body.append(cells)
    heads = [[f"`{name}`, tree", "without", "ratio"] for name in ("fa4", "triton")]
    return table(["case", "head size", *heads[0], *heads[1]], body)


def pair_peer() -> str:
    """Compares steps on a pair of answers with TRL's."""
    rows = read("pairs_peer_h200.jsonl")
    peers = [r for r in rows if r.get("peer")]
    body = []
    for row in (r for r in rows if not r.get("peer") and r["attention"] == "fa4"):
        answer, shared = row["answer"], row["settings"]["objective.share_prompt"]
        prompt = (row["T"] - 2 * answer) // (1 if shared else 2) + 1
        cells = [f"{prompt:,} + 2 × {answer:,}", "one" if shared else "two"]
        cells += [f"{row['step_s']:.2f} s, {gib(row)}"]
        for kept in (True, False):
            theirs = [r for r in peers if (r["prompt"], r["answer"]) == (prompt, answer)]
            best = min(
                (r for r in theirs if r["checkpointing"] is not kept), key=lambda r: r["step_s"]
            )
            ratio = best["step_s"] / row["step_s"]
            cells += [f"{best['step_s']:.2f} s, {best['peak_gib']:.1f} GiB: {ratio:.2f}"]
        body.append(cells)
    head = ["prompt + answers", "copies of the prompt", "bptjax", "TRL, all activations kept"]
    return table([*head, "TRL, gradient checkpointing"], body)


def pair_steps() -> str:
    """Steps on pairs of answers with one copy of the prompt and with two, and on plain text."""
    body = []
    for r in read("pairs_h200.jsonl"):
        numbers = [f"{r['T']:,}", r["attention"], f"{r['step_s']:.2f}", gib(r)]
        if (answer := r["answer"]) is None:
            body.append(["text", "", "", *numbers])
            continue
        copies = 1 if r["settings"]["objective.share_prompt"] else 2
        prompt = (r["T"] - 2 * answer) // copies + 1
        body.append(["pair", f"{copies} × {prompt:,}", f"2 × {answer:,}", *numbers])
    head = ["step", "prompt", "answers", "tokens", "attention", "seconds", "memory"]
    return table(head, body)


def pair_devices() -> str:
    """Steps on one pair over one GPU and over two."""
    rows = read("pairs_h100x2.jsonl")
    alone = {r["T"]: r for r in rows if r["devices"] == 1}
    body = []
    for r in rows:
        gain = alone[r["T"]]["step_s"] / r["step_s"]
        body.append(
            [
                f"{r['T'] + 1 - 2 * r['answer']:,} + 2 × {r['answer']:,}",
                str(r["devices"]),
                f"{r['step_s']:.1f}",
                f"{r['tokens_per_second']:,.0f}",
                f"{r['program_gib']:.1f} GiB + {r['host_gib']:.0f} GiB host",
                f"{r['losses'][0]:.3f}",
                f"{gain:.2f}" if r["devices"] > 1 else "",
            ]
        )
    head = ["prompt + answers", "GPUs", "seconds", "tokens/s", "memory of a GPU", "first loss"]
    return table([*head, "times as fast as one GPU"], body)


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
    "in_backward": lambda: in_backward("in_backward_h100.jsonl"),
    "in_backward_h200": lambda: in_backward(IN_BACKWARD),
    "qlora": lambda: steps("qlora_h200.json"),
    "compare": compare,
    "loss": loss,
    "attention": attention,
    "kernels": kernels,
    "wide": wide,
    "windows": windows,
    "parity": parity,
    "mixtures": lambda: shapes("mixture_h200.json", "transformers + PEFT + Liger"),
    "hybrids": lambda: shapes("hybrid_h200.json", "transformers + PEFT + fla + Liger"),
    "rules": rules,
    "step": lambda: steps("step_h200.json"),
    "sequence": sequence,
    "several": several,
    "plans": plans,
    "recipes": recipes,
    "strength": strength,
    "auto": lambda: auto("auto_h200.json"),
    "auto_h100": lambda: auto("auto_h100.json"),
    "longest_planned": longest_planned,
    "speeds_planned": speeds_planned,
    "passes": passes,
    "gguf_families": gguf_families,
    "gguf_types": gguf_types,
    "gguf_loop": gguf_loop,
    "faults": faults,
    "missed_faults": missed_faults,
    "extend_tiny": lambda: perplexity("extend_tiny_cpu.json"),
    "extension_perplexity": extension_perplexity,
    "extension_scores": extension_scores,
    "extension_ways": extension_ways,
    "extension_chats": extension_chats,
    "trees": trees,
    "pair_steps": pair_steps,
    "pair_devices": pair_devices,
    "pair_peer": pair_peer,
    "host_events": host_events,
    "host_starts": host_starts,
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
