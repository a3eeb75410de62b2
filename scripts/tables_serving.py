"""The tables of docs/serving.md: models in llama.cpp."""

import re
from collections.abc import Callable

from measurements import Row, read, table


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


TABLES: dict[str, Callable[[], str]] = {
    "gguf_families": gguf_families,
    "gguf_types": gguf_types,
    "gguf_loop": gguf_loop,
}
