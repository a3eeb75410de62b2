"""Disturbs tiny runs on hosts of one machine (see `hosts.py`): their links, disks, clocks, versions
and starts. Needs Linux, root, iproute2, iptables and libfaketime.

    python scripts/host_events.py --seconds 600 --seed 0 --out rows.jsonl

Every run has up to four events. After an event, the run either goes on, or each of its processes
ends with one line that says why, and the same command goes on. At the end, losses, gradient norms
and every array of the last checkpoint must be, bit for bit, those of a run on the same hosts
without events. Prints a row per event, and exits with 1 after a fault.
"""

import argparse
import contextlib
import ctypes
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import disturbances
from disturbances import PROCESSES, Started, call, make_read_only, mount
from hosts import PORT, Cluster, base_environment, ip, torchrun, write_config
from tiny_run import STEPS, metrics, write_result, write_texts

from bptjax.run.supervise import LIMITS, supervise

# Mesh by number of hosts, with one process each.
MESHES: Mapping[int, Mapping[str, int]] = {2: {"fsdp": 2}, 4: {"dp": 2, "fsdp": 2}}
CLONE_NEWUTS, CLONE_NEWNET = 0x4000000, 0x40000000
FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
DAYS = 40
ON = "continued"
REFUSED = "refused with one line, then continued"
RESTARTED = "restarted by supervisors"
LOST = "a peer process is lost: "
ENDED = LOST + "another process of this run has ended"


def enter(namespace: str, name: str, shared: str) -> None:
    """Moves this process, which has one thread, to a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        done = libc.setns(file.fileno(), CLONE_NEWNET)
    if done or libc.unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    socket.sethostname(name)
    disturbances.own_mounts()
    mount(f"/etc/netns/{namespace}/hosts", "/etc/hosts", disturbances.MS_BIND)
    mount(shared, shared, disturbances.MS_BIND)


def execute(
    where: tuple[str, str, str],
    argv: Sequence[str],
    environment: Mapping[str, str],
    errors: Any,
    how: str,
) -> None:
    """Trains on a host.

    Args:
      where: arguments of `enter`.
      errors: pipe for stderr.
      how: `supervised`; `clock` or `version` of this host alone; or empty.
    """
    enter(*where)
    os.environ |= environment
    os.dup2(errors.fileno(), 2)
    errors.close()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    command = [sys.executable, "-m", "bptjax", "train", *argv]
    if how == "supervised":
        sys.exit(supervise(command, replace(LIMITS, pause=1.0)))
    if how == "clock":
        os.environ |= {"LD_PRELOAD": FAKETIME, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        os.execv(sys.executable, command)
    from bptjax.cli.train import main
    from bptjax.run import versions

    if how == "version":
        real = versions.installed
        versions.installed = lambda package: "0.0.1" if package == "bptjax" else real(package)
    sys.exit(main(list(argv)))


class Drill:
    """Runs on some hosts.

    Attributes:
      cluster: the hosts, made anew for each event.
      port: port of process 0.
    """

    def __init__(self, work: Path, hosts: int, rng: random.Random):
        """Trains a run without events."""
        self.work, self.rng, self.count = work, rng, hosts
        self.runs = 0
        work.mkdir()
        write_texts(work / "texts", random.Random(0))
        write_config(work, MESHES[hosts])
        with Cluster(hosts, work / "run0") as self.cluster:
            run = self.cluster.shared / "run"
            end = self.end(self.start(run))
        if end.outcome != ON:
            raise RuntimeError(f"the run without events failed: {end}")
        self.wanted = self.result(run)

    def result(self, run: Path) -> tuple[list[Any], dict[str, bytes]]:
        """Returns the result of a run."""
        file = self.work / "result"
        call(write_result, run, file)
        return pickle.loads(file.read_bytes())

    def run(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Starts a run with events, one after another, until it has ended well. Returns the
        outcome of each."""
        self.runs += 1
        work, rows = self.work / f"run{self.runs}", []
        with Cluster(self.count, work, loopback=self.rng.random() < 0.5) as self.cluster:
            run = self.cluster.shared / "run"
            for name in names:
                start = time.monotonic()
                end = EVENTS[name][1](self, run)
                row = dict(event=name, hosts=self.count, outcome=end.outcome)
                row |= dict(seconds=round(time.monotonic() - start, 1))
                row |= dict(lines=end.lines) if any(end.lines) else {}
                rows.append(row | (dict(fault=end.fault) if end.fault else {}))
                if end.outcome != REFUSED:
                    break
            else:
                end = self.end(self.start(run))
        fault = ""
        if end.outcome == REFUSED or end.fault:
            fault = f"refused again: {end.fault} {end.lines}"
        elif self.result(run) != self.wanted:
            fault = "the results differ"
        for row in rows:
            if fault:
                row.setdefault("fault", fault)
        if not any("fault" in row for row in rows):
            shutil.rmtree(work)
        return rows

    @property
    def hosts(self) -> range:
        return range(self.count)

    def start(
        self,
        run: Path,
        how: str = "",
        *,
        on: Sequence[int] | None = None,
        flags: Sequence[str] = (),
    ) -> Started:
        """Starts the processes of a run, or those of the hosts `on`."""
        processes, pipes = [], []
        for host in self.hosts if on is None else on:
            environment, _ = torchrun(self.count, host, self.count)
            environment = base_environment(self.work, 1) | environment
            environment |= {
                "TMPDIR": str(self.cluster.own[host]),
                "FAKETIME": f"{self.rng.choice('+-')}{DAYS}d",
            }
            argv = [f"--config={self.work / 'config.yaml'}", f"--run_dir={run}", *flags]
            pipe, errors = PROCESSES.Pipe(duplex=False)
            where = self.cluster.names[host], f"host{host}", str(self.cluster.shared)
            process = PROCESSES.Process(
                target=execute, args=(where, argv, environment, errors, how)
            )
            process.start()
            errors.close()
            processes.append(process)
            pipes.append(pipe)
        return Started(processes, pipes, PORT, how == "supervised")

    def wait(self, run: Path, started: Started) -> None:
        """Waits for a random step of a run, and a moment more."""
        last = max((record["step"] for record in metrics(run)), default=0)
        step = self.rng.randint(min(last + 1, STEPS - 4), STEPS - 4)
        while all(x.is_alive() for x in started.processes):
            if any(record["step"] >= step for record in metrics(run)):
                break
            time.sleep(0.01)
        time.sleep(self.rng.random() * 0.1)

    def end(
        self, started: Started, texts: Sequence[str] = (), codes: Sequence[int] = (1,)
    ) -> "End":
        """Waits for the end of a run.

        Args:
          texts: what each process may say in its line: a regular expression for each.
          codes: exit codes that are allowed with a line.
        """
        found, lines = started.finish()
        outcome, fault = (RESTARTED if started.supervised else ON), ""
        if any(found) or any(lines):
            outcome = REFUSED
            if not set(found) <= {*codes} or any(len(own) != 1 for own in lines):
                fault = f"exit codes {found}"
            elif not texts or not all(map(re.search, texts, [own[0] for own in lines])):
                fault = "unexpected lines"
        return End(outcome, [x[-3:] for x in lines], fault)


@dataclass(frozen=True)
class End:
    """End of a run.

    Attributes:
      lines: last lines of stderr of each process.
      fault: why the end is not as promised; empty if it is.
    """

    outcome: str
    lines: list[list[str]]
    fault: str = ""


def silent(drill: Drill, lost: int) -> list[str]:
    """Returns what each process says if the network does not reach a host."""
    gone = [f"host{x}" for x in drill.hosts if x] if lost == 0 else [f"host{lost}"]
    first = LOST + "no answer from " + " and ".join(gone)
    alone = LOST + "no answer from host0"
    return [first, *(alone if lost in (0, x) else ENDED for x in drill.hosts if x)]


def link_for_seconds(drill: Drill, run: Path) -> End:
    started = drill.start(run)
    drill.wait(run, started)
    host = drill.rng.choice(drill.hosts)
    drill.cluster.link(host, up=False)
    time.sleep(drill.rng.uniform(1, 20))
    drill.cluster.link(host, up=True)
    return drill.end(started)


def link_for_good(drill: Drill, run: Path) -> End:
    started = drill.start(run)
    drill.wait(run, started)
    host = drill.rng.choice(drill.hosts)
    drill.cluster.link(host, up=False)
    end = drill.end(started, silent(drill, host))
    drill.cluster.link(host, up=True)
    return end


def partition(drill: Drill, run: Path) -> End:
    """The halves of the hosts no longer reach each other."""
    started = drill.start(run)
    drill.wait(run, started)
    half = [x for x in drill.hosts if x >= drill.count // 2]
    for host in half:
        drill.cluster.connect(host, "other")
    texts = [LOST + "no answer from " + " and ".join(f"host{x}" for x in half)]
    texts += [LOST + "no answer from host0" if x in half else ENDED for x in drill.hosts if x]
    end = drill.end(started, texts)
    for host in half:
        drill.cluster.connect(host)
    return end


def host_gone(drill: Drill, run: Path) -> End:
    """A host loses its power, and returns after the others have noticed."""
    started = drill.start(run, "supervised")
    drill.wait(run, started)
    host = drill.rng.choice(drill.hosts)
    drill.cluster.link(host, up=False)
    drill.cluster.kill(host)
    started.processes.pop(host)
    started.pipes.pop(host)
    while all(x.is_alive() for x in started.processes):
        log = run / "log.txt"
        if log.exists() and "restarting after exit code 1: a peer" in log.read_text():
            break
        time.sleep(0.2)
    time.sleep(drill.rng.uniform(0, 5))
    drill.cluster.link(host, up=True)
    returned = drill.start(run, "supervised", on=[host])
    started.processes += returned.processes
    started.pipes += returned.pipes
    return drill.end(started)


def process_killed(drill: Drill, run: Path) -> End:
    started = drill.start(run, "supervised")
    drill.wait(run, started)
    victim = drill.rng.choice(started.processes).pid
    for child in Path(f"/proc/{victim}/task/{victim}/children").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)
    return drill.end(started)


def slow_link(drill: Drill, run: Path) -> End:
    """A link of 1 to 20 Mbit/s, whose queue delays packets by up to 0.4 s and drops others."""
    shape = ["root", "tbf", "rate", f"{drill.rng.uniform(1, 20):.1f}mbit", "burst", "16kbit"]
    shape += ["latency", f"{drill.rng.uniform(50, 400):.0f}ms"]
    namespace = drill.cluster.names[drill.rng.choice(drill.hosts)]
    ip("netns", "exec", namespace, "tc", "qdisc", "add", "dev", "eth0", *shape)
    return drill.end(drill.start(run))


def lossy_link(drill: Drill, run: Path) -> End:
    """A host loses 1 to 10 % of the packets that it receives."""
    namespace = drill.cluster.names[drill.rng.choice(drill.hosts)]
    chance = ["--mode", "random", "--probability", f"{drill.rng.uniform(0.01, 0.1):.3f}"]
    rule = ["-A", "INPUT", "-i", "eth0", "-m", "statistic", *chance, "-j", "DROP"]
    ip("netns", "exec", namespace, "iptables", *rule)
    return drill.end(drill.start(run))


def full_disk(drill: Drill, run: Path) -> End:
    """Of one host alone, as with a quota: files cannot grow beyond a size."""
    started = drill.start(run)
    drill.wait(run, started)
    host, size = drill.rng.choice(drill.hosts), drill.rng.choice([0, 500, 3000, 9000])
    with contextlib.suppress(ProcessLookupError):
        pid = started.processes[host].pid
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    return drill.end(started, disk_of(drill, host, "File too large|disk"))


def disk_of(drill: Drill, host: int, text: str) -> list[str]:
    """Returns what each process says after an error of the disk of a host: its own says the error,
    the others the same or that it is lost."""
    others = rf"{LOST}|on host{host}|{text}"
    return [text if x == host else others for x in drill.hosts]


def shared_gone(drill: Drill, run: Path) -> End:
    """A host sees an empty directory in place of the shared one."""
    return shared(drill, run, hide)


def hide(directory: str) -> None:
    """Mounts an empty directory over another."""
    mount("none", directory, 0, "tmpfs")


def shared_read_only(drill: Drill, run: Path) -> End:
    """A host sees the shared directory read-only."""
    return shared(drill, run, make_read_only)


def shared(drill: Drill, run: Path, change: Callable[[str], None]) -> End:
    started = drill.start(run)
    drill.wait(run, started)
    host = drill.rng.choice(drill.hosts)
    call(change_mounts, started.processes[host].pid, change, str(drill.cluster.shared))
    text = "No such file|Read-only|removed|gone|read-only"
    return drill.end(started, disk_of(drill, host, text), (1, 2))


def change_mounts(pid: int, change: Callable[[str], None], where: str) -> None:
    """Changes the mounts of another process."""
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/ns/mnt") as file:
        if libc.setns(file.fileno(), disturbances.CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        change(where)


def clock(drill: Drill, run: Path) -> End:
    return drill.end(odd(drill, run, "clock"))


def version(drill: Drill, run: Path) -> End:
    host = drill.rng.randrange(1, drill.count)
    text = rf"process {host} on host{host}: .*version"
    return drill.end(odd(drill, run, "version", host=host), [text] * drill.count, (2,))


def config(drill: Drill, run: Path) -> End:
    host = drill.rng.randrange(1, drill.count)
    text = rf"process {host} on host{host}: must have the same config"
    started = odd(drill, run, "", ["--seed=1"], host)
    return drill.end(started, [text] * drill.count, (2,))


def late(drill: Drill, run: Path) -> End:
    """A host starts 2 to 60 s after the others."""
    return drill.end(odd(drill, run, "", delay=drill.rng.uniform(2, 60)))


def odd(
    drill: Drill,
    run: Path,
    how: str,
    flags: Sequence[str] = (),
    host: int | None = None,
    delay: float = 0,
) -> Started:
    """Starts a run in which one host, by default a random one, is unlike the others."""
    host = drill.rng.choice(drill.hosts) if host is None else host
    started = drill.start(run, on=[x for x in drill.hosts if x != host])
    time.sleep(delay)
    other = drill.start(run, how, on=[host], flags=flags)
    started.processes.insert(host, other.processes[0])
    started.pipes.insert(host, other.pipes[0])
    return started


def strangers(drill: Drill, run: Path) -> End:
    """Unknown connections to the port of process 0, from another host."""
    namespace, seed = drill.cluster.names[1], drill.rng.random()
    where = namespace, "stranger", str(drill.cluster.shared)
    stranger = PROCESSES.Process(target=bother, args=(where, seed), daemon=True)
    stranger.start()
    end = drill.end(drill.start(run))
    stranger.kill()
    return end


def bother(where: tuple[str, str, str], seed: float) -> None:
    """Connects to the port of process 0 from a host."""
    enter(*where)
    with disturbances.strangers(PORT, random.Random(seed), "host0"):
        time.sleep(3600)


def impostor(drill: Drill, run: Path) -> End:
    """Another program has the port of process 0, and leaves after process 0 was refused."""
    where = drill.cluster.names[0], "host0", str(drill.cluster.shared)
    other = PROCESSES.Process(target=occupy, args=(where, drill.rng.random()), daemon=True)
    other.start()
    started = drill.start(run)
    first = started.processes[0]
    first.join(60)
    text = rf"parallel.coordinator=host0:{PORT}: "
    end = drill.end(Started([first], started.pipes[:1], PORT, False), [text], (2,))
    time.sleep(drill.rng.uniform(0, 5))
    other.kill()
    other.join()
    if end.outcome != REFUSED:
        return replace(end, fault="process 0 started")
    if not all(process.is_alive() for process in started.processes[1:]):
        for process in started.processes[1:]:
            process.terminate()  # As a launcher does.
        return end
    again = drill.start(run, on=[0])
    started.processes[0], started.pipes[0] = again.processes[0], again.pipes[0]
    rest = drill.end(started)
    return replace(rest, lines=[*end.lines, *rest.lines], fault=end.fault or rest.fault)


def occupy(where: tuple[str, str, str], seed: float) -> None:
    """Listens at the port of process 0 and answers with garbage or nothing."""
    enter(*where)
    with socket.create_server(("", PORT)) as server:
        kept, rng = [], random.Random(seed)
        while True:
            kept.append(server.accept()[0])
            with contextlib.suppress(OSError):
                kept[-1].sendall(rng.choice(disturbances.GREETINGS))
            if rng.random() < 0.5:
                kept.pop().close()


@contextlib.contextmanager
def slowed(pid: int) -> Iterator[None]:
    """Stops a process for two thirds of the time."""
    done = threading.Event()

    def slow() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not done.is_set():
                for number, seconds in ((signal.SIGSTOP, 0.02), (signal.SIGCONT, 0.01)):
                    os.kill(pid, number)
                    time.sleep(seconds)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def slow_host(drill: Drill, run: Path) -> End:
    """The log names the host."""
    started = drill.start(run)
    host = drill.rng.choice(drill.hosts)
    with slowed(started.processes[host].pid):
        end = drill.end(started)
    log = (run / "log.txt").read_text()
    named = set(re.findall(r"(host\d) takes [\d.]+ × ", log))
    return end if f"host{host}" in named else replace(end, fault=f"named: {sorted(named)}")


# Smallest number of hosts, function, and whether it ends the run.
EVENTS: dict[str, tuple[int, Callable[[Drill, Path], End], bool]] = {
    "link down for good": (2, link_for_good, True),
    "partition between two halves": (4, partition, True),
    "full disk of one host": (2, full_disk, True),
    "shared directory gone on one host": (2, shared_gone, True),
    "shared directory read-only on one host": (2, shared_read_only, True),
    "other version on one host": (2, version, True),
    "other config on one host": (2, config, True),
    "host gone, and back": (2, host_gone, False),
    "process of a host killed": (2, process_killed, False),
    "link down for 1 to 20 s": (2, link_for_seconds, False),
    "slow link": (2, slow_link, False),
    "lossy link": (2, lossy_link, False),
    "slow host": (2, slow_host, False),
    "clock 40 days off on one host": (2, clock, False),
    "late host": (2, late, False),
    "unknown connections": (2, strangers, False),
    "impostor at the port": (2, impostor, False),
}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="time after which no run starts")
    parser.add_argument("--seed", type=int, default=0, help="seed of the events")
    text = "parts of the names of events"
    parser.add_argument("--events", nargs="+", default=[""], help=text)
    parser.add_argument("--hosts", type=int, nargs="+", choices=MESHES, default=list(MESHES))
    parser.add_argument("--out", type=Path, help="file to which each row is appended")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begin, rng = time.monotonic(), random.Random(args.seed)
    work = Path(tempfile.mkdtemp(prefix="bptjax-hosts-"))
    # JAX reads them when the server of forks imports it.
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(work / "compiled")}
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    drills: dict[int, Drill] = {}
    number = faults = 0
    while number == 0 or time.monotonic() - begin < args.seconds:
        hosts = args.hosts[0] if rng.random() < 0.8 else args.hosts[-1]
        names = [name for name in EVENTS if any(part in name for part in args.events)]
        names = [name for name in names if hosts >= EVENTS[name][0]]
        rng.shuffle(names)
        last = [name for name in names if not EVENTS[name][2]]
        names = [name for name in names if EVENTS[name][2]][:3] + last[:1]
        if hosts not in drills:
            drills[hosts] = Drill(work / str(hosts), hosts, rng)
        for row in drills[hosts].run(names):
            row = dict(seed=args.seed) | row
            faults += "fault" in row
            number += 1
            print(json.dumps(row), flush=True)
            if args.out:
                with args.out.open("a") as stream:
                    stream.write(json.dumps(row) + "\n")
    print(f"seed {args.seed}: {number} events, {faults} faults")
    if not faults:
        shutil.rmtree(work)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
