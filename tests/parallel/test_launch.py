"""The identity of a process, from the config or the environment of a launcher."""

import os

import pytest

from bptjax.parallel.launch import ProcessInfo, find_process
from bptjax.parallel.mesh import ParallelConfig

TORCHRUN = {"MASTER_ADDR": "node7", "MASTER_PORT": "1234", "WORLD_SIZE": "4", "RANK": "3"}
JAX = {
    "JAX_COORDINATOR_ADDRESS": "node8:99",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "0",
}
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[017-018]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "2",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "8192.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_SIZE": "1",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "1"}
CONFIG = ParallelConfig(coordinator="node9:1", num_processes=3, process_id=2)
PROCESSES = {
    "alone": (ParallelConfig(), {}, None),
    "one of torchrun": (ParallelConfig(), TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, None),
    "one of Slurm": (ParallelConfig(), SLURM | {"SLURM_NTASKS": "1"}, None),
    "one of Open MPI": (ParallelConfig(), OPEN_MPI_5, None),
    "Slurm's batch script": (ParallelConfig(), {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, None),
    "config": (CONFIG, TORCHRUN | JAX, ProcessInfo("node9:1", 3, 2, None)),
    "JAX": (ParallelConfig(), TORCHRUN | JAX, ProcessInfo("node8:99", 2, 0, None)),
    "torchrun, one a host": (ParallelConfig(), TORCHRUN, ProcessInfo("node7:1234", 4, 3, None)),
    "torchrun, two a host": (
        ParallelConfig(),
        TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"},
        ProcessInfo("node7:1234", 4, 3, [1]),
    ),
    "Slurm": (ParallelConfig(), SLURM, ProcessInfo("node017:61441", 8, 5, [1])),
    "Slurm, own coordinator and GPUs": (
        ParallelConfig(coordinator="node1:5"),
        SLURM | {"JAX_LOCAL_DEVICE_IDS": "0,1"},
        ProcessInfo("node1:5", 8, 5, [0, 1]),
    ),
    "Open MPI": (ParallelConfig(), OPEN_MPI, ProcessInfo("10.96.0.1:61442", 4, 2, [0])),
    "indexed Job": (
        ParallelConfig(),
        KUBERNETES | {"JAX_COORDINATOR_ADDRESS": "run-0.run:99", "JAX_NUM_PROCESSES": "2"},
        ProcessInfo("run-0.run:99", 2, 1, None),
    ),
    "array of runs in an indexed Job": (ParallelConfig(), KUBERNETES, None),
    "loopback on one host": (
        ParallelConfig(),
        TORCHRUN | {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"},
        ProcessInfo("127.0.0.1:1234", 4, 3, [3]),
    ),
}


@pytest.mark.parametrize(("config", "environment", "process"), PROCESSES.values(), ids=PROCESSES)
def test_config_and_environment_identify_a_process(monkeypatch, config, environment, process):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert find_process(config, os.environ) == process


LOCAL = {"MASTER_ADDR": "localhost"}
REFUSED = {
    "loopback of torchrun": (TORCHRUN | LOCAL | {"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2 of"),
    "loopback of Slurm": (
        SLURM | {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:5"},
        "coordinator=127.0.0.1:5: must not be a loopback address .*SLURM_STEP_NUM_NODES=2",
    ),
    "loopback of Open MPI": (
        OPEN_MPI | {"JAX_COORDINATOR_ADDRESS": "[::1]:5"},
        "OMPI_COMM_WORLD_LOCAL_SIZE=2 of 4 processes",
    ),
    "no coordinator": ({"WORLD_SIZE": "2", "RANK": "0"}, "coordinator=None, .*must all be set"),
    "no port": (JAX | {"JAX_COORDINATOR_ADDRESS": "node8"}, "coordinator=node8: must be host:port"),
    "no number": (TORCHRUN | {"RANK": "first"}, "RANK=first: must be a number"),
    "no devices": (
        JAX | {"JAX_LOCAL_DEVICE_IDS": "0-3"},
        "JAX_LOCAL_DEVICE_IDS=0-3: must be numbers",
    ),
    "out of range": (TORCHRUN | {"RANK": "4"}, "num_processes=4, process_id=4: "),
}


@pytest.mark.parametrize(("environment", "message"), REFUSED.values(), ids=REFUSED)
def test_incomplete_or_wrong_settings_are_refused(monkeypatch, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        find_process(ParallelConfig(), os.environ)
