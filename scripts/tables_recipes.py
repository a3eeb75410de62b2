"""The tables of a model before and after its context was extended, in docs/recipes.md and
docs/long_context.md."""

from collections.abc import Callable

from measurements import Row, read, table

from bptjax.tasks import TASKS

EXTENSION = "extension_h200.jsonl", "extension_h100.jsonl"
# Names of ways to extend a context in tables; of others, theta is named.
WAYS = {
    "concat_50": "theta 10.2 million, documents not masked",
    "few_steps": "theta 10.2 million, 10 steps",
    "chats_10": "a tenth chats",
    "chats_10_50": "a tenth chats",
    "chats_25_50": "a quarter chats",
    "theta_seed_1": "theta 25.6 million, another seed",
    "theta_seed_2": "theta 25.6 million, third seed",
    "theta_seed_1_50": "another seed",
    "smaller_theta_50": "theta 1.6 million",
    "larger_theta_50": "theta 25.6 million",
    "yarn_50": "YaRN",
    "llama3_50": "Llama 3's scaling",
    "linear_50": "linear scaling",
    "lora_embeddings_50": "LoRA with embeddings",
}
# Names of models in tables, by way and trained length.
MODELS = {
    ("before", 65536): "before",
    ("theta", 65536): "after",
    ("theta_seed_1", 65536): "after, another seed",
    ("theta_seed_2", 65536): "after, third seed",
    ("chats_10", 65536): "after, a tenth chats",
    ("largest_theta", 65536): "after, theta 102.4 million",
    ("medium_theta", 65536): "after 200 steps, theta 6.4 million",
    ("medium_theta_again", 65536): "after 200 steps, theta 6.4 million, second run",
    ("fewer_steps", 65536): "after 50 steps, theta 6.4 million",
    ("fewer_steps", 131072): "after 50 steps of 131,072, theta 16.1 million",
    ("low_rate_50", 65536): "after 50 steps, theta 6.4 million, learning rate 3e-5",
    ("chats_25_50", 65536): "after 50 steps, theta 6.4 million, a quarter chats",
    ("fewer_steps", 32768): "after 50 steps of 32,768",
    **{(way, 32768): f"after 50 steps of 32,768, {name}" for way, name in WAYS.items()},
    ("few_steps", 32768): "after 10 steps of 32,768, theta 10.2 million",
    ("smaller_theta_200_steps", 65536): "after 200 steps, theta 1.6 million",
}


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
    rows = [r for r in extension_rows() if "task" in r]
    found = {(r["task"], (r["variant"], r["length_trained"]), r["length"]): r for r in rows}
    lengths = sorted({r["length"] for r in rows})
    form = "{score:.2f} ({low:.2f}–{high:.2f})"
    body = [
        [task, MODELS[of]]
        + [form.format(**row) if (row := found.get((task, of, n))) else "" for n in lengths]
        for task, of in sorted(
            {(task, of) for task, of, _ in found if of in MODELS},
            key=lambda x: (list(TASKS).index(x[0]), list(MODELS).index(x[1])),
        )
    ]
    return table(["task", "model", *(f"{n:,}" for n in lengths)], body)


def extension_ways() -> str:
    """Ways to extend a context: held-out loss, perplexity and pass keys."""
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
                WAYS.get(variant, f"theta {run['rope_theta'] / 1e6:.1f} million"),
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
    rows = [r for r in extension_rows() if r["measure"] == "chats"]
    body = []
    # Some models were measured on other chats.
    for chats in dict.fromkeys(r["records"] for r in rows):
        found = {
            (r["variant"], r["length_trained"]): r["loss"] for r in rows if r["records"] == chats
        }
        (before,) = (loss for (variant, _), loss in found.items() if variant == "before")
        body.append([str(chats), "before", f"{before:.3f}", ""])
        for of, name in MODELS.items():
            if of in found and of[0] != "before":
                body.append([str(chats), name, f"{found[of]:.3f}", f"{found[of] - before:+.3f}"])
    return table(["held-out chats", "model", "loss (nats per token)", "change"], body)


TABLES: dict[str, Callable[[], str]] = {
    "extend_tiny": lambda: perplexity("extend_tiny_cpu.json"),
    "extension_perplexity": extension_perplexity,
    "extension_scores": extension_scores,
    "extension_chats": extension_chats,
    "extension_ways": extension_ways,
}
