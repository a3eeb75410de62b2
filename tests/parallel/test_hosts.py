"""Two hosts of one machine: network namespaces with their own links, addresses and names."""

import subprocess
import sys
import time

import fewer_hosts
import pytest
from hosts import Cluster, base_environment, finish, torchrun

JOINED = """
import sys, time
from bptjax.parallel import distributed
from bptjax.parallel.mesh import ParallelConfig
distributed.initialize(ParallelConfig())
print(distributed.hosts(), distributed.all_gather_json(1), flush=True)
time.sleep(120)
"""


@pytest.fixture
def cluster(tmp_path):
    try:
        cluster = Cluster(2, tmp_path, loopback=True)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"needs network namespaces: {error}")
    with cluster:
        yield cluster


@pytest.mark.thorough
def test_a_silent_host_is_named_in_one_line(cluster, tmp_path):
    """After the hosts, whose own names are loopback addresses, have exchanged values."""
    pair = []
    for host in cluster.hosts:
        environment = base_environment(tmp_path, 1) | torchrun(2, host, 2)[0]
        pair.append(cluster.start(host, [sys.executable, "-c", JOINED], environment))
    for process in pair:
        lines = iter(process.stdout.readline, "")
        assert "['host0', 'host1'] [1, 1]\n" in lines  # After lines of Gloo.
    cluster.link(1, up=False)
    start = time.monotonic()
    ends = finish(pair, 100)
    assert time.monotonic() - start < 60
    for other, (code, lines) in zip(("host1", "host0"), ends, strict=True):
        assert code == 1 and len(lines) == 1
        assert f"lost: no answer from {other} for 40 s; check that the host runs" in lines[0]


@pytest.mark.thorough
def test_a_run_goes_on_without_a_host_until_it_returns(cluster, tmp_path):
    """With the records and the losses of one process."""
    cluster.close()  # The case makes hosts of its own.
    row = fewer_hosts.compare(fewer_hosts.CASES[0], tmp_path / "case")
    assert "fault" not in row and row["records"], row
    without, returned = row["told"]
    assert without.startswith("without host1: 1 of 2 processes, gradient_accumulation_steps=4 in")
    assert returned.startswith("with host1 again: going on from step ")
