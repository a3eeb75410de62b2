"""The secret that the processes of a run share, and proof of it over a connection."""

import hmac
import logging
import os
import socket
import stat
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from bptjax.parallel.mesh import cache_directory, make_cache_directory

log = logging.getLogger("bptjax")
VARIABLE = "BPTJAX_SECRET"
FILE = "secret"
# First bytes that a process of a run sends, and first bytes of the answer.
HELLO = b"bptjax 1"
BYTES = 32
# Seconds for the exchange of proofs.
TIMEOUT_S = 5


class WrongSecret(ValueError):
    """The process at the coordinator's port does not know the secret."""


def read_secret() -> bytes:
    """Returns the value of `VARIABLE`, or else the secret in the user's cache directory, which the
    first call creates.

    Raises:
      ValueError: the file cannot be read or created, is empty, belongs to another user, or is
        readable by other users.
    """
    if value := os.environ.get(VARIABLE):
        return value.encode()
    remedy = f"set {VARIABLE} to the same text in all processes"
    try:
        file = cache_directory() / FILE
        if not file.exists():
            _make(file)
        status, secret = file.stat(), file.read_bytes()
    except OSError as error:
        raise ValueError(f"secret of the processes: {error}; {remedy}") from error
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ValueError(
            f"{file}: must belong to you and be readable by you alone; remove it, or {remedy}"
        )
    if not secret:
        raise ValueError(f"{file}: must not be empty; remove it, or {remedy}")
    return secret


def _make(file: Path) -> None:
    """Creates the file atomically; the first of several processes wins."""
    make_cache_directory()
    fresh = file.with_name(f".{FILE}.{socket.gethostname()}.{os.getpid()}.tmp")
    fresh.unlink(missing_ok=True)
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(os.urandom(BYTES).hex().encode())
        with suppress(FileExistsError):
            os.link(fresh, file)
    finally:
        fresh.unlink()


def demand_proof(connection: socket.socket, secret: bytes, timeout: float = TIMEOUT_S) -> bool:
    """Returns whether the connected process knows the secret, and proves to it that this process
    does too.

    Each side sends a random number, and the other side returns a digest of both numbers keyed with
    the secret (RFC 2104), so neither the secret nor a replayable answer is sent.

    Args:
      timeout: seconds for the exchange.
    """
    deadline, greeted = time.monotonic() + timeout, False
    try:
        first = _receive(connection, len(HELLO) + BYTES, deadline)
        if not first.startswith(HELLO):
            return False
        greeted = True
        theirs, ours = first[len(HELLO) :], os.urandom(BYTES)
        connection.sendall(ours + _digest(secret, b"coordinator", theirs, ours))
        proof = _receive(connection, BYTES, deadline)
        connection.settimeout(None)
        if hmac.compare_digest(proof, _digest(secret, b"process", theirs, ours)):
            return True
    except OSError:
        pass
    if greeted:
        _tell_of_another_secret()
    return False


@cache
def _tell_of_another_secret() -> None:
    """Warns once, because unknown processes may also send the greeting."""
    log.warning(
        "a process with another secret was turned away; set %s to the same text in all processes",
        VARIABLE,
    )


def prove(connection: socket.socket, secret: bytes) -> None:
    """Proves to the coordinator at the other end of `connection` that this process knows the
    secret.

    Raises:
      WrongSecret: the other side does not know it.
      OSError: the connection has ended.
    """
    deadline = time.monotonic() + TIMEOUT_S
    ours = os.urandom(BYTES)
    connection.sendall(HELLO + ours)
    answer = _receive(connection, 2 * BYTES, deadline)
    theirs, proof = answer[:BYTES], answer[BYTES:]
    if not hmac.compare_digest(proof, _digest(secret, b"coordinator", ours, theirs)):
        raise WrongSecret
    connection.sendall(_digest(secret, b"process", ours, theirs))
    connection.settimeout(None)


def _digest(secret: bytes, role: bytes, process: bytes, coordinator: bytes) -> bytes:
    return hmac.digest(secret, role + process + coordinator, "sha256")


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Receives `count` bytes.

    Raises:
      OSError: the connection has ended, or the deadline has passed.
    """
    received = b""
    while len(received) < count:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = connection.recv(count - len(received))
        if not part or time.monotonic() > deadline:
            raise ConnectionError
        received += part
    return received
