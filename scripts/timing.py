"""What the timing scripts share."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np


def milliseconds(f: Callable, *operands: Any, repeats: int = 9) -> tuple[float, float, float]:
    """Median, least and greatest, after two runs to warm up."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(f(*operands))
        times.append(1e3 * (time.perf_counter() - start))
    return float(np.median(times[2:])), min(times[2:]), max(times[2:])


def tell(rows: list[dict[str, Any]], out: Path | None, **row: Any) -> None:
    """Adds a row, with where it was measured; prints it, and writes all of them."""
    rows.append(row | dict(device=jax.devices()[0].device_kind, jax=jax.__version__))
    print({k: round(x, 3) if isinstance(x, float) else x for k, x in row.items()}, flush=True)
    if out:
        out.write_text(json.dumps(rows, indent=1) + "\n")
