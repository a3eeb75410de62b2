"""The tables of docs/preferences.md: steps on pairs of answers, and attention with trees."""

from collections.abc import Callable

from measurements import gib, read, settings, table


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
                if (name, case, H) in found:
                    tree, same = (found[name, x, H]["step_tflops"] for x in (case, other))
                    cells += [f"{tree:.0f}", f"{same:.0f}", f"{tree / same:.2f}"]
                else:
                    cells += ["", "", ""]
            body.append(cells)
    heads = [[f"`{name}`, tree", "without", "ratio"] for name in ("fa4", "triton")]
    return table(["case", "head size", *heads[0], *heads[1]], body)


def pair_peer() -> str:
    """Compares steps on a pair of answers with TRL's."""
    rows = read("pairs_peer_h200.jsonl")
    peers = [r for r in rows if r.get("peer")]
    body = []
    for row in (r for r in rows if not r.get("peer") and r["attention"] == "fa4"):
        answer, shared = row["answer"], row["settings"].get("objective.share_prompt", True)
        prompt = (row["T"] - 2 * answer) // (1 if shared else 2) + 1
        cells = [f"{prompt:,} + 2 × {answer:,}", "one" if shared else "two"]
        cells += [settings(row), f"{row['step_s']:.2f} s, {gib(row)}"]
        for kept in (True, False):
            same = [r for r in peers if (r["answer"], r.get("run")) == (answer, row.get("run"))]
            # Prompts may differ by one token.
            theirs = [r for r in same if abs(r["prompt"] - prompt) <= 1]
            steps = [r for r in theirs if r["checkpointing"] is not kept]
            if not steps:
                cells.append("")
                continue
            best = min(steps, key=lambda r: r["step_s"])
            ratio = best["step_s"] / row["step_s"]
            cells += [f"{best['step_s']:.2f} s, {best['peak_gib']:.1f} GiB: {ratio:.2f}"]
        body.append(cells)
    head = ["prompt + answers", "copies of the prompt", "settings", "bptjax"]
    head += ["TRL, all activations kept"]
    return table([*head, "TRL, gradient checkpointing"], body)


def pair_steps() -> str:
    """Steps on pairs of answers with one copy of the prompt and with two, and on plain text."""
    body = []
    for r in (r for r in read("pairs_h200.jsonl") if r["decoder"] == "8b"):
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


TABLES: dict[str, Callable[[], str]] = {
    "pair_peer": pair_peer,
    "pair_steps": pair_steps,
    "pair_devices": pair_devices,
    "trees": trees,
}
