"""Pinned host memory, to which orbax copies a GPU's arrays before it writes them."""

import threading
from collections.abc import Iterable
from contextlib import suppress

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

PINNED = "pinned_host"


def reserve(arrays: Iterable[jax.Array]) -> threading.Thread:
    """Starts a thread that makes XLA allocate the pinned memory for copies of these arrays, which
    it keeps. Without, a first save of 25 GiB held up training for 20 s (docs/reliability.md).
    """
    # The caller may donate the arrays while the thread runs.
    places = list(shards_to_copy(arrays))
    thread = threading.Thread(target=_allocate, args=(places,), name="reserve", daemon=True)
    thread.start()
    return thread


def shards_to_copy(
    arrays: Iterable[jax.Array],
) -> Iterable[tuple[tuple[int, ...], np.dtype, jax.Device]]:
    """Yields shape, dtype and device of each shard on this process's devices that is written: one
    of its replicas, in the device's own memory."""
    for array in arrays:
        for shard in array.addressable_shards:
            if shard.replica_id == 0 and array.sharding.memory_kind != PINNED:
                yield shard.data.shape, array.dtype, shard.device


def _allocate(places: list[tuple[tuple[int, ...], np.dtype, jax.Device]]) -> None:
    # If there is too little memory, the save says so.
    with suppress(jax.errors.JaxRuntimeError):
        copies = [
            jax.device_put(np.zeros(shape, dtype), SingleDeviceSharding(device, memory_kind=PINNED))
            for shape, dtype, device in places
        ]
        jax.block_until_ready(copies)
