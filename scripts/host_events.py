"""Disturbs tiny runs on hosts of one machine (see `hosts.py`): their links, disks, clocks,
versions, processes and starts. Needs Linux, root, iproute2, iptables, ethtool, libfaketime and
bindfs.

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
import subprocess
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
from hosts import PORT, Cluster, base_environment, ip, log_of, torchrun, write_config
from tiny_run import STEPS, metrics, write_result, write_texts

from bptjax.run.heartbeat import BEAT, DIRECTORY
from bptjax.run.supervise import supervise

# Mesh by number of hosts, with one process each.
MESHES: Mapping[int, Mapping[str, int]] = {2: {"fsdp": 2}, 3: {"fsdp": 3}, 4: {"dp": 2, "fsdp": 2}}
CLONE_NEWUTS, CLONE_NEWNET = 0x4000000, 0x40000000
FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
DAYS = 40
ON = "continued"
REFUSED = "refused with one line, then continued"
RESTARTED = "restarted by supervisors"
# Kinds of refusals.
GAVE_UP = "given up by all supervisors, then continued"
STOPPED = "saved and stopped on all hosts, then continued"
LOST = "a peer process is lost: "
ENDED = LOST + r"a process on host\d has ended, and its output says why"
SUPERVISED = "supervised"
# Seconds of a run whose supervisors give up after three starts that each wait for five minutes.
LONG_S = 1800


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
      how: `supervised`; `clock` or `version` of this host alone; `served` for a shared directory
        from this host's own server, with flags of bindfs; or empty.
    """
    enter(*where)
    os.environ |= environment
    os.dup2(errors.fileno(), 2)
    errors.close()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    command = [sys.executable, "-m", "bptjax", "train", *argv]
    if "served" in how:
        serve(where[2], *how.partition("served")[2].split())
    if SUPERVISED in how:
        sys.exit(supervise(command))
    if how == "clock":
        os.environ |= {"LD_PRELOAD": FAKETIME, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        os.execv(sys.executable, command)
    from bptjax.cli.train import main
    from bptjax.run import versions

    if how == "version":
        real = versions.installed
        versions.installed = lambda package: "0.0.1" if package == "bptjax" else real(package)
    sys.exit(main(list(argv)))


def serve(directory: str, *flags: str) -> None:
    """Mounts a directory over itself, from a file server as with NFS, which may hang or end."""
    before = os.stat(directory).st_dev
    command = ["bindfs", "-f", "--no-allow-other", *flags, directory, directory]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    Path(os.environ["TMPDIR"], "server").write_text(str(server.pid))
    while os.stat(directory).st_dev == before:
        time.sleep(0.01)


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

    def choose(self, *, but: int | None = None) -> int:
        """Returns a random host."""
        return self.rng.choice([host for host in self.hosts if host != but])

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
                row |= dict(restarts=end.restarts) if any(end.restarts) else {}
                lines = [[x.replace(f"{run.parent}/", "") for x in own] for own in end.lines]
                row |= dict(lines=lines) if any(lines) else {}
                rows.append(row | (dict(fault=end.fault) if end.fault else {}))
                if end.outcome in (ON, RESTARTED):
                    break
            else:
                end = self.end(self.start(run))
        fault = ""
        if end.outcome not in (ON, RESTARTED) or end.fault:
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
        served: Mapping[int, str] | None = None,
    ) -> Started:
        """Starts the processes of a run, or those of the hosts `on`.

        Args:
          served: hosts with a server of the shared directory, and the flags of bindfs.
        """
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
            kind = f"{how} served {served[host]}" if served and host in served else how
            process = PROCESSES.Process(
                target=execute, args=(where, argv, environment, errors, kind)
            )
            process.start()
            errors.close()
            processes.append(process)
            pipes.append(pipe)
        return Started(processes, pipes, PORT, SUPERVISED in how)

    def wait(self, run: Path, started: Started, first: int = 1, most: int = STEPS - 4) -> None:
        """Waits for a random step of a run, `first` to `most`, and a moment more."""
        file, last = run / "metrics.jsonl", max((x["step"] for x in metrics(run)), default=0)
        before = file.stat().st_mtime_ns if file.exists() else 0
        step = self.rng.randint(min(max(first, last + 1), most), most)
        while all(x.is_alive() for x in started.processes):
            written = file.exists() and file.stat().st_mtime_ns > before
            if written and any(record["step"] >= step for record in metrics(run)):
                break
            time.sleep(0.01)
        time.sleep(self.rng.random() * 0.1)

    def end(
        self,
        started: Started,
        texts: Sequence[str] = (),
        codes: Sequence[int] = (1,),
        killed: int | None = None,
    ) -> "End":
        """Waits for the end of a run.

        Args:
          texts: what each process may say in its line: a regular expression for each.
          codes: exit codes that are allowed with a line.
          killed: a host whose process was killed, and says nothing.
        """
        found, lines = started.finish()
        outcome, fault = (RESTARTED if started.supervised else ON), ""
        if any(found) or any(lines):
            outcome = REFUSED
            ends = enumerate(zip(found, map(len, lines), strict=True))
            spoke = [end for x, end in ends if (x, end) != (killed, (-signal.SIGKILL, 0))]
            if len(found) < len(started.processes):
                fault = "no end"
            elif not {code for code, _ in spoke} <= {*codes} or any(n != 1 for _, n in spoke):
                fault = f"exit codes {found}"
            elif not texts or not all(
                re.search(text, own[0]) for text, own in zip(texts, lines, strict=True) if own
            ):
                fault = "unexpected lines"
        elif started.supervised and 0 in started.restarts:
            fault = "no restart"
        return End(outcome, [x[-3:] for x in lines], fault, started.restarts)

    def end_of_supervisors(self, started: Started, outcome: str, codes: Sequence[int]) -> "End":
        """Waits until all supervisors have ended for good, with one of `codes`, all the same."""
        found, lines = started.finish(LONG_S)
        if not any(found):
            return End(ON, lines)
        last = [own[-1:] for own in lines]
        fault = "" if len({*found}) == 1 and {*found} <= {*codes} else f"exit codes {found}"
        told = all(own and "not restarted" in own[0] for own in last)
        if outcome == GAVE_UP and found[0] == 1 and not told:
            fault = "unexpected lines"
        return End(outcome, last, fault, started.restarts)


@dataclass(frozen=True)
class End:
    """End of a run.

    Attributes:
      lines: last lines of stderr of each process.
      fault: why the end is not as promised; empty if it is.
      restarts: number of restarts by each supervisor.
    """

    outcome: str
    lines: list[list[str]]
    fault: str = ""
    restarts: Sequence[int] = ()


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


def host_back(drill: Drill, run: Path) -> End:
    """A host loses its power, and returns after the others have noticed."""
    started = drill.start(run, SUPERVISED)
    drill.wait(run, started)
    host = drill.choose()
    before = log_of(run)
    lose(drill, started, host)
    wait_for_restart(run, started, before)
    time.sleep(drill.rng.uniform(0, 5))
    drill.cluster.link(host, up=True)
    returned = drill.start(run, SUPERVISED, on=[host])
    started.processes += returned.processes
    started.pipes += returned.pipes
    end = drill.end(started)
    # The host that returned has a new supervisor.
    again = "no restart" if 0 in started.restarts[:-1] else ""
    return replace(end, fault=again) if end.fault == "no restart" else end


def lose(drill: Drill, started: Started, host: int) -> None:
    """Cuts the power of a host."""
    drill.cluster.link(host, up=False)
    drill.cluster.kill(host)
    started.processes.pop(host)
    started.pipes.pop(host)


def wait_for_restart(run: Path, started: Started, before: list[str]) -> None:
    """Waits for a restart after a lost peer, later than the lines `before` of the log."""
    while all(x.is_alive() for x in started.processes):
        if any("restarting after exit code 1: a peer" in x for x in log_of(run)[len(before) :]):
            break
        time.sleep(0.2)


def host_gone(drill: Drill, run: Path) -> End:
    """A host loses its power for good, and the supervisors of the others give up."""
    started = drill.start(run, SUPERVISED)
    drill.wait(run, started)
    host = drill.choose()
    lose(drill, started, host)
    end = drill.end_of_supervisors(started, GAVE_UP, (1,))
    drill.cluster.link(host, up=True)
    return end


def always_refused(drill: Drill, run: Path) -> End:
    """A host sees the shared directory read-only, and keeps seeing it so after each restart.
    Exit code 2 if it is the host of process 0, whose next start is refused."""
    started = drill.start(run, SUPERVISED)
    drill.wait(run, started)
    host = drill.choose()
    directory = str(drill.cluster.shared)
    call(change_mounts, started.processes[host].pid, make_read_only, directory)
    return drill.end_of_supervisors(started, GAVE_UP, (2,) if host == 0 else (1,))


def signaled(drill: Drill, run: Path) -> End:
    """SIGTERM to the supervisor of one host."""
    started = drill.start(run, SUPERVISED)
    drill.wait(run, started)
    with contextlib.suppress(ProcessLookupError):
        os.kill(started.processes[drill.choose()].pid, signal.SIGTERM)
    return drill.end_of_supervisors(started, STOPPED, (128 + signal.SIGTERM,))


def link_restored(drill: Drill, run: Path) -> End:
    """A link comes back after all processes have ended, and the supervisors restart them."""
    started = drill.start(run, SUPERVISED)
    drill.wait(run, started)
    host = drill.choose()
    before = log_of(run)
    drill.cluster.link(host, up=False)
    wait_for_restart(run, started, before)
    time.sleep(drill.rng.uniform(0, 60))
    drill.cluster.link(host, up=True)
    return drill.end(started)


def processes_of(supervisor: int) -> list[int]:
    """Returns the processes that a supervisor has started."""
    try:
        text = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def send(pids: Sequence[int], number: int) -> None:
    """Sends a signal to processes, some of which may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def process_killed(drill: Drill, run: Path) -> End:
    started = drill.start(run, SUPERVISED)
    drill.wait(run, started)
    send(processes_of(drill.rng.choice(started.processes).pid), signal.SIGKILL)
    return drill.end(started)


def killed_alone(drill: Drill, run: Path) -> End:
    """Without supervisors."""
    started = drill.start(run)
    drill.wait(run, started)
    host = drill.choose()
    send([started.processes[host].pid], signal.SIGKILL)
    return drill.end(started, [ENDED] * drill.count, killed=host)


def process_stopped(drill: Drill, run: Path) -> End:
    """For good, at a random moment or in a save."""
    started = drill.start(run, SUPERVISED)
    drill.wait(run, started)
    supervisor = drill.rng.choice(started.processes).pid
    if drill.rng.random() < 0.7:
        wait_for_save(supervisor, started)
    send(processes_of(supervisor), signal.SIGSTOP)
    return drill.end(started)


def wait_for_save(supervisor: int, started: Started) -> None:
    """Waits until the process of a supervisor saves."""
    while all(x.is_alive() for x in started.processes):
        for pid in processes_of(supervisor):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                variables = dict(x.split(b"=", 1) for x in words if b"=" in x)
                beat = Path(os.fsdecode(variables[DIRECTORY.encode()]), BEAT).read_text()
                if "saving" in beat:
                    return
        time.sleep(0.002)


def paused(drill: Drill, run: Path) -> End:
    """The process of a host is stopped for 30 to 100 s, while it starts or later."""
    started = drill.start(run)
    if drill.rng.random() < 0.5:
        time.sleep(drill.rng.uniform(0, 15))
    else:
        drill.wait(run, started)
    pid = started.processes[drill.choose()].pid
    send([pid], signal.SIGSTOP)
    time.sleep(drill.rng.uniform(30, 100))
    send([pid], signal.SIGCONT)
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


def delays(drill: Drill, run: Path) -> End:
    """The packets of a host are delayed by up to 25 ms, may overtake each other, and up to 3 % of
    them are lost."""
    delay, jitter, loss = (drill.rng.uniform(0, most) for most in (0.015, 0.01, 0.03))
    flags = f"--delay={delay:.4f}", f"--jitter={jitter:.4f}", f"--loss={loss:.3f}"
    drill.cluster.disturb(drill.choose(), *flags, f"--seed={drill.rng.randrange(10**6)}")
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


def server_of(drill: Drill, host: int) -> list[int]:
    """Returns the server of the shared directory of a host."""
    return [int((drill.cluster.own[host] / "server").read_text())]


def shared_hangs(drill: Drill, run: Path) -> End:
    """The server of a host's shared directory does not answer for up to 60 s."""
    host = drill.choose()
    started = drill.start(run, served={host: ""})
    drill.wait(run, started)
    send(server_of(drill, host), signal.SIGSTOP)
    time.sleep(drill.rng.uniform(5, 60))
    send(server_of(drill, host), signal.SIGCONT)
    return drill.end(started)


def shared_lost(drill: Drill, run: Path) -> End:
    """The server of a host's shared directory no longer answers, after the first save."""
    host = drill.choose()
    started = drill.start(run, served={host: ""})
    drill.wait(run, started, 4, 9)
    send(server_of(drill, host), signal.SIGSTOP)
    end = drill.end(started, disk_of(drill, host, "the disk has not answered for 300 s"))
    send(server_of(drill, host), signal.SIGKILL)
    return end


def shared_stale(drill: Drill, run: Path) -> End:
    """The server of a host's shared directory ends, and the mount remains."""
    host = drill.choose()
    started = drill.start(run, served={host: ""})
    drill.wait(run, started)
    send(server_of(drill, host), signal.SIGKILL)
    text = "not connected|removed|connection abort|Input/output|No such file"
    return drill.end(started, disk_of(drill, host, text), (1, 2))


def shared_slow(drill: Drill, run: Path) -> End:
    """A host reads and writes 10 to 200 kB/s of the shared directory."""
    rate = int(drill.rng.uniform(10e3, 200e3))
    flags = f"--read-rate={rate} --write-rate={rate}"
    return drill.end(drill.start(run, served={drill.choose(): flags}))


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
    "shared directory stale on one host": (2, shared_stale, True),
    "shared directory hangs on one host for good": (2, shared_lost, True),
    "other version on one host": (2, version, True),
    "other config on one host": (2, config, True),
    "process of a host killed, no supervisors": (2, killed_alone, True),
    "supervisor of a host gets SIGTERM": (2, signaled, True),
    "shared directory read-only after each restart": (2, always_refused, True),
    "host gone for good": (2, host_gone, True),
    "host gone, and back": (2, host_back, False),
    "link down until the run restarts": (2, link_restored, False),
    "process of a host killed": (2, process_killed, False),
    "process of a host stopped": (2, process_stopped, False),
    "process of a host paused for 30 to 100 s": (2, paused, False),
    "link down for 1 to 20 s": (2, link_for_seconds, False),
    "slow link": (2, slow_link, False),
    "lossy link": (2, lossy_link, False),
    "delayed and reordered packets": (2, delays, False),
    "slow host": (2, slow_host, False),
    "shared directory hangs on one host for 5 to 60 s": (2, shared_hangs, False),
    "slow shared directory on one host": (2, shared_slow, False),
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
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(work / "compiled"))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    drills: dict[int, Drill] = {}
    number = faults = 0
    while number == 0 or time.monotonic() - begin < args.seconds:
        hosts = rng.choice(args.hosts)
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
