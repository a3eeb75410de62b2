"""Drills tiny runs: kills, signals, full and read-only disks, damaged checkpoints and base models,
changed data, steps of the clock, lost and stalled processes, in an order that a seed decides. A run
that goes on must end with the metrics and parameters of an undisturbed run, bit for bit; a run that
cannot go on must say so in one line.

    python scripts/drill.py --seconds 600 --seed 0 --runs plain pair

Prints a table of events and outcomes, and exits with 1 if an outcome was neither. A start of the
run takes some seconds, and each disturbed run is started until it has finished.
"""

import argparse
import contextlib
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import disturbances
from conversions import Conversions
from disturbances import NEVER, Started, call, damage, file_of_newest, fork
from tiny_run import ADAPTERS, RUNS, STEPS, config, metrics, write_base, write_result, write_texts

CONVERSIONS = "conversions"
DURING = {
    "SIGKILL at a random moment": "",
    "SIGKILL at a file operation": "kill",
    "SIGKILL of a supervised run": "supervised",
    "SIGTERM": "",
    "SIGSTOP for a second": "",
    "full disk": "full",
    "read-only disk": "read-only",
    "run directory removed": "",
    "steps of the clock": "clock",
    "data changed during the run": "",
}
DURING_PAIR = {
    "SIGKILL of one of two processes": "",
    "SIGKILL of one of two processes at a file operation": "kill",
    "SIGKILL of one of two supervised processes": "supervised",
    "SIGSTOP of one of two supervised processes, for good": "supervised",
    "SIGSTOP of one of two processes for a second": "",
    "SIGTERM to one of two processes": "",
    "strangers at the port, then SIGTERM": "",
    "full disk of one of two processes": "full",
    "another config in one of two processes": "",
}
BETWEEN = ("bit flipped in the newest checkpoint", "file cut", "file removed")
OF_DATA = ("data changed between starts",)
OF_BASE = ("bit flipped in the base model", "file of the base model cut")
ON, STEP_0 = "went on; metrics and parameters equal", "refused in one line; equal from step 0"
REFUSED = "refused in one line; equal once it was undone"


class Drill:
    """Runs of one kind that are disturbed, and the run that is not.

    Attributes:
      outcomes: number of each (event, outcome).
      faults: descriptions of outcomes that must not be.
    """

    def __init__(self, work: Path, kind: str, rng: random.Random):
        self.work, self.kind, self.rng = work, kind, rng
        self.local, self.texts, self.base = work / "local", work / "texts", work / "base"
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.faults: list[str] = []
        self.local.mkdir(parents=True)
        write_texts(self.texts, rng)
        (work / "config.yaml").write_text(config(kind, work))
        if kind in ADAPTERS:
            call(write_base, self.base)
        code, lines = self.start(work / "undisturbed").finish()
        if any(code) or any(lines):
            raise RuntimeError(f"the undisturbed run failed: {lines}")
        self.wanted = self.result(work / "undisturbed")
        self.during = dict(DURING_PAIR if kind == "pair" else DURING)
        if not disturbances.can_mount():
            self.during.pop("read-only disk", None)
        self.between = BETWEEN + OF_DATA + OF_BASE * (kind in ADAPTERS)

    def result(self, run: Path) -> tuple[list[Any], dict[str, bytes]]:
        """Returns the result of a run."""
        file = self.work / "result"
        call(write_result, run, file)
        return pickle.loads(file.read_bytes())

    def start(
        self, run: Path, kind: str = "", at: int = NEVER, size: int = 0, odd: str = ""
    ) -> Started:
        """Starts the run, or resumes it. Only one process of two, the last, is disturbed inside, or
        has the flag `odd`."""
        count = 2 if self.kind == "pair" else 1
        port, started, pipes = disturbances.free_port(), [], []
        for rank in range(count):
            last = rank == count - 1
            argv = [f"--config={self.work / 'config.yaml'}", f"--run_dir={run}"]
            argv += [odd] if odd and last else []
            where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            where = where | {"WORLD_SIZE": "2", "RANK": str(rank)} if count > 1 else {}
            inside = kind if last or kind == "supervised" else ""
            process, pipe = fork(
                *("bptjax.train", argv, (str(run), str(self.local)), where),
                *(inside, at if inside else NEVER, size),
            )
            started.append(process)
            pipes.append(pipe)
        return Started(started, pipes, port, kind == "supervised")

    def one_run(self, number: int) -> None:
        """Disturbs a run up to three times, then resumes it until it ends, and compares it."""
        run, events = self.work / f"run{number}", []
        for _ in range(self.rng.randrange(1, 4)):
            during = not (run / "checkpoints").exists() or self.rng.random() < 0.6
            event = self.rng.choice(list(self.during) if during else self.between)
            if event in OF_DATA + OF_BASE:
                self.undone(event, run)
                continue
            events.append(event)
            if not during:
                if file := file_of_newest([run / "checkpoints", *self.local.iterdir()], self.rng):
                    damage(event, file, self.rng)
            elif not self.disturb(event, run):
                break
        codes, lines = self.start(run).finish()
        outcome = ON
        if refused(codes, lines):
            outcome = STEP_0
            shutil.rmtree(run / "checkpoints")
            codes, lines = self.start(run).finish()
        left = list(self.local.iterdir())
        if any(codes) or any(lines) or left or self.result(run) != self.wanted:
            outcome = "FAULT"
            last = [x[-1:] for x in lines]
            self.faults.append(f"{events}: exit codes {codes}, {last}, {left}, {run}")
            shutil.rmtree(self.local)
            self.local.mkdir()
        for event in events:
            self.outcomes[event, outcome] += 1
        if outcome != "FAULT":
            shutil.rmtree(run)

    def undone(self, event: str, run: Path) -> None:
        """Changes the data or the base model between two starts, and restores them afterwards."""
        directory = self.texts if event in OF_DATA else self.base
        file = self.rng.choice(sorted(x for x in directory.rglob("*") if x.is_file()))
        before = file.read_bytes()
        if event in OF_DATA:
            file.write_bytes(before + b" more")
        else:
            damage(event, file, self.rng)
        codes, lines = self.start(run).finish()
        file.write_bytes(before)
        one = all(code in (1, 2) for code in codes) and all(len(x) == 1 for x in lines)
        if not any(codes) and not any(lines) and self.result(run) == self.wanted:
            self.outcomes[event, ON] += 1  # The file has no effect.
        else:
            self.outcomes[event, REFUSED if one else "FAULT"] += 1
            if not one:
                self.faults.append(f"{event}, {file.name}: exit codes {codes}, {lines}, {run}")

    def disturb(self, event: str, run: Path) -> bool:
        """Starts the run and disturbs it. Returns whether it may be disturbed again."""
        # A run has about as many operations.
        operation = self.rng.randrange(1, 1000 if self.kind == "local" else 500)
        size = self.rng.choice([0, 500, 3000, 9000, 30000])
        kind = self.during[event]
        odd = "--seed=1" if event.startswith("another config") else ""
        started = self.start(run, kind, operation, size, odd)
        if kind in ("", "supervised") and not odd:
            with contextlib.ExitStack() as stack:
                if event.startswith("strangers"):
                    stack.enter_context(disturbances.strangers(started.port, self.rng))
                self.strike(event, run, started)
                codes, lines = started.finish()
        else:
            codes, lines = started.finish()
        if refused(codes, lines):
            return False  # The run is started again, and its outcome is told there.
        if self.wrong(event, codes, lines):
            self.faults.append(f"{event}: exit codes {codes}, {[x[-3:] for x in lines]}")
            self.outcomes[event, "FAULT"] += 1
            return False
        if event == "run directory removed":
            shutil.rmtree(run, ignore_errors=True)  # What the run wrote after the removal.
        return any(codes)

    def strike(self, event: str, run: Path, started: Started) -> None:
        """Disturbs the run from outside, at a random step."""
        victim = self.rng.choice(started.processes)
        last = max((r["step"] for r in metrics(run)), default=0)
        wanted = self.rng.randint(last, STEPS)
        if event.startswith(("data", "SIGSTOP of one of two supervised")):
            # The run has opened its data and shown how long a step takes.
            wanted = min(max(wanted, last + 3), STEPS - 1)
        while victim.is_alive() and not any(r["step"] >= wanted for r in metrics(run)):
            time.sleep(0.005)
        time.sleep(self.rng.random() * 0.1)
        if event == "run directory removed":
            shutil.rmtree(run, ignore_errors=True)
        elif event.startswith("data"):
            with disturbances.changed_file(self.texts, self.rng):
                started.processes[0].join(300)
        elif started.supervised:
            number = signal.SIGSTOP if event.startswith("SIGSTOP") else signal.SIGKILL
            for child in children(victim.pid):
                send(child, number)
        elif event.startswith("SIGSTOP"):
            send(victim.pid, signal.SIGSTOP)
            time.sleep(1)
            send(victim.pid, signal.SIGCONT)
        else:
            send(victim.pid, signal.SIGKILL if "SIGKILL" in event else signal.SIGTERM)

    def wrong(self, event: str, codes: list[int], lines: list[list[str]]) -> bool:
        """Returns whether an exit code or a number of lines is not one of those that are
        promised."""
        kind, pair = self.during[event], self.kind == "pair"
        allowed: set[int] = {0}
        if kind == "supervised" or event.startswith("SIGSTOP") or kind == "clock":
            pass
        elif "SIGKILL" in event:
            allowed |= {-signal.SIGKILL, 1} if pair else {-signal.SIGKILL}
        elif "SIGTERM" in event:
            # A signal before the run handles it, while libraries load, ends the process at once.
            allowed |= {128 + signal.SIGTERM, -signal.SIGTERM} | ({1} if pair else set())
        elif event.startswith("another config"):
            allowed = {2}
        else:
            allowed |= {1, 2} if kind == "read-only" or event.startswith("data") else {1}
        return any(
            code not in allowed or len(own) != (code in (1, 2))
            for code, own in zip(codes, lines, strict=True)
        )


def refused(codes: list[int], lines: list[list[str]]) -> bool:
    """Returns whether a run was refused because all of its checkpoints are damaged."""
    one = all(code == 1 for code in codes) and all(len(own) == 1 for own in lines)
    return one and "move the directory away" in lines[0][0]


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


def table(outcomes: Counter[tuple[str, str]]) -> str:
    """Formats the outcomes."""
    rows = [f"| {event} | {n} | {outcome} |" for (event, outcome), n in sorted(outcomes.items())]
    return "\n".join(["| event | number | outcome |", "| --- | --- | --- |", *rows])


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="time after which no run starts")
    parser.add_argument("--seed", type=int, default=0, help="seed of the events")
    text = "kinds of runs"
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help=text)
    args = parser.parse_args(argv)
    start, rng = time.monotonic(), random.Random(args.seed)
    work = Path(tempfile.mkdtemp(prefix="bptjax-drill-"))
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(work / "cache")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["XDG_CACHE_HOME"] = str(work / "home")  # The secret and fingerprints.
    drills: dict[str, Any] = {}
    number = 0
    with contextlib.suppress(KeyboardInterrupt):
        while number == 0 or time.monotonic() - start < args.seconds:
            kind = args.runs[number % len(args.runs)]
            if kind not in drills:
                drills[kind] = drill = Drill(work / kind, kind, rng)
                if kind == CONVERSIONS:
                    drills[kind] = Conversions(work / kind / "undisturbed", drill.base, rng)
            drills[kind].one_run(number)
            number += 1
    outcomes = sum((drill.outcomes for drill in drills.values()), Counter())
    faults = [fault for drill in drills.values() for fault in drill.faults]
    print(table(outcomes))
    events = sum(outcomes.values())
    print(f"\nseed {args.seed}: {events} events, {number} runs, {len(faults)} faults")
    print("\n".join(faults))
    if not faults:
        shutil.rmtree(work)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
