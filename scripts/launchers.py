"""Starts a run on two hosts of one machine (see `hosts.py`) by ssh and by Slurm, as
docs/distributed.md says, and compares its losses with one process. Needs Linux, root, iproute2,
openssh-server, slurmctld, slurmd, slurm-client and munge.

    python scripts/launchers.py --out rows.jsonl

Prints a row per start. Exits with 1 if a run fails or the losses differ by more than float32
rounding.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from hosts import (
    PORT,
    ROUNDING,
    Cluster,
    alone,
    base_environment,
    losses,
    run_cases,
    write_config,
)
from tiny_run import metrics, write_texts

SHELL = """
for i in 0 1; do
  ssh -F SSH host$i "cd WORK; ENVIRONMENT JAX_COORDINATOR_ADDRESS=host0:PORT \
    JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=$i \
    nohup COMMAND > host$i.log 2>&1 < /dev/null & echo \\$! > host$i.pid"
done
"""
SSHD = """
HostKey WORK/key
AuthorizedKeysFile WORK/key.pub
PidFile none
StrictModes no
UsePAM no
"""
SSH = """
Host *
  IdentityFile WORK/key
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
SLURM = """
ClusterName=hosts
SlurmctldHost=host0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=WORK/munge/socket
StateSaveLocation=WORK/state
SlurmdSpoolDir=WORK/spool-%n
SlurmctldPidFile=WORK/slurmctld.pid
SlurmdPidFile=WORK/slurmd-%n.pid
SlurmctldLogFile=WORK/slurmctld.log
SlurmdLogFile=WORK/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
SlurmdTimeout=15
SlurmdParameters=config_overrides
KillWait=60
NodeName=host[0-1] CPUs=2
PartitionName=main Nodes=ALL Default=YES State=UP
"""
# A longer run, of which something is stopped.
LONG = [
    *("--train.max_steps=150", "--train.eval_steps=50", "--checkpoint.save_steps=10"),
    *("--train.seq_len=512", "--model.hidden_size=64", "--model.num_layers=4"),
]


class Start:
    """Two hosts with a shared directory, and commands on host 0.

    Attributes:
      run: run directory.
    """

    def __init__(self, cluster: Cluster, work: Path):
        self.cluster, self.work, self.run = cluster, work, cluster.shared / "run"

    def write(self, name: str, text: str) -> Path:
        """Writes a file in which WORK stands for the work directory."""
        file = self.work / name
        file.write_text(text.replace("WORK", str(self.work)).lstrip())
        return file

    def call(self, command: str, *, seconds: float = 600, **environment: str) -> tuple[int, str]:
        """Calls a shell command on host 0. Returns its exit code and its output."""
        whole = base_environment(self.work, 1) | environment
        process = self.cluster.start(0, ["sh", "-c", command], whole)
        out, error = process.communicate(timeout=seconds)
        return process.returncode, out + error

    def daemon(self, host: int, *command: str) -> subprocess.Popen[str]:
        """Starts a daemon on a host, with its output in a file."""
        file = self.work / f"{Path(command[0]).name}-{host}.out"
        line = ["sh", "-c", f'exec "$@" > {file} 2>&1', "sh", *command]
        return self.cluster.start(host, line, base_environment(self.work, 1))

    def command(self, *flags: str) -> str:
        """Returns the command of a run."""
        python = f"{sys.executable} -m bptjax train --config=config.yaml --run_dir={self.run}"
        return " ".join([python, *flags])

    def wait(self, step: int, seconds: float = 300) -> None:
        """Waits for a step of the run."""
        deadline = time.monotonic() + seconds
        while all(record["step"] < step for record in metrics(self.run)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step {step} of the run in {self.run}")
            time.sleep(0.2)

    def finished(self, seconds: float = 600) -> None:
        """Waits until the log says that the run has ended."""
        deadline, log = time.monotonic() + seconds, self.run / "log.txt"
        while not (log.exists() and re.search(r"plot: |, then stopping", log.read_text())):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no end of the run in {self.run}")
            time.sleep(0.2)


@contextlib.contextmanager
def ssh(start: Start) -> Iterator[Callable[..., None]]:
    """Runs an sshd on both hosts. Yields a function that starts a run by a shell loop."""
    key = start.work / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    daemon, client = start.write("sshd_config", SSHD), start.write("ssh_config", SSH)
    for host in start.cluster.hosts:
        start.daemon(host, shutil.which("sshd") or "/usr/sbin/sshd", "-D", "-f", str(daemon))
    environment = base_environment(start.work, 1)
    passed = {x: environment[x] for x in ("BPTJAX_SECRET", "PYTHONPATH") if x in environment}
    passed |= {x: environment[x] for x in ("JAX_PLATFORMS", "XDG_CACHE_HOME", "OMP_NUM_THREADS")}
    passed["XLA_FLAGS"] = f"'{environment['XLA_FLAGS']}'"

    def begin(*flags: str) -> None:
        text = SHELL.replace("SSH", str(client)).replace("PORT", str(PORT))
        text = text.replace("ENVIRONMENT", " ".join(f"{k}={v}" for k, v in passed.items()))
        text = text.replace("COMMAND", start.command("--supervise", *flags))
        code, out = start.call(f"sleep 1; {text.replace('WORK', str(start.work))}", seconds=60)
        if code:
            raise RuntimeError(out)

    yield begin


def ssh_runs(start: Start) -> dict[str, Any]:
    """A run to its end."""
    with ssh(start) as begin:
        begin()
        start.finished()
    return {}


def ssh_stops(start: Start) -> dict[str, Any]:
    """A signal to one host's supervisor stops both; the same loop then continues."""
    with ssh(start) as begin:
        begin(*LONG)
        start.wait(30)
        text = f"ssh -F {start.work}/ssh_config host1 'kill $(cat {start.work}/host1.pid)'"
        code, out = start.call(text, seconds=60)
        start.finished()
        time.sleep(15)
        logs = [(start.work / f"host{i}.log").read_text() for i in range(2)]
        stopped = max(record["step"] for record in metrics(start.run))
        (start.run / "log.txt").rename(start.run / "log_before.txt")
        begin(*LONG)
        start.finished()
    return dict(flags=LONG, stopped_at=stopped, kill=[code, out], last=[x[-200:] for x in logs])


@contextlib.contextmanager
def slurm(start: Start) -> Iterator[Callable[..., tuple[int, str]]]:
    """Runs Slurm on both hosts. Yields a function that calls a command of Slurm on host 0."""
    munge = start.work / "munge"
    munge.mkdir(mode=0o755)
    (munge / "key").write_bytes(os.urandom(1024))
    (munge / "key").chmod(0o400)
    files = [f"--{name}={munge / name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
    start.daemon(0, "munged", "--foreground", "--force", f"--key-file={munge / 'key'}", *files)
    file = start.write("slurm.conf", SLURM)
    # Namespaces of `ip netns exec` have no mounted cgroups, which are not needed here.
    start.write("cgroup.conf", "CgroupPlugin=cgroup/v1")
    (start.work / "state").mkdir()
    time.sleep(2)
    start.daemon(0, "slurmctld", "-D", "-f", str(file))
    for host in start.cluster.hosts:
        start.daemon(host, "slurmd", "-D", "-f", str(file), "-N", f"host{host}")

    def call(command: str, seconds: float = 600) -> tuple[int, str]:
        return start.call(f"cd {start.work} && {command}", seconds=seconds, SLURM_CONF=str(file))

    deadline = time.monotonic() + 60
    while "idle" not in (out := call("sinfo -h -o '%t %D'", 30)[1]) or " 2" not in out:
        if time.monotonic() > deadline:
            raise TimeoutError(f"Slurm's nodes are not idle: {out}")
        time.sleep(1)
    yield call


def slurm_runs(start: Start) -> dict[str, Any]:
    """Two nodes with two tasks each, by srun alone, which sets all that JAX needs."""
    with slurm(start) as call:
        code, out = call(f"srun --nodes=2 --ntasks-per-node=2 {start.command()}")
    return dict(exit=code) if code == 0 else dict(fault=out[-2000:])


def submit(
    call: Callable[..., tuple[int, str]],
    start: Start,
    *flags: str,
    step: str = "",
    run: Sequence[str] = LONG,
) -> str:
    """Submits the documented job. Returns its number.

    Args:
      flags: more flags of sbatch.
      step: more flags of srun.
      run: flags of the run.
    """
    srun = f"srun --kill-on-bad-exit=0 {step} {start.command('--supervise', *run)}"
    job = "sbatch --parsable --requeue --nodes=2 --ntasks-per-node=1 --output=job.out"
    code, out = call(f"{job} {' '.join(flags)} --wrap '{srun}'", 60)
    if code:
        raise RuntimeError(out)
    return out.split()[0]


def until(call: Callable[..., tuple[int, str]], job: str, states: str, seconds: float = 600) -> str:
    """Waits until a job is in one of some states. Returns the state and the exit code."""
    deadline = time.monotonic() + seconds
    while True:
        shown = call(f"scontrol show job {job}", 60)[1]
        found = re.search(r"JobState=(\w+).* ExitCode=([\d:]+)", shown, re.DOTALL)
        if found and re.fullmatch(states, found[1]):
            return f"{found[1]} {found[2]}"
        if time.monotonic() > deadline:
            raise TimeoutError(shown)
        time.sleep(0.5)


def slurm_time_limit(start: Start) -> dict[str, Any]:
    """SIGTERM before the time limit; the same job, submitted again, continues."""
    with slurm(start) as call:
        job = submit(call, start, "--time=5", "--signal=TERM@240")
        ends = [until(call, job, "COMPLETED|FAILED|TIMEOUT")]
        stopped = max(record["step"] for record in metrics(start.run))
        ends.append(until(call, submit(call, start), "COMPLETED|FAILED|TIMEOUT"))
        log = (start.run / "log.txt").read_text()
    saved = re.findall(r"SIGTERM: saving step \d+", log)
    return dict(flags=LONG, jobs=ends, stopped_at=stopped, told=saved)


def slurm_kill(start: Start) -> dict[str, Any]:
    """SIGKILL to a process of host 1, and scontrol requeue."""
    with slurm(start) as call:
        job = submit(call, start)
        start.wait(15)
        shown = subprocess.run(["ip", "netns", "pids", start.cluster.names[1]], capture_output=True)
        for pid in shown.stdout.split():
            words = Path(f"/proc/{int(pid)}/cmdline").read_bytes().split(b"\0")
            if b"bptjax.train" in words:
                os.kill(int(pid), signal.SIGKILL)
        start.wait(70)
        code, out = call(f"scontrol requeue {job}", 60)
        states = [until(call, job, "PENDING|COMPLETING|CONFIGURING|REQUEUED"), out]
        states.append(until(call, job, "COMPLETED|FAILED|TIMEOUT"))
        log = (start.run / "log.txt").read_text()
    told = re.findall(r"supervisor: (.*)", log)
    return dict(flags=LONG, jobs=states, told=told, resumed=len(re.findall("resumed at", log)))


def slurm_node(start: Start) -> dict[str, Any]:
    """Host 1 loses its power; Slurm requeues the job, which continues when the host is back."""
    with slurm(start) as call:
        job = submit(call, start)
        start.wait(30)
        start.cluster.link(1, up=False)
        start.cluster.kill(1)
        states = [until(call, job, "PENDING")]
        start.cluster.link(1, up=True)
        file = start.work / "slurm.conf"
        start.daemon(1, "slurmd", "-D", "-f", str(file), "-N", "host1")
        states.append(until(call, job, "COMPLETED|FAILED|TIMEOUT"))
    return dict(flags=LONG, jobs=states)


def slurm_fewer(start: Start) -> dict[str, Any]:
    """Host 1 loses its power for good, and the job keeps its other node."""
    flags = ["--train.max_steps=80", *LONG[1:], "--model.attention_dropout=0"]
    flags += ["--parallel.fsdp=-1", "--parallel.host_wait_s=30"]
    # With accumulation, rounding differs, which a larger rate amplifies.
    flags += ["--optimizer.learning_rate=1e-3"]
    with slurm(start) as call:
        job = submit(call, start, "--no-kill", step="--no-kill", run=flags)
        start.wait(30)
        start.cluster.link(1, up=False)
        start.cluster.kill(1)
        states = [until(call, job, "COMPLETED|FAILED|TIMEOUT|NODE_FAIL|PENDING")]
        told = re.findall("without host1: .*", (start.run / "log.txt").read_text())
        out = (start.work / "job.out").read_text().splitlines()
    return dict(flags=flags, jobs=states, told=told, srun=[x for x in out if "srun" in x][-3:])


STARTS: dict[str, tuple[int, Callable[[Start], dict[str, Any]]]] = {
    "ssh": (2, ssh_runs),
    "ssh, stopped and started again": (2, ssh_stops),
    "srun": (4, slurm_runs),
    "sbatch, ended before its time limit and submitted again": (2, slurm_time_limit),
    "sbatch, a process killed, then requeued": (2, slurm_kill),
    "sbatch, a node lost": (2, slurm_node),
    "sbatch --no-kill, a node lost for good": (2, slurm_fewer),
}


def compare(name: str, work: Path) -> dict[str, Any]:
    """Runs a start. Returns its row."""
    processes, function = STARTS[name]
    write_texts(work / "texts", random.Random(0))
    write_config(work, {"fsdp": processes})
    begin = time.monotonic()
    row: dict[str, Any] = dict(start=name, hosts=2, processes=processes, jax=jax.__version__)
    with Cluster(2, work, loopback=True) as cluster:
        start = Start(cluster, work)
        row |= function(start)
    got = losses(start.run)
    wanted = alone(work, processes, *row.get("flags", []))
    row["seconds"] = round(time.monotonic() - begin, 1)
    if "fault" in row or got.keys() != wanted.keys():
        return dict(fault="steps are missing or repeated") | row
    difference = max(abs(got[at] - wanted[at]) / abs(wanted[at]) for at in wanted)
    row |= dict(losses=len(wanted), difference=difference)
    return row | (dict(fault="the losses differ") if difference > ROUNDING else {})


if __name__ == "__main__":
    sys.exit(run_cases({name: name for name in STARTS}, compare, __doc__.splitlines()[0]))
