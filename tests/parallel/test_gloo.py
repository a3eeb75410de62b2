"""Errors of Gloo and of barriers, as one line that names a host."""

import jax
import pytest

from bptjax.parallel import distributed, gloo
from bptjax.parallel.gloo import Failure, parse_error

PAIR = "[external/gloo/gloo/transport/tcp/pair.cc:547] "
# As Gloo gives them.
CLOSED = f"UNKNOWN: Gloo AllGather failed: {PAIR}Connection closed by peer [10.77.0.2]:37785"
RESET = f"UNKNOWN: Gloo all-reduce failed: {PAIR}Read error [fd77::2]:8: Connection reset by peer"
WAITED = (
    "UNKNOWN: Gloo ReduceScatter failed: [external/gloo/gloo/transport/tcp/buffer.cc:72] Read "
    "timeout [10.77.0.2]:58535"
)
LATE = (
    "UNKNOWN: Gloo context initialization failed: DEADLINE_EXCEEDED: GetKeyValue() timed out with "
    "key: cpu:gloo/0,5,2/1 and duration: 29.99999991s [type.googleapis.com/"
    "tensorflow.CoordinationServiceError='']"
)
ENDLESS = (
    "UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/unbound_buffer.cc:81] "
    "Timed out waiting 1800000ms for recv operation to complete"
)
OTHER = "UNKNOWN: Gloo collective permute failed: no memory"


@pytest.mark.parametrize(
    "text, failure",
    [
        (CLOSED, Failure("10.77.0.2", None, False)),
        (RESET, Failure("fd77::2", None, False)),
        (WAITED, Failure("10.77.0.2", None, True)),
        (LATE, Failure(None, 5, True)),
        (ENDLESS, Failure(None, None, True)),
        (OTHER, None),
        ("INTERNAL: failed: Connection closed by peer [10.77.0.2]:1", None),
    ],
)
def test_errors_are_parsed(text, failure):
    assert parse_error(text) == failure


@pytest.fixture
def members(monkeypatch):
    found = [("host0", "10.77.0.1"), ("host1", "10.77.0.2"), ("host1", "fd77::2")]
    members = [dict(host=host, address=address) for host, address in found]
    monkeypatch.setattr(distributed, "_members", members)


@pytest.mark.parametrize(
    "text, line",
    [
        (CLOSED, "a process on host1 has ended, and its output says why"),
        (RESET, "a process on host1 has ended, and its output says why"),
        (WAITED, "no answer from host1 within Gloo's timeout; see what else runs there"),
        (ENDLESS, "no answer from another process within Gloo's timeout; see what else runs"),
        (LATE, "process 0 on host0 did not connect within 30 s of the others; see what else"),
        (OTHER, ""),
        ("INTERNAL: failed", ""),
    ],
)
def test_errors_name_the_host(members, text, line):
    told = distributed.describe_gloo_error(text)
    assert told.startswith(line) and bool(told) == bool(line)


def test_one_host_is_not_named():
    text = CLOSED.replace("10.77.0.2", "127.0.0.1")
    line = "another process of this run has ended, and its output says why"
    assert distributed.describe_gloo_error(text) == line


@pytest.mark.parametrize("kind", [ValueError, jax.errors.JaxRuntimeError])
def test_errors_become_a_lost_peer(members, monkeypatch, kind):
    distributed._initialized.set()
    try:
        with pytest.raises(
            distributed.PeerLost, match="^a peer process is lost: a process on host1"
        ):
            with distributed.translate_peer_errors():
                raise kind(CLOSED)
        with pytest.raises(ValueError, match="^seed=-1: must"), distributed.translate_peer_errors():
            raise ValueError("seed=-1: must be positive")
    finally:
        distributed._initialized.clear()


def test_a_single_process_connects_to_nobody():
    mesh = jax.make_mesh((2, 4), ("dp", "fsdp"), (jax.sharding.AxisType.Auto,) * 2)
    called = []
    gloo.connect(mesh, lambda: called.append(1))  # Every order of the axes compiles and runs.
    assert called == [1]


def test_processes_absent_from_a_barrier():
    text = (
        "DEADLINE_EXCEEDED: Barrier timed out. Id: bptjax/x::0. This usually happens because …\n"
        "# of tasks that reached the barrier: 1/4.\n"
        "The first task at the barrier: 0. Some timed out task names:\n{}\n\n\n"
        "RPC: /xla.coordination.CoordinationService/Barrier [type.googleapis.com/…='']"
    )
    names = "/job:jax_worker/replica:0/task:3\n/job:jax_worker/replica:0/task:2"
    for late in ("3\n2", names):
        assert distributed.absent_from_barrier(text.format(late)) == [2, 3]
    assert distributed.absent_from_barrier("UNAVAILABLE: …") == []
