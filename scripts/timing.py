"""What the timing scripts share."""

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
    f: Callable, *operands: Any, repeats: int = 9, seconds: float = 1e9
) -> tuple[float, float, float]:
    """Median, least and greatest, after two runs to warm up; fewer of both, but one of each, where
    they would take more than so many seconds."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(f(*operands))
        times.append(1e3 * (time.perf_counter() - start))
        if len(times) > 1 and sum(times) + times[-1] > 1e3 * seconds:
            break
    times = times[min(2, len(times) - 1) :]
    return float(np.median(times)), min(times), max(times)


def needs(compiled: jax.stages.Compiled) -> dict[str, float]:
    """What a program takes of each device, and of the host, by the compiler's own account."""
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
    """Its figures, and as `status` ok, or why there are none."""
    try:
        return dict(status="ok") | measure()
    except (NotImplementedError, ValueError) as error:
        return dict(status=f"refused: {error}")
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
    # The next rows are to find the memory free that the frames of the error held.
    gc.collect()
    if "RESOURCE_EXHAUSTED" in text:
        return dict(status="out of memory")
    return dict(status=f"failed: {text.splitlines()[0]}")


def tell(rows: list[dict[str, Any]], out: Path | None, **row: Any) -> None:
    """Adds a row, with where it was measured; prints it, and writes all of them, as JSON or CSV."""
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
