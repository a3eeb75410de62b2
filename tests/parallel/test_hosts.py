"""Hosts of one machine: network namespaces with their own links, addresses and names."""

import signal
import subprocess
import sys
import time

import fewer_hosts
import pytest
from hosts import Cluster, base_environment, finish, torchrun

JOINED = """
import sys, time
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from bptjax.parallel import distributed
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.training.notes import describe_hosts
distributed.initialize(ParallelConfig())
print(distributed.hosts(), distributed.all_gather_json(1), flush=True)
index = jax.process_index()
"""
WAITING = "time.sleep(300)"
# All but the last wait for the last one.
COLLECTIVE = """
if index == jax.process_count() - 1:
    time.sleep(300)
try:
    with distributed.translate_peer_errors():
        distributed.all_gather_json(1)
except distributed.PeerLost as error:
    distributed.exit_with(error)
"""
# A process comes 35 s late to the first communication along an axis.
LATE = """
mesh = make_mesh(ParallelConfig(dp=2, fsdp=2))
distributed.connect_along(mesh)
if index == 1:
    time.sleep(35)
where = NamedSharding(mesh, PartitionSpec(("dp", "fsdp")))
x = jax.make_array_from_callback((4,), where, np.arange(4.0)[None].repeat(4, 0)[0].__getitem__)
mapped = jax.shard_map(
    lambda x: jax.lax.psum(x, "fsdp"), mesh=mesh,
    in_specs=PartitionSpec(("dp", "fsdp")), out_specs=PartitionSpec("dp"),
)
print(distributed.all_gather_json(float(np.sum(jax.jit(mapped)(x).addressable_data(0)))))
if index == 0:
    print(describe_hosts(distributed.hosts(), distributed.addresses(), "cpu"))
distributed.shutdown()
"""
LOST = "error: a peer process is lost: "


def make_hosts(count, work, **kind):
    try:
        return Cluster(count, work, **kind)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"needs network namespaces: {error}")


@pytest.fixture
def start(tmp_path):
    """Starts code on hosts, in processes that are joined when the call returns."""
    started = []

    def start(code, hosts, per_host=1, **kind):
        cluster = make_hosts(hosts, tmp_path, **kind)
        started.append(cluster)
        count, processes = hosts * per_host, []
        for index in range(count):
            environment = base_environment(tmp_path, 1) | torchrun(count, index, hosts)[0]
            if kind.get("second"):
                environment |= {"MASTER_ADDR": "fast0"}
            command = [sys.executable, "-c", JOINED + code]
            processes.append(cluster.start(index // per_host, command, environment))
        names = [f"host{index // per_host}" for index in range(count)]
        for process in processes:
            lines = iter(process.stdout.readline, "")
            assert f"{names} {[1] * count}\n" in lines  # After lines of Gloo.
        return cluster, processes

    yield start
    for cluster in started:
        cluster.close()


@pytest.mark.thorough
def test_a_silent_host_is_named_in_one_line(start):
    """After the hosts, whose own names are loopback addresses, have exchanged values."""
    cluster, pair = start(WAITING, 2, loopback=True)
    cluster.link(1, up=False)
    begin = time.monotonic()
    ends = finish(pair, 100)
    assert time.monotonic() - begin < 60
    for other, (code, lines) in zip(("host1", "host0"), ends, strict=True):
        assert code == 1 and len(lines) == 1
        assert f"lost: no answer from {other} for 40 s; check that the host runs" in lines[0]


@pytest.mark.thorough
def test_all_hosts_beyond_a_partition_are_named(start):
    cluster, four = start(WAITING, 4)
    for host in (2, 3):
        cluster.connect(host, "other")
    ends = finish(four, 100)
    assert [(code, len(lines)) for code, lines in ends] == [(1, 1)] * 4
    first, second, third, fourth = (lines[0] for _, lines in ends)
    assert first.startswith(LOST + "no answer from host2 and host3 for 40 s")
    assert second.startswith(LOST + "a process on host0 has ended")
    assert {third, fourth} == {third} and third.startswith(LOST + "no answer from host0 for 40 s")


@pytest.mark.thorough
def test_the_host_of_a_killed_process_is_named(start):
    """Also by processes that are not connected to it but by Gloo."""
    _, three = start(COLLECTIVE, 3)
    time.sleep(5)
    three[2].send_signal(signal.SIGKILL)
    ends = finish(three, 60)
    assert ends.pop() == (-signal.SIGKILL, [])
    for code, lines in ends:
        assert code == 1 and len(lines) == 1
        assert lines[0].startswith(LOST + "a process on host2 has ended, and its output says why")


@pytest.mark.thorough
def test_a_process_may_be_late_for_the_first_step(start):
    """Later than Gloo waits for new connections. The hosts have two interfaces."""
    _, four = start(LATE, 2, 2, second=True)
    said = [process.communicate(timeout=200) for process in four]
    assert [process.returncode for process in four] == [0] * 4, said
    assert "[1.0, 1.0, 5.0, 5.0]" in said[3][0]
    named = "hosts: host0 (10.88.0.1), host1 (10.88.0.2), communicate by these addresses"
    assert named in said[0][0]


@pytest.mark.thorough
def test_a_run_goes_on_without_a_host_until_it_returns(tmp_path):
    """With the records and the losses of one process."""
    make_hosts(1, tmp_path / "hosts").close()  # The case makes its own.
    row = fewer_hosts.compare(fewer_hosts.CASES[0], tmp_path / "case")
    assert "fault" not in row and row["records"], row
    without, returned = row["told"]
    assert without.startswith("without host1: 1 of 2 processes, gradient_accumulation_steps=4 in")
    assert returned.startswith("with host1 again: going on from step ")
