"""Multi-process runs: initialization, detection of lost peers, shutdown, exchange of values."""

import errno
import ipaddress
import json
import os
import re
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
import numpy as np
from jax._src import distributed as jax_distributed
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bptjax.parallel import gloo
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
# Lines of the processes that did not arrive, in the coordination service's error of a barrier.
ABSENT = re.compile(r"^(?:.*task:)?(\d+)$", re.MULTILINE)
# Maximum simultaneous connections to process 0 that have not yet proved knowledge of the secret.
MAX_PENDING = 64
# Errors of a connection to a host that no longer answers.
UNREACHABLE = errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH
# Maximum bytes of a socket path on Linux.
MAX_SOCKET_PATH = 107
# Place of the milliseconds since the last answer in Linux's `struct tcp_info`.
TCP_LAST_ANSWER = 56

# State of this process, global like the state of jax.distributed.
_initialized = threading.Event()
# Directory of this process's sockets, until all processes are connected.
_private: list[str] = []
# Addresses of this process at the connections between the coordinator and the others.
_addresses: list[str] = []
_peer_lost = threading.Event()
# The line of `exit_with` is printed.
_telling, _told = threading.Lock(), threading.Event()
# Host, address and versions of each process.
_members: list[dict[str, Any]] = []
# Connections between the coordinator and the others.
_connections: list[socket.socket] = []
# Hosts that no longer answer, and hosts with a process that has ended.
_silent: list[str] = []
_ended: list[str] = []


class PeerLost(RuntimeError):
    """Another process of the run has ended unexpectedly, or its host no longer answers."""

    def __init__(self, why: str = ""):
        super().__init__(
            f"a peer process is lost: {why or _describe_loss()}; start all processes again to "
            "resume from the last checkpoint"
        )


def _describe_loss() -> str:
    """Describes the loss of a peer that the relays have noticed."""
    if _silent:
        names = " and ".join(sorted(set(_silent)))
        return (
            f"no answer from {names} for {SILENCE_S} s; check that the host runs and the network "
            "connects it"
        )
    return describe_end(_ended[0] if _ended else "")


def describe_end(host: str) -> str:
    """Describes the end of another process, with its host if there are several."""
    known = host and len(set(hosts())) > 1
    who = f"a process on {host}" if known else "another process of this run"
    return f"{who} has ended, and its output says why"


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
    wait_for_all(MEMBERS)
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


def addresses() -> list[str]:
    """Returns the address of each process; empty for a single process."""
    return [member["address"] for member in _members]


def describe_process(index: int) -> str:
    """Names a process, with its host if there are several."""
    return f"process {index}" + (f" on {hosts()[index]}" if len(set(hosts())) > 1 else "")


def wait_for_all(name: str) -> None:
    """Waits up to `INIT_TIMEOUT_S` until all processes call it with the same name, each once.

    Raises:
      RuntimeError: a process did not call it in time; one line names it.
    """
    client: Any = jax_distributed.global_state.client
    try:
        client.wait_at_barrier(name, 1000 * INIT_TIMEOUT_S)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        names = ", ".join(map(describe_process, absent_from_barrier(str(error))))
        names = names or "another process"
        raise RuntimeError(
            f"{names}: must be ready within {INIT_TIMEOUT_S} s of the others; see what else runs "
            "there, then start all processes again"
        ) from error


def absent_from_barrier(text: str) -> list[int]:
    """Returns the processes that did not arrive at a barrier, from the error of its end."""
    return sorted(map(int, ABSENT.findall(text.partition("timed out task names:")[2])))


def _set_gloo_address() -> None:
    """Makes Gloo listen on the address at which this process is connected to the coordinator, or to
    the other processes. Call it before a JAX backend starts."""
    address = addresses()[jax_distributed.global_state.process_id]
    if is_loopback(address):  # On the host of process 0.
        address = addresses()[0]
    gloo.listen_at(address)


def connect_along(mesh: Mesh) -> None:
    """Connects all processes along the axes of a mesh. All processes must call it together, once.

    Raises:
      RuntimeError: as `wait_for_all`.
    """
    if jax.process_count() > 1:
        gloo.connect(mesh, lambda: wait_for_all("bptjax/connect"))


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
    if member:
        _connections.append(remote)
    threading.Thread(target=_pump, args=(server, client, member, remote), daemon=True).start()
    _pump(client, server, member, remote)


def _detect_silence(connection: socket.socket) -> None:
    """Makes a connection fail if the other host does not answer for `SILENCE_S`."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        tcp = socket.IPPROTO_TCP
        connection.setsockopt(tcp, socket.TCP_KEEPIDLE, PROBE_S)
        connection.setsockopt(tcp, socket.TCP_KEEPINTVL, PROBE_S)
        connection.setsockopt(tcp, socket.TCP_KEEPCNT, SILENCE_S // PROBE_S)
        connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_S)


def _pump(source: socket.socket, sink: socket.socket, member: bool, remote: socket.socket) -> None:
    """Forwards data, and ends this process if a member of the run is lost.

    Args:
      remote: the connection to the other process, one of `source` and `sink`.
    """
    lost, peer = _ended, _parse_address(remote.getpeername())
    try:
        while data := source.recv(1 << 16):
            if member and _initialized.is_set() and _has_ended(source):
                break  # The last words would make JAX's client abort this process in C++.
            sink.sendall(data)
    except OSError as error:
        if error.errno in UNREACHABLE:
            lost = _silent
            _silent.extend(map(_host_at, _unanswered()))
    if member and _initialized.is_set():
        lost.append(_host_at(peer))
        _peer_lost.set()
        time.sleep(REPORT_TIMEOUT_S)
        exit_with(PeerLost())
    sink.close()


def _has_ended(connection: socket.socket) -> bool:
    """Returns whether the other side has sent its last data and closed the connection."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def _unanswered() -> list[str]:
    """Returns the addresses of all hosts that have not answered for half of `SILENCE_S`. The
    connections to several lost hosts fail within seconds of each other."""
    found = []
    for connection in _connections:
        with suppress(OSError, AttributeError):  # Already closed; no such option.
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 2 * TCP_LAST_ANSWER)
            if struct.unpack_from("I", info, TCP_LAST_ANSWER)[0] > 1000 * SILENCE_S / 2:
                found.append(_parse_address(connection.getpeername()))
    return found


def _host_at(address: str) -> str:
    """Returns the host of an address, or the address if no process has introduced itself."""
    if is_loopback(address):
        return socket.gethostname()
    return next((x["host"] for x in _members if x["address"] == address), address)


def _remove_private() -> None:
    while _private:
        shutil.rmtree(_private.pop(), ignore_errors=True)


def exit_with(error: BaseException, code: int = 1) -> None:
    """Ends this process at once with one line, from any thread, also if the others wait for it.
    Several threads may notice a lost peer; only the first prints its line."""
    message = " ".join(str(error).split())
    record_error(message)
    _remove_private()
    with _telling:
        if not _told.is_set():
            os.write(2, f"error: {message}\n".encode())
        _told.set()
    for connection in _connections:
        # A thread that waits for a disk would keep them open.
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    os._exit(code)


@contextmanager
def translate_peer_errors() -> Iterator[None]:
    """Raises `PeerLost` in place of an error that a lost peer caused."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, OSError, ValueError) as error:
        # JAX raises some of Gloo's errors as ValueError.
        why = describe_gloo_error(str(error))
        if not _initialized.is_set() or (isinstance(error, ValueError) and not why):
            raise
        if why:
            raise PeerLost(why) from error
        if _peer_lost.wait(REPORT_TIMEOUT_S / 2):
            raise PeerLost from error
        raise


def describe_gloo_error(text: str) -> str:
    """Describes the loss of a peer in an error of Gloo; empty if it is another error."""
    found = gloo.parse_error(text)
    if found is None:
        return ""
    if found.late is not None:
        index = next(x.process_index for x in jax.devices() if x.id == found.late)
        return (
            f"{describe_process(index)} did not connect within {gloo.TIMEOUT_S} s of the others; "
            "see what else runs there"
        )
    host = _host_at(found.address) if found.address else ""
    if found.timed_out:
        host = host or "another process"
        return f"no answer from {host} within Gloo's timeout; see what else runs there"
    return describe_end(host)


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
