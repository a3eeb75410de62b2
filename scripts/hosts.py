"""Trains tiny runs on several hosts of one machine, and compares their losses with one process that
has as many devices. The hosts are network namespaces, each with its own interfaces, addresses, name
and directory; devices are CPUs. Needs Linux, root, iproute2 and ethtool.

    python scripts/hosts.py --out rows.jsonl

Prints a row per run. Exits with 1 if a run fails or the losses differ by more than float32
rounding.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from tiny_run import CONFIG, DEFAULTS, metrics, write_texts

# Greatest relative difference of losses from float32 rounding.
ROUNDING = 1e-6
PORT = 47123
# Further name of each host, as Kubernetes names the pods of a JobSet.
POD = "train-hosts-{}-0.train"
FORWARD = str(Path(__file__).with_name("forward.py"))
EXPERTS = """{hidden_size: 16, num_layers: 1, num_heads: 4, attention_dropout: 0.1,
  feed_forward: experts, experts: {count: 4}}"""
DENSE = "{hidden_size: 16, num_layers: 1, num_heads: 4, attention_dropout: 0.1}"


class Cluster:
    """Hosts named host0, host1, …, joined by a bridge in a namespace of its own.

    Attributes:
      names: namespace of each host.
      shared: directory that all hosts see.
      own: directory of each host.
      disk: path of a disk that each host has for itself.
    """

    def __init__(
        self,
        count: int,
        work: Path,
        *,
        family: int = 4,
        loopback: bool = False,
        second: bool = False,
    ):
        """Makes the namespaces.

        Args:
          work: directory for `shared` and `own`.
          family: 4 or 6, the version of IP that the hosts' names resolve to.
          loopback: a host's own name resolves to 127.0.1.1 or ::1 on that host, as on Debian.
          second: every host has a second interface, `eth1`, on a separate network. The names
            `fast0`, `fast1`, … resolve to its addresses there.

        Raises:
          OSError: this machine does not allow namespaces; the message says why.
        """
        self._prefix = f"bptjax{os.getpid()}"
        self.names = [f"{self._prefix}-{i}" for i in range(count)]
        self._switch = f"{self._prefix}-switch"
        self.shared, self.own = work / "shared", [work / f"host{i}" for i in range(count)]
        self.disk = work / "disk"
        for directory in (self.shared, self.disk, *(own / "disk" for own in self.own)):
            directory.mkdir(parents=True)
        self._processes: list[subprocess.Popen[str]] = []
        self._forwarders: list[subprocess.Popen[str]] = []
        try:
            self._make(family, loopback, second)
        except BaseException:
            self.close()
            raise

    def _make(self, family: int, loopback: bool, second: bool) -> None:
        for name in (self._switch, *self.names):
            ip("netns", "add", name)
        for bridge in ("bridge", "other", "fast"):
            ip("-n", self._switch, "link", "add", "name", bridge, "type", "bridge")
            ip("-n", self._switch, "link", "set", bridge, "up")
        addresses = [f"10.77.0.{i + 1}" if family == 4 else f"fd77::{i + 1}" for i in self.hosts]
        for host, name in enumerate(self.names):
            port = ["link", "add", "name", f"to{host}", "type", "veth"]
            ip("-n", self._switch, *port, "peer", "name", "eth0", "netns", name)
            self.connect(host)
            self.link(host, up=True)
            ip("-n", name, "addr", "add", f"10.77.0.{host + 1}/24", "dev", "eth0")
            ip("-n", name, "addr", "add", f"fd77::{host + 1}/64", "dev", "eth0", "nodad")
            for interface in ("lo", "eth0"):
                ip("-n", name, "link", "set", interface, "up")
            lines = ["127.0.0.1 localhost", "::1 localhost"]
            for other, address in enumerate(addresses):
                if other == host and loopback:
                    address = "127.0.1.1" if family == 4 else "::1"
                lines.append(f"{address} host{other} {POD.format(other)}")
            if second:
                self._make_second(host, family)
                network = "10.88.0." if family == 4 else "fd88::"
                lines += [f"{network}{other + 1} fast{other}" for other in self.hosts]
            directory = Path("/etc/netns") / name
            directory.mkdir(parents=True)
            (directory / "hosts").write_text("\n".join(lines) + "\n")

    def _make_second(self, host: int, family: int) -> None:
        name, port = self.names[host], f"fast{host}"
        ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "eth1", "netns", name)
        ip("-n", self._switch, "link", "set", port, "master", "fast", "up")
        ip("-n", name, "addr", "add", f"10.88.0.{host + 1}/24", "dev", "eth1")
        ip("-n", name, "addr", "add", f"fd88::{host + 1}/64", "dev", "eth1", "nodad")
        ip("-n", name, "link", "set", "eth1", "up")

    def received(self, host: int, interface: str) -> int:
        """Returns the bytes that an interface of a host has received."""
        text = ip("-n", self.names[host], "-s", "-j", "link", "show", interface)
        return json.loads(text)[0]["stats64"]["rx"]["bytes"]

    @property
    def hosts(self) -> range:
        """Indices of the hosts."""
        return range(len(self.own))

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        """Starts a command on a host, with pipes of its stdout and stderr."""
        # `ip netns exec` has given the command its own mounts.
        script = 'hostname "$0"; mount --bind "$1" "$2"; shift 2; exec "$@"'
        named = ["unshare", "--uts", "sh", "-c", script, f"host{host}"]
        named += [str(self.own[host] / "disk"), str(self.disk)]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *named, *command],
            env={**environment, "TMPDIR": str(self.own[host])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def link(self, host: int, *, up: bool) -> None:
        """Connects or disconnects the cable of a host."""
        ip("-n", self._switch, "link", "set", f"to{host}", "up" if up else "down")

    def connect(self, host: int, bridge: str = "bridge") -> None:
        """Plugs the cable of a host into a bridge: `bridge`, or `other` for a partition."""
        ip("-n", self._switch, "link", "set", f"to{host}", "master", bridge)

    def disturb(self, host: int, *flags: str) -> None:
        """Delays and loses packets of a host; `flags` are those of `forward.py`."""
        inside = f"in{host}", f"mid{host}"
        ip("-n", self._switch, "link", "set", f"to{host}", "nomaster")
        ip("-n", self._switch, "link", "add", inside[0], "type", "veth", "peer", "name", inside[1])
        ip("-n", self._switch, "link", "set", inside[0], "master", "bridge")
        for name in inside:
            ip("-n", self._switch, "link", "set", name, "up")
        for name in self.names:
            # The kernel leaves checksums to the other end of a veth pair, and joins packets.
            off = [word for x in ("tx", "tso", "gso", "gro") for word in (x, "off")]
            ip("netns", "exec", name, "ethtool", "-K", "eth0", *off)
        command = ["ip", "netns", "exec", self._switch, sys.executable, FORWARD]
        command += [f"to{host}", inside[1], *flags]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._forwarders.append(subprocess.Popen(command, text=True, **pipes))

    def kill(self, host: int) -> None:
        """Kills all processes of a host."""
        command = ["ip", "netns", "pids", self.names[host]]
        found = subprocess.run(command, capture_output=True, text=True)
        for pid in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        """Ends the processes and removes the namespaces."""
        for host in self.hosts:
            self.kill(host)
        for process in self._forwarders:
            process.kill()
        for process in (*self._processes, *self._forwarders):
            process.communicate()
        for name in (self._switch, *self.names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def ip(*arguments: str) -> str:
    """Calls iproute2's `ip`. Returns its output.

    Raises:
      OSError: the call failed, or there is no `ip`.
    """
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def torchrun(count: int, index: int, hosts: int) -> tuple[dict[str, str], list[str]]:
    """Returns torchrun's environment variables of a process, and no flags."""
    where = {"MASTER_ADDR": "host0", "MASTER_PORT": str(PORT)}
    return where | {"WORLD_SIZE": str(count), "RANK": str(index)}, []


def variables(count: int, index: int, hosts: int) -> tuple[dict[str, str], list[str]]:
    """Returns JAX's environment variables of a process, and no flags."""
    where = {"JAX_COORDINATOR_ADDRESS": f"host0:{PORT}"}
    return where | {"JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(index)}, []


def flags(
    count: int, index: int, hosts: int, first: str = "host0"
) -> tuple[dict[str, str], list[str]]:
    """Returns no environment variables, and the flags of a process."""
    keys = dict(coordinator=f"{first}:{PORT}", num_processes=count, process_id=index)
    return {}, [f"--parallel.{key}={value}" for key, value in keys.items()]


def slurm(count: int, index: int, hosts: int) -> tuple[dict[str, str], list[str]]:
    """Returns the environment variables that srun sets, and no flags."""
    return {
        "SLURM_JOB_ID": "4097",
        "SLURM_STEP_NODELIST": f"host[0-{hosts - 1}]",
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index % (count // hosts)),
        "SLURM_STEP_NUM_NODES": str(hosts),
    }, []


def indexed_job(
    count: int, index: int, hosts: int, first: str = "host0"
) -> tuple[dict[str, str], list[str]]:
    """Returns the variables of a manifest, the same in all pods, with the index that Kubernetes
    adds to a pod of an indexed Job, and no flags."""
    given = {"JAX_COORDINATOR_ADDRESS": f"{first}:{PORT}", "JAX_NUM_PROCESSES": str(count)}
    return given | {"JOB_COMPLETION_INDEX": str(index)}, []


STARTS: dict[str, Callable[[int, int, int], tuple[dict[str, str], list[str]]]] = {
    "torchrun's variables": torchrun,
    "JAX's variables": variables,
    "--parallel.coordinator": flags,
    "Slurm's variables": slurm,
    "variables of Kubernetes's indexed Job": indexed_job,
    "variables of Kubernetes's JobSet": partial(indexed_job, first=POD.format(0)),
    # The name of the second interface.
    "--parallel.coordinator of a second interface": partial(flags, first="fast0"),
}


@dataclass(frozen=True)
class Case:
    """A run on several hosts.

    Attributes:
      mesh: sizes of the mesh axes; their product is the number of processes.
      start: a key of `STARTS`.
      family: 4 or 6, the version of IP.
      loopback: as in `Cluster`.
      local: checkpoints are written to each host's own disk first.
    """

    mesh: Mapping[str, int]
    start: str
    hosts: int = 2
    per_host: int = 2
    family: int = 4
    loopback: bool = False
    local: bool = False

    @property
    def second(self) -> bool:
        """Whether the hosts have a second interface."""
        return "second" in self.start

    @property
    def count(self) -> int:
        """Number of processes."""
        return self.hosts * self.per_host


CASES = [
    Case({"dp": 4}, "torchrun's variables"),
    Case({"fsdp": 4}, "--parallel.coordinator", family=6),
    Case({"tp": 4}, "Slurm's variables", loopback=True),
    Case({"sp": 4}, "JAX's variables", family=6, loopback=True),
    Case({"ep": 4}, "variables of Kubernetes's indexed Job"),
    Case({"dp": 2, "fsdp": 2}, "variables of Kubernetes's JobSet", family=6),
    Case({"fsdp": 4}, "--parallel.coordinator of a second interface"),
    Case({"fsdp": 2, "tp": 2}, "--parallel.coordinator of a second interface", family=6),
    Case({"fsdp": 3, "tp": 2}, "torchrun's variables", hosts=3, loopback=True),
    Case({"fsdp": 4}, "torchrun's variables", local=True),
    Case({"dp": 3, "sp": 2}, "variables of Kubernetes's JobSet", hosts=3, loopback=True),
    Case({"dp": 2, "fsdp": 4}, "Slurm's variables", hosts=4, family=6),
    Case({"ep": 4, "fsdp": 2}, "--parallel.coordinator", hosts=4),
]


def write_config(work: Path, mesh: Mapping[str, int]) -> Path:
    """Writes the config of a run on a mesh."""
    sizes = {"fsdp": 1, **mesh}
    values = DEFAULTS | {
        "PARALLEL": "{" + ", ".join(f"{axis}: {size}" for axis, size in sizes.items()) + "}",
        "MODEL": EXPERTS if "ep" in mesh else DENSE,
        "TEXTS": str(work / "texts"),
    }
    text = CONFIG
    for name, value in values.items():
        text = text.replace(name, value)
    file = work / "config.yaml"
    file.write_text(text)
    return file


def base_environment(work: Path, devices: int) -> dict[str, str]:
    """Returns the environment of a process: this one's, without launchers' variables."""
    launchers = ("SLURM_", "JAX_", "OMPI_", "MASTER_", "KUBERNETES_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    return kept | {
        "BPTJAX_SECRET": "hosts",
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(work / "cache"),
        "XLA_FLAGS": "--xla_backend_optimization_level=0 "
        f"--xla_force_host_platform_device_count={devices}",
    }


def start_all(
    cluster: Cluster, case: Case, work: Path, run: Path, *more: str
) -> list[subprocess.Popen[str]]:
    """Starts all processes of a run, with `more` flags."""
    started = []
    for index in range(case.count):
        environment, own = STARTS[case.start](case.count, index, case.hosts)
        command = [sys.executable, "-m", "bptjax.train", f"--config={work / 'config.yaml'}"]
        command += [f"--run_dir={run}", *own, *more]
        whole = base_environment(work, 1) | environment
        started.append(cluster.start(index // case.per_host, command, whole))
    return started


def finish(
    processes: Sequence[subprocess.Popen[str]], seconds: float = 600
) -> list[tuple[int, list[str]]]:
    """Waits for the end of processes. Returns each exit code with the lines of stderr; kills a
    process after `seconds`."""
    found, deadline = [], time.monotonic() + seconds
    for process in processes:
        try:
            _, error = process.communicate(timeout=max(1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            _, error = process.communicate()
        found.append((process.returncode, error.splitlines()))
    return found


def log_of(run: Path) -> list[str]:
    """Returns the lines of the log of a run; none if there is none."""
    file = run / "log.txt"
    return file.read_text().splitlines() if file.exists() else []


def losses(run: Path) -> dict[tuple[int, str], float]:
    """Returns the losses of a run by step and name."""
    names = ("train/loss", "eval/loss")
    return {(r["step"], name): r[name] for r in metrics(run) for name in names if name in r}


def alone(work: Path, devices: int, *more: str) -> dict[tuple[int, str], float]:
    """Returns the losses of one process with as many devices, and `more` flags."""
    run = work / "alone"
    command = [sys.executable, "-m", "bptjax.train", f"--config={work / 'config.yaml'}"]
    command += [f"--run_dir={run}", *more]
    environment = base_environment(work, devices)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return losses(run)


def compare(case: Case, work: Path) -> dict[str, Any]:
    """Runs a case. Returns its row."""
    write_texts(work / "texts", random.Random(0))
    write_config(work, case.mesh)
    wanted = alone(work, case.count)
    start = time.monotonic()
    options = dict(family=case.family, loopback=case.loopback, second=case.second)
    with Cluster(case.hosts, work, **options) as cluster:
        run = cluster.shared / "run"
        more = [f"--checkpoint.local_dir={cluster.disk}"] if case.local else []
        ends = finish(start_all(cluster, case, work, run, *more))
        interfaces = ["eth0", "eth1"] if case.second else ["eth0"]
        received = {x: cluster.received(0, x) for x in interfaces}
    got = losses(run)
    row: dict[str, Any] = dict(
        hosts=case.hosts,
        processes=case.count,
        mesh=dict(case.mesh),
        start=case.start,
        ip=case.family,
        loopback=case.loopback,
        local=case.local,
        received=received,
        told=next((x for x in log_of(run) if " hosts: " in x), "")[20:],
        seconds=round(time.monotonic() - start, 1),
        jax=jax.__version__,
    )
    if any(code for code, _ in ends) or got.keys() != wanted.keys():
        return row | dict(fault=[[code, lines[-3:]] for code, lines in ends])
    difference = max(abs(got[at] - wanted[at]) / abs(wanted[at]) for at in wanted)
    row |= dict(losses=len(wanted), equal=got == wanted, difference=difference)
    return row | (dict(fault="the losses differ") if difference > ROUNDING else {})


def run_cases(
    cases: Mapping[str, Any],
    measure: Callable[[Any, Path], dict[str, Any]],
    about: str,
    argv: list[str] | None = None,
) -> int:
    """Measures the cases that the command line names, and prints a row of each.

    Args:
      measure: returns the row of a case, with `fault` if it failed, in an empty directory.
      about: what the script does.

    Returns:
      The exit code.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--cases", nargs="+", default=list(cases), choices=cases, metavar="CASE")
    parser.add_argument("--out", type=Path, help="file to which each row is appended")
    args = parser.parse_args(argv)
    faults = 0
    for name in args.cases:
        with tempfile.TemporaryDirectory(prefix="bptjax-hosts-") as work:
            row = measure(cases[name], Path(work))
        faults += "fault" in row
        print(json.dumps(row), flush=True)
        if args.out:
            with args.out.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
    return 1 if faults else 0


def numbered(cases: Sequence[Any]) -> dict[str, Any]:
    """Returns the cases by their number."""
    return {str(number): case for number, case in enumerate(cases)}


if __name__ == "__main__":
    sys.exit(run_cases(numbered(CASES), compare, __doc__.splitlines()[0]))
