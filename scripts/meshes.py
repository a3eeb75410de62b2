"""Compares every mesh of eight devices, and some of three and six, with one device: loss, gradients
and evaluation of a tiny decoder on packed documents, in float32. Meshes with ep > 1 have a decoder
with experts.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python scripts/meshes.py --out rows.json

A row is a mesh and a sequence strategy. Errors are relative; the error of the gradients is that of
the worst leaf.
"""

import argparse
import itertools
import math
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from timing import add_row

from bptjax.config import Config, TrainConfig
from bptjax.models.config import ModelConfig
from bptjax.models.execution import ExecutionConfig
from bptjax.models.groups.experts import ExpertsConfig
from bptjax.parallel.mesh import ParallelConfig, axis_sizes, make_mesh
from bptjax.parallel.sequence import STRATEGIES
from bptjax.training.spec import TrainSpec
from bptjax.training.state import TrainState, abstract_state, init_state
from bptjax.training.step import evaluator, gradients

T, ROWS = 20, 8
MODEL = ModelConfig(vocab_size=64, hidden_size=32, num_layers=1, num_heads=8, num_kv_heads=2)
EXPERTS = replace(
    MODEL,
    feed_forward="experts",
    experts=ExpertsConfig(count=8, size=24, aux_loss=1.0, z_loss=0.1),
)
CONFIG = Config(
    train=TrainConfig(seq_len=T),
    execution=ExecutionConfig(q_chunk=8, k_chunk=8, ffn_chunk=16, ce_chunk=32),
)
ONE = ParallelConfig(1, 1, 1, 1)
MESHES = [
    ParallelConfig(dp, fsdp, tp, sp, ep)
    for dp, fsdp, tp, sp, ep in itertools.product((1, 2, 4, 8), repeat=5)
    if dp * fsdp * tp * sp * ep == 8
] + [ParallelConfig(*sizes) for sizes in ((1, 1, 1, 3), (1, 1, 1, 6), (2, 1, 1, 3), (1, 1, 2, 3))]


def model_of(mesh: ParallelConfig) -> ModelConfig:
    """Returns the model that is compared on a mesh."""
    return EXPERTS if mesh.ep > 1 else MODEL


def documents() -> dict[str, np.ndarray]:
    """Returns different sequences of two documents and padding."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, MODEL.V, (ROWS, T), dtype=np.int32)
    ends, place = rng.integers(2, T + 1, (ROWS, 1)), np.arange(T)[None]
    segments = np.where(place < ends, 1 + (place >= ends // 2), 0)
    return dict(
        tokens=tokens,
        labels=np.where(segments > 0, np.roll(tokens, -1, 1), -100).astype(np.int32),
        segments=segments.astype(np.int32),
        positions=np.where(segments == 2, place - ends // 2, place).astype(np.int32),
    )


@cache
def start(model: ModelConfig) -> TrainState:
    """Returns the state at step 0 on one device."""
    return init_state(TrainSpec(CONFIG, model, make_mesh(ONE, jax.devices()[:1])))


def results(model: ModelConfig, parallel: ParallelConfig, strategy: Any = "auto") -> Any:
    """Returns (loss, gradients, evaluation loss) on a mesh."""
    devices = jax.devices()[: math.prod(axis_sizes(parallel).values())]
    config = replace(CONFIG, parallel=replace(parallel, sequence_strategy=strategy))
    spec, batch = TrainSpec(config, model, make_mesh(parallel, devices)), documents()
    where = jax.tree.map(lambda x: x.sharding, abstract_state(spec))
    state = jax.device_put(start(model), where)
    with jax.set_mesh(spec.mesh):
        jitted = jax.jit(partial(gradients, spec))
        losses, found, _ = jitted(state, spec.layout.put(batch))
    evaluated = evaluator(spec)(state.model, {"": [batch]}, lambda: None)["eval/loss"]
    loss = losses.loss + losses.auxiliary
    return jax.tree.map(np.asarray, (loss, found, evaluated))


def errors(got: Any, wanted: Any) -> dict[str, float]:
    """Returns relative errors. A gradient with a norm below 1e-3 counts as having that norm."""

    def error(a, b):
        return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-3))

    each = [
        max(jax.tree.leaves(jax.tree.map(error, *pair))) for pair in zip(got, wanted, strict=True)
    ]
    return dict(zip(("loss", "gradients", "evaluation"), each, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    wanted = {model: results(model, ONE) for model in (MODEL, EXPERTS)}
    for mesh in MESHES:
        model = model_of(mesh)
        for strategy in STRATEGIES if mesh.sp > 1 else ("auto",):
            try:
                got = results(model, mesh, strategy)
            except NotImplementedError as refused:
                found: dict[str, Any] = dict(refused=str(refused))
            else:
                found = errors(got, wanted[model])
            sizes = axis_sizes(mesh)
            add_row(rows, args.out, **sizes, strategy=strategy if mesh.sp > 1 else None, **found)


if __name__ == "__main__":
    main()
