"""Processes of a drill, forked from one that has imported the libraries, and their disturbances:
those inside a process, those of its files, and strangers at its port."""

import contextlib
import ctypes
import errno
import importlib
import itertools
import multiprocessing
import os
import random
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bptjax.run.supervise import Limits, supervise

# An operation beyond the last one of a run, at which nothing happens.
NEVER = 10**9
# Imported once, before the processes are forked. None of them starts a JAX backend.
LIBRARIES = [
    *("bptjax.cli.train", "bptjax.config_parser", "bptjax.training.loop", "bptjax.cli.convert"),
    "disturbances",
]
# Lines that are no errors: they name skipped checkpoints and restarts, and XLA's slow compilations
# on a busy machine.
TOLD = re.compile(
    r"\*{9,}|.*slow_operation_alarm\.cc.*|\[Compiling module .*|The operation took .*|"
    r"WARNING.*/checkpoints: .*(using|starting from) step \d+|"
    r"WARNING.*/checkpoints: step \d+ is not copied to it, .*|"
    r"WARNING.*/local/run.*: removing steps .*"
)
RESTARTED = re.compile(
    r"supervisor: restarting after (the run was killed by SIGKILL|no |a process on |"
    r"exit code 1: (a peer|process \d+ on )).*|error: (a peer process is lost: |process \d+ on ).*"
)
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(LIBRARIES)
FILES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")
# A hang is found after 5 s without a step, where the default is 120 s, and after 90 s of other
# work, where the default is an hour.
LIMITS = Limits(pause=0.1, poll=0.1, step=5.0, work=90.0, end=5.0)
DAY_S = 86_400
# Flags of Linux.
CLONE_NEWNS = 0x20000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 1 << 12, 1 << 14, 1 << 18
# Bytes that strangers send: garbage, the start of a gRPC connection, half a greeting, or nothing.
GREETINGS = (b"\xff\x00" * 2500, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"bptjax 1", b"")


@dataclass
class Started:
    """The processes of a run, and the pipes of their stderr.

    Attributes:
      restarts: number of restarts by each supervisor, known at the end.
    """

    processes: list[Any]
    pipes: list[Any]
    port: int
    supervised: bool
    restarts: list[int] = field(default_factory=list)

    def finish(self, seconds: float = 600) -> tuple[list[int], list[list[str]]]:
        """Waits for the end. Returns the exit codes, and the errors on each stderr."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
        if any(process.exitcode is None for process in self.processes):
            for process in self.processes:
                process.kill()
            return [-signal.SIGALRM], [[f"no end in {seconds:.0f} s"]]
        found = []
        for pipe in self.pipes:
            with open(os.dup(pipe.fileno()), errors="replace") as stream:
                lines = [x for x in stream.read().splitlines() if not TOLD.fullmatch(x)]
            self.restarts.append(sum("supervisor: restarting" in x for x in lines))
            found.append([x for x in lines if not (self.supervised and RESTARTED.fullmatch(x))])
        return [process.exitcode for process in self.processes], found


def fork(module: str, argv: list[str], places: tuple[str, ...], *how: Any) -> Any:
    """Starts a command in a process. Returns the process, and the pipe of its stderr."""
    pipe, errors = PROCESSES.Pipe(duplex=False)
    arguments = module, argv, places, errors, *how
    process = PROCESSES.Process(target=execute, args=arguments, daemon=True)
    process.start()
    errors.close()
    return process, pipe


def call(function: Any, *arguments: Any) -> None:
    """Calls a function that starts JAX, in a process of its own."""
    process = PROCESSES.Process(target=function, args=arguments)
    process.start()
    process.join()


def execute(
    module: str,
    argv: list[str],
    places: tuple[str, ...],
    errors: Any,
    environment: dict[str, str],
    kind: str,
    at: int,
    size: int,
) -> None:
    """Executes a command in a process of its own, with its stderr in a pipe, which has no limit of
    size.

    Args:
      module: the module of the command, such as `bptjax.cli.train`.
      kind: `supervised` for a run with a supervisor; `small` for a disk of `at` KiB as the last of
        `places`, which is lost with the process; or what happens at Python's file operation `at`
        in `places`: `kill`, `interrupt`, `terminate`, `full` (disk), `read-only` (disk), `clock`
        (steps by days). Tensorstore's operations, in C++, are reached by kills at a random moment,
        and by the disks.
      size: bytes to which files may grow on the full disk.
    """
    os.environ |= environment
    os.dup2(errors.fileno(), 2)
    errors.close()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if kind == "supervised":
        sys.exit(supervise([sys.executable, "-m", "bptjax", "train", *argv], LIMITS))
    if kind in ("read-only", "small"):
        own_mounts()
    if kind == "small":
        mount("none", places[-1], 0, "tmpfs", f"size={at}k")
        at = NEVER
    effects: dict[str, Callable[[], None]] = {
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
        "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
        "full": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, -1)),
        "read-only": lambda: make_read_only(places[0]),
        "clock": lambda: step_clock(random.Random(at)),
    }
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in FILES or not any(str(x).startswith(places) for x in arguments[:2]):
            return
        seen += 1
        if kind and seen == at:
            effects[kind]()

    sys.addaudithook(hook)
    sys.exit(importlib.import_module(module).main(argv))


def mount(source: str | None, target: str, flags: int, kind: str = "", options: str = "") -> None:
    """Calls mount(2). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    texts = kind.encode() or None, flags, options.encode() or None
    if libc.mount(source and source.encode(), target.encode(), *texts):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def own_mounts() -> None:
    """Gives this process mounts of its own, which end with it. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    mount("none", "/", MS_REC | MS_PRIVATE)


def make_read_only(directory: str) -> None:
    """Mounts a directory read-only; files that are open stay writable."""
    with contextlib.suppress(FileNotFoundError):  # The run has not made it yet.
        mount(directory, directory, MS_BIND)
        mount(None, directory, MS_REMOUNT | MS_BIND | MS_RDONLY)


def can_mount() -> bool:
    """Returns whether a process may have mounts of its own, by trying in a child."""
    child = os.fork()
    if child == 0:
        try:
            own_mounts()
        except OSError as error:
            os._exit(error.errno or errno.EPERM)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def step_clock(rng: random.Random) -> None:
    """Steps the clock by up to 100 days at each tenth look at it, back or forth."""
    real, looks, offset = time.time_ns, itertools.count(), 0

    def now_ns() -> int:
        nonlocal offset
        if next(looks) % 10 == 0:
            offset = rng.randrange(-100 * DAY_S, 100 * DAY_S) * 10**9
        return real() + offset

    time.time_ns, time.time = now_ns, lambda: now_ns() / 1e9


def damage(event: str, file: Path, rng: random.Random) -> None:
    """Removes or cuts a file, or flips a bit of it, as the name of the event says."""
    content = bytearray(file.read_bytes())
    if "removed" in event:
        file.unlink()
    elif "cut" in event:
        file.write_bytes(content[: rng.randrange(len(content) or 1)])
    elif content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)


def file_of_newest(directories: list[Path], rng: random.Random) -> Path | None:
    """Returns a file of the newest checkpoint in the directories; None if there is none."""
    steps = [path for d in directories for path in d.iterdir() if path.name.isdecimal()]
    if not steps:
        return None
    newest = max(steps, key=lambda path: int(path.name))
    return rng.choice(sorted(path for path in newest.rglob("*") if path.is_file()))


@contextlib.contextmanager
def changed_file(directory: Path, rng: random.Random) -> Iterator[None]:
    """Changes a file of the data in place, or replaces it, and restores it at the end."""
    file = rng.choice(sorted(directory.iterdir()))
    before = file.read_bytes()
    content = rng.choice([before[::-1], before[: len(before) // 2], before + b" more", b"\xff"])
    if rng.random() < 0.5:
        file.write_bytes(content)
    else:
        fresh = directory.parent / "fresh"
        fresh.write_bytes(content)
        fresh.replace(file)
    try:
        yield
    finally:
        file.write_bytes(before)


@contextlib.contextmanager
def strangers(port: int, rng: random.Random, host: str = "localhost") -> Iterator[None]:
    """Connects to the port again and again; sends garbage or half a greeting, or nothing."""
    done = threading.Event()

    def bother() -> None:
        kept = []
        while not done.wait(0.05):
            with contextlib.suppress(OSError):
                kept.append(socket.create_connection((host, port), 1))
                kept[-1].sendall(rng.choice(GREETINGS))
            if len(kept) > 20 or kept and rng.random() < 0.5:
                kept.pop(0).close()
        for connection in kept:
            connection.close()

    thread = threading.Thread(target=bother)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]
