"""The mesh and the table of its axes."""

import itertools
import logging
import math
import os
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from bptjax.ops.attention import fa4
from bptjax.ops.determinism import add_in_order, is_deterministic
from bptjax.run.output import FULL_DISK

# Fraction of a GPU's memory for JAX. Libraries, contexts and other programs need little.
MEMORY_FRACTION = "0.93"
# Minimum of parallel.host_wait_s, in which every process shows that it is there.
LEAST_HOST_WAIT_S = 30
# Exists if the driver sees a GPU.
NVIDIA = "/dev/nvidia0"
# Memory limit of a container, in cgroups v2 and v1.
CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)

# Logical axes of parameters and activations that each mesh axis shards, in mesh order.
# `ParallelConfig` has the sizes under the same names. No other module names mesh axes.
AXES: dict[str, tuple[str, ...]] = {
    "dp": ("batch",),
    "fsdp": ("batch", "embed"),
    "tp": ("vocab", "heads", "kv_heads", "mlp"),
    "sp": ("sequence", "embed"),
    "ep": ("batch", "experts", "embed"),
}
# Mesh axes of each logical axis. Logical axes without an entry are replicated.
RULES: dict[str, tuple[str, ...]] = {
    logical: tuple(name for name, sharded in AXES.items() if logical in sharded)
    for logical in dict.fromkeys(itertools.chain(*AXES.values()))
}
# Logical axis that `zero_stage` shards or replicates.
STATE_AXIS = "embed"


@dataclass(frozen=True)
class ParallelConfig:
    """Device mesh and processes.

    Attributes:
      dp: devices for data parallelism. The batch is sharded, the parameters are replicated. One of
        the five axes may be -1, which takes all remaining devices.
      fsdp: devices for fully sharded data parallelism. Shards the batch, and the state according to
        zero_stage.
      tp: devices for tensor parallelism. Shards heads, feed-forward network and vocabulary.
      sp: devices for sequence parallelism. Shards the tokens of a sequence, and the state according
        to zero_stage.
      ep: devices for expert parallelism. Shards the batch and the experts, and the rest of the
        state according to zero_stage. Must divide model.experts.count.
      zero_stage: state that fsdp, sp and ep shard. 1 is optimizer state; 2 adds gradients; 3 adds
        parameters. Experts are sharded over ep in every stage.
      sequence_strategy: how attention communicates along sp. auto picks the first of ulysses,
        ulysses_ring and ring that the number of heads allows.
      coordinator: host:port of process 0. If not set, taken from the environment.
      num_processes: number of processes. If not set, taken from the environment.
      process_id: index of this process, from 0. If not set, taken from the environment.
      host_wait_s: seconds that a run with --supervise waits for missing processes before it goes on
        without them, if an axis is -1; at least 30. null waits for all.

    Rajbhandari et al. 2019, arXiv 1910.02054, for zero_stage.
    """

    dp: int = 1
    fsdp: int = -1
    tp: int = 1
    sp: int = 1
    ep: int = 1
    zero_stage: Literal[1, 2, 3] = 3
    sequence_strategy: Literal["auto", "ulysses", "ulysses_ring", "ring", "gather"] = "auto"
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    host_wait_s: float | None = 600.0

    def __post_init__(self):
        if self.host_wait_s is not None and not self.host_wait_s >= LEAST_HOST_WAIT_S:
            raise ValueError(
                f"parallel.host_wait_s={self.host_wait_s}: must be at least "
                f"{LEAST_HOST_WAIT_S}, or null to wait for all processes"
            )


def select_devices(device: str) -> list[jax.Device]:
    """Returns the devices for `auto`, `cpu` or `gpu`. Call it before anything else starts a JAX
    backend.

    Unless the environment sets other values, JAX uses `MEMORY_FRACTION` of a GPU's memory and up to
    four fifths of the host's memory (JAX's default is 64 GiB, and its memory pools double up to the
    limit), and caches compiled programs in the user's cache directory. With fa4-jax and a GPU, XLA
    runs with `fa4.XLA_FLAG`.

    Raises:
      ValueError: device=gpu, but JAX sees no GPU; device=auto, but JAX would run on the CPU of a
        machine with an NVIDIA GPU.
    """
    if not {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & os.environ.keys():
        os.environ["XLA_CLIENT_MEM_FRACTION"] = MEMORY_FRACTION
    limit = host_memory() * 4 // 5 // 2**30
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(limit))
    flags = os.environ.get("XLA_FLAGS", "").strip()
    name = fa4.XLA_FLAG.partition("=")[0]
    # XLA_FLAGS may name a file of flags.
    takes_more = not flags or (flags.startswith("-") and name not in flags)
    if takes_more and device != "cpu" and os.path.exists(NVIDIA) and find_spec("fa4_jax"):
        os.environ["XLA_FLAGS"] = f"{flags} {fa4.XLA_FLAG}".strip()
    for number in FULL_DISK:
        # JAX continues without its cache; the run's own writes report the full disk.
        message = f"Error (reading|writing) persistent compilation cache .*{os.strerror(number)}"
        warnings.filterwarnings("ignore", message)
    if not os.path.exists(NVIDIA):
        # JAX prints a traceback if the CUDA plugin, which plans need, finds no GPU.
        logging.getLogger("jax._src.xla_bridge").addFilter(_is_about_no_plugin)
    devices = _devices(device)
    if devices[0].platform == "gpu" and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        with suppress(OSError):  # JAX goes on without a cache.
            jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "xla"))
            make_cache_directory()
    return devices


def _is_about_no_plugin(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Jax plugin configuration error")


def cache_directory() -> Path:
    """Returns this package's directory in the user's cache directory.

    Raises:
      OSError: the user has no home directory.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if cache == "~/.cache":
        raise OSError("no home directory for a cache; set HOME or XDG_CACHE_HOME")
    return Path(cache) / "bptjax"


def make_cache_directory() -> None:
    """Makes the directory, or restricts an existing one: only the user may access it, because JAX
    runs the programs in it."""
    directory = cache_directory()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_mode & 0o077:
        directory.chmod(0o700)


def host_memory() -> int:
    """Returns the bytes of host memory that this container may use."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in CONTAINER_LIMITS:
        try:
            sizes.append(int(file.read_text()))
        except (OSError, ValueError):
            continue  # No file, or "max".
    return min(sizes)


def available_memory() -> int:
    """Returns the bytes of memory that programs may still take without swapping, by Linux's
    estimate, and at most the limit of this container."""
    try:
        match = re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())
    except OSError:  # Another system than Linux.
        match = None
    return min(host_memory(), int(match[1]) * 1024) if match else host_memory()


def _devices(device: str) -> list[jax.Device]:
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        return jax.devices("cpu")
    remedy = 'pip install -e ".[gpu]" brings JAX with CUDA'
    if device == "gpu":
        try:
            return jax.devices("gpu")
        except RuntimeError as error:
            raise ValueError(f"device=gpu: JAX sees no GPU; {remedy}, or set device=cpu") from error
    devices = jax.devices()
    if devices[0].platform == "cpu" and Path(NVIDIA).exists():
        raise ValueError(
            "device=auto: this machine has an NVIDIA GPU, but JAX runs on the CPU; "
            f"{remedy}, or set device=cpu"
        )
    return devices


def axis_sizes(config: ParallelConfig) -> dict[str, int]:
    """Returns the size of each mesh axis; -1 means all remaining devices."""
    return {name: getattr(config, name) for name in AXES}


def num_shards(mesh: Mesh | AbstractMesh, axis: str) -> int:
    """Returns the number of shards of a logical axis that the mesh axes divide evenly."""
    return math.prod(mesh.shape[name] for name in RULES[axis])


def data_shards(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of shards of the batch."""
    return num_shards(mesh, "batch")


def shards_on(config: ParallelConfig, devices: int) -> int | None:
    """Returns the number of shards of the batch on a number of devices; None if the set axes do not
    divide it, or no axis is -1."""
    sizes = axis_sizes(config)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if devices % fixed or -1 not in sizes.values():
        return None
    rest = devices // fixed
    return math.prod(rest if sizes[name] == -1 else sizes[name] for name in RULES["batch"])


def make_mesh(config: ParallelConfig, devices: list | None = None) -> Mesh:
    """Returns a mesh of all devices. With one device, all axes have size 1.

    Raises:
      ValueError: a size of 0, several axes of size -1, or a product other than the number of
        devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = axis_sizes(config)
    for name, size in sizes.items():
        if size < 1 and size != -1:
            raise ValueError(
                f"parallel.{name}={size}: must be at least 1, or -1 for all remaining devices"
            )
    text = "parallel: " + ", ".join(f"{name}={size}" for name, size in sizes.items())
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"{text}: must have at most one -1, the default of fsdp; set the others")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(devices) % fixed or (not open_axes and fixed != len(devices)):
        raise ValueError(
            f"{text}: must multiply to {len(devices)} devices; nearest: "
            f"{_nearest(sizes, len(devices))}"
        )
    for name in open_axes:
        sizes[name] = len(devices) // fixed
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes), devices=devices
    )


def _nearest(sizes: dict[str, int], devices: int) -> str:
    """Formats the two factorizations of the number of devices that are closest to the sizes."""

    def change(factorization):
        return sum(
            abs(math.log(b / max(a, 1))) for a, b in zip(sizes.values(), factorization, strict=True)
        )

    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    factorizations = [
        m for m in itertools.product(divisors, repeat=len(sizes)) if math.prod(m) == devices
    ]
    texts = (
        " ".join(f"{name}={size}" for name, size in zip(sizes, m, strict=True))
        for m in sorted(factorizations, key=change)[:2]
    )
    return " or ".join(texts)


def partition_spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """Returns the partition spec of an array with these logical axes."""
    return PartitionSpec(*(RULES.get(axis) if axis else None for axis in axes))


def sharding(
    mesh: Mesh | AbstractMesh,
    axes: tuple[str | None, ...],
    shape: tuple[int, ...],
    replicated: tuple[str, ...] = (),
) -> NamedSharding:
    """Returns the sharding of an array of this shape. `axes` are the logical names of its last
    axes; leading axes, such as stacked layers, are not sharded.

    An axis is sharded over its mesh axes that divide it and shard no earlier axis, unless it is
    one of the `replicated` logical axes.
    """
    partition, used = [], set()
    for axis, size in zip((None,) * (len(shape) - len(axes)) + axes, shape, strict=True):
        names: tuple[str, ...] = ()
        for name in () if axis in replicated else RULES.get(axis or "", ()):
            devices = mesh.shape[name]
            if devices > 1 and name not in used and size % devices == 0:
                names, size = (*names, name), size // devices
        used.update(names)
        partition.append(names or None)
    return NamedSharding(mesh, PartitionSpec(*partition))


def constrain(x: Array, *axes: str | None) -> Array:
    """Shards an array by its logical axes, in the mesh set by `jax.set_mesh`. Returns the array
    itself without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, sharding(mesh, axes, x.shape).spec)


def lookup(table: Array, indices: Array, axis: str | None = None) -> Array:
    """Returns the entries of a table `[R, D]` at the indices. `axis` is the logical name of axis R.

    All-gathers the table's axis D first: if D were sharded over the mesh axes that shard the
    indices, XLA would replicate the result on every device. The gradient of each entry is summed in
    float32: in 16 bits, the sum over a frequent token stops growing.
    """
    return _take(constrain(table, axis, None), indices)


@jax.custom_vjp
def _take(table, indices):
    return jnp.take(table, indices, axis=0)


def _take_backward(residuals, cotangent):
    table, indices = residuals
    # Zeros tied to the cotangent: otherwise XLA would make them before the layers' backward pass
    # and keep an array of the table's size until its end.
    cotangent, zero = jax.lax.optimization_barrier((cotangent, jnp.zeros((), jnp.float32)))
    if is_deterministic():
        sums = _add_in_order(table.shape, zero, indices, cotangent)
    else:
        sums = jnp.full(table.shape, zero).at[indices].add(cotangent.astype(jnp.float32))
    return sums.astype(table.dtype), None


def _add_in_order(shape: tuple[int, ...], zero: Array, indices: Array, values: Array) -> Array:
    """Returns the result of `add_in_order` on zeros. Each device adds its own tokens to its own
    entries of the vocabulary."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return add_in_order(jnp.full(shape, zero), indices, values)
    tokens = sharding(mesh, ("batch", "sequence")[: indices.ndim], indices.shape).spec
    entries = sharding(mesh, ("vocab", None), shape).spec
    axes = [n for part in tokens for n in ((part,) if isinstance(part, str) else part or ())]
    size = shape[0] // (mesh.shape[entries[0]] if entries[0] else 1)

    def local(zero, indices, values):
        own = indices - (jax.lax.axis_index(entries[0]) * size if entries[0] else 0)
        own = jnp.where((own >= 0) & (own < size), own, size)
        sums = add_in_order(jnp.full((size, shape[1]), zero), own, values)
        return jax.lax.psum(sums, axes)

    specs = PartitionSpec(), tokens, PartitionSpec(*tokens, None)
    mapped = jax.shard_map(local, in_specs=specs, out_specs=entries, check_vma=False)
    return mapped(zero, indices, values)


_take.defvjp(lambda table, indices: (_take(table, indices), (table, indices)), _take_backward)
