"""Gloo, JAX's collectives of CPUs: its address, its connections, its errors."""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax._src import distributed, xla_bridge
from jax.extend.backend import register_backend_factory
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import _jax

# Seconds that Gloo, which has no setting for it, waits for a process to connect, and for data of a
# reduce-scatter. XLA gives other collectives 30 minutes.
TIMEOUT_S = 30
# Gloo's errors, the process that did not connect among global devices, the address of a peer, and
# the end of a wait.
FAILED = re.compile(r"Gloo [\w -]+ failed: ")
LATE = re.compile(r"timed out with key: \S*gloo/([\d,]+)/(\d+)")
PEER = re.compile(r"\[([\da-fA-F.:%\w]+)\]:\d+")
TIMED_OUT = re.compile(r"timeout|timed out", re.IGNORECASE)


def is_used() -> bool:
    """Returns whether JAX uses Gloo for collectives of CPUs."""
    return jax.config.values["jax_cpu_collectives_implementation"] == "gloo"


def listen_at(address: str) -> None:
    """Makes Gloo listen at an address of this host. Call it before a JAX backend starts.

    By itself, Gloo takes the address of the host's name. On Debian and in many containers it is a
    loopback address, which other hosts cannot reach.
    """
    if not is_used():
        return
    client: Any = distributed.global_state.client
    collectives = _jax.make_gloo_tcp_collectives(client, hostname=address)
    factory = partial(xla_bridge.make_cpu_client, collectives)
    register_backend_factory("cpu", factory, priority=0, fail_quietly=False)


def connect(mesh: Mesh, wait_for_all: Callable[[], None]) -> None:
    """Connects the processes of a mesh along all axes, in any order, if its devices are CPUs.

    Otherwise a group of processes connects when it first communicates, usually in the first step.
    Gloo then fails if a process, such as one that compiles slowly, comes `TIMEOUT_S` later.

    Args:
      wait_for_all: waits for all processes.
    """
    if not is_used() or mesh.devices.flat[0].platform != "cpu":
        return
    axes = [name for name, size in mesh.shape.items() if size > 1]
    counts = range(1, len(axes) + 1)
    # Gloo makes another group for the same devices in another order.
    groups = [x for count in counts for x in itertools.permutations(axes, count)]

    def sums(x: jax.Array) -> jax.Array:
        for group in groups:
            x = jax.lax.psum(x, group)
        return x

    each = PartitionSpec(mesh.axis_names)
    ones = np.ones(mesh.size, np.float32)
    inputs = jax.make_array_from_callback(
        ones.shape, NamedSharding(mesh, each), lambda index: ones[index]
    )
    mapped = jax.shard_map(sums, mesh=mesh, in_specs=each, out_specs=each, check_vma=False)
    compiled = jax.jit(mapped).lower(inputs).compile()
    wait_for_all()
    jax.block_until_ready(compiled(inputs))


@dataclass(frozen=True)
class Failure:
    """An error of Gloo.

    Attributes:
      address: address of the peer, if known.
      late: global device of the process that did not connect in time, if any did not.
      timed_out: whether Gloo waited in vain, while the connection remained.
    """

    address: str | None
    late: int | None
    timed_out: bool


def parse_error(text: str) -> Failure | None:
    """Parses an error of Gloo about another process. Returns None for other errors."""
    if not (failed := FAILED.search(text)):
        return None
    text = text[failed.end() :]
    late, peer, timed_out = (x.search(text) for x in (LATE, PEER, TIMED_OUT))
    if not late and not peer and not timed_out:
        return None
    device = int(late[1].split(",")[int(late[2])]) if late else None
    return Failure(peer[1] if peer else None, device, timed_out is not None)
