"""Finds out which process of a run this is, from the config or a launcher's environment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bptjax.parallel.mesh import ParallelConfig

# Environment variables for keys that the config leaves out; the first one that is set counts: JAX's
# names, which JAX itself does not read, then torchrun's, then Open MPI's, which JAX without mpi4py
# does not detect from version 5 on.
VARIABLES = {
    "num_processes": ("JAX_NUM_PROCESSES", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
    "process_id": ("JAX_PROCESS_ID", "RANK", "OMPI_COMM_WORLD_RANK"),
}
# Index of a pod in an indexed Job of Kubernetes. The index alone does not make a pod a process of a
# run: the Job may be an array of separate runs.
POD = "JOB_COMPLETION_INDEX"
# Number of processes on this host, and the index of this process among them.
ON_HOST = {
    "LOCAL_WORLD_SIZE": "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "OMPI_COMM_WORLD_LOCAL_RANK",
}


@dataclass(frozen=True)
class ProcessInfo:
    """Identity of a process in a multi-process run.

    Attributes:
      coordinator: host:port of process 0.
      count: number of processes.
      index: index of this process.
      local_devices: indices of the host's GPUs that this process uses; None for all.
    """

    coordinator: str
    count: int
    index: int
    local_devices: Sequence[int] | None


def find_process(config: ParallelConfig, environment: Mapping[str, str]) -> ProcessInfo | None:
    """Returns the identity of this process, or None if it is the only one.

    The config has precedence, then JAX_COORDINATOR_ADDRESS and related variables, then MASTER_ADDR
    and related variables (torchrun), then JAX's detection of Slurm and Open MPI. In an indexed Job
    of Kubernetes, the index is that of the pod.

    Raises:
      ValueError: a value is missing, not a number or out of range; a loopback address as
        coordinator of several hosts.
    """
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    if not address and {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        address = "{MASTER_ADDR}:{MASTER_PORT}".format_map(environment)
    address = config.coordinator or address
    count, index = (_number(config, name, environment) for name in VARIABLES)
    if index is None and None not in (address, count) and POD in environment:
        index = _integer(POD, environment, 0)
    local: Sequence[int] | None = None
    if devices := environment.get("JAX_LOCAL_DEVICE_IDS"):
        try:
            local = [int(number) for number in devices.split(",")]
        except ValueError as error:
            raise ValueError(
                f"JAX_LOCAL_DEVICE_IDS={devices}: must be numbers such as 0,1; change the "
                "environment variable"
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
        raise ValueError(f"{text}: must all be set, by these keys or in the environment")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise ValueError(f"parallel.coordinator={address}: must be host:port")
    if not 0 <= index < count:
        raise ValueError(f"{text}: process_id: must be in [0, num_processes)")
    if is_loopback(host) and (why := _several_hosts(count, environment)):
        raise ValueError(
            f"parallel.coordinator={address}: must not be a loopback address on several hosts "
            f"({why}); give the name of process 0's host"
        )
    return ProcessInfo(address, count, index, local)


def is_loopback(host: str) -> bool:
    """Returns whether a host name or address is the loopback interface's."""
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")


def _number(config: ParallelConfig, name: str, environment: Mapping[str, str]) -> int | None:
    if (value := getattr(config, name)) is not None:
        return value
    set_variables = (variable for variable in VARIABLES[name] if variable in environment)
    return next((_integer(variable, environment, 0) for variable in set_variables), None)


def _integer(variable: str, environment: Mapping[str, str], default: int) -> int:
    text = environment.get(variable, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(
            f"{variable}={text}: must be a number; change the environment variable"
        ) from error


def _several_hosts(count: int, environment: Mapping[str, str]) -> str:
    """Returns the variable that implies several hosts, with its value; empty if there is none."""
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"):
        if _integer(name, environment, 1) > 1:
            return f"{name}={environment[name]}"
    for name in ON_HOST:
        if _integer(name, environment, count) < count:
            return f"{name}={environment[name]} of {count} processes"
    return ""
