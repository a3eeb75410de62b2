"""Guards of a run: the lock on its directory, signals, out of memory, values that are not
finite."""

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bptjax.training.spec import TrainSpec
from bptjax.training.state import abstract_state


class RunFailed(RuntimeError):
    """The run cannot continue. The message says which step is saved and which keys to change."""


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Locks the run directory against other processes until the end of this process.

    Raises:
      ValueError: another process has the lock.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ValueError(f"another process is running in {directory}") from error
    finally:
        os.close(handle)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Yields a list to which the first SIGINT or SIGTERM is added. A second signal has its usual
    effect."""
    got: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def note(number, frame):
        got.append(number)
        for kind, handler in before.items():
            signal.signal(kind, handler)

    for kind in kinds:
        signal.signal(kind, note)
    try:
        yield got
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


@contextmanager
def explain_out_of_memory(spec: TrainSpec) -> Iterator[None]:
    """Rewrites JAX's out-of-memory error in one line, with the use of memory and keys to change.

    Raises:
      RunFailed: memory ran out.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        state = abstract_state(spec)
        held = {
            name: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(getattr(state, name)))
            / 2**30
            for name in ("model", "opt_state")
        }
        train, execution = spec.config.train, spec.execution
        raise RunFailed(
            f"out of memory: parameters take {held['model']:.2f} GiB and the optimizer "
            f"{held['opt_state']:.2f} GiB over all devices, the rest is a step of "
            f"{train.per_device_train_batch_size} × {train.seq_len} tokens per device "
            f"with execution.remat={execution.remat}, ffn_chunk={execution.ffn_chunk}, "
            f"ce_chunk={execution.ce_chunk}: try remat=full, a "
            "smaller per_device_train_batch_size, smaller chunks, param_dtype=bfloat16, "
            "optimizer.state_dtype=int8, optimizer.state_memory_kind=pinned_host or "
            "adapter.type=qlora"
        ) from error


@jax.jit
def finite(tree: Any) -> Array:
    """Returns whether all floats of the tree are finite, as a bool scalar."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(x).all() for x in floats]).all()
