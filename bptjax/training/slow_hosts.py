"""Names slow hosts: all processes time the same computation on their own devices, without
communication, because a step takes as long as on the slowest host."""

import statistics
import time
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bptjax.parallel.distributed import all_gather_json, hosts

# A host is slow if it takes this factor longer than the others.
SLOW = 1.5
# Side of the multiplied matrices, and number of multiplications: some ms of work.
GPU_WORK = 4096, 32
CPU_WORK = 256, 32
# The shortest of several times counts, because it has the least noise.
REPEATS = 5


def find_slow_hosts(mesh: Mesh) -> str:
    """Names the slow hosts, or returns an empty text. All processes must call it together."""
    if len(set(hosts())) < 2:
        return ""
    return describe_slow_hosts(hosts(), all_gather_json(time_devices(mesh.local_devices)))


def time_devices(devices: Sequence[jax.Device]) -> float:
    """Returns the seconds that the devices take for a fixed computation."""
    on_cpu = devices[0].platform == "cpu"
    size, count = CPU_WORK if on_cpu else GPU_WORK
    dtype = jnp.float32 if on_cpu else jnp.bfloat16
    inputs = [jax.device_put(jnp.full((size, size), 1 / size, dtype), x) for x in devices]
    seconds = []
    for _ in range(1 + REPEATS):  # The first call compiles.
        start = time.perf_counter()
        jax.block_until_ready([_multiply(x, count=count) for x in inputs])
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


@partial(jax.jit, static_argnames="count")
def _multiply(x: jax.Array, *, count: int) -> jax.Array:
    return jax.lax.fori_loop(0, count, lambda _, y: x @ y, x)


def describe_slow_hosts(names: Sequence[str], seconds: Sequence[float]) -> str:
    """Names the slow hosts, or returns an empty text.

    Args:
      names: host of each process.
      seconds: time of each process for the same computation.
    """
    slowest: dict[str, float] = {}
    for name, time_s in zip(names, seconds, strict=True):
        slowest[name] = max(time_s, slowest.get(name, 0.0))
    lines = []
    for name, time_s in slowest.items():
        factor = time_s / statistics.median(x for other, x in slowest.items() if other != name)
        if factor > SLOW:
            lines.append(f"{name} takes {factor:.1f} × the median of the other hosts")
    if not lines:
        return ""
    return f"slow host: {', '.join(lines)} for the same computation; see what else runs there"
