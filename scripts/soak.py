"""Trains a tiny model for many steps on a CPU, and measures what grows: memory, file descriptors,
threads and files of the process. The same run, stopped and resumed at several steps, must have the
same metrics and parameters, bit for bit.

    python scripts/soak.py --steps 50000 --stops 8 --out scripts/results/soak_cpu.json

Prints the slope of each, per 1,000 steps, and exits with 1 if the two runs differ.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tiny_run import config, result, write_texts

FLAGS = ("--train.eval_steps=500", "--checkpoint.save_steps=250", "--optimizer.learning_rate=1e-3")
# Share of the steps that warm up: caches of the allocator and of JAX fill.
WARM_UP = 0.2


def sample(pid: int, run: Path, scratch: Path) -> dict[str, int]:
    """Measures a process and its files. Raises OSError if the process has ended."""
    status = dict(x.split(":", 1) for x in Path(f"/proc/{pid}/status").read_text().splitlines())
    file, others = run / "metrics.jsonl", 0
    for path in (*run.rglob("*"), *scratch.rglob("*")):
        try:
            others += path.stat().st_size if path != file else 0
        except OSError:  # A checkpoint that has just been removed.
            continue
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - 2000))
        last = stream.read().splitlines()[-2]
    return {
        "step": json.loads(last)["step"],
        "resident_bytes": 1024 * int(status["VmRSS"].split()[0]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "metrics_bytes": size,
        "other_bytes": others,
    }


def start(work: Path, run: Path, steps: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "bptjax.train", f"--config={work / 'config.yaml'}", *FLAGS]
    command += [f"--run_dir={run}", f"--train.max_steps={steps}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def watched(work: Path, run: Path, steps: int, seconds: float) -> list[dict[str, int]]:
    """Trains without a disturbance. Returns samples, `seconds` apart."""
    process, samples = start(work, run, steps), []
    while process.poll() is None:
        try:
            samples.append(sample(process.pid, run, work / "tmp"))
        except (OSError, LookupError, ValueError):  # Before the first metrics, or at the end.
            pass
        time.sleep(seconds)
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}")
    return samples


def stopped(work: Path, run: Path, steps: int, stops: list[int]) -> None:
    """Trains, and stops the run after each of the stops, by SIGTERM and SIGKILL in turn."""
    for i, step in enumerate(stops):
        process = start(work, run, steps)
        while process.poll() is None and latest(run) < step:
            time.sleep(0.1)
        process.send_signal((signal.SIGTERM, signal.SIGKILL)[i % 2])
        process.wait()
    if code := start(work, run, steps).wait():
        raise RuntimeError(f"exit code {code}")


def latest(run: Path) -> int:
    """Returns the step of the last checkpoint, which takes no time to find."""
    names = [path.name for path in run.glob("checkpoints/*")]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def slopes(samples: list[dict[str, int]], steps: int) -> dict[str, float]:
    """Returns the growth of each measurement per 1,000 steps after the warm-up, by least
    squares."""
    late = [x for x in samples if x["step"] >= WARM_UP * steps]
    at = [x["step"] / 1000 for x in late]
    names = [name for name in late[0] if name != "step"]
    return {name: float(np.polyfit(at, [x[name] for x in late], 1)[0]) for name in names}


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50_000, help="number of optimizer steps")
    parser.add_argument("--stops", type=int, default=8, help="number of stops of the second run")
    parser.add_argument("--seconds", type=float, default=0.5, help="interval of the samples")
    parser.add_argument("--seed", type=int, default=0, help="seed of the texts and the stops")
    parser.add_argument("--out", type=Path, help="file for the row and the samples")
    args = parser.parse_args()
    work, rng = Path(tempfile.mkdtemp(prefix="bptjax-soak-")), random.Random(args.seed)
    write_texts(work / "texts", rng)
    (work / "config.yaml").write_text(config("plain", work))
    (work / "tmp").mkdir()
    os.environ |= {"TMPDIR": str(work / "tmp"), "JAX_PLATFORMS": "cpu"}
    begin = time.monotonic()
    samples = watched(work, work / "whole", args.steps, args.seconds)
    seconds = time.monotonic() - begin
    stops = sorted(rng.sample(range(args.steps), args.stops))
    stopped(work, work / "stopped", args.steps, stops)
    row: dict[str, Any] = {"steps": args.steps, "seed": args.seed, "seconds": round(seconds)}
    row |= {"samples": len(samples), "slopes_per_1000_steps": slopes(samples, args.steps)}
    row["first"] = next(x for x in samples if x["step"] >= WARM_UP * args.steps)
    row["last"] = samples[-1]
    row["resident_bytes_peak"] = max(x["resident_bytes"] for x in samples)
    row |= {"stops": stops, "jax": jax.__version__}
    one, other = (result(work / name, args.steps) for name in ("whole", "stopped"))
    row |= {"records": len(one[0]), "arrays": len(one[1]), "equal": one == other}
    print(json.dumps(row, indent=1))
    if args.out:
        args.out.write_text(json.dumps(row | {"rows": samples[:: len(samples) // 100 or 1]}) + "\n")
    if row["equal"]:
        shutil.rmtree(work)
    return 0 if row["equal"] else 1


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
