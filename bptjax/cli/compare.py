"""`bptjax compare`: times one transformer layer with different implementations of its loops.

A step is Algorithm 1 forward and backward: causal attention, then the feed-forward network with
norms and residuals. `loop` runs Python loops over blocks, with one dispatch per operation;
`unrolled` runs the same loops under jit; `fused` is one scan over query blocks; any other name is
an attention implementation, with the feed-forward network in a scan over chunks.
"""

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from rich.console import Console

from bptjax.cli.compare_report import best_chunks, conclusions, plot, table
from bptjax.cli.run_command import run_command
from bptjax.config_parser import parse
from bptjax.models.config import ModelConfig
from bptjax.models.layers import Layer, TokenContext
from bptjax.ops.attention import KERNELS, attention
from bptjax.ops.blockwise import blockwise, blockwise_transformer
from bptjax.parallel.mesh import select_devices
from bptjax.run.progress import Progress

DESCRIPTION = """Times one transformer layer, forward and backward, with each implementation of its
loops over chunks: a Python loop, the same loop unrolled under jit, a scan, and the fused scan.
Prints a table, and writes rows.json and a plot."""
IMPLEMENTATIONS = ("loop", "unrolled", "fused", *(name for name in KERNELS if name != "loop"))


@dataclass(frozen=True)
class CompareConfig:
    """Implementations, sizes and timing.

    Attributes:
      implementations: implementations to compare. loop, unrolled, fused, or an attention
        implementation: fa4, cudnn, triton, scan, products, reference.
      lengths: tokens per sequence, one measurement for each.
      chunks: chunk sizes, in tokens, of queries, keys and the feed-forward network.
      sweep: measure every pair of query and key chunks, and name the fastest.
      hidden_size: width of the residual stream.
      num_heads: number of query heads.
      num_kv_heads: number of key and value heads.
      intermediate_size: width of the feed-forward network.
      batch: sequences per batch.
      dtype: dtype of the computation. Parameters are float32.
      repeats: number of timed steps; the median is reported. Slow implementations run fewer.
      oracle_length: gradients are checked against a dense float32 reference up to this length.
      device: device to run on. auto refuses the CPU of a machine with an NVIDIA GPU.
      out: directory of rows.json and compare.png.
    """

    implementations: list[str] = field(
        default_factory=lambda: ["loop", "unrolled", "scan", "fused"]
    )
    lengths: list[int] = field(default_factory=lambda: [512, 1024, 2048])
    chunks: list[int] = field(default_factory=lambda: [256])
    sweep: bool = False
    hidden_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 4
    intermediate_size: int = 512
    batch: int = 1
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    repeats: int = 7
    oracle_length: int = 2048
    device: Literal["auto", "cpu", "gpu"] = "auto"
    out: str = "runs/compare"

    def __post_init__(self):
        for name in self.implementations:
            if name not in IMPLEMENTATIONS:
                known = ", ".join(IMPLEMENTATIONS)
                raise ValueError(f"implementations={name!r}: must be one of {known}")
        for name in ("lengths", "chunks"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be positive token counts")
        for name in ("batch", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        _ = self.model  # Raises if the sizes do not fit together.

    @property
    def model(self) -> ModelConfig:
        """The layer as a model with one layer."""
        return ModelConfig(
            hidden_size=self.hidden_size,
            num_layers=1,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            intermediate_size=self.intermediate_size,
        )


def layer_output(implementation: str, layer: Layer, x: Array, q_chunk: int, k_chunk: int) -> Array:
    """Returns the layer's output `[B, T, D]`, computed by the named implementation."""
    B, T, _ = x.shape
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    tokens, rope = TokenContext(positions, positions), layer.config.rope_parameters
    k, v = layer.keys_values(x, tokens, rope)
    chunks = dict(q_chunk=q_chunk, k_chunk=k_chunk)

    def query(layer, chunk):
        return layer.queries(*chunk, rope)

    def finish(layer, chunk, out):
        x, _ = layer.finish(chunk[0], out, chunk[1], jnp.ones(out.shape[1], bool))
        return x

    chunk = x, tokens
    if implementation == "fused":
        return blockwise_transformer(query, finish, layer, chunk, k, v, impl="scan", **chunks)
    impl = "loop" if implementation == "unrolled" else implementation
    out = attention(query(layer, chunk), k, v, impl=impl, **chunks)
    if impl == "loop":
        parts = [slice(i, i + q_chunk) for i in range(0, T, q_chunk)]
        # Recompute each chunk in the backward pass, as the other implementations do.
        again = jax.checkpoint(finish)
        done = [again(layer, *jax.tree.map(lambda y, p=p: y[:, p], (chunk, out))) for p in parts]
        return jnp.concatenate(done, axis=1)
    return blockwise(lambda layer, c: finish(layer, *c), layer, (chunk, out), chunk=q_chunk)


class Work:
    """A layer and sequences of T tokens. Computes gradients of a random projection of the
    output."""

    def __init__(self, config: CompareConfig, T: int):
        key, *data = jax.random.split(jax.random.key(0), 3)
        shape, dtype = (config.batch, T, config.hidden_size), jnp.dtype(config.dtype)
        self.config, self.T = config, T
        self.operands = (
            Layer(config.model, key, jnp.float32),
            *(jax.random.normal(k, shape, dtype) for k in data),
        )
        self.oracle = None
        if T <= config.oracle_length:
            layer, *rest = self.operands
            dense = jax.jit(self.gradients("reference", T, T))
            with jax.default_matmul_precision("highest"):
                self.oracle = dense(layer, *(x.astype(jnp.float32) for x in rest))

    def gradients(self, implementation: str, q_chunk: int, k_chunk: int) -> Callable:
        """Returns a function that computes the gradients of the layer's parameters and its
        input."""

        def projected(layer, x, g):
            y = layer_output(implementation, layer, x, q_chunk, k_chunk)
            return (y.astype(jnp.float32) * g.astype(jnp.float32)).sum()

        return jax.grad(projected, (0, 1))

    def row(self, implementation: str, q_chunk: int, k_chunk: int) -> dict[str, Any]:
        """Returns a row of measurements. Its `status` is ok, or the reason why there are none."""
        row: dict[str, Any] = dict(implementation=implementation, T=self.T)
        row |= dict(q_chunk=q_chunk, k_chunk=k_chunk, status="ok")
        try:
            return row | self._figures(implementation, q_chunk, k_chunk)
        except NotImplementedError as error:
            return row | {"status": f"refused: {error}"}
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return row | {"status": "out of memory"}

    def _figures(self, implementation: str, q_chunk: int, k_chunk: int) -> dict[str, Any]:
        run, figures = self.gradients(implementation, q_chunk, k_chunk), {}
        start = time.perf_counter()
        if implementation != "loop":
            lowered = jax.jit(run).lower(*self.operands)
            figures["trace_s"], start = time.perf_counter() - start, time.perf_counter()
            run = lowered.compile()
            figures["compile_s"] = time.perf_counter() - start
            text, needs = run.as_text(), run.memory_analysis()
            if text is not None and needs is not None:
                figures["hlo_instructions"] = text.count(" = ")
                figures["temp_bytes"] = needs.temp_size_in_bytes
        result = jax.block_until_ready(run(*self.operands))
        times = list(_times(lambda: run(*self.operands), self.config.repeats))
        figures["step_ms"] = 1e3 * statistics.median(times)
        figures["fastest_ms"], figures["slowest_ms"] = 1e3 * min(times), 1e3 * max(times)
        figures["repeats"] = len(times)
        if self.oracle is not None:
            figures["gradient_error"] = _distance(result, self.oracle)
        return figures


def _times(run: Callable, repeats: int, budget: float = 10.0) -> Iterator[float]:
    """Yields the seconds of each run: at least one, and more while they fit into `budget`
    seconds."""
    spent = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        taken = time.perf_counter() - start
        yield taken
        spent += taken
        if spent + taken > budget:
            return


def _distance(tree: Any, wanted: Any) -> float:
    """Returns ‖a - b‖ / ‖b‖ over all leaves, float32."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(wanted), strict=True)
    squares = [
        (jnp.sum((a.astype(jnp.float32) - b) ** 2), jnp.sum(b.astype(jnp.float32) ** 2))
        for a, b in pairs
    ]
    off, size = (float(sum(part)) for part in zip(*squares, strict=True))
    return (off / size) ** 0.5


def _commit() -> str | None:
    """Returns the commit of the running code; None outside a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def compare(config: CompareConfig) -> list[dict[str, Any]]:
    """Measures, prints a table, and writes rows.json and compare.png. Returns the rows."""
    device = select_devices(config.device)[0]
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    about = dict(
        device=device.device_kind,
        dtype=config.dtype,
        jax=jax.__version__,
        python=platform.python_version(),
        commit=_commit(),
        batch=config.batch,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        intermediate_size=config.intermediate_size,
    )
    console, rows = Console(highlight=False), []
    pairs = list(product(config.chunks, repeat=2))
    if not config.sweep:
        pairs = [(chunk, chunk) for chunk in config.chunks]
    measurements = list(product(config.implementations, pairs))
    with Progress("comparing", len(config.lengths) * len(measurements)) as progress:
        for T in config.lengths:
            progress.describe(f"dense reference, {T:,} tokens")
            work = Work(config, T)
            for implementation, (q_chunk, k_chunk) in measurements:
                progress.describe(f"{implementation}, {T:,} tokens, chunks {q_chunk}/{k_chunk}")
                rows.append(work.row(implementation, q_chunk, k_chunk) | about)
                progress.advance()
                (out / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
    plot(rows, out / "compare.png")
    console.print(table(rows))
    print()
    for line in conclusions(rows) + (best_chunks(rows) if config.sweep else []):
        console.print(line, soft_wrap=not console.is_terminal)
    print(f"rows: {out / 'rows.json'}\nplot: {out / 'compare.png'}")
    return rows


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""

    def command(argv: list[str]) -> int:
        compare(parse(argv, DESCRIPTION, CompareConfig, "compare"))
        return 0

    return run_command(command, argv)
