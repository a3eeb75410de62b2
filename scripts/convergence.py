"""Trains twice from the same state on the same batches, with the fused loss and with plain logits,
and draws both curves.

    python scripts/convergence.py --steps 300 --out DIRECTORY

Uses the quickstart's model and data. Further options are config keys.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

import bptjax.objectives.cross_entropy
from bptjax.config_parser import parse
from bptjax.training.setup import setup
from bptjax.training.state import init_state
from bptjax.training.step import compile_step


def plain(hidden, head, labels, weights=None, **_):
    """Returns the sum of the losses, computed from `[B, T, V]` logits, and 0 for the z-loss.
    Applies no weights and no soft cap."""
    logits = jnp.einsum("btd,vd->btv", hidden, head.astype(hidden.dtype)).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    losses = jnp.where(labels == -100, 0.0, jax.nn.logsumexp(logits, -1) - picked)
    return losses.sum(), jnp.zeros(())


def losses(argv: list[str], steps: int, defaults: Sequence[str] = ()) -> list[float]:
    """Returns the loss of each step of a new run. `argv` overrides the flags in `defaults`."""
    with tempfile.TemporaryDirectory() as directory:
        run = setup(parse([*argv, f"--run_dir={directory}/run"], "", defaults=defaults))
        spec, state, told = run.spec, init_state(run.spec), []
        accumulate = run.config.train.gradient_accumulation_steps
        step = None
        for _ in range(steps):
            batch = spec.layout.put(next(run.batches), accumulate)
            step = step or compile_step(spec, state, batch)
            state, metrics = step(state, batch)
            told.append(float(metrics["train/loss"]))
        run.batches.close()
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("runs/convergence"))
    args, options = parser.parse_known_args()
    argv = ["--config=configs/quickstart.yaml", *options]
    fused = losses(argv, args.steps)
    bptjax.objectives.cross_entropy.cross_entropy_and_z_loss = plain
    rows = dict(fused=fused, plain=losses(argv, args.steps))
    apart = max(abs(a - b) for a, b in zip(*rows.values(), strict=True))
    print(f"{args.steps} steps; last {fused[-1]:.4f}; never more than {apart:.1e} nats apart")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "convergence.json").write_text(json.dumps(rows) + "\n")

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(rows["plain"], label="plain logits", linewidth=3, alpha=0.4)
    axes.plot(fused, label="fused loss", linewidth=1)
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.legend()
    figure.tight_layout()
    figure.savefig(args.out / "convergence.png", dpi=120)


if __name__ == "__main__":
    main()
