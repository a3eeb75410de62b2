"""Guards of a run: directory lock, signals, out of memory, values that are not finite."""

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bptjax.cost.auto import describe
from bptjax.cost.devices import GIB
from bptjax.cost.memory import QLORA_REMEDY, remedies, tree_bytes
from bptjax.models.execution import ExecutionConfig
from bptjax.training.spec import TrainSpec
from bptjax.training.state import HOST, abstract_state

# Seconds in which a second signal counts as the first.
REPEATED_S = 1.0


class RunFailed(RuntimeError):
    """The run cannot continue. The message names the saved step and the keys to change."""


def diverged(
    values: str, last_saved: int | None, checkpoints: Path, on_spike: bool = False
) -> RunFailed:
    """Returns the error for values that are not finite, or (with `on_spike`) too large. Names keys
    to change."""
    good = f"step {last_saved}" if last_saved else "none yet"
    text = (
        f"{values}; last good checkpoint: {good} in {checkpoints}; start again in another run_dir "
        "with a lower optimizer.learning_rate, more optimizer.warmup_steps or a lower "
        "optimizer.max_grad_norm"
    )
    if on_spike:
        text += (
            "; or go on with the same command and a larger train.on_spike.max_rollbacks or "
            "train.on_spike.factor"
        )
    return RunFailed(text)


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Locks a directory against other processes.

    Raises:
      ValueError: another process holds the lock.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{directory}: must not be in use by another process; stop that process, or choose "
                "another directory"
            ) from error
        yield
    finally:
        os.close(handle)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Yields a list to which the first SIGINT or SIGTERM is added. A second signal has its usual
    effect. Within a second it counts as the first, because a scheduler's signal to all processes
    arrives both directly and through the supervisor."""
    got: list[int] = []
    repeated = 0.0
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def restore():
        for kind, handler in before.items():
            signal.signal(kind, handler)

    def note(number, frame):
        nonlocal repeated
        if not got:
            got.append(number)
            repeated = time.monotonic() + REPEATED_S
        elif time.monotonic() > repeated:
            restore()
            signal.raise_signal(number)

    for kind in kinds:
        signal.signal(kind, note)
    try:
        yield got
    finally:
        restore()


@contextmanager
def explain_out_of_memory(spec: TrainSpec) -> Iterator[None]:
    """Rewrites JAX's out-of-memory error as one line, with the memory in use and keys to change.

    Raises:
      RunFailed: memory ran out.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        # On a CPU, running out of memory is an internal error.
        if not any(text in str(error) for text in ("RESOURCE_EXHAUSTED", "Out of memory")):
            raise
        train, state = spec.config.train, abstract_state(spec)
        settings = describe(spec.execution, ExecutionConfig().unset)
        limit = (spec.mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")
        raise RunFailed(
            f"out of memory: per device, parameters take {tree_bytes(state.model) / GIB:.2f} GiB "
            f"and the optimizer state {tree_bytes(state.opt_state) / GIB:.2f} GiB, the rest is a "
            f"step of {train.per_device_train_batch_size} × {train.seq_len} tokens with "
            f"execution={settings}; {', '.join(advice(spec, limit))}"
        ) from error


def advice(spec: TrainSpec, limit: int | None) -> Iterator[str]:
    """Formats changes to a config whose step ran out of memory.

    Args:
      limit: bytes of device memory that JAX may use; None on a CPU.
    """
    config = spec.config
    if limit:
        # Memory ran out despite the prediction, so leave a tenth free.
        budget = 0.9 * (config.memory.budget_gib or limit / GIB)
        yield (
            f"memory.budget_gib={budget:.3g} chooses settings that need less, if these keys of "
            "execution are not set"
        )
    else:
        yield "execution.remat=full and smaller ffn_chunk and ce_chunk save activations"
    if config.train.per_device_train_batch_size > 1:
        yield "train.per_device_train_batch_size=1 divides the activations"
    for key, saved in remedies(spec):
        if saved and (limit or HOST not in key):
            yield f"{key} saves {saved / GIB:.2f} GiB"
    if spec.pretrained and config.adapter.type == "none":
        yield QLORA_REMEDY


@jax.jit
def finite(tree: Any) -> Array:
    """Returns whether all floats of the tree are finite, as a bool scalar."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(x).all() for x in floats]).all()
