"""Measures how far adapters lower the held-out loss, by alpha and learning rate, with one seed.

    python scripts/adapter_strength.py --model my-model --data my.jsonl --out rows.jsonl \\
        [--r 64] [--steps 200] [--rates 5e-5 1e-4 2e-4 5e-4 1e-3] \\
        [--cases 8 r 2r rslora:sqrt rslora:r] [--commit SHA] [--train.seq_len=1024 ...]

Trains QLoRA adapters of the Hugging Face directory `--model` once for each case and rate, on the
same sequences, and writes a line of JSON for each run as soon as it has ended. Started again with
the same --out, it leaves out the runs that are there. Further options are config keys. A case is a
value of alpha (`r` is the rank), with `rslora:` for `adapter.use_rslora`, where `sqrt` is the root
of the rank: alpha `r` and `rslora:sqrt` both have scale 1, and give the same losses. Alpha is an
array of the step, so that the cases of a rate share one program in JAX's cache.
"""

import argparse
import json
import math
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

import bptjax
from bptjax.config import Config
from bptjax.config_parser import parse
from bptjax.run.metrics import read_metrics
from bptjax.run.versions import versions

CASES = "8", "r", "2r", "rslora:sqrt", "rslora:r"
RATES = 5e-5, 1e-4, 2e-4, 5e-4, 1e-3
DEFAULTS = [
    "--train.seq_len=1024",
    "--train.per_device_train_batch_size=8",
    "--train.eval_batches=32",
    "--data.eval_fraction=0.05",
    "--data.packing=best_fit",
    "--optimizer.lr_scheduler_type=cosine",
]


def alpha(case: str, r: int) -> tuple[float, bool]:
    """Returns adapter.alpha and adapter.use_rslora of a case."""
    text = case.removeprefix("rslora:")
    known = {"r": float(r), "2r": 2.0 * r, "sqrt": math.sqrt(r)}
    return known[text] if text in known else float(text), text != case


def measure(config: Config) -> dict[str, Any]:
    """Returns the held-out loss of a run before and after training, and its last training loss."""
    start = time.perf_counter()
    records = list(read_metrics(bptjax.train(config) / "metrics.jsonl"))
    held_out = [record["eval/loss"] for record in records if "eval/loss" in record]
    trained = [record for record in records if "train/loss" in record][-1]
    return dict(
        eval_loss_before=held_out[0],
        eval_loss=held_out[-1],
        change=held_out[-1] - held_out[0],
        train_loss=trained["train/loss"],
        steps=trained["step"],
        tokens=trained["train/tokens_seen"],
        seconds=time.perf_counter() - start,
    )


def commit() -> str | None:
    """Returns the commit of the source; None outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--data", required=True, help="data.path of the runs")
    parser.add_argument("--out", type=Path, required=True, help="file of rows, .jsonl")
    parser.add_argument("--r", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--commit", default=commit(), help="where the source is no repository")
    args, options = parser.parse_known_args(argv)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = args.out.read_text().splitlines(keepends=True) if args.out.exists() else []
    lines = [line for line in lines if line.endswith("\n")]  # The last one of a killed process.
    args.out.write_text("".join(lines))
    done = {(row["case"], row["learning_rate"]) for row in map(json.loads, lines)}
    for rate in args.rates:
        for case in args.cases:
            if (case, rate) in done:
                continue
            number, use_rslora = alpha(case, args.r)
            with tempfile.TemporaryDirectory() as directory:
                flags = [
                    f"--run_dir={directory}/run",
                    f"--model.name_or_path={args.model}",
                    f"--data.path={args.data}",
                    f"--train.max_steps={args.steps}",
                    f"--optimizer.learning_rate={rate}",
                    "--adapter.type=qlora",
                    f"--adapter.r={args.r}",
                    f"--adapter.alpha={number}",
                    f"--adapter.use_rslora={str(use_rslora).lower()}",
                ]
                config = parse([*options, *flags], defaults=DEFAULTS)
                row = dict(
                    case=case,
                    r=args.r,
                    alpha=number,
                    use_rslora=use_rslora,
                    scale=config.adapter.scale,
                    learning_rate=rate,
                    **measure(config),
                    model=Path(args.model).name,
                    data=Path(args.data).stem,
                    seed=config.seed,
                    seq_len=config.train.seq_len,
                    per_device_train_batch_size=config.train.per_device_train_batch_size,
                    device=jax.devices()[0].device_kind,
                    devices=jax.device_count(),
                    versions={k: v for k, v in versions().items() if v is not None},
                    commit=args.commit,
                )
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{case:>12} at {rate:g}: {row['change']:+.4f} nats", flush=True)


if __name__ == "__main__":
    main()
