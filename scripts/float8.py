"""Compares steps and losses with linear layers in float8 and in bfloat16, on a GPU.

    python scripts/float8.py steps --out DIRECTORY
    python scripts/float8.py losses --out DIRECTORY --data.path 'texts/*.txt' --data.tokenizer NAME
    python scripts/float8.py adapters --out DIRECTORY --model.name_or_path my-model \\
        --data.path my.jsonl

`steps` times full fine-tuning steps of the 8B decoder of scripts/step.py, each in a process of its
own: in bfloat16, in float8, and in float8 with fewer saved activations. `losses` trains a model of
124M parameters, if the vocabulary has 50,000 tokens, with several seeds in bfloat16 and one in
float8, and draws the losses. `adapters` does the same with QLoRA adapters of a Hugging Face
directory. Further options are config keys.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import convergence
import jax
import numpy as np
from step import SETTINGS

from bptjax.config import Config
from bptjax.config_parser import parse
from bptjax.parsing.keys import flatten

# Settings of the best steps in bfloat16 by length, and names of fewer activations to save.
STEPS = {
    8_192: (["--execution.remat=dots"], "[query,key,value,attended,up]"),
    32_768: (["--execution.save=[query,key,value,attended]"], "[attended]"),
}
SCHEDULE = [
    "--train.compute_dtype=bfloat16",
    "--train.seq_len=1024",
    "--optimizer.lr_scheduler_type=cosine",
    "--optimizer.warmup_ratio=0.05",
]
MODEL = [
    *SCHEDULE,
    "--model.hidden_size=768",
    "--model.intermediate_size=2048",
    "--model.num_layers=12",
    "--model.num_heads=12",
    "--train.per_device_train_batch_size=32",
    "--optimizer.learning_rate=6e-4",
    "--data.packing=concat",
]
ADAPTERS = [
    *SCHEDULE,
    "--adapter.type=qlora",
    "--adapter.r=64",
    "--train.per_device_train_batch_size=8",
    "--optimizer.learning_rate=2e-4",
    "--data.packing=best_fit",
]
FLOAT8 = "--train.linear=float8"
# Steps over which losses are averaged, for comparison and for drawing.
WINDOW = 50


def steps(out: Path, options: list[str], repeats: int) -> None:
    """Writes `steps.jsonl`, a row per step of scripts/step.py."""
    file = out / "steps.jsonl"
    for T, (best, fewer) in STEPS.items():
        for flags in (best, [*best, FLOAT8], [f"--execution.save={fewer}", FLOAT8]):
            chunk = f"--execution.ffn_chunk={T}"
            command = [sys.executable, str(Path(__file__).with_name("step.py")), "8b", str(T)]
            command += [f"--steps={repeats}", f"--out={file}", chunk, *flags, *options]
            subprocess.run(command, check=True)


def losses(out: Path, options: list[str], count: int, seeds: int, defaults: list[str]) -> None:
    """Writes `losses.json`, again after each run, and `losses.png`."""
    defaults = [*defaults, f"--train.max_steps={count}"]
    config, plain = flatten(parse(options, defaults=defaults)), flatten(Config())
    settings = {k: v for k, v in config.items() if k.startswith(SETTINGS) and v != plain[k]}
    about = dict(settings=settings, device=jax.devices()[0].device_kind, jax=jax.__version__)
    kinds = [(f"bfloat16, seed {seed}", [f"--seed={seed}"]) for seed in range(seeds)]
    rows: dict[str, list[float]] = {}
    for name, flags in [*kinds, ("float8", [FLOAT8])]:
        rows[name] = convergence.losses([*options, *flags], count, defaults)
        (out / "losses.json").write_text(json.dumps(dict(about=about, losses=rows)) + "\n")
    draw(rows, out / "losses.png")
    *plain, float8 = (float(np.mean(found[-WINDOW:])) for found in rows.values())
    print(
        f"mean loss of the last {WINDOW} of {count} steps: float8 {float8:.4f}, bfloat16 "
        f"{min(plain):.4f} to {max(plain):.4f} with {seeds} seeds"
    )


def draw(rows: dict[str, list[float]], path: Path) -> None:
    """Draws smoothed losses by step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, found in rows.items():
        smooth = np.convolve(found, np.ones(WINDOW) / WINDOW, "valid")
        axes.plot(smooth, label=name, linewidth=1.5 if name == "float8" else 0.8)
    axes.set(xlabel="step", ylabel=f"loss, nats a token, mean of {WINDOW} steps")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=("steps", "losses", "adapters"))
    parser.add_argument(
        "--steps", type=int, help="timed steps, by default 5; or of a run: 2000, adapters 1000"
    )
    parser.add_argument("--seeds", type=int, default=3, help="of the losses in bfloat16")
    parser.add_argument("--out", type=Path, default=Path("runs/float8"))
    args, options = parser.parse_known_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.study == "steps":
        steps(args.out, options, args.steps or 5)
    elif args.study == "losses":
        losses(args.out, options, args.steps or 2000, args.seeds, MODEL)
    else:
        losses(args.out, options, args.steps or 1000, args.seeds, ADAPTERS)


if __name__ == "__main__":
    main()
