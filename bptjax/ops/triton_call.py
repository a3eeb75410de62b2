"""Calls Triton kernels through jax-triton."""

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
from jax import Array

from bptjax.ops.target import is_absent, stand_in

MANUAL = jax.sharding.AxisType.Manual
# First version of jax-triton that passes a kernel one pointer instead of two for an input and the
# output that reuses its memory.
TOO_NEW = (0, 4)


def unusable() -> str | None:
    """Returns why jax-triton cannot be called here, or None if it can."""
    if is_absent():
        return None
    versions = {}
    for package in ("jax-triton", "triton"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            return f'{package} is not installed; pip install -e ".[gpu]" brings it'
    installed = versions["jax-triton"]
    if tuple(map(int, installed.split(".")[:2])) >= TOO_NEW:
        return f'jax-triton {installed} is too new; pip install -e ".[gpu]" brings an older one'
    return None


def compiler_shards_arrays() -> bool:
    """Returns whether the compiler itself shards arrays here, which it cannot do for a kernel."""
    mesh = jax.sharding.get_abstract_mesh()
    auto = [n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != MANUAL]
    return any(mesh.shape[name] > 1 for name in auto)


def triton_call(
    module: str,
    name: str,
    inputs: tuple[Array, ...],
    shapes: tuple[jax.ShapeDtypeStruct, ...],
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    constants: Any,
    aliases: dict[int, int] | None = None,
) -> tuple[Array, ...]:
    """Runs `{name}_kernel` of a module over its grid, or a stand-in for it on absent devices.

    Args:
      aliases: maps an input's index to the index of the output that reuses its memory.
    """
    if is_absent():
        return stand_in(inputs, shapes, aliases=aliases)
    # Imported here because importing jax-triton fails without a GPU.
    import jax_triton

    return jax_triton.triton_call(
        *inputs,
        kernel=getattr(importlib.import_module(module), f"{name}_kernel"),
        out_shape=shapes,
        grid=grid,
        num_warps=warps,
        num_stages=stages,
        input_output_aliases=aliases,
        C=constants,
    )
