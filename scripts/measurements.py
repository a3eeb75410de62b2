"""Reads and formats the rows of measurements in scripts/results, for tables and pictures."""

import csv
import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
SYSTEMS = {
    "auto": "auto",
    "triton": "triton",
    "torch SDPA cudnn": "cuDNN",
    "torch flex_attention": "flex_attention",
}
DECODERS = {
    "bloom-560m": "BLOOM-560m's shape",
    "1b": "1B",
    "8b": "8B",
    "30b-a3b": "Qwen3-30B-A3B's shape",
    "gpt-oss-20b": "gpt-oss-20b's shape",
    "26b-a4b": "Gemma 4 26B-A4B's shape",
    "qwen3.5-9b": "Qwen3.5-9B's shape",
}
# Names of peers, by a word of `system` in their rows.
PEERS = {
    "Unsloth": "Unsloth",
    "PEFT": "transformers + PEFT",
    "torch.compile": "transformers + torch.compile",
    "Liger": "transformers + Liger",
}
IN_BACKWARD = "in_backward_h200.jsonl"
WORKS = {"QLoRA": "qlora_h200.json", "full fine-tuning": "step_h200.json"}
ADAPTERS = {"lora": "LoRA", "qlora": "QLoRA"}
CASES = {
    "causal": "causal",
    "alibi": "ALiBi",
    "softcap": "soft cap 50",
    "8 documents": "8 packed documents",
    "window 4096": "window 4,096",
    "window 4096, 128 global": "window 4,096, 128 global tokens",
    "dropout": "dropout",
}


def read(name: str) -> list[Row]:
    with (RESULTS / name).open(newline="") as file:
        if name.endswith(".jsonl"):
            return [json.loads(line) for line in file]
        return json.load(file) if name.endswith(".json") else list(csv.DictReader(file))


def memory_gib(row: Row) -> float:
    """Returns the memory of a step. The peak of a process may be of work before the step."""
    return float(row.get("program_gib") or row["peak_gib"])


def gib(row: Row) -> str:
    """Formats the memory of a step: the device's, and the host's if activations are offloaded."""
    size = float(row.get("host_gib") or 0)
    host = f" + {size:.0f} GiB host" if size else ""
    return f"{memory_gib(row):#.3g}".rstrip(".") + " GiB" + host


def settings(row: Row) -> str:
    """Formats settings as a config does. An ffn_chunk that is the full sequence is left out."""
    said = []
    for key, value in row["settings"].items():
        group, name = key.split(".")
        if group == "execution" and (name, value) != ("ffn_chunk", row["T"]):
            said.append(f"`{name}: {value}`".replace("'", ""))
        elif key in ("optimizer.state_dtype", "train.linear"):
            said.append(f"`{name}: {value}`")
    return ", ".join(said)


def pairs(name: str) -> list[tuple[Row, Row | None]]:
    """Returns the measured steps of full decoders on one GPU, each with the peer's fastest row of
    the same run and length, if there is one. If another peer is faster at the same work in another
    run, only the pairs with this peer are returned."""
    rows = sorted(read(name), key=lambda r: (list(DECODERS).index(r["decoder"]), r["T"]))
    peers = sorted((r for r in rows if r["system"] != "bptjax"), key=speed)
    strongest = {(r["decoder"], r["T"]): peer_name(r) for r in peers}
    peers = {(r["run"], r["decoder"], r["T"]): r for r in peers}
    ours = [r for r in rows if r["system"] == "bptjax" and r.get("devices", 1) == 1]
    layers = {r["decoder"]: r["layers"] for r in sorted(ours, key=lambda r: r["layers"])}
    ran = [r for r in ours if "step_s" in r and r["layers"] == layers[r["decoder"]]]
    found = [(r, peers.get((r["run"], r["decoder"], r["T"]))) for r in ran]
    return [(r, p) for r, p in found if not p or peer_name(p) == strongest[p["decoder"], p["T"]]]


def peer_name(row: Row) -> str:
    """Returns the name of the peer of a row."""
    return next(name for word, name in PEERS.items() if word in row["system"])


def speed(row: Row) -> float:
    return row.get("tokens_per_second", 0.0)


def in_less_memory() -> list[tuple[str, Row, Row]]:
    """Returns the fastest step of each work that needs at most the GPU memory of the peer, with the
    name of the work and the peer of the same run; steps in float8 apart."""
    found = {}
    for work, name in WORKS.items():
        for row, peer in sorted(pairs(name), key=lambda pair: speed(pair[0])):
            if peer and "note" not in peer and memory_gib(row) <= memory_gib(peer):
                decoder, linear = row["decoder"], row["settings"].get("train.linear", "")
                text = f"{work}, {DECODERS[decoder]}" + f", {linear}" * bool(linear)
                found[work, decoder, row["T"], linear] = text, row, peer
    order = list(WORKS), list(DECODERS)
    keys = sorted(found, key=lambda k: (order[0].index(k[0]), order[1].index(k[1]), *k[2:]))
    return [found[key] for key in keys]


def longest() -> list[tuple[str, Row, None]]:
    """Returns the longest measured step of the 8B for each kind of work and number of GPUs, with
    the name of the work."""
    found = {}
    for work, name in WORKS.items():
        rows = [r for r in read(name) if r["decoder"] == "8b" and r["system"] == "bptjax"]
        if work == "full fine-tuning":
            rows += read(IN_BACKWARD)
        layers = max(r["layers"] for r in rows)
        for row in sorted(rows, key=lambda r: r["T"]):
            if "step_s" in row and row["layers"] == layers:
                found[work, row.get("devices", 1)] = f"{work}, 8B", row, None
    return list(found.values())


def tokens(row: Row) -> str:
    """Formats the micro-batches of a step × sequences in each × tokens in a sequence."""
    train = "train.gradient_accumulation_steps", "train.per_device_train_batch_size"
    counts = [str(row["settings"][key]) for key in train if key in row["settings"]]
    return " × ".join([*counts, f"{row['T']:,}"])


def attention_rows() -> dict[tuple[str, int], dict[str, Row]]:
    """Returns the rows by case and head size, then by implementation. Documents were timed over
    five calls, because their kernels are short; dropout in a later run."""
    runs = {"8 documents": ("c", 5), "dropout": ("d", 5)}
    found: dict[tuple[str, int], dict[str, Row]] = {(c, H): {} for c in CASES for H in (128, 64)}
    for row in read("attention_h200.json"):
        run = runs.get(row["case"], ("a", None))
        if (row["run"], row.get("calls_in_a_row")) == run and row["implementation"] in SYSTEMS:
            found[row["case"], row["H"]][row["implementation"]] = row
    return found


def budget(row: Row) -> float | None:
    return row["settings"].get("memory.budget_gib")


def table(head: list[str], body: list[list[str]]) -> str:
    """Formats a table as Markdown."""
    lines = head, ["---"] * len(head), *body
    return "".join("|" + "|".join(f" {x} " if x else " " for x in cells) + "|\n" for cells in lines)
