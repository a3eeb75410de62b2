"""Multi-process runs: initialization, detection of lost peers, shutdown, exchange of values."""

import errno
import ipaddress
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np
from jax._src import distributed as jax_distributed
from jax._src import xla_bridge
from jax.experimental import multihost_utils
from jax.extend.backend import register_backend_factory
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import _jax

from bptjax.parallel.launch import ProcessInfo, find_process, is_loopback
from bptjax.parallel.mesh import ParallelConfig
from bptjax.parallel.secret import VARIABLE, WrongSecret, demand_proof, prove, read_secret
from bptjax.run.heartbeat import record_error
from bptjax.run.versions import computing_versions, describe_differences

# Seconds within which all processes must connect.
INIT_TIMEOUT_S = 300
# Seconds without an answer from a host until this process ends. Shorter losses of the network do no
# harm.
SILENCE_S = 40
# Seconds between probes of an idle connection to another host.
PROBE_S = 10
# Seconds without a heartbeat until JAX aborts all processes in C++. The relays notice the end of a
# process at once, and a silent host after `SILENCE_S`.
HEARTBEAT_TIMEOUT_S = 3600
# Seconds that a process has to report a lost peer, or a failure of all processes, before it is
# killed.
REPORT_TIMEOUT_S = 5
# Seconds that a failed process may wait for its peers during clean-up.
CLEANUP_TIMEOUT_S = 30
# Directory of what the processes know of each other in JAX's coordination service, and the name of
# the barrier before it is read.
MEMBERS = "bptjax/members/"
# Maximum simultaneous connections to process 0 that have not yet proved knowledge of the secret.
MAX_PENDING = 64
# Errors of a connection to a host that no longer answers.
UNREACHABLE = errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH
# Maximum bytes of a socket path on Linux.
MAX_SOCKET_PATH = 107

# State of this process, global like the state of jax.distributed.
_initialized = threading.Event()
# Directory of this process's sockets, until all processes are connected.
_private: list[str] = []
# Addresses of this process at the connections between the coordinator and the others.
_addresses: list[str] = []
_peer_lost = threading.Event()
# Host, address and versions of each process.
_members: list[dict[str, Any]] = []
# Hosts that no longer answer.
_silent: list[str] = []


class PeerLost(RuntimeError):
    """Another process of the run has ended unexpectedly, or its host no longer answers."""

    def __init__(self):
        why = "another process of this run has ended, and its output says why"
        if _silent:
            hosts = " and ".join(sorted(set(_silent)))
            why = (
                f"no answer from {hosts} for {SILENCE_S} s; check that the host runs and the "
                "network connects it"
            )
        super().__init__(
            f"a peer process is lost: {why}; start all processes again to resume from the last "
            "checkpoint"
        )


def initialize(config: ParallelConfig, process: ProcessInfo | None = None) -> None:
    """Joins the other processes of the run, if there are any. Call it before a JAX backend starts.

    Afterwards, a peer that ends unexpectedly also ends this process: with `PeerLost` inside
    `translate_peer_errors`, or, if this process is blocked, with one line on stderr and exit code 1
    after `REPORT_TIMEOUT_S`. If a peer does not connect within `INIT_TIMEOUT_S`, this process also
    ends with one line and exit code 1.

    Args:
      process: identity of this process; by default that of `find_process`.

    Raises:
      ValueError: as in `find_process`, or the coordinator's port is taken or on a host other than
        process 0's, or a process has other versions than process 0.
    """
    process = process or find_process(config, os.environ)
    if process is None or jax.distributed.is_initialized():
        return
    # The preemption service would handle SIGTERM instead of Python.
    jax.config.update("jax_enable_preemption_service", False)
    private = tempfile.mkdtemp(prefix="bptjax-")  # With mode 0700.
    _private.append(private)
    path = os.path.join(private, "socket")
    try:
        if len(path) > MAX_SOCKET_PATH:
            parent = os.path.dirname(private)
            raise ValueError(f"TMPDIR={parent}: must be shorter, for sockets in it")
        address = _start_relay(process, path)
    except (ValueError, OSError):
        _remove_private()
        raise
    timeout = TimeoutError(
        f"process {process.index} of {process.count} has waited {INIT_TIMEOUT_S} s for the other "
        f"processes at parallel.coordinator={process.coordinator}"
    )
    # JAX's own timeout, a C++ abort, comes later.
    timer = threading.Timer(INIT_TIMEOUT_S, exit_with, (timeout,))
    timer.daemon = True
    timer.start()
    jax.distributed.initialize(
        address,
        process.count,
        process.index,
        local_device_ids=process.local_devices,
        cluster_detection_method="deactivate",
        coordinator_bind_address=address,
        initialization_timeout=INIT_TIMEOUT_S + REPORT_TIMEOUT_S,
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
    )
    timer.cancel()
    _initialized.set()
    _remove_private()  # All are connected.
    _introduce(process)
    _set_gloo_address()


def _introduce(process: ProcessInfo) -> None:
    """Exchanges the host, address and versions of all processes.

    Raises:
      ValueError: a process has other versions than process 0.
    """
    client: Any = jax_distributed.global_state.client
    address = next((x for x in _addresses if not is_loopback(x)), _addresses[0])
    own = dict(host=socket.gethostname(), address=address, versions=computing_versions())
    client.key_value_set(f"{MEMBERS}{process.index}", json.dumps(own))
    client.wait_at_barrier(MEMBERS, 1000 * INIT_TIMEOUT_S)
    texts = {name.rpartition("/")[2]: text for name, text in client.key_value_dir_get(MEMBERS)}
    _members.extend(json.loads(texts[str(index)]) for index in range(process.count))
    for index, member in enumerate(_members):
        if found := describe_differences(member["versions"], _members[0]["versions"]):
            shutdown()
            raise ValueError(
                f"{describe_process(index)}: must have the same versions as process 0, {found}"
            )


def hosts() -> list[str]:
    """Returns the host of each process; empty for a single process."""
    return [member["host"] for member in _members]


def describe_process(index: int) -> str:
    """Names a process, with its host if there are several."""
    return f"process {index}" + (f" on {hosts()[index]}" if len(set(hosts())) > 1 else "")


def _set_gloo_address() -> None:
    """Makes Gloo, JAX's collectives of CPUs, listen on the address at which this process is
    connected to the coordinator, or to the other processes. Call it before a JAX backend starts.

    By itself, Gloo takes the address of the host's name. On Debian and in many containers it is a
    loopback address, which other hosts cannot reach.
    """
    if jax.config.values["jax_cpu_collectives_implementation"] != "gloo":
        return
    client: Any = jax_distributed.global_state.client
    address = _members[jax_distributed.global_state.process_id]["address"]
    if is_loopback(address):  # On the host of process 0.
        address = _members[0]["address"]
    collectives = _jax.make_gloo_tcp_collectives(client, hostname=address)
    factory = partial(xla_bridge.make_cpu_client, collectives)
    register_backend_factory("cpu", factory, priority=0, fail_quietly=False)


def _start_relay(process: ProcessInfo, path: str) -> str:
    """Starts a relay to the coordination service, and returns the address for JAX.

    When the connection breaks, the service's client aborts its process in C++ at once. With a
    relay, this module notices the break first. The relay of process 0 has the public address, so it
    notices the end of any other process, while the service would wait for missing heartbeats.

    The service accepts any client. Therefore the relays prove to each other that they know the
    secret before they forward anything, and the service and the relays of other processes listen on
    sockets in a directory private to the user.

    Args:
      path: private socket of the service in process 0, or of the relay in other processes.
    """
    secret = read_secret()
    host, _, port = process.coordinator.rpartition(":")
    host = host.strip("[]")
    if process.index == 0:
        if process.count == 1:
            _addresses.append("127.0.0.1")  # No other process connects.
        try:
            listeners = listen(host, int(port))
        except OSError as error:
            raise ValueError(
                f"parallel.coordinator={process.coordinator}: {error.strerror or error}"
            ) from error
    else:
        listeners = [socket.socket(socket.AF_UNIX)]
        listeners[0].bind(path)
        listeners[0].listen()

    def connect(client: socket.socket) -> socket.socket | None:
        """Returns the connection that `client` is forwarded to; None for an unknown client."""
        if process.index == 0:
            if not demand_proof(client, secret):
                return None
            _addresses.append(_parse_address(client.getsockname()))
            server = socket.socket(socket.AF_UNIX)
            server.connect(path)
            return server
        server = socket.create_connection((host, int(port)), REPORT_TIMEOUT_S)
        try:
            prove(server, secret)
        except WrongSecret:
            text = (
                f"parallel.coordinator={process.coordinator}: must be process 0 with the secret of "
                f"this process; set {VARIABLE} to the same text in all processes"
            )
            exit_with(ValueError(text), 2)
        _addresses.append(_parse_address(server.getsockname()))
        return server

    # Unknown clients may open many connections and send nothing.
    pending = threading.BoundedSemaphore(MAX_PENDING)

    def accept(listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # Such as too many open files.
                time.sleep(0.1)
                continue
            if not pending.acquire(blocking=False):
                client.close()
                continue
            # A client that connects after initialization is not a process of the run.
            arguments = client, connect, pending, not _initialized.is_set()
            threading.Thread(target=_serve, args=arguments, daemon=True).start()

    for listener in listeners:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
    return f"unix:{path}"


def _parse_address(name: tuple[Any, ...]) -> str:
    """Returns the address in a socket's name, an IPv4 address also if the socket has IPv6."""
    address = ipaddress.ip_address(name[0])
    return str(getattr(address, "ipv4_mapped", None) or address)


def listen(host: str, port: int) -> list[socket.socket]:
    """Returns sockets that listen on the addresses of `host`, which must be this host.

    If the name resolves only to a loopback address, as with Debian's /etc/hosts, other hosts may
    know it by another address, so the sockets listen on all addresses.

    Raises:
      OSError: the name is unknown or belongs to another host, or the port is taken.
    """
    stream = socket.SOCK_STREAM
    addresses = {info[4][0]: info[0] for info in socket.getaddrinfo(host, port, type=stream)}
    if not is_loopback(host) and all(is_loopback(str(address)) for address in addresses):
        addresses = {"": socket.AF_INET}
        if socket.has_dualstack_ipv6():
            both = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
            return [both]
    listeners, errors = [], []
    for address, family in addresses.items():
        try:
            listeners.append(socket.create_server((address, port), family=family))
        except OSError as error:
            errors.append(error)
    if not listeners or any(error.errno == errno.EADDRINUSE for error in errors):
        for listener in listeners:
            listener.close()
        raise errors[0]
    return listeners


def _serve(
    client: socket.socket,
    connect: Callable[[socket.socket], socket.socket | None],
    pending: threading.BoundedSemaphore,
    member: bool,
) -> None:
    try:
        server = connect(client)
    except OSError:
        server = None  # The client will retry.
    finally:
        pending.release()
    if server is None:
        return client.close()
    server.settimeout(None)
    remote = client if client.family != socket.AF_UNIX else server
    _detect_silence(remote)
    peer = _parse_address(remote.getpeername())
    threading.Thread(target=_pump, args=(server, client, member, peer), daemon=True).start()
    _pump(client, server, member, peer)


def _detect_silence(connection: socket.socket) -> None:
    """Makes a connection fail if the other host does not answer for `SILENCE_S`."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        tcp = socket.IPPROTO_TCP
        connection.setsockopt(tcp, socket.TCP_KEEPIDLE, PROBE_S)
        connection.setsockopt(tcp, socket.TCP_KEEPINTVL, PROBE_S)
        connection.setsockopt(tcp, socket.TCP_KEEPCNT, SILENCE_S // PROBE_S)
        connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_S)


def _pump(source: socket.socket, sink: socket.socket, member: bool, peer: str) -> None:
    """Forwards data, and ends this process if a member of the run is lost.

    Args:
      peer: address of the other host.
    """
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
    except OSError as error:
        if error.errno in UNREACHABLE:
            hosts = [x["host"] for x in _members if x["address"] == peer]
            _silent.append(hosts[0] if hosts else peer)
    if member and _initialized.is_set():
        _peer_lost.set()
        time.sleep(REPORT_TIMEOUT_S)
        exit_with(PeerLost())
    sink.close()


def _remove_private() -> None:
    while _private:
        shutil.rmtree(_private.pop(), ignore_errors=True)


def exit_with(error: BaseException, code: int = 1) -> None:
    """Ends this process at once with one line, from any thread, also if the others wait for it."""
    message = " ".join(str(error).split())
    record_error(message)
    _remove_private()
    os.write(2, f"error: {message}\n".encode())
    os._exit(code)


@contextmanager
def translate_peer_errors() -> Iterator[None]:
    """Raises `PeerLost` in place of an error that a lost peer caused."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, OSError) as error:
        if _initialized.is_set() and _peer_lost.wait(REPORT_TIMEOUT_S / 2):
            raise PeerLost from error
        raise


def exit_after_timeout(kind: type | None, error: BaseException | None, trace: Any) -> None:
    """Ends this process if clean-up after an error takes longer than `CLEANUP_TIMEOUT_S`, because
    it may wait for peers that are blocked on this process. Exit callback of an ExitStack."""
    if error is not None and _initialized.is_set():
        timer = threading.Timer(CLEANUP_TIMEOUT_S, exit_with, (error,))
        timer.daemon = True
        timer.start()


def shutdown() -> None:
    """Waits until all processes call it, and disconnects from them."""
    if _initialized.is_set():
        _initialized.clear()
        jax.distributed.shutdown()


def exit_without_barriers(main: Callable[[], int]) -> int:
    """Returns the exit code of `main`. Without `shutdown`, exits at once, not waiting for peers."""
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


def all_reduce_max(value: int, mesh: Mesh) -> jax.Array | int:
    """Returns the maximum over all processes, without waiting for the result. All processes must
    call it in the same order."""
    if jax.process_count() == 1:
        return value
    where = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    each = np.full(mesh.size, value, np.int32)
    return jax.make_array_from_callback(each.shape, where, each.__getitem__).max()


def all_gather_json(value: Any) -> list[Any]:
    """Gathers the values of all processes as JSON. All processes must call it in the same order."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.reshape(multihost_utils.process_allgather(np.int32(text.size)), -1)
    # JAX compiles a program per size, so round up to few sizes.
    padded = np.pad(text, (0, -(-int(sizes.max()) // 4096) * 4096 - text.size))
    gathered = np.reshape(multihost_utils.process_allgather(padded), (len(sizes), -1))
    return [json.loads(row[:n].tobytes()) for row, n in zip(gathered, sizes, strict=True)]


@contextmanager
def raise_together() -> Iterator[None]:
    """Raises an error of one process in all processes, after `shutdown`."""
    error = None
    try:
        yield
    except (ValueError, NotImplementedError, OSError) as found:
        error = found
    messages = all_gather_json(None if error is None else str(error))
    failed = next((index for index, text in enumerate(messages) if text is not None), None)
    if failed is not None:
        shutdown()
        raise error or ValueError(f"{describe_process(failed)}: {messages[failed]}")


def assert_equal_across_processes(text: str, name: str) -> None:
    """Checks that all processes have the same text.

    Raises:
      ValueError: the text, named `name` in the message, differs in a process.
    """
    first, *others = all_gather_json(zlib.crc32(text.encode()))
    odd = next((index for index, code in enumerate(others, 1) if code != first), None)
    if odd is not None:
        raise ValueError(f"{describe_process(odd)}: must have the same {name} as process 0")
