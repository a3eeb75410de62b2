"""The mesh, and the one table from logical axis names to its axes."""

import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

# What libraries, contexts and other programs need besides is little.
MEMORY_FRACTION = "0.93"
# Present where the driver sees a GPU.
NVIDIA = "/dev/nvidia0"

# Devices along these would have the same parameters: each stores a part, as `zero_stage` says.
CUT = ("fsdp", "sp")
# What each logical axis of a parameter or activation is cut over; one that is not named here is
# whole on every device.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("dp", "fsdp"),
    "sequence": ("sp",),
    "embed": CUT,
    "vocab": ("tp",),
    "heads": ("tp",),
    "kv_heads": ("tp",),
    "mlp": ("tp",),
}


@dataclass(frozen=True)
class ParallelConfig:
    """Device mesh and processes.

    Attributes:
      dp: devices for data parallelism. The batch is sharded, the parameters are replicated. One of
        the four axes may be -1, which takes all remaining devices.
      fsdp: devices for fully sharded data parallelism. The batch is sharded, and the state as
        zero_stage says.
      tp: devices for tensor parallelism. Heads, feed-forward network and vocabulary are sharded.
      sp: devices for sequence parallelism. The tokens of a sequence are sharded, and the state as
        zero_stage says.
      zero_stage: state that fsdp and sp shard. 1 is optimizer state; 2 adds gradients; 3 adds
        parameters.
      sequence_strategy: how attention communicates along sp. auto picks the first of ulysses,
        ulysses_ring and ring that the number of heads allows.
      coordinator: host:port of process 0. If not set, taken from the environment.
      num_processes: number of processes. If not set, taken from the environment.
      process_id: index of this process, from 0. If not set, taken from the environment.

    Rajbhandari et al. 2019, arXiv 1910.02054, for zero_stage.
    """

    dp: int = 1
    fsdp: int = -1
    tp: int = 1
    sp: int = 1
    zero_stage: Literal[1, 2, 3] = 3
    sequence_strategy: Literal["auto", "ulysses", "ulysses_ring", "ring", "gather"] = "auto"
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


def select_devices(device: str) -> list[jax.Device]:
    """The devices to run on: `auto`, `cpu` or `gpu`. To be called before anything else starts a JAX
    backend.

    Where the environment does not say otherwise, JAX takes `MEMORY_FRACTION` of a GPU's memory, may
    take four fifths of the host's (its own limit is 64 GiB; pools grow by doubling, which the limit
    cuts short), and keeps what it compiles in the user's cache directory.

    Raises:
      ValueError: gpu where JAX sees none; or auto, where JAX is about to run on the CPU beside an
        NVIDIA GPU.
    """
    if not {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & os.environ.keys():
        os.environ["XLA_CLIENT_MEM_FRACTION"] = MEMORY_FRACTION
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(host * 4 // 5 // 2**30))
    devices = _devices(device)
    if devices[0].platform == "gpu" and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(caches / "bptjax" / "xla"))
    return devices


def _devices(device: str) -> list[jax.Device]:
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        return jax.devices("cpu")
    remedy = 'pip install -e ".[gpu]" brings JAX with CUDA'
    if device == "gpu":
        try:
            return jax.devices("gpu")
        except RuntimeError as error:
            raise ValueError(
                f"device=gpu, but JAX sees no GPU; {remedy}, and device=cpu does without"
            ) from error
    devices = jax.devices()
    if devices[0].platform == "cpu" and Path(NVIDIA).exists():
        raise ValueError(
            f"this machine has an NVIDIA GPU, but JAX runs on the CPU; {remedy}, or set device=cpu"
        )
    return devices


def make_mesh(config: ParallelConfig, devices: list | None = None) -> Mesh:
    """A mesh (dp, fsdp, tp, sp) over all devices. One device is a mesh of ones.

    Raises:
      ValueError: the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {"dp": config.dp, "fsdp": config.fsdp, "tp": config.tp, "sp": config.sp}
    text = "parallel: " + ", ".join(f"{name}={size}" for name, size in sizes.items())
    if any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(f"{text}: an axis is at least 1, or -1 for the rest")
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"{text}: one axis is -1 (fsdp, where it is not set), and no more")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(devices) % fixed or (not open_axes and fixed != len(devices)):
        raise ValueError(
            f"{text} does not make {len(devices)} devices; nearest: {_nearest(sizes, len(devices))}"
        )
    for name in open_axes:
        sizes[name] = len(devices) // fixed
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes), devices=devices
    )


def _nearest(sizes: dict[str, int], devices: int) -> str:
    """The two factorisations that change least of what was asked for."""

    def change(made):
        return sum(abs(math.log(b / max(a, 1))) for a, b in zip(sizes.values(), made, strict=True))

    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    made = [m for m in itertools.product(divisors, repeat=4) if math.prod(m) == devices]
    texts = (
        " ".join(f"{name}={size}" for name, size in zip(sizes, m, strict=True))
        for m in sorted(made, key=change)[:2]
    )
    return " or ".join(texts)


def spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """The partition of an array whose axes bear these logical names."""
    return PartitionSpec(*(RULES.get(axis) if axis else None for axis in axes))


def sharding(
    mesh: Mesh | AbstractMesh,
    axes: tuple[str | None, ...],
    shape: tuple[int, ...],
    whole: tuple[str, ...] = (),
) -> NamedSharding:
    """Where an array of this shape lives, whose last axes bear these names; those in front, stacked
    layers, are not cut. An axis is cut over as many of its mesh axes as divide it, and over none of
    `whole`.
    """
    parts = []
    for axis, size in zip((None,) * (len(shape) - len(axes)) + axes, shape, strict=True):
        names: tuple[str, ...] = ()
        for name in RULES.get(axis or "", ()):
            devices = mesh.shape[name]
            if devices > 1 and name not in whole and size % devices == 0:
                names, size = (*names, name), size // devices
        parts.append(names or None)
    return NamedSharding(mesh, PartitionSpec(*parts))


def constrain(x: Array, *axes: str | None) -> Array:
    """Pins an array to where its logical axes say, in the mesh set by `jax.set_mesh`; without one,
    nothing.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, sharding(mesh, axes, x.shape).spec)


def lookup(table: Array, indices: Array, axis: str | None = None) -> Array:
    """Rows of a table `[R, D]`, R along the logical axis `axis`. They are gathered whole: cut over
    axes that cut the indices too, XLA would make all that are looked up on every device.
    """
    return jnp.take(constrain(table, axis, None), indices, axis=0)
