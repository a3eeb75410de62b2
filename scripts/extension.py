"""Extends a model's context in several ways, and measures what the model makes of it.

    python scripts/extension.py --model DIR --train train.jsonl --held_out held_out.jsonl \\
        --out rows.jsonl --runs RUNS [--variants before theta yarn ...] \\
        [--measures perplexity ...] [--samples 100] [--length 65536] \\
        [--config configs/smollm2_64k.yaml] [--chats DIR] [--train.max_steps=100 ...]

Each variant is a run of the config with other keys; `before` is the model itself. Writes a line of
JSON for each row of `bptjax evaluate`, and one about each training, as soon as it is there; started
again with the same --out, it leaves out what is there, and continues a run. `scripts/
linux_documents.py` makes the documents, `scripts/model_chats.py` the directory of chats, which
the variants and the measure of chats need. Further options are keys of all runs.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bptjax.run.metrics import read_metrics
from bptjax.run.versions import versions
from bptjax.run.yaml_files import read_yaml

ROOT = Path(__file__).parents[1]
BEFORE, CHATS = "before", "chats"
NO_EXTENSION = ["--model.extend_to=null", "--model.max_position_embeddings={length}"]


def scaled(kind: str) -> list[str]:
    """Returns the keys of a scaling of rotary positions in place of a larger theta."""
    scaling = {"rope_type": kind, "factor": "{factor}"}
    if kind != "linear":
        scaling["original_max_position_embeddings"] = "{trained}"
    if kind == "llama3":  # As in Llama 3.1.
        scaling |= {"low_freq_factor": "1.0", "high_freq_factor": "4.0"}
    return NO_EXTENSION + [f"--model.rope_parameters.{key}={x}" for key, x in scaling.items()]


def mixed(share: float) -> list[str]:
    """Returns the keys of a mixture with a share of chats among the tokens."""
    documents = f'{{{{"path": "{{train}}", "weight": {1 - share}}}}}'
    chats = f'{{{{"path": "{{chats}}", "weight": {share}}}}}'
    return ["--data.path=null", f"--data.sources=[{documents}, {chats}]"]


LORA = ["--adapter.type=lora", "--adapter.r=64", "--adapter.target_modules=all-linear"]
# Keys of each variant, with {length} for train.seq_len, {trained} for the model's own positions and
# {factor} for their ratio; {train} and {chats} are files.
VARIANTS: dict[str, list[str]] = {
    "theta": [],
    "theta_seed_1": ["--seed=1", "--data.seed=1"],
    "theta_seed_2": ["--seed=2", "--data.seed=2"],
    # ProLong's rule alone gives SmolLM2 this theta at 65,536 tokens.
    "smaller_theta": [*NO_EXTENSION, "--model.rope_parameters.rope_theta=1.6e6"],
    # Other thetas than that of extend_to, which was 6.4e6 at 65,536 tokens for older rows, whose
    # runs took 200 steps.
    "medium_theta": [
        *NO_EXTENSION,
        "--model.rope_parameters.rope_theta=6.4e6",
        "--train.max_steps=200",
    ],
    "larger_theta": [*NO_EXTENSION, "--model.rope_parameters.rope_theta=2.56e7"],
    "largest_theta": [*NO_EXTENSION, "--model.rope_parameters.rope_theta=1.024e8"],
    "unscaled": NO_EXTENSION,
    "yarn": scaled("yarn"),
    "llama3": scaled("llama3"),
    "linear": scaled("linear"),
    "few_steps": ["--train.max_steps=10"],
    "fewer_steps": ["--train.max_steps=50"],
    "more_steps": ["--train.max_steps=763"],  # 100 million tokens, at 131,072 a step.
    "low_rate": ["--optimizer.learning_rate=3e-5"],
    "concat": ["--data.packing=concat"],
    "lora": LORA,
    "lora_embeddings": [*LORA, "--adapter.modules_to_save=[embed_tokens]"],
    "chats_10": mixed(0.1),
    "chats_25": mixed(0.25),
}
# Also with as many steps as `fewer_steps`, under names that end in _50.
FEWER = (
    *("theta_seed_1", "theta_seed_2", "smaller_theta", "larger_theta", "yarn", "llama3", "linear"),
    *("low_rate", "concat", "lora", "lora_embeddings", "chats_10", "chats_25"),
)
VARIANTS |= {f"{name}_50": [*VARIANTS["fewer_steps"], *VARIANTS[name]] for name in FEWER}


def lengths(longest: int, shortest: int) -> list[str]:
    """Returns the powers of two from one length to the other."""
    return [str(2**n) for n in range(shortest.bit_length() - 1, longest.bit_length())]


def measures(
    length: int, trained: int, samples: int, held_out: str, chats: str
) -> dict[str, list[str]]:
    """Returns the flags of `bptjax evaluate` of each measure, in up to `length` tokens. `trained`
    is the number of the model's own positions, `chats` the file of held-out chats."""
    counts = [f"--samples={samples}"]
    hard = ["niah_multikey", "variable_tracking", "common_words"]
    data = [f"--data={held_out}"]
    return {
        "perplexity": [*data, f"--perplexity={length}", f"--short_context={length // 16}"],
        "passkey": ["--tasks", "passkey", "--lengths", *lengths(length, trained // 2), *counts],
        "tasks": ["--tasks", *hard, "--lengths", *lengths(length, trained), *counts],
        "short": ["--tasks", "niah_single", *hard, "--lengths", str(trained // 4), *counts],
        # All models in one dtype and one length, which is longer than the chats.
        CHATS: [f"--data={chats}", f"--seq_len={trained // 4}", "--dtype=bfloat16"],
    }


def train(command: list[str], run: Path) -> dict[str, Any]:
    """Trains, or continues, a run. Returns its held-out losses, tokens, speed, memory and theta."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "bptjax", "train", *command, f"--run_dir={run}"], check=True
    )
    records = list(read_metrics(run / "metrics.jsonl"))
    held_out = {x["step"]: x["eval/loss"] for x in records if "eval/loss" in x}
    steps = [x for x in records if "throughput/tokens_per_second" in x]
    log = (run / "log.txt").read_text()
    (device,) = set(re.findall(r"devices: 1 × (.*?), jax", log))
    # Set by hand, chosen by extend_to, or the checkpoint's.
    theta = (read_yaml(run / "config.yaml")["model"].get("rope_parameters") or {}).get("rope_theta")
    for chosen in re.findall(r"model.extend_to: .*rope_theta ([\d,.]+)", log):
        theta = float(chosen.replace(",", ""))
    base = json.loads((run / "hf" / "config.json").read_text())["rope_theta"]
    return dict(
        device=device,
        rope_theta=theta or base,
        peak_gib=max(x.get("memory/peak_gib", 0.0) for x in records),
        seconds=round(time.perf_counter() - start, 1),
        held_out=held_out,
        steps=steps[-1]["step"],
        tokens=steps[-1]["train/tokens_seen"],
        tokens_per_second=round(steps[-1]["throughput/tokens_per_second"]),
        versions=versions(),
    )


def evaluate(model: str, flags: list[str], out: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of an evaluation."""
    command = [sys.executable, "-m", "bptjax", "evaluate", f"--model={model}", f"--out={out}"]
    subprocess.run([*command, *flags], check=True)
    for file in sorted(out.glob("*.json")):
        yield from json.loads(file.read_text())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--train", required=True, help="documents to train on")
    parser.add_argument("--held_out", required=True, help="documents for the perplexity")
    parser.add_argument("--out", type=Path, required=True, help="file of rows")
    parser.add_argument(
        "--runs", type=Path, required=True, help="directory of runs and evaluations"
    )
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "smollm2_64k.yaml")
    names = [BEFORE, *VARIANTS]
    parser.add_argument("--variants", nargs="+", default=[BEFORE, "theta"], choices=names)
    kinds = list(measures(1, 1, 1, "", ""))
    parser.add_argument("--measures", nargs="+", choices=kinds, help="if not set, all with data")
    parser.add_argument("--chats", type=Path, help="directory of scripts/model_chats.py")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--length", type=int, help="if not set, train.seq_len of the config")
    parser.add_argument("--device", default="auto")
    args, keys = parser.parse_known_args(argv)
    if args.chats is None and any(CHATS in name for name in args.variants + (args.measures or [])):
        parser.error(f"--variants and --measures: {CHATS} require --chats DIR")
    asked = args.measures or [name for name in kinds if name != CHATS or args.chats]
    chats, held_out_chats = (f"{args.chats}/{name}.jsonl" for name in ("chats", "held_out_chats"))
    length = args.length or read_yaml(args.config)["train"]["seq_len"]
    trained = json.loads((args.model / "config.json").read_text())["max_position_embeddings"]
    known = set()
    if args.out.exists():
        rows = map(json.loads, args.out.read_text().splitlines())
        known = {(row["variant"], row["length_trained"], row["measure"]) for row in rows}

    def write(variant: str, measure: str, found: list[dict[str, Any]]) -> None:
        # Paths of this machine.
        found = [
            {name: x for name, x in row.items() if name not in ("model", "data")} for row in found
        ]
        about = dict(variant=variant, trained=trained, length_trained=length, measure=measure)
        with args.out.open("a") as file:
            file.write("".join(json.dumps(about | row) + "\n" for row in found))

    values = dict(length=length, trained=trained, factor=length / trained)
    values |= dict(train=args.train, chats=chats)
    for variant in args.variants:
        model, run = str(args.model), args.runs / f"{variant}_{length}"
        if variant != BEFORE:
            own = [key.format(**values) for key in VARIANTS[variant]]
            command = [f"--config={args.config}", f"--model.name_or_path={model}"]
            command += [f"--data.path={args.train}", f"--train.seq_len={length}"]
            command += [f"--device={args.device}", f"--model.extend_to={length}", *keys, *own]
            # The last of two values for a key counts here.
            command = list({each.partition("=")[0]: each for each in command}.values())
            if (variant, length, "train") not in known:
                write(variant, "train", [train(command, run)])
            model = str(run)
        of = length, trained, args.samples, args.held_out, held_out_chats
        for measure, flags in measures(*of).items():
            if measure in asked and (variant, length, measure) not in known:
                out = args.runs / f"{variant}_{length}_{measure}"
                flags = [*flags, f"--device={args.device}"]
                if measure == CHATS and variant != BEFORE:
                    flags.append(f"--model={args.model}")  # For the interval of the difference.
                found = evaluate(model, flags, out)
                write(variant, measure, [row for row in found if row["model"] == model])


if __name__ == "__main__":
    main()
