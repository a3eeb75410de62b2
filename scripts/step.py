"""Times full fine-tuning steps of decoders with random weights on this machine's GPU.

    python scripts/step.py 1b 32768 --out rows.json --memory.remat=save_attention

One row of random tokens, bfloat16 parameters and AdamW; every option of a config can be set.
Prints a row, and appends it to `--out`.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from bptjax.config import Config, flatten, parse
from bptjax.models.config import ModelConfig
from bptjax.parallel.mesh import make_mesh, select_devices
from bptjax.trainer import Task

DECODERS = {
    "1b": ModelConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rope_parameters={"rope_theta": 500_000.0},
    ),
    "8b": ModelConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        tied_head=False,
        rope_parameters={"rope_theta": 500_000.0},
    ),
}
DEFAULTS = ("--train.dtype=bfloat16", "--train.param_dtype=bfloat16", "--train.max_steps=100")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("decoder", choices=DECODERS)
    parser.add_argument("length", type=int)
    parser.add_argument("--layers", type=int, help="fewer layers than the decoder's own")
    parser.add_argument("--steps", type=int, default=3, help="0 compiles only")
    parser.add_argument("--profile", type=Path, help="write a profile of one step here")
    parser.add_argument("--out", type=Path)
    args, options = parser.parse_known_args()
    T, model = args.length, DECODERS[args.decoder]
    model = replace(model, num_layers=args.layers or model.num_layers)
    config: Config = parse([*DEFAULTS, f"--train.seq_len={T}", *options], "")
    task = Task(
        replace(config, model=model),
        model,
        make_mesh(config.parallel, select_devices(config.device)),
    )
    tokens = np.random.default_rng(0).integers(0, model.V, (1, T + 1), np.int32)
    batch = task.put(
        dict(
            tokens=tokens[:, :-1],
            labels=tokens[:, 1:],
            positions=np.arange(T, dtype=np.int32)[None],
            segments=np.ones((1, T), np.int32),
        )
    )
    start = time.perf_counter()
    step = task.compile_step(task.abstract_state(), batch)
    compiled = time.perf_counter() - start
    needs = step.memory_analysis()
    gib = {
        "held_gib": needs.argument_size_in_bytes,
        "temporary_gib": needs.temp_size_in_bytes,
        "host_gib": needs.host_temp_size_in_bytes,
    }
    row = dict(
        decoder=args.decoder,
        layers=model.num_layers,
        T=T,
        settings={
            k: v
            for k, v in flatten(config).items()
            if k.startswith(("memory.", "optimizer.", "adapter.")) and v != flatten(Config())[k]
        },
        attention=task.attention()[0],
        compile_s=compiled,
        **{name: size / 2**30 for name, size in gib.items()},
    )
    if args.steps:
        state, times, losses = task.init_state(), [], []
        for _ in range(args.steps + 1):
            start = time.perf_counter()
            state, metrics = step(state, batch)
            losses.append(float(metrics["train/loss"]))
            times.append(time.perf_counter() - start)
        stats = jax.devices()[0].memory_stats() or {}
        seconds = float(np.median(times[1:]))
        row |= dict(
            step_s=seconds,
            fastest_s=min(times[1:]),
            tokens_per_second=T / seconds,
            peak_gib=stats.get("peak_bytes_in_use", 0) / 2**30,
            losses=losses,
        )
        if args.profile:
            with jax.profiler.trace(str(args.profile)):
                state, metrics = step(state, batch)
                jax.block_until_ready(metrics)
    row |= dict(device=jax.devices()[0].device_kind, jax=jax.__version__)
    print(json.dumps(row), flush=True)
    if args.out:
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
