"""Trains a tiny model for many steps on a CPU, and measures what grows: memory, file descriptors,
threads and files of each process. The same run, stopped and resumed at several steps, must have the
same metrics and parameters, bit for bit.

    python scripts/soak.py --steps 50000 --stops 8 --out scripts/results/soak_cpu.json
    python scripts/soak.py --processes 4 --steps 20000 --stops 24

Several processes are supervised, and SIGKILL ends one of them, at random, at each stop; there is no
second run. Prints the slope of each measurement, per 1,000 steps. Exits with 1 if the two runs
differ, or if the supervised run fails.
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
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from disturbances import free_port
from tiny_run import config, result, write_texts

FLAGS = ("--train.eval_steps=500", "--optimizer.learning_rate=1e-3")
# Share of the steps that warm up: caches of the allocator and of JAX fill.
WARM_UP = 0.2
# Steps after a restart that warm up.
WARM_UP_STEPS = 200


def sample(pid: int, run: Path, scratch: Path) -> dict[str, int]:
    """Measures a process and its files. Raises OSError if the process has ended."""
    row = {"step": last_step(run), **of_process(pid)}
    row["metrics_bytes"] = size = (run / "metrics.jsonl").stat().st_size
    return row | {"other_bytes": size_of(run) + size_of(scratch) - size}


def of_process(pid: int) -> dict[str, int]:
    """Measures a process. Raises OSError if it has ended."""
    status = dict(x.split(":", 1) for x in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "resident_bytes": 1024 * int(status["VmRSS"].split()[0]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
    }


def size_of(directory: Path) -> int:
    """Returns the sum of the sizes of all files in a directory."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(OSError):  # A checkpoint that has just been removed.
            total += path.lstat().st_size
    return total


def last_step(run: Path) -> int:
    """Returns the step of the last complete record of the metrics."""
    with (run / "metrics.jsonl").open("rb") as stream:
        stream.seek(max(0, stream.seek(0, 2) - 2000))
        return json.loads(stream.read().splitlines()[-2])["step"]


def start(
    work: Path, run: Path, steps: int, *more: str, save_steps: int = 250, **environment: str
) -> subprocess.Popen:
    command = [sys.executable, "-m", "bptjax.train", f"--config={work / 'config.yaml'}", *FLAGS]
    command += [f"--run_dir={run}", f"--train.max_steps={steps}"]
    command += [f"--checkpoint.save_steps={save_steps}", *more]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | environment)


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


def supervised(work: Path, run: Path, args: argparse.Namespace, stops: list[int]) -> dict[str, Any]:
    """Trains in supervised processes, with one core each, and kills one of them, at random, at each
    of the stops. Returns samples of each process and of the files, and what was killed."""
    port, rng = str(free_port()), random.Random(args.seed)
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(args.processes)}
    where |= {"XDG_CACHE_HOME": str(work / "cache"), "OMP_NUM_THREADS": "1"}
    own = [work / f"tmp{rank}" for rank in range(args.processes)]
    started, cores = [], sorted(os.sched_getaffinity(0))
    for rank, directory in enumerate(own):
        directory.mkdir()
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        alone = where | {"RANK": str(rank), "TMPDIR": str(directory)}
        more = "--supervise", "--parallel.dp=2", "--parallel.fsdp=-1"
        started.append(start(work, run, args.steps, *more, save_steps=100, **alone))
    os.sched_setaffinity(0, cores)
    samples, files, killed, first = [], [], [], {}
    left = list(stops)
    while any(process.poll() is None for process in started):
        time.sleep(args.seconds)
        try:
            step = last_step(run)
            for rank, process in enumerate(started):
                child = child_of(process.pid)
                row = {"step": step, "process": rank, "since": step - first.setdefault(child, step)}
                row |= of_process(child)
                parent = {f"supervisor_{x}": y for x, y in of_process(process.pid).items()}
                samples.append(row | parent | {"temporary_bytes": size_of(own[rank])})
            sizes = {x.name: x.stat().st_size for x in (run / "metrics.jsonl", run / "log.txt")}
            row = {"step": step, **sizes, "cache_bytes": size_of(work / "cache")}
            row["other_bytes"] = size_of(run) - sum(sizes.values())
            files.append(row | {"files": sum(1 for _ in work.rglob("*"))})
        except (OSError, LookupError, ValueError):  # Between two starts, or at the end.
            continue
        if left and step >= left[0]:
            rank = rng.randrange(args.processes)
            os.kill(child_of(started[rank].pid), signal.SIGKILL)
            killed.append({"step": step, "process": rank})
            left = [stop for stop in left if stop > step]
    codes = [process.returncode for process in started]
    return {"samples": samples, "files": files, "killed": killed, "exit_codes": codes}


def child_of(pid: int) -> int:
    """Returns the child of a supervisor. Raises IndexError if it has none."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def slopes_of_processes(samples: list[dict[str, int]]) -> dict[str, dict[str, float]]:
    """Returns, of each measurement, the growth per 1,000 steps by least squares: `run` along the
    steps of the run, at the same age of the process, and `process` along its age."""
    late = [x for x in samples if x["since"] >= WARM_UP_STEPS]
    at = np.array([[1, x["step"] / 1000, x["since"] / 1000] for x in late])
    found = {}
    for name in [name for name in late[0] if name not in ("step", "process", "since")]:
        values = np.array([x[name] for x in late])
        _, run, process = np.linalg.lstsq(at, values)[0]
        found[name] = {"run": float(run), "process": float(process), "mean": float(values.mean())}
    return found


def soak_processes(work: Path, args: argparse.Namespace, rng: random.Random) -> int:
    """Returns the exit code of a soak of several processes."""
    begin, count = time.monotonic(), args.processes
    found = supervised(work, work / "run", args, sorted(rng.sample(range(args.steps), args.stops)))
    samples, files = found["samples"], found["files"]
    row: dict[str, Any] = {"processes": count, "steps": args.steps, "seed": args.seed}
    row |= {"seconds": round(time.monotonic() - begin), "jax": jax.__version__}
    row |= {"killed": found["killed"], "exit_codes": found["exit_codes"]}
    row |= {"last_step": last_step(work / "run"), "samples": len(samples)}
    of = [[x for x in samples if x["process"] == rank] for rank in range(count)]
    row["slopes_per_1000_steps"] = [slopes_of_processes(each) for each in of]
    row["slopes_of_files_per_1000_steps"] = slopes(files, args.steps)
    row["last_files"] = files[-1]
    print(json.dumps(row, indent=1))
    if args.out:
        kept = [x for each in of for x in each[:: len(each) // 100 or 1]]
        row |= {"rows": kept, "files": files[:: len(files) // 100 or 1]}
        args.out.write_text(json.dumps(row) + "\n")
    return 1 if any(found["exit_codes"]) or row["last_step"] != args.steps else 0


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50_000, help="number of optimizer steps")
    parser.add_argument("--stops", type=int, default=8, help="number of stops of the second run")
    parser.add_argument("--processes", type=int, default=1, help="number of processes, 1 or even")
    parser.add_argument("--seconds", type=float, default=0.5, help="interval of the samples")
    parser.add_argument("--seed", type=int, default=0, help="seed of the texts and the stops")
    parser.add_argument("--out", type=Path, help="file for the row and the samples")
    args = parser.parse_args()
    work, rng = Path(tempfile.mkdtemp(prefix="bptjax-soak-")), random.Random(args.seed)
    write_texts(work / "texts", rng)
    (work / "config.yaml").write_text(config("plain", work))
    (work / "tmp").mkdir()
    os.environ |= {"TMPDIR": str(work / "tmp"), "JAX_PLATFORMS": "cpu"}
    if args.processes > 1:
        return soak_processes(work, args, rng)
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
