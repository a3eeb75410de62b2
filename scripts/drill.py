"""Drills a tiny run: kills, signals, full disks and damaged checkpoints, in an order that a seed
decides. A run that goes on must end with the metrics and parameters of an undisturbed run, bit for
bit; a run that cannot go on must say so in one line.

    python scripts/drill.py --seconds 600 --seed 0

`--local` writes checkpoints to a local directory first, which must be empty at the end of a run.

Prints a table of events and outcomes, and exits with 1 if an outcome was neither. A start of the
run takes some seconds, and each disturbed run is started until it has finished. Its processes are
forked from one that has imported the libraries.
"""

import argparse
import contextlib
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bptjax.metrics import read_metrics
from bptjax.supervise import Limits, supervise

STEPS = 24
CONFIG = f"""
device: cpu
parallel: {{fsdp: 1}}
model: {{hidden_size: 16, num_layers: 1, num_heads: 2, attention_dropout: 0.1}}
data: {{eval_fraction: 0.1}}
train: {{max_steps: {STEPS}, seq_len: 32, per_device_train_batch_size: 2, eval_steps: 8,
  sample_tokens: 0}}
optimizer: {{learning_rate: 1.0e-2}}
execution: {{q_chunk: 16, k_chunk: 16, ffn_chunk: 16}}
checkpoint: {{save_steps: 3, local_dir: LOCAL}}
"""
# Metrics that the clock does not change.
EXACT = ("train/loss", "train/grad_norm", "train/learning_rate", "train/tokens_seen", "eval/loss")
# An operation beyond the last one of a run, at which nothing happens.
NEVER = 10**9
DURING = (
    "SIGKILL at a random moment",
    "SIGKILL at a file operation",
    "SIGKILL of a supervised run",
    "SIGTERM",
    "SIGSTOP for a second",
    "full disk",
    "run directory removed",
)
BETWEEN = ("bit flipped in the newest checkpoint", "file cut", "file removed")


# Imported once, before the processes are forked. None of them starts a JAX backend.
LIBRARIES = ["bptjax.train", "bptjax.config_parser", "bptjax.training.loop"]
FILES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")


def train(
    argv: list[str], places: tuple[str, ...], errors: Any, kind: str, at: int, size: int
) -> None:
    """Trains in a process of its own, with its stderr in a pipe, which has no limit of size.

    Args:
      kind: `supervised` for a run with a supervisor; or `kill` or `full`, which happens at Python's
        file operation `at` in `places`.
        Tensorstore's operations, in C++, are reached by kills at a random moment, and by the full
        disk.
      size: bytes to which files may grow on the full disk.
    """
    os.dup2(errors.fileno(), 2)
    errors.close()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if kind == "supervised":
        command = [sys.executable, "-m", "bptjax.train", *argv]
        sys.exit(supervise(command, Limits(pause=0.1, poll=0.1)))
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in FILES or not any(str(x).startswith(places) for x in arguments[:2]):
            return
        seen += 1
        if seen == at and kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if seen == at and kind == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, -1))

    sys.addaudithook(hook)
    from bptjax.train import main

    sys.exit(main(argv))


def read(run: Path, file: Path) -> None:
    """Writes the metrics by step, and the bytes of each array of the last checkpoint, to `file`."""
    from bptjax.checkpoint import Checkpoints

    rows = [[(r["step"], name, r[name]) for name in EXACT if name in r] for r in metrics(run)]
    checkpoints, arrays = Checkpoints(run), {}
    if checkpoints.newest() == STEPS:
        arrays = {x: checkpoints.read(STEPS, x).tobytes() for x in checkpoints.specs(STEPS)}
    file.write_bytes(pickle.dumps((rows, arrays)))


class Drill:
    """Runs that are disturbed, and the run that is not.

    Attributes:
      outcomes: number of each (event, outcome).
      faults: descriptions of outcomes that must not be.
    """

    def __init__(self, work: Path, seed: int, local: bool):
        self.work, self.rng = work, random.Random(seed)
        self.local, self.copies = work / "local", local
        self.local.mkdir(parents=True)
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.faults: list[str] = []
        texts = work / "texts"
        texts.mkdir(parents=True)
        words = "the quick brown fox jumps over a lazy dog".split()
        for i in range(20):
            text = " ".join(self.rng.choices(words, k=self.rng.randrange(5, 60)))
            (texts / f"{i:02}.txt").write_text(text)
        config = CONFIG.replace("data: {", f"data: {{path: {texts}, ")
        config = config.replace("LOCAL", str(self.local) if local else "null")
        (work / "config.yaml").write_text(config)
        self.processes = multiprocessing.get_context("forkserver")
        self.processes.set_forkserver_preload(LIBRARIES)
        code, lines = self.finish(self.start(work / "undisturbed"))
        if code or lines:
            raise RuntimeError(f"the undisturbed run failed: {lines}")
        self.wanted = self.result(work / "undisturbed")

    def start(self, run: Path, kind: str = "", at: int = NEVER, size: int = 0) -> Any:
        """Starts the run, or resumes it."""
        argv = [f"--config={self.work / 'config.yaml'}", f"--run_dir={run}"]
        self.stderr, errors = self.processes.Pipe(duplex=False)
        arguments = argv, (str(run), str(self.local)), errors, kind, at, size
        process = self.processes.Process(target=train, args=arguments)
        process.start()
        errors.close()
        return process

    def finish(self, process: Any) -> tuple[int, list[str]]:
        """Waits for the end. Returns the exit code, and the lines on stderr without those that name
        skipped checkpoints and restarts."""
        process.join(300)
        if process.exitcode is None:
            process.kill()
            return -signal.SIGALRM, ["no end in 300 s"]
        with open(os.dup(self.stderr.fileno()), errors="replace") as stream:
            lines = stream.read().splitlines()
        told = re.compile(
            r"WARNING.*/checkpoints: .*(using|starting from) step \d+|"
            r"WARNING.*/checkpoints: step \d+ is not copied to it, .*|"
            r"WARNING.*/local/run.*: removing steps .*|"
            r"supervisor: restarting after the run was killed by SIGKILL, .*"
        )
        return process.exitcode, [line for line in lines if not told.fullmatch(line)]

    def result(self, run: Path) -> tuple[list[Any], dict[str, bytes]]:
        """Returns what `read` writes about a run."""
        file = self.work / "result"
        process = self.processes.Process(target=read, args=(run, file))
        process.start()
        process.join()
        return pickle.loads(file.read_bytes())

    def one_run(self, number: int) -> None:
        """Disturbs a run up to three times, then resumes it until it ends, and compares it."""
        run, events = self.work / f"run{number}", []
        for _ in range(self.rng.randrange(1, 4)):
            during = not (run / "checkpoints").exists() or self.rng.random() < 0.6
            event = self.rng.choice(DURING if during else BETWEEN)
            events.append(event)
            if not during:
                damage(event, [run / "checkpoints", *self.local.iterdir()], self.rng)
            elif not self.disturb(event, run):
                break
        code, lines = self.finish(self.start(run))
        outcome = "went on; metrics and parameters equal"
        if refused(code, lines):
            outcome = "refused in one line; equal from step 0"
            shutil.rmtree(run / "checkpoints")
            code, lines = self.finish(self.start(run))
        left = list(self.local.iterdir())
        if code or lines or left or self.result(run) != self.wanted:
            outcome = "FAULT"
            self.faults.append(f"{events}: exit code {code}, {lines[-1:]}, {left}, {run}")
            shutil.rmtree(self.local)
            self.local.mkdir()
        for event in events:
            self.outcomes[event, outcome] += 1
        if outcome != "FAULT":
            shutil.rmtree(run)

    def disturb(self, event: str, run: Path) -> bool:
        """Starts the run and disturbs it. Returns whether it may be disturbed again."""
        # A run has about as many operations.
        operation = self.rng.randrange(1, 1000 if self.copies else 500)
        size = self.rng.choice([0, 500, 3000, 9000, 30000])
        kind = {
            "SIGKILL at a file operation": "kill",
            "SIGKILL of a supervised run": "supervised",
            "full disk": "full",
        }.get(event, "")
        process = self.start(run, kind, operation, size)
        if kind in ("", "supervised"):
            last = max((r["step"] for r in metrics(run)), default=0)
            wanted = self.rng.randint(last, STEPS)
            while process.is_alive() and not any(r["step"] >= wanted for r in metrics(run)):
                time.sleep(0.005)
            time.sleep(self.rng.random() * 0.1)
            if event == "run directory removed":
                shutil.rmtree(run, ignore_errors=True)
            elif kind == "supervised":
                for child in children(process.pid):
                    send(child, signal.SIGKILL)
            elif event.startswith("SIGSTOP"):
                send(process.pid, signal.SIGSTOP)
                time.sleep(1)
                send(process.pid, signal.SIGCONT)
            else:
                send(process.pid, getattr(signal, event.split()[0]))
        code, lines = self.finish(process)
        if refused(code, lines):
            return False  # The run is started again, and its outcome is told there.
        allowed = {"SIGKILL": (0, -signal.SIGKILL), "SIGTERM": (0, 128 + signal.SIGTERM)}
        codes = allowed.get(event.split()[0], (0,) if event.startswith("SIGSTOP") else (0, 1))
        codes = (0,) if kind == "supervised" else codes
        # A signal before the run handles it, while libraries load, ends the process at once.
        codes += (-signal.SIGTERM,) if event == "SIGTERM" else ()
        if code not in codes or len(lines) != (code == 1):
            self.faults.append(f"{event}: exit code {code}, {len(lines)} lines: {lines[-3:]}")
            self.outcomes[event, "FAULT"] += 1
        if event == "run directory removed":
            shutil.rmtree(run, ignore_errors=True)  # What the run wrote after the removal.
        return code != 0 and code in codes

    def table(self) -> str:
        """Formats the outcomes."""
        rows = [f"| {e} | {n} | {o} |" for (e, o), n in sorted(self.outcomes.items())]
        return "\n".join(["| event | number | outcome |", "| --- | --- | --- |", *rows])


def refused(code: int, lines: list[str]) -> bool:
    """Returns whether a run was refused because all of its checkpoints are damaged."""
    return code == 1 and len(lines) == 1 and "move the directory away" in lines[0]


def send(pid: int, number: int) -> None:
    """Sends a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def children(pid: int) -> list[int]:
    """Returns the ids of the children of a process; none if it has ended."""
    try:
        return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def metrics(run: Path) -> list[dict[str, Any]]:
    """Returns the metrics of a run; empty if there are none."""
    file = run / "metrics.jsonl"
    try:
        return list(read_metrics(file))
    except OSError:
        return []


def damage(event: str, directories: list[Path], rng: random.Random) -> None:
    """Damages a file of the newest checkpoint in the directories."""
    steps = [path for d in directories for path in d.iterdir() if path.name.isdecimal()]
    if not steps:
        return
    newest = max(steps, key=lambda path: int(path.name))
    file = rng.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
    content = bytearray(file.read_bytes())
    if event == "file removed":
        file.unlink()
    elif event == "file cut":
        file.write_bytes(content[: rng.randrange(len(content) or 1)])
    elif content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="time after which no run starts")
    parser.add_argument("--seed", type=int, default=0, help="seed of the events")
    text = "write checkpoints to a local directory first"
    parser.add_argument("--local", action="store_true", help=text)
    args = parser.parse_args(argv)
    start = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="bptjax-drill-"))
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(work / "cache")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    drill, number = Drill(work, args.seed, args.local), 0
    with contextlib.suppress(KeyboardInterrupt):
        while number == 0 or time.monotonic() - start < args.seconds:
            drill.one_run(number)
            number += 1
    print(drill.table())
    events = sum(drill.outcomes.values())
    print(f"\nseed {args.seed}: {events} events, {number} runs, {len(drill.faults)} faults")
    print("\n".join(drill.faults))
    if not drill.faults:
        shutil.rmtree(work)
    return 1 if drill.faults else 0


if __name__ == "__main__":
    sys.exit(main())
