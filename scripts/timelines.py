"""Draws the memory of steps over their progress, for an H200 that need not be there.

    python scripts/timelines.py

Needs no GPU, but `pip install -e ".[plan]"`. Writes scripts/results/memory_*.png.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from step import DECODERS, DEFAULTS

from bptjax.config_parser import parse
from bptjax.cost.devices import absent_devices
from bptjax.cost.memory import tracing_for
from bptjax.cost.profile_report import plot_memory
from bptjax.cost.timeline import compile_with_timeline
from bptjax.parallel.mesh import make_mesh
from bptjax.training.spec import TrainSpec
from bptjax.training.state import abstract_state
from bptjax.training.step import abstract_batch

# Pictures: the decoder, and the settings of each panel.
PICTURES: dict[str, tuple[str, dict[str, list[str]]]] = {
    "memory_8b_h200": (
        "8b",
        {
            "32,768 tokens": ["--train.seq_len=32768"],
            "131,072 tokens, execution.ffn_chunk=16384, execution.offload=0.4": [
                *("--train.seq_len=131072", "--execution.ffn_chunk=16384"),
                "--execution.offload=0.4",
            ],
        },
    ),
    "memory_loss_h200": (
        "1b",
        {
            "131,072 tokens, logits of 2,048 tokens at a time": [
                *("--train.seq_len=131072", "--execution.ce_chunk=2048")
            ],
            "131,072 tokens, all logits at once (execution.ce_chunk=131072)": [
                *("--train.seq_len=131072", "--execution.ce_chunk=131072")
            ],
        },
    ),
}


def timeline(decoder: str, settings: list[str]) -> list[dict[str, Any]]:
    """Returns the rows of `Timeline.rows` of a full fine-tuning step on one H200."""
    kind, devices = absent_devices("h200")
    config, model = parse(settings, defaults=DEFAULTS), DECODERS[decoder]
    config = replace(config, model=model)
    spec = TrainSpec(config, model, make_mesh(config.parallel, devices))
    with tracing_for(spec, kind.platform):
        state, batch = abstract_state(spec), abstract_batch(spec)
        return compile_with_timeline(spec, state, batch, kind)[2].rows()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    out = parser.parse_args().out
    for name, (decoder, panels) in PICTURES.items():
        rows = {title: timeline(decoder, settings) for title, settings in panels.items()}
        title = f"{decoder.upper()}, full fine-tuning in bfloat16, one H200 (predicted)"
        plot_memory(rows, out / f"{name}.png", title)


if __name__ == "__main__":
    main()
