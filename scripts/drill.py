"""Drills tiny runs: kills, signals, full and read-only disks, damaged checkpoints and base models,
changed data, steps of the clock, lost and stalled processes, in an order that a seed decides. A run
that goes on must end with the metrics and parameters of an undisturbed run, bit for bit; a run that
cannot go on must say so in one line.

    python scripts/drill.py --seconds 600 --seed 0 --runs plain pair

Prints each outcome, and at the end or after Ctrl-C a table of events and outcomes. Exits with 1 if
an outcome was neither. A start of the run takes some seconds, and each disturbed run is started
until it has finished.
"""

import argparse
import contextlib
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import disturbances
from conversions import Conversions
from disturbances import NEVER, Started, call, damage, file_of_newest, fork
from outcomes import Outcomes
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
COPYING = "SIGKILL between a local save and the end of its copy"
DURING_LOCAL = DURING | {
    COPYING: "kill",
    "local directory removed": "",
    "small local disk, lost with the process": "small",
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
OF_LOCAL = (
    "bit flipped in the newest local checkpoint",
    "file of the newest local checkpoint cut",
    "file of the newest local checkpoint removed",
    "local directory lost",
)
OF_DATA = ("data changed between starts",)
OF_BASE = ("bit flipped in the base model", "file of the base model cut")
ON, STEP_0 = "went on; metrics and parameters equal", "refused in one line; equal from step 0"
REFUSED = "refused in one line; equal once it was undone"


class Drill:
    """Runs of one kind that are disturbed, and the run that is not."""

    def __init__(self, work: Path, kind: str, rng: random.Random, outcomes: Outcomes):
        self.work, self.kind, self.rng, self.outcomes = work, kind, rng, outcomes
        self.local, self.texts, self.base = work / "local", work / "texts", work / "base"
        self.local.mkdir(parents=True)
        write_texts(self.texts, rng)
        (work / "config.yaml").write_text(config(kind, work))
        if kind in ADAPTERS:
            call(write_base, self.base)
        code, lines = self.start(work / "undisturbed").finish()
        if any(code) or any(lines):
            raise RuntimeError(f"the undisturbed run failed: {lines}")
        self.wanted = self.result(work / "undisturbed")
        self.during = {"pair": DURING_PAIR, "local": DURING_LOCAL}.get(kind, DURING)
        if not disturbances.can_mount():
            mounts = ("read-only", "small")
            self.during = {x: how for x, how in self.during.items() if how not in mounts}
        self.between = BETWEEN + OF_DATA + OF_BASE * (kind in ADAPTERS)

    def result(self, run: Path) -> tuple[list[Any], dict[str, bytes]]:
        """Returns the result of a run."""
        file = self.work / "result"
        call(write_result, run, file)
        return pickle.loads(file.read_bytes())

    def start(
        self,
        run: Path,
        kind: str = "",
        at: int = NEVER,
        size: int = 0,
        odd: str = "",
        places: tuple[Path, ...] = (),
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
                *("bptjax.cli.train", argv, tuple(map(str, places or (run, self.local))), where),
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
            if self.local_checkpoints() and self.rng.random() < 0.5:
                during, event = False, self.rng.choice(OF_LOCAL)
            if event in OF_DATA + OF_BASE:
                self.undone(event, run)
                continue
            events.append(event)
            if event == "local directory lost":
                self.remove_local()
            elif not during:
                places = [run / "checkpoints"] * (event not in OF_LOCAL) + [*self.local.iterdir()]
                if file := file_of_newest(places, self.rng):
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
            self.outcomes.fault(f"{events}: exit codes {codes}, {last}, {left}, {run}")
            shutil.rmtree(self.local)
            self.local.mkdir()
        for event in events:
            self.outcomes.add(self.kind, event, outcome)
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
            self.outcomes.add(self.kind, event, ON)  # The file has no effect.
        else:
            self.outcomes.add(self.kind, event, REFUSED if one else "FAULT")
            if not one:
                self.outcomes.fault(f"{event}, {file.name}: exit codes {codes}, {lines}, {run}")

    def local_checkpoints(self) -> list[Path]:
        """Returns the checkpoints in the local directory."""
        return [path for path in self.local.glob("*/*") if path.name.isdecimal()]

    def remove_local(self) -> None:
        """Removes the local directory of the run."""
        for path in self.local.iterdir():
            shutil.rmtree(path, ignore_errors=True)

    def disturb(self, event: str, run: Path) -> bool:
        """Starts the run and disturbs it. Returns whether it may be disturbed again."""
        # A run has about as many operations.
        operation = self.rng.randrange(1, 1000 if self.kind == "local" else 500)
        size = self.rng.choice([0, 500, 3000, 9000, 30000])
        kind = self.during[event]
        odd = "--seed=1" if event.startswith("another config") else ""
        places = (run / "checkpoints",) if event == COPYING else ()
        started = self.start(run, kind, operation // (2 if places else 1), size, odd, places)
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
            self.outcomes.fault(f"{event}: exit codes {codes}, {[x[-3:] for x in lines]}")
            self.outcomes.add(self.kind, event, "FAULT")
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
        elif event == "local directory removed":
            self.remove_local()
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
            starts = kind == "read-only" or event.startswith(("data", "local"))
            allowed |= {1, 2} if starts else {1}
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


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="time after which no run starts")
    parser.add_argument("--seed", type=int, default=0, help="seed of the events")
    text = "kinds of runs"
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help=text)
    parser.add_argument("--out", type=Path, help="file to which each outcome is appended")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    start, rng = time.monotonic(), random.Random(args.seed)
    work = Path(tempfile.mkdtemp(prefix="bptjax-drill-"))
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(work / "cache")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["XDG_CACHE_HOME"] = str(work / "home")  # The secret and fingerprints.
    drills: dict[str, Any] = {}
    number, outcomes = 0, Outcomes(args.seed, args.out)
    with contextlib.suppress(KeyboardInterrupt):
        while number == 0 or time.monotonic() - start < args.seconds:
            kind = args.runs[number % len(args.runs)]
            if kind not in drills:
                drills[kind] = drill = Drill(work / kind, kind, rng, outcomes)
                if kind == CONVERSIONS:
                    run = work / kind / "undisturbed"
                    drills[kind] = Conversions(run, drill.base, rng, outcomes)
            drills[kind].one_run(number)
            number += 1
    for process in multiprocessing.active_children():
        process.terminate()  # A supervisor ends its run.
        process.join(30)
    events, faults = outcomes.numbers.total(), outcomes.faults
    print(f"\n{outcomes.table()}\n\nseed {args.seed}: {events} events, {number} runs, ", end="")
    print(f"{len(faults)} faults", *faults, sep="\n")
    if not faults:
        shutil.rmtree(work, ignore_errors=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
