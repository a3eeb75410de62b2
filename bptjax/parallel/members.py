"""Agreement of a supervised run's processes on which of them take part in a start.

The processes have one thing in common even if a host is lost, also that of process 0: the run
directory. In it, each process has a file, which it rewrites every few seconds. A process whose file
does not change for `SILENT_S` is lost, so no clocks are compared. The waiting process of the lowest
index writes the next plan, a new file that only one process can create.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bptjax.parallel.launch import ProcessInfo, is_loopback
from bptjax.parallel.mesh import LEAST_HOST_WAIT_S
from bptjax.run.heartbeat import beat
from bptjax.run.output import write_atomically

# Directory in the run directory, and its file with facts of the run with all processes.
DIRECTORY, COMPLETE = "processes", "complete.json"
# Seconds between signs of a process in training, and of a process that waits.
RUNNING_S, WAITING_S = 5.0, 1.0
# Seconds without a sign after which a process counts as lost.
SILENT_S = LEAST_HOST_WAIT_S


@dataclass(frozen=True)
class Complete:
    """Facts of a run with all its processes.

    Attributes:
      hosts: host of each process.
      devices: number of devices of each process.
      global_batch: number of sequences in an optimizer step.
      micro_batch: number of sequences in a micro-batch.
    """

    hosts: list[str]
    devices: list[int]
    global_batch: int
    micro_batch: int


@dataclass(frozen=True)
class Plan:
    """Processes that start together, or the end of the run.

    Attributes:
      members: indices of the processes, in the order of their new indices.
      tokens: the token of each; a process draws one at each start.
      coordinator: host:port of the first.
      spare: indices of processes that are present but do not start.
      code: exit code of the run's end; None if processes start.
      error: why the run ends.
    """

    members: list[int] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    coordinator: str = ""
    spare: list[int] = field(default_factory=list)
    code: int | None = None
    error: str = ""


# Members of this process, once it has joined others; global like the state of jax.distributed.
_joined: list["Members"] = []


def end_run(code: int) -> None:
    """Tells processes that wait to take part that the run has ended with an exit code."""
    for members in _joined:
        members.end(code)


class Members:
    """This process among the processes of a run.

    Attributes:
      complete: the facts of the run with all processes; None in the first start of a run, which
        needs all processes.
      plan: the processes of this start; None in a start with all processes that needed no
        agreement.
    """

    def __init__(
        self,
        run_dir: Path,
        process: ProcessInfo,
        choose: Callable[[Complete, Sequence[int]], list[int]],
        wait_s: float,
    ):
        """Reads the facts of the run. Writes nothing.

        Args:
          process: identity of this process in the run with all processes.
          choose: returns the indices of the processes that can keep the global batch, of those that
            are present; see `choose_members`.
          wait_s: seconds to wait for missing processes.
        """
        self.directory, self.process = run_dir / DIRECTORY, process
        self.plan: Plan | None = None
        self._choose, self._wait_s = choose, wait_s
        self._token = os.urandom(8).hex()
        # Last file of each other process, and when it last changed; None before the first change.
        self._seen: dict[int, tuple[str, float | None]] = {}
        self._own: dict[str, Any] = {}
        self._beats = self._number = 0
        self._lock = threading.Lock()
        self.complete: Complete | None = None
        with suppress(OSError, ValueError, TypeError):
            found = Complete(**json.loads((self.directory / COMPLETE).read_text()))
            if len(found.devices) == process.count:
                self.complete = found

    def join(self, tell: Callable[[str], None]) -> ProcessInfo:
        """Waits for the other processes. Returns this process's identity among those that start.

        Args:
          tell: prints a line.

        Raises:
          ValueError: the run was refused, such as a start whose processes cannot keep the global
            batch, or this host's address is unknown.
          SystemExit: the run has ended otherwise while this process waited.
        """
        address = _own_address(self.process)
        self.directory.mkdir(exist_ok=True)
        newest, told = self._newest(), set[str]()
        arrived = since = time.monotonic()
        while True:
            if (number := self._newest()) > newest and (plan := self._read(number)):
                newest = number
                if plan.error:
                    raise ValueError(plan.error)
                if plan.code is not None:
                    raise SystemExit(plan.code)
                if self._token in plan.tokens:
                    return self._start(plan, number)
            others, now = self._look(), time.monotonic()
            running = sorted(i for i, other in others.items() if other["plan"] is not None)
            if running:
                since = now
            self._write(plan=None, address=address, waited=now - since)
            absent = sorted({*range(self.process.count)} - {*others} - {self.process.index})
            leads = not running and self.process.index < min(others, default=self.process.count)
            text = f"waiting for {self._names(absent)} for up to {self._wait_s:,.0f} s"
            if running:
                text = f"the next checkpoint, or the end, of the run on {self._names(running)}"
                text = f"waiting for {text}"
            beat(text)
            if (running or (leads and absent)) and now - arrived > SILENT_S / 2:
                if text not in told:
                    tell(text)
                told.add(text)
            if leads:
                self._decide(newest, others, absent, now - since)
            time.sleep(WAITING_S)

    def begin(self, complete: Complete) -> None:
        """Keeps the facts of a start with all processes, and shows the others that this one runs.
        Call it after all checks."""
        if self.missing:
            return
        self.complete = complete
        if self.process.index == 0:
            self.directory.mkdir(exist_ok=True)
            write_atomically(self.directory / COMPLETE, json.dumps(asdict(complete)) + "\n")
        if self.plan is None:
            self._show()

    @property
    def is_first(self) -> bool:
        """Whether this process is process 0 of this start."""
        first = self.plan.members[0] if self.plan else 0
        return self.process.index == first

    @property
    def missing(self) -> list[str]:
        """Hosts of the processes that do not take part in this start."""
        if self.plan is None or self.complete is None:
            return []
        absent = {*range(self.process.count)} - {*self.plan.members}
        return list(dict.fromkeys(self.complete.hosts[i] for i in sorted(absent)))

    @property
    def spare(self) -> str:
        """Hosts of the processes that are present but do not take part; empty if there are none."""
        return self._names(self.plan.spare) if self.plan else ""

    def returned(self) -> str:
        """Returns the hosts of waiting processes with which more could take part; empty if there
        are none. Call it in process 0 of the start."""
        if self.plan is None or self.complete is None:
            return ""
        with self._lock:
            alive = self._alive()
        waiting = [i for i, other in alive.items() if other["plan"] is None]
        chosen = self._choose(self.complete, [*self.plan.members, *waiting])
        if len(chosen) <= len(self.plan.members):
            return ""
        return self._names(sorted({*chosen} - {*self.plan.members}))

    def end(self, code: int) -> None:
        """Tells waiting processes, from process 0 of the start, that the run has ended."""
        if self.plan is not None and self.missing and self.is_first:
            error = f"the run on {self._names(self.plan.members)} was refused; its output says why"
            with suppress(OSError):
                self._create(self._newest() + 1, Plan(code=code, error=error * (code == 2)))

    def _decide(
        self, newest: int, others: Mapping[int, Mapping[str, Any]], absent: list[int], waited: float
    ) -> None:
        """Writes the next plan, once all processes are present or have been waited for.

        Args:
          newest: number of the newest plan.
          others: files of the other processes, which all wait.
        """
        assert self.complete is not None
        waited = max([waited, *(other["waited"] for other in others.values())])
        present = {*others, self.process.index}
        before = self._read(newest)
        # After a start without some processes, these were waited for.
        enough = before is not None and bool(before.members) and present >= {*before.members}
        if absent and waited < (min(SILENT_S, self._wait_s) if enough else self._wait_s):
            return
        chosen = self._choose(self.complete, sorted(present))
        if not chosen:
            names = self._names(sorted(present))
            error = (
                f"{names}: must have devices for the axes of parallel, in a number that divides "
                f"the {self.complete.global_batch} sequences of a step; start {self._names(absent)}"
                " too"
            )
            self._create(newest + 1, Plan(code=2, error=error))
            return
        files = {i: self._own if i == self.process.index else others[i] for i in chosen}
        tokens = [file["token"] for file in files.values()]
        spare = sorted(present - {*chosen})
        self._create(newest + 1, Plan(chosen, tokens, files[chosen[0]]["address"], spare))

    def _start(self, plan: Plan, number: int) -> ProcessInfo:
        self.plan, self._number = plan, number
        _joined.append(self)
        self._show()
        index, own = plan.members.index(self.process.index), self.process
        return ProcessInfo(plan.coordinator, len(plan.members), index, own.local_devices)

    def _show(self) -> None:
        """Starts a thread that keeps this process's file new."""

        def show() -> None:
            while True:
                with suppress(OSError), self._lock:
                    self._write(plan=self._number)
                    if self.is_first:
                        self._look()
                time.sleep(RUNNING_S)

        threading.Thread(target=show, daemon=True).start()

    def _look(self) -> dict[int, dict[str, Any]]:
        """Reads the files of the other processes. Returns those of processes that are not lost."""
        now = time.monotonic()
        for index in range(self.process.count):
            if index == self.process.index:
                continue
            with suppress(OSError):
                text = (self.directory / f"{index}.json").read_text()
                before, changed = self._seen.get(index, (None, None))
                if text != before:
                    self._seen[index] = text, None if before is None else now
        return self._alive()

    def _alive(self) -> dict[int, dict[str, Any]]:
        found, now = {}, time.monotonic()
        for index, (text, changed) in self._seen.items():
            if changed is not None and now - changed < SILENT_S:
                with suppress(ValueError):  # A host that crashed may leave an empty file.
                    found[index] = json.loads(text)
        return found

    def _write(self, **values: Any) -> None:
        self._beats += 1
        self._own = dict(host=socket.gethostname(), token=self._token, beat=self._beats) | values
        # A half-written file would make this process look absent.
        file = self.directory / f"{self.process.index}.json"
        write_atomically(file, json.dumps(self._own) + "\n")

    def _newest(self) -> int:
        """Returns the number of the newest plan; 0 if there is none."""
        with suppress(OSError):
            names = [file.name for file in self.directory.glob("plan*.json")]
            return max((int(x[4:-5]) for x in names if x[4:-5].isdecimal()), default=0)
        return 0

    def _read(self, number: int) -> Plan | None:
        """Returns a plan; None if there is none of this number."""
        with suppress(OSError, ValueError, TypeError):
            return Plan(**json.loads((self.directory / f"plan{number}.json").read_text()))
        return None

    def _create(self, number: int, plan: Plan) -> None:
        """Writes a plan, unless another process has written one of this number."""
        fresh = self.directory / f".plan.{self._token}.tmp"
        fresh.write_text(json.dumps(asdict(plan)) + "\n")
        with suppress(FileExistsError):
            os.link(fresh, self.directory / f"plan{number}.json")
        fresh.unlink()
        for old in range(number - 10, number - 1):
            (self.directory / f"plan{old}.json").unlink(missing_ok=True)

    def _names(self, indices: Sequence[int]) -> str:
        """Names the hosts of processes."""
        assert self.complete is not None
        return " and ".join(dict.fromkeys(self.complete.hosts[i] for i in indices))


def choose_members(
    complete: Complete, present: Sequence[int], fits: Callable[[int], bool]
) -> list[int]:
    """Returns all processes if all are present, or else as many as have a number of devices that
    `fits`; none if no number does. Prefers hosts of which more processes are present.

    Args:
      fits: whether a number of devices can keep the mesh's set axes and the global batch.
    """
    if len(present) == len(complete.hosts):
        return sorted(present)
    counts = {name: sum(complete.hosts[i] == name for i in present) for name in complete.hosts}
    order = sorted(present, key=lambda i: (-counts[complete.hosts[i]], i))
    for number in range(len(order), 0, -1):
        if fits(sum(complete.devices[i] for i in order[:number])):
            return order[:number]
    return []


def _own_address(process: ProcessInfo) -> str:
    """Returns the host:port at which other processes would reach this one as process 0: its address
    on the way to process 0's host, with the same port.

    Raises:
      ValueError: this host has no such address.
    """
    host, _, port = process.coordinator.rpartition(":")
    if process.index == 0:
        return process.coordinator
    address = ""
    with suppress(OSError):
        family, kind, _, _, where = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # Sends nothing.
            address = probe.getsockname()[0]
            if is_loopback(address):  # On process 0's host.
                return process.coordinator
    if not address:  # The name of process 0's host may vanish with the host.
        with suppress(OSError):
            address = socket.gethostbyname(socket.gethostname())
    if not address or is_loopback(address):
        raise ValueError(
            f"parallel.coordinator={process.coordinator}: must be a name or address that this host "
            "can resolve; check the network"
        )
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
