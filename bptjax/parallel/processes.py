"""Several processes as one run: found in the config or the environment, joined, watched, left."""

import json
import os
import socket
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bptjax.parallel.mesh import ParallelConfig

# Where the config is silent, the first of these in the environment: JAX's names, which it does not
# read itself, torchrun's, and Open MPI's, from version 5 of which JAX takes nothing without mpi4py.
VARIABLES = {
    "num_processes": ("JAX_NUM_PROCESSES", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
    "process_id": ("JAX_PROCESS_ID", "RANK", "OMPI_COMM_WORLD_RANK"),
}
# Processes of this host, and this one's number among them.
ON_HOST = {
    "LOCAL_WORLD_SIZE": "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "OMPI_COMM_WORLD_LOCAL_RANK",
}
# Seconds that the processes have to meet.
MEETING = 300
# Seconds without a sign of life after which JAX ends all, if a host vanishes: a process that ends
# is missed at once.
HEARTBEAT = 60
# Seconds that a process has to end by its own account of a loss, or of what goes wrong in all.
GRACE = 5
# Seconds that a process which failed may wait for the others.
CLOSING = 30

# Of this process, as jax.distributed's own state is.
_together = threading.Event()
_lost = threading.Event()


class PeerLost(RuntimeError):
    """Another process of the run has ended before its time."""

    def __init__(self):
        super().__init__(
            "a peer process is lost: another process of this run has ended, and its output says "
            "why; start all of them again to go on from the last checkpoint"
        )


@dataclass(frozen=True)
class Place:
    """A process's place among those of the run.

    Attributes:
      coordinator: host:port of process 0.
      local_devices: the GPUs of its host that it takes; None: all.
    """

    coordinator: str
    count: int
    index: int
    local_devices: Sequence[int] | None


def find_place(config: ParallelConfig, environment: Mapping[str, str]) -> Place | None:
    """Where this process stands; None where it is alone.

    The config comes before the environment: JAX_COORDINATOR_ADDRESS and the like, torchrun's
    MASTER_ADDR and the like, then what JAX finds of Slurm and Open MPI.

    Raises:
      ValueError: a part of it is missing, is no number or out of range; or the coordinator is a
        loopback address and there are several hosts.
    """
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    if not address and {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        address = "{MASTER_ADDR}:{MASTER_PORT}".format_map(environment)
    address = config.coordinator or address
    count, index = (_number(config, name, environment) for name in VARIABLES)
    local: Sequence[int] | None = None
    if devices := environment.get("JAX_LOCAL_DEVICE_IDS"):
        try:
            local = [int(number) for number in devices.split(",")]
        except ValueError as error:
            raise ValueError(
                f"JAX_LOCAL_DEVICE_IDS={devices} in the environment is not numbers, as 0,1"
            ) from error
    for size, rank in ON_HOST.items():
        if local is None and _integer(size, environment, 1) > 1:
            local = [_integer(rank, environment, 0)]
    slurm = "SLURM_STEP_NODELIST" in environment and _integer("SLURM_NTASKS", environment, 1) > 1
    if count == 1:
        return None
    if None in (address, count, index) and (slurm or "OMPI_COMM_WORLD_SIZE" in environment):
        from jax._src.clusters import ClusterEnv

        try:
            address, count, index, local = ClusterEnv.auto_detect_unset_distributed_params(
                address, count, index, local, None, None
            )
        except RuntimeError as error:
            raise ValueError(f"{error} Or set parallel.coordinator") from error
    if (address, count, index) == (None, None, None):
        return None
    text = f"parallel.coordinator={address}, num_processes={count}, process_id={index}"
    if address is None or count is None or index is None:
        raise ValueError(f"{text}: all three are needed, here or in the environment")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise ValueError(f"parallel.coordinator={address} is not host:port")
    if not 0 <= index < count:
        raise ValueError(f"{text}: process_id is from 0 to num_processes - 1")
    loopback = host in ("localhost", "::1", "[::1]") or host.startswith("127.")
    if loopback and (why := _several_hosts(count, environment)):
        raise ValueError(
            f"parallel.coordinator={address} is the loopback address of each host, and there are "
            f"several ({why}); give the name of process 0's host"
        )
    return Place(address, count, index, local)


def _number(config: ParallelConfig, name: str, environment: Mapping[str, str]) -> int | None:
    if (value := getattr(config, name)) is not None:
        return value
    found = (variable for variable in VARIABLES[name] if variable in environment)
    return next((_integer(variable, environment, 0) for variable in found), None)


def _integer(variable: str, environment: Mapping[str, str], default: int) -> int:
    text = environment.get(variable, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{variable}={text} in the environment is not a number") from error


def _several_hosts(count: int, environment: Mapping[str, str]) -> str:
    """What in the environment says that there are several hosts, or nothing."""
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"):
        if _integer(name, environment, 1) > 1:
            return f"{name}={environment[name]}"
    for name in ON_HOST:
        if _integer(name, environment, count) < count:
            return f"{name}={environment[name]} of {count} processes"
    return ""


def join(config: ParallelConfig) -> None:
    """Joins the other processes of the run, if there are any; before a JAX backend starts.

    From then on a peer that ends before its time ends this process too: by `PeerLost` in what is
    `watched`, or, if that is stuck, by one line on stderr and exit code 1 after `GRACE` seconds.
    So ends it too if the others do not come within `MEETING` seconds.

    Raises:
      ValueError: as `find_place`, or the coordinator's port is taken.
    """
    place = find_place(config, os.environ)
    if place is None or jax.distributed.is_initialized():
        return
    # It would take SIGTERM from Python.
    jax.config.update("jax_enable_preemption_service", False)
    here = _relay(place)
    alone = TimeoutError(
        f"process {place.index} of {place.count} has waited {MEETING} s for the others at "
        f"parallel.coordinator={place.coordinator}"
    )
    # Before JAX does so itself, by a C++ abort.
    timer = threading.Timer(MEETING, _end, (alone,))
    timer.daemon = True
    timer.start()
    jax.distributed.initialize(
        here,
        place.count,
        place.index,
        local_device_ids=place.local_devices,
        cluster_detection_method="deactivate",
        coordinator_bind_address=here,
        initialization_timeout=MEETING + GRACE,
        heartbeat_timeout_seconds=HEARTBEAT,
    )
    timer.cancel()
    _together.set()


def _relay(place: Place) -> str:
    """The address at which the coordination service is to be spoken to.

    Its client ends the process by a C++ abort as soon as the connection breaks; through a relay
    of our own, it is we who see that. The relay of process 0 has the public address, and so sees
    the others end, where the service would wait for their heartbeats.
    """
    host, _, port = place.coordinator.rpartition(":")
    if place.index == 0:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        try:
            listener = socket.create_server(("", int(port)), family=family, dualstack_ipv6=both)
        except OSError as error:
            raise ValueError(
                f"parallel.coordinator={place.coordinator}: {error.strerror or error}"
            ) from error
        with socket.create_server(("127.0.0.1", 0)) as free:
            target = here = free.getsockname()
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        target, here = (host.strip("[]"), int(port)), listener.getsockname()

    def accept():
        while True:
            near, _ = listener.accept()
            # Whoever comes later is none of the run's.
            ends = near, target, not _together.is_set()
            threading.Thread(target=_serve, args=ends, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return f"127.0.0.1:{here[1]}"


def _serve(near: socket.socket, target: tuple[str, int], member: bool) -> None:
    try:
        first = near.recv(1 << 16)
        if not first:  # Nor is one that says nothing.
            return near.close()
        far = socket.create_connection(target, GRACE)
        far.sendall(first)
    except OSError:
        return near.close()  # It asks again.
    far.settimeout(None)
    threading.Thread(target=_pump, args=(far, near, member), daemon=True).start()
    _pump(near, far, member)


def _pump(source: socket.socket, sink: socket.socket, member: bool) -> None:
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
    except OSError:
        pass
    if member and _together.is_set():
        _lost.set()
        time.sleep(GRACE)
        _end(PeerLost())
    sink.close()


def _end(error: BaseException) -> None:
    os.write(2, f"error: {' '.join(str(error).split())}\n".encode())
    os._exit(1)


@contextmanager
def watched() -> Iterator[None]:
    """What fails inside because another process is gone raises `PeerLost`."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, OSError) as error:
        if _together.is_set() and _lost.wait(GRACE / 2):
            raise PeerLost from error
        raise


def hurry(kind: type | None, error: BaseException | None, trace: Any) -> None:
    """For an ExitStack: after an error, what waits for the other processes may do so for `CLOSING`
    seconds, for they may be waiting for this one."""
    if error is not None and _together.is_set():
        timer = threading.Timer(CLOSING, _end, (error,))
        timer.daemon = True
        timer.start()


def part() -> None:
    """Waits until all are at the end, and leaves them."""
    if _together.is_set():
        _together.clear()
        jax.distributed.shutdown()


def run(main: Callable[[], int]) -> int:
    """The exit code of `main`; ends a process that has not parted at once, without waiting for
    those that it leaves."""
    try:
        code = main()
    except BaseException:
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        code = 1
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def largest(value: int, mesh: Mesh) -> jax.Array | int:
    """The largest that any process gives, each in the same turn; it need not be waited for."""
    if jax.process_count() == 1:
        return value
    where = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    each = np.full(mesh.size, value, np.int32)
    return jax.make_array_from_callback(each.shape, where, each.__getitem__).max()


def everyone(value: Any) -> list[Any]:
    """What each process gives, as JSON, each in the same turn."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.reshape(multihost_utils.process_allgather(np.int32(text.size)), -1)
    # Few sizes, for each of which a program is compiled.
    padded = np.pad(text, (0, -(-int(sizes.max()) // 4096) * 4096 - text.size))
    found = np.reshape(multihost_utils.process_allgather(padded), (len(sizes), -1))
    return [json.loads(row[:n].tobytes()) for row, n in zip(found, sizes, strict=True)]


@contextmanager
def agreed() -> Iterator[None]:
    """What is refused inside in one process is refused in all, which then part."""
    error = None
    try:
        yield
    except (ValueError, NotImplementedError, OSError) as found:
        error = found
    said = everyone(None if error is None else str(error))
    odd = next((index for index, text in enumerate(said) if text is not None), None)
    if odd is not None:
        part()
        raise error or ValueError(f"process {odd}: {said[odd]}")


def same(text: str, what: str) -> None:
    """Checks that all processes have the same text.

    Raises:
      ValueError: one of them has another `what`.
    """
    first, *others = everyone(zlib.crc32(text.encode()))
    odd = next((index for index, code in enumerate(others, 1) if code != first), None)
    if odd is not None:
        raise ValueError(f"process {odd} has {what} other than process 0's")
