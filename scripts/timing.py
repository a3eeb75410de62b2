"""Functions shared by the timing scripts."""

import csv
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np


def milliseconds(
    f: Callable, *operands: Any, repeats: int = 9, seconds: float = 1e9, calls: int = 1
) -> tuple[float, float, float]:
    """Returns the median, the least and the greatest time of a call, after two warm-up runs. Makes
    fewer runs, but at least one of each kind, if they would take more than `seconds`.

    Args:
      calls: calls of a run. They follow each other without a wait, as in a training step, so that
        the time to start one is hidden by the others.
    """
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready([f(*operands) for _ in range(calls)][-1])
        times.append(1e3 * (time.perf_counter() - start) / calls)
        if len(times) > 1 and calls * (sum(times) + times[-1]) > 1e3 * seconds:
            break
    times = times[min(2, len(times) - 1) :]
    return float(np.median(times)), min(times), max(times)


def needs(compiled: jax.stages.Compiled) -> dict[str, float]:
    """Returns the memory of a program on each device and on the host, as the compiler reports
    it."""
    stats = compiled.memory_analysis()
    assert stats is not None
    kept = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    gib = dict(
        program_gib=kept + stats.temp_size_in_bytes,
        held_gib=stats.argument_size_in_bytes,
        temporary_gib=stats.temp_size_in_bytes,
        host_gib=stats.host_temp_size_in_bytes + stats.host_argument_size_in_bytes,
    )
    return {name: size / 2**30 for name, size in gib.items()}


def attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the row with the measurements, and with `status` ok or the reason why there are
    none."""
    try:
        return dict(status="ok") | measure()
    except (NotImplementedError, ValueError) as error:
        return dict(status=f"refused: {error}")
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
    # Free the memory that the frames of the error hold, for the next rows.
    gc.collect()
    if "RESOURCE_EXHAUSTED" in text:
        return dict(status="out of memory")
    return dict(status=f"failed: {text.splitlines()[0]}")


def append_row(out: Path | None, row: dict[str, Any]) -> None:
    """Prints a row as JSON, and appends it to the file."""
    print(json.dumps(row), flush=True)
    if out:
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def add_row(rows: list[dict[str, Any]], out: Path | None, **row: Any) -> None:
    """Adds a row with the device and versions, prints it, and writes all rows as JSON or CSV."""
    rows.append(row | dict(device=jax.devices()[0].device_kind, jax=jax.__version__))
    print({k: float(f"{x:.4g}") if isinstance(x, float) else x for k, x in row.items()}, flush=True)
    if out and out.suffix == ".csv":
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("w", newline="") as file:
            writer = csv.DictWriter(file, dict.fromkeys(name for row in rows for name in row))
            writer.writeheader()
            writer.writerows(rows)
    elif out:
        out.write_text(json.dumps(rows, indent=1) + "\n")
