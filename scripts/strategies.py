"""Compares time and memory of several ways to run a training step on several devices: data
parallelism, the stages of ZeRO, optimizer state in host memory, checkpointing.

    python scripts/strategies.py --out DIRECTORY --decoders char 1b --dtypes float32 bfloat16

For every decoder, an epoch has one token for each character of tinyshakespeare that
`data.eval_fraction=0.1` leaves for training. All strategies have the same number of sequences per
device. Options that the script does not know are config keys.
"""

import argparse
import itertools
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from step import DECODERS, DEFAULTS, measure
from timing import add_row, attempt

from bptjax.config import Config
from bptjax.config_parser import parse
from bptjax.parallel.mesh import make_mesh, select_devices
from bptjax.training.spec import TrainSpec

FULL, HOST = "--execution.remat=full", "--optimizer.state_memory_kind=pinned_host"
# Replicated parameters, then the stages of ZeRO, then other ways to save memory.
STRATEGIES = {
    "data parallel": ("--parallel.dp=-1", "--parallel.fsdp=1"),
    "ZeRO-1": ("--parallel.zero_stage=1",),
    "ZeRO-2": ("--parallel.zero_stage=2",),
    "ZeRO-3": (),
    "ZeRO-3 + checkpointing": (FULL,),
    "ZeRO-3 + offload": (HOST,),
    "ZeRO-3 + both": (FULL, HOST),
}
CHAR_GPT = Path(__file__).parents[1] / "configs" / "char_gpt.yaml"
# Vocabulary of `char` on tinyshakespeare, and nine tenths of its 1,115,394 characters.
VOCABULARY, EPOCH = 65, 1_003_854


def spec_of(decoder: str, dtype: str, devices: list[jax.Device], options: list[str]) -> TrainSpec:
    """Returns the spec of a run, without checkpointing unless the options set it."""
    common = ["--execution.remat=none", f"--train.compute_dtype={dtype}"]
    if decoder == "char":
        config: Config = parse(options, defaults=[f"--config={CHAR_GPT}", *common])
        model = replace(config.model, vocab_size=VOCABULARY)
    else:
        sizes = ["--train.seq_len=8192", f"--train.param_dtype={dtype}"]
        config = parse(options, defaults=[*DEFAULTS, *sizes, *common])
        model = DECODERS[decoder]
    return TrainSpec(replace(config, model=model), model, make_mesh(config.parallel, devices))


def figures(spec: TrainSpec, steps: int) -> dict[str, Any]:
    train = spec.config.train
    row = measure(spec, steps)
    # The peak includes earlier work of this process.
    row = {name: x for name, x in row.items() if name not in ("attention", "peak_gib", "losses")}
    about = dict(T=train.seq_len, batch=spec.global_batch_size, parameters=train.param_dtype)
    steps_per_epoch = math.ceil(EPOCH / spec.global_batch_size / train.seq_len)
    return about | row | dict(epoch_s=row["step_s"] * steps_per_epoch)


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Plots seconds per epoch and memory per device, a bar for each row that did not fail."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [f"{r['decoder']} {r['dtype']} × {r['devices']}: {r['strategy']}" for r in rows]
    figure = Figure(figsize=(12, 1 + 0.3 * len(rows)), layout="constrained")
    panels = {"epoch_s": "seconds an epoch", "program_gib": "GiB a device"}
    for axes, (name, title) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
        bars = axes.barh(names, [r.get(name, 0.0) for r in rows])
        said = [f"{r[name]:.3g}" if name in r else r["status"][:40] for r in rows]
        axes.bar_label(bars, said, padding=3, fontsize="small")
        axes.set(xlabel=title)
        axes.margins(x=0.15)
    figure.axes[0].invert_yaxis()
    FigureCanvasAgg(figure).print_png(file)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--decoders", nargs="+", choices=("char", *DECODERS), default=["char"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--devices", type=int, nargs="+", help="numbers of devices; by default all")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--out", type=Path, required=True, help="directory of the rows and the plot"
    )
    args, options = parser.parse_known_args(argv)
    there, rows, file = select_devices("auto"), [], args.out / "strategies.csv"
    if max(args.devices or [1]) > len(there):
        parser.error(f"--devices {max(args.devices)}: must be at most {len(there)}")
    for decoder, dtype, n, name in itertools.product(
        args.decoders, args.dtypes, args.devices or [len(there)], args.strategies
    ):
        # An invalid config is an error, not a row.
        try:
            spec = spec_of(decoder, dtype, there[:n], [*STRATEGIES[name], *options])
        except ValueError as error:
            parser.error(str(error))
        about = dict(decoder=decoder, strategy=name, dtype=dtype, devices=n)
        add_row(rows, file, **about, **attempt(partial(figures, spec, args.steps)))
    draw(rows, file.with_suffix(".png"))


if __name__ == "__main__":
    main()
