"""Takes hosts from supervised runs on several hosts of one machine (see `hosts.py`), gives them
back, and compares the runs with one undisturbed process. Needs Linux, root and iproute2.

    python scripts/fewer_hosts.py --out rows.jsonl

The run must go on without the hosts, and take them back at a checkpoint, with the same records in
every step and the losses of one process up to float32 rounding. Prints a row per run, and exits
with 1 after a fault.
"""

import random
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from hosts import (
    ROUNDING,
    Cluster,
    alone,
    base_environment,
    finish,
    losses,
    numbered,
    run_cases,
    torchrun,
    write_config,
)
from tiny_run import metrics, write_texts

STEPS = 60
FLAGS = [
    *(f"--train.max_steps={STEPS}", "--train.eval_steps=15", "--train.eval_batches=1"),
    *("--train.seq_len=256", "--checkpoint.save_steps=5", "--optimizer.learning_rate=1e-3"),
    *("--model.attention_dropout=0", "--model.hidden_size=32", "--model.num_layers=2"),
    "--parallel.host_wait_s=60",
]
# Time after which a run has failed, long enough for a busy machine.
LONGEST_S = 1800
# Text of the log when a run goes on without hosts.
WITHOUT = re.compile(r"without (host.*?): (.*)")
RETURNED = re.compile(r"with (host.*) again: going on from step (\d+)")


@dataclass(frozen=True)
class Case:
    """A run that loses hosts.

    Attributes:
      mesh: sizes of the mesh axes, one of them -1.
      lost: hosts that are lost at the same time.
      accumulate: micro-batches of a step on all hosts.
      silent: the hosts' links go down too, so that the others notice the loss late.
      refused: text of the refusal if the other hosts cannot go on.
    """

    mesh: Mapping[str, int]
    lost: Sequence[int]
    hosts: int = 2
    per_host: int = 1
    accumulate: int = 2
    silent: bool = False
    refused: str = ""

    @property
    def count(self) -> int:
        """Number of processes."""
        return self.hosts * self.per_host


CASES = [
    Case({"fsdp": -1}, [1]),
    Case({"dp": -1, "fsdp": 2}, [0], per_host=2, silent=True),
    Case({"fsdp": -1}, [0], hosts=3),
    # Three hosts cannot share 8 sequences, so one of them waits.
    Case({"dp": -1}, [2], hosts=4, accumulate=1),
    Case({"fsdp": -1, "tp": 2}, [0, 3], hosts=4, per_host=2, silent=True),
    Case({"dp": -1, "tp": 2}, [0], refused="must have devices for the axes of parallel"),
]


def start(cluster: Cluster, case: Case, work: Path, hosts: Sequence[int]) -> list[Any]:
    """Starts a supervisor for each process of some hosts."""
    started = []
    for index in range(case.count):
        if (host := index // case.per_host) in hosts:
            environment = base_environment(work, 1) | torchrun(case.count, index, case.hosts)[0]
            environment |= {
                "JAX_COMPILATION_CACHE_DIR": str(work / "compiled"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
            command = [sys.executable, "-m", "bptjax", "train", "--supervise", *flags(case)]
            command += [f"--config={work / 'config.yaml'}", f"--run_dir={cluster.shared / 'run'}"]
            started.append(cluster.start(host, command, environment))
    return started


def flags(case: Case) -> list[str]:
    return [*FLAGS, f"--train.gradient_accumulation_steps={case.accumulate}"]


def wait(run: Path, processes: Sequence[subprocess.Popen[str]], pattern: str) -> None:
    """Waits for a pattern in the log or a step in the metrics of a run."""
    log, deadline = run / "log.txt", time.monotonic() + LONGEST_S
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        if log.exists() and re.search(pattern, log.read_text()):
            return
        time.sleep(0.2)


def disturb(case: Case, work: Path) -> tuple[list[tuple[int, list[str]]], list[str]]:
    """Runs a case. Returns the ends of the processes and the lines of the log."""
    with Cluster(case.hosts, work, loopback=True) as cluster:
        run = cluster.shared / "run"
        everyone = start(cluster, case, work, cluster.hosts)
        while all(process.poll() is None for process in everyone):
            if any(record["step"] > 12 for record in metrics(run)):
                break
            time.sleep(0.05)
        for host in case.lost:
            if case.silent:
                cluster.link(host, up=False)
            cluster.kill(host)
        kept = [x for i, x in enumerate(everyone) if i // case.per_host not in case.lost]
        if not case.refused:
            wait(run, kept, WITHOUT.pattern)
            for host in case.lost:
                cluster.link(host, up=True)
            kept += start(cluster, case, work, case.lost)
        return finish(kept, LONGEST_S), (run / "log.txt").read_text().splitlines()


def cursor(run: Path) -> Any:
    """Returns the position in the data after the last step."""
    from bptjax.run.checkpoint import Checkpoints

    return Checkpoints(run).extra(STEPS)["data"]


def compare(case: Case, work: Path) -> dict[str, Any]:
    """Runs a case. Returns its row."""
    write_texts(work / "texts", random.Random(0))
    write_config(work, case.mesh)
    begin = time.monotonic()
    ends, log = disturb(case, work)
    row: dict[str, Any] = dict(
        hosts=case.hosts,
        processes=case.count,
        mesh=dict(case.mesh),
        lost=list(case.lost),
        silent=case.silent,
        told=[line[20:] for line in log if WITHOUT.search(line) or RETURNED.search(line)],
        seconds=round(time.monotonic() - begin, 1),
        jax=jax.__version__,
    )
    if case.refused:
        lines = [lines[-1] for _, lines in ends if lines]
        good = {code for code, _ in ends} == {2} and all(case.refused in x for x in lines)
        return row | dict(refused=lines) | ({} if good else dict(fault=f"{ends}"))
    if any(code for code, _ in ends) or len(row["told"]) != 2:
        return row | dict(fault=[[code, lines[-3:]] for code, lines in ends], log=log)
    wanted = alone(work, case.count, *flags(case))
    run, other = work / "shared" / "run", work / "alone"
    got = losses(run)
    if got.keys() != wanted.keys():
        return row | dict(fault="steps are missing or repeated")
    difference = max(abs(got[at] - wanted[at]) / abs(wanted[at]) for at in wanted)
    row |= dict(losses=len(wanted), difference=difference, records=cursor(run) == cursor(other))
    seen = [[(r["step"], r["train/tokens_seen"]) for r in metrics(x)] for x in (run, other)]
    if seen[0] != seen[1] or not row["records"]:
        return row | dict(fault="other records")
    return row | (dict(fault="the losses differ") if difference > ROUNDING else {})


if __name__ == "__main__":
    sys.exit(run_cases(numbered(CASES), compare, __doc__.splitlines()[0]))
