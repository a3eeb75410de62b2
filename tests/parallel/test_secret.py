"""Proof of the secret over a connection, its file, and the addresses that are listened on."""

import os
import socket
import threading

import pytest

from bptjax.parallel import distributed, launch, secret
from bptjax.parallel.secret import BYTES, HELLO, WrongSecret, demand_proof, prove, read_secret


def exchange(coordinators, processes):
    """Whether the coordinator lets the process in, and what the process raises."""
    ours, theirs = socket.socketpair()
    answer = []
    thread = threading.Thread(target=lambda: answer.append(demand_proof(ours, coordinators)))
    thread.start()
    error = None
    try:
        prove(theirs, processes)
    except (WrongSecret, OSError) as found:
        error = type(found)
    theirs.close()
    thread.join()
    ours.close()
    return answer[0], error


def test_only_who_knows_the_secret_is_let_in(caplog):
    secret._tell_of_another_secret.cache_clear()
    assert exchange(b"a", b"a") == (True, None)
    assert caplog.text == ""
    for _ in range(2):
        assert exchange(b"a", b"b") == (False, WrongSecret)
    assert caplog.text.count("another secret was turned away; set BPTJAX_SECRET") == 1
    # Without the secret, an answer to this process is no proof for that one.
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = threading.Thread(target=demand_proof, args=(ours, b"a"))
        thread.start()
        theirs.sendall(HELLO + bytes(BYTES))
        answer = theirs.recv(2 * BYTES)
        theirs.sendall(answer[BYTES:])
        thread.join()
        assert answer[BYTES:] != secret._digest(b"a", b"process", bytes(BYTES), answer[:BYTES])


@pytest.mark.parametrize("sent", [b"", HELLO, b"GET / HTTP/1.1\r\n\r\n" * 9, HELLO + bytes(999)])
def test_a_stranger_is_not_waited_for(sent):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        assert not demand_proof(ours, b"a", timeout=0.1)


def test_the_file_of_the_secret_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("BPTJAX_SECRET", raising=False)
    monkeypatch.setattr(os, "getpid", threading.get_ident)  # As several processes.
    found = []
    threads = [threading.Thread(target=lambda: found.append(read_secret())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (file,) = (tmp_path / "bptjax").iterdir()
    assert len(set(found)) == 1 and len(found[0]) == 2 * BYTES and len(found) == 4
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    with pytest.raises(ValueError, match="secret: must belong to you and be readable by you alone"):
        read_secret()
    file.chmod(0o600)
    file.write_bytes(b"")
    with pytest.raises(ValueError, match="secret: must not be empty; remove it, or set BPTJAX_SEC"):
        read_secret()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # No directory can be made there.
    with pytest.raises(ValueError, match="Not a directory.*; set BPTJAX_SECRET to the same text"):
        read_secret()
    monkeypatch.setenv("BPTJAX_SECRET", "mine")
    assert read_secret() == b"mine"


def test_only_the_named_interface_is_listened_on():
    for host in ("localhost", "127.0.0.1"):
        for listener in (listeners := distributed.listen(host, 0)):
            assert launch.is_loopback(listener.getsockname()[0])
            listener.close()
        assert listeners
    with pytest.raises(OSError):
        distributed.listen("192.0.2.7", 0)  # For documentation: never of this host.


def test_the_private_socket_is_the_users_alone(monkeypatch, tmp_path):
    """Until all processes are connected; then it is removed."""
    seen = {}

    def joined(address, *args, **options):
        path = address.removeprefix("unix:")
        seen["mode"] = os.stat(os.path.dirname(path)).st_mode & 0o777
        seen["exists"] = os.path.exists(path)
        seen["path"], seen["bind"] = path, options["coordinator_bind_address"]

    monkeypatch.setattr("jax.distributed.initialize", joined)
    monkeypatch.setattr(distributed, "_introduce", lambda process: None)
    monkeypatch.setattr(distributed, "_set_gloo_address", lambda: None)
    monkeypatch.setattr(distributed, "_initialized", threading.Event())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = distributed.ParallelConfig(coordinator="127.0.0.1:1", num_processes=2, process_id=1)
    distributed.initialize(config)
    assert seen["mode"] == 0o700 and seen["exists"]
    assert seen["bind"] == f"unix:{seen['path']}" and not os.path.exists(seen["path"])
