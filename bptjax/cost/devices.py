"""Kinds of accelerators, and devices of these kinds on other machines, to compile for.

Sizes and rates are from the vendors' data sheets, except memory, which the driver reports.
"""

import os
import re
import site
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from jax.experimental import topologies

from bptjax.ops.target import STAND_IN

MIB, GIB = 2**20, 2**30
# Bytes/s of 16 lanes, each way.
PCIE_4, PCIE_5 = 31.5e9, 63e9
# FLOP/s of cuDNN's attention on an H200 (scripts/results/attention_fa4_h200.json).
CUDNN_RATES = dict(attention_64=422e12, attention_128=531e12)


@dataclass(frozen=True)
class Rates:
    """Rates of a device in a training step.

    Attributes:
      products: FLOP/s of matrix products in bfloat16.
      float8: FLOP/s of matrix products of linear layers in float8.
      attention_64, attention_128: FLOP/s of causal attention, forward and backward, with head sizes
        up to 64 and larger; only pairs that the mask allows count.
      bandwidth: bytes/s of device memory, read and written.
      link: bytes/s between device and host memory, each way.
    """

    products: float
    float8: float
    attention_64: float
    attention_128: float
    bandwidth: float
    link: float

    def attention(self, head_size: float) -> float:
        return self.attention_64 if head_size <= 64 else self.attention_128


@dataclass(frozen=True)
class DeviceKind:
    """A kind of accelerator.

    Attributes:
      name: jax's `device_kind`, or a prefix of it.
      memory: bytes.
      flops: dense bfloat16 matrix products, FLOP/s: the denominator of MFU.
      bandwidth: bytes/s of device memory.
      cores: streaming multiprocessors of a GPU; 0 for a TPU.
      capability: compute capability of a GPU.
      l2: bytes of a GPU's L2 cache.
      shared: KiB of shared memory of a GPU's core.
      clock: GHz of a GPU.
      peers: bytes/s that a device receives from the other devices of its host.
      host: bytes/s between device and host memory, each way.
      measured: rates measured by this repository's scripts, or consistent with measured steps; None
        without measurements.
    """

    name: str
    memory: int
    flops: float
    bandwidth: float
    cores: int = 0
    capability: tuple[int, int] = (0, 0)
    l2: int = 0
    shared: int = 0
    clock: float = 0.0
    peers: float = PCIE_4
    host: float = PCIE_4
    measured: Rates | None = None

    @property
    def rates(self) -> Rates:
        """The measured rates, or an H200's rates scaled by the data sheets. On GPUs other than
        Hopper, attention runs cuDNN instead of FlashAttention-4."""
        if self.measured:
            return self.measured
        h200 = KINDS["h200"]
        assert h200.measured is not None
        flops, bandwidth = self.flops / h200.flops, self.bandwidth / h200.bandwidth
        hopper = self.capability == h200.capability
        known = h200.measured if hopper else replace(h200.measured, **CUDNN_RATES)
        return Rates(
            flops * known.products,
            flops * known.float8,
            flops * known.attention_64,
            flops * known.attention_128,
            bandwidth * known.bandwidth,
            # The link depends on the host: this is the measured rate of PCIe 4 with 16 lanes, and a
            # host with a newer PCIe is faster.
            22e9,
        )

    @property
    def platform(self) -> str:
        return "gpu" if self.cores else "tpu"

    def seconds(self, flops: float, bytes: float) -> float:
        """Returns the least time if arithmetic and memory traffic overlap completely."""
        return max(flops / self.flops, bytes / self.bandwidth)


# fmt: off
KINDS = {
    "a100-40gb": DeviceKind(
        "NVIDIA A100-SXM4-40GB", 40960 * MIB, 312e12, 1.555e12,
        108, (8, 0), 40 * MIB, 164, 1.41, 300e9, PCIE_4,
    ),
    "a100": DeviceKind(
        "NVIDIA A100", 81920 * MIB, 312e12, 2.039e12,
        108, (8, 0), 40 * MIB, 164, 1.41, 300e9, PCIE_4,
    ),
    "h100": DeviceKind(
        "NVIDIA H100", 81559 * MIB, 989e12, 3.35e12,
        132, (9, 0), 50 * MIB, 228, 1.98, 450e9, PCIE_5,
        # The H200's rates scaled by the data sheets, and a slow link: with these, seven steps of
        # scripts/results/auto_h100.json run at 0.95 to 1.07 of the predicted speed.
        Rates(660e12, 975e12, 505e12, 600e12, 3.0e12, 22e9),
    ),
    "h200": DeviceKind(
        "NVIDIA H200", 143155 * MIB, 989e12, 4.8e12,
        132, (9, 0), 60 * MIB, 228, 1.98, 450e9, PCIE_5,
        # Steps of scripts/results/step_h200.json, attention of attention_fa4_h200.json, and copies.
        # float8, which includes rounding the operands, is from the steps of float8_h200.jsonl.
        Rates(660e12, 975e12, 505e12, 600e12, 4.3e12, 53e9),
    ),
    "b200": DeviceKind(
        "NVIDIA B200", 183359 * MIB, 2250e12, 8.0e12,
        148, (10, 0), 126 * MIB, 228, 1.97, 900e9, PCIE_5,
    ),
    "l40s": DeviceKind(
        "NVIDIA L40S", 46068 * MIB, 362e12, 0.864e12,
        142, (8, 9), 96 * MIB, 100, 2.52, PCIE_4, PCIE_4,
    ),
    "rtx4090": DeviceKind(
        "NVIDIA GeForce RTX 4090", 24564 * MIB, 165e12, 1.008e12,
        128, (8, 9), 72 * MIB, 100, 2.52, PCIE_4, PCIE_4,
    ),
    "v5e": DeviceKind("TPU v5 lite", 16 * 1024 * MIB, 197e12, 0.82e12, peers=200e9),
    "v5p": DeviceKind("TPU v5p", 95 * 1024 * MIB, 459e12, 2.77e12, peers=600e9),
    "v6e": DeviceKind("TPU v6 lite", 32 * 1024 * MIB, 918e12, 1.64e12, peers=448e9),
}
# fmt: on


def kind_of(device_kind: str) -> str | None:
    """Returns the key in `KINDS` for jax's `device_kind`; None if the kind is unknown."""
    known = [key for key, kind in KINDS.items() if device_kind.startswith(kind.name)]
    # The name of one kind may be a prefix of another's.
    return max(known, key=lambda key: len(KINDS[key].name), default=None)


def parse_devices(text: str) -> tuple[DeviceKind, tuple[int, ...]]:
    """Parses KIND, KIND:GPUS, KIND:HOSTSxGPUS, or KIND:XxYxZ for a TPU.

    Returns:
      The kind and the topology: (hosts, GPUs per host), or the axes of a TPU's torus.

    Raises:
      ValueError: an unknown kind, or sizes that are not positive.
    """
    name, _, sizes = text.lower().partition(":")
    if name not in KINDS:
        known = ", ".join(KINDS)
        raise ValueError(f"devices={text}: must be one of {known}, and may have a number, like :8")
    if sizes and not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4}){0,2}", sizes):
        raise ValueError(
            f"devices={text}: must be like h100:8, h100:64x8 (hosts x GPUs) or v5p:2x2x2"
        )
    kind, counts = KINDS[name], tuple(int(n) for n in (sizes or "1").split("x"))
    if kind.platform == "tpu":
        least = 3 if name == "v5p" else 2
        return kind, counts + (1,) * (least - len(counts))
    if len(counts) > 2:
        raise ValueError(f"devices={text}: must be {name}:GPUS or {name}:HOSTSxGPUS")
    return kind, counts if len(counts) == 2 else (1, *counts)


def absent_devices(text: str) -> tuple[DeviceKind, list[jax.Device]]:
    """Returns devices to compile for, which need not be on this machine; see `parse_devices`.

    Raises:
      ValueError: as `parse_devices`; or the compiler for these devices is not installed, or refuses
        their number.
    """
    from jaxlib.cpu import _lapack

    kind, counts = parse_devices(text)
    # Any handler works, because it is never called.
    handler = dict(_lapack.registrations())["lapack_spotrf_ffi"]
    jax.ffi.register_ffi_target(STAND_IN, handler, platform="CUDA", api_version=1)
    jax.config.update("jax_platforms", "cpu")
    try:
        if kind.platform == "tpu":
            # Allow two plans at once: libtpu's lock protects TPUs, and a plan uses none.
            os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
            shape = "x".join(map(str, counts))
            name = text.lower().partition(":")[0]
            topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:{shape}")
        else:
            _find_assembler()
            hosts, gpus = counts
            topology = topologies.get_topology_desc(
                platform="cuda",
                topology_name=kind.name,
                topology=f"1x{hosts}x{gpus}",
                target_config=_target_config(kind),
            )
    except Exception as error:
        # If the plugin is missing or has another version, jax may raise any exception.
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        package = '-e ".[plan]"' if kind.platform == "gpu" else '"jax[tpu]"'
        raise ValueError(
            f"devices={text}: no compiler for these devices ({first}); if it is not installed, "
            f"pip install {package}"
        ) from error
    return kind, list(topology.devices)


def _find_assembler() -> None:
    """Adds the directory where pip installed ptxas to PATH."""
    for root in site.getsitepackages():
        tools = Path(root) / "nvidia" / "cu13" / "bin"
        if tools.is_dir() and str(tools) not in os.environ.get("PATH", ""):
            os.environ["PATH"] = f"{os.environ.get('PATH', '')}:{tools}"


def _target_config(kind: DeviceKind) -> str:
    """Formats XLA's description of a GPU."""
    threads = 1536 if kind.capability == (8, 9) else 2048
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {kind.shared * 1024}
  shared_memory_per_block_optin: {(kind.shared - 1) * 1024}
  threads_per_core_limit: {threads}
  core_count: {kind.cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {int(kind.bandwidth)}
  l2_cache_size: {kind.l2}
  clock_rate_ghz: {kind.clock}
  device_memory_size: {kind.memory}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {kind.capability[0]} minor: {kind.capability[1]} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 19 }}
runtime_version {{ major: 13 }}
device_description_str: "{kind.name}"
"""
