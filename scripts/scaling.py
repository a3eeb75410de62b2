"""Times attention alone, encoders and full training steps, sharded over 1, 2, 4 … devices.

    python scripts/scaling.py attention --out DIRECTORY --lengths 131072 1048576 --devices 4
    python scripts/scaling.py encoder --out DIRECTORY --encoders bert vit
    python scripts/scaling.py step --out DIRECTORY --decoder 1b --lengths 8192 --rows 8

Strong scaling divides the same sequences and tokens among the devices. Weak scaling gives each
device the same number of tokens (sp) or of sequences (dp). Runs forward and backward on random data
that no single device holds completely. TFLOP/s count allowed query-key pairs only: 4 · H FLOPs per
pair, and 2.5 times that for the backward pass. For Taylor attention they count its matmuls, and for
a step the model FLOPs without recomputation. Options that the script does not know are config keys
of a step.
"""

import argparse
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from step import DECODERS, DEFAULTS, measure
from timing import add_row, attempt, milliseconds, needs

from bptjax import Mask
from bptjax.config_parser import parse
from bptjax.cost.flops import matmul_parameters, model_flops
from bptjax.models.config import ModelConfig
from bptjax.models.encoder import Encoder
from bptjax.models.execution import Execution
from bptjax.models.groups.attention import AttentionConfig
from bptjax.models.groups.encoder import EncoderConfig
from bptjax.models.groups.norms import NormsConfig
from bptjax.ops.taylor_attention import taylor_attention
from bptjax.parallel.mesh import ParallelConfig, constrain, make_mesh, select_devices
from bptjax.parallel.ring import zigzag
from bptjax.parallel.sequence import STRATEGIES, attention
from bptjax.training.spec import TrainSpec

TRANSFORMER = ModelConfig(
    causal=False,
    hidden_size=768,
    num_layers=12,
    num_heads=12,
    norms=NormsConfig("layer", bias=True),
    position_embedding="learned",
    max_position_embeddings=512,
    activation="gelu",
    gated=False,
    attention=AttentionConfig(qkv_bias=True, out_bias=True),
    mlp_bias=True,
)
# The shapes of BERT-base and ViT-B/16.
ENCODERS = {
    "bert": replace(
        TRANSFORMER,
        vocab_size=30_522,
        norms=NormsConfig("layer", position="post", bias=True, embedding=True, final=False),
        encoder=EncoderConfig(token_types=2, masked_head=True),
        head_bias=True,
    ),
    "vit": replace(
        TRANSFORMER,
        encoder=EncoderConfig(image_size=(224, 224), patch_size=(16, 16), classes=1000),
    ),
}
SPLITS = ("dp", "sp")
# Strategies that shard keys, whose order over the devices may be balanced or not.
SHARDED_KEYS = ("ring", "ulysses_ring", "gather")
ORDERS = ("zigzag", "plain")
# Number of sequences, and of tokens in a sequence.
SIZES = dict(attention=(1, 131_072), encoder=(64, 512), step=(8, 8192))


def mesh_of(split: str, n: int) -> jax.sharding.Mesh:
    """Returns a mesh of the first n devices along one axis."""
    sizes: dict[str, Any] = {"fsdp": 1, split: n}
    return make_mesh(ParallelConfig(**sizes), jax.devices()[:n])


def arrays(mesh: jax.sharding.Mesh, dtype: jnp.dtype, *shapes: tuple[int, ...]) -> list[jax.Array]:
    """Returns normal random numbers `[B, T, ...]`, created with their sharding."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    where = NamedSharding(mesh, PartitionSpec(("dp", "fsdp"), "sp"))
    make = partial(jax.jit, static_argnums=1, out_shardings=where)(
        lambda key, shape: jax.random.normal(key, shape, dtype)
    )
    return [make(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def timed(args: argparse.Namespace, f: Callable, *operands: Any, **options: Any) -> dict[str, Any]:
    """Returns milliseconds and memory of the compiled `f`."""
    compiled = jax.jit(f, **options).lower(*operands).compile()
    ms, least, most = milliseconds(compiled, *operands, repeats=args.repeats, seconds=args.seconds)
    return dict(ms=ms, fastest_ms=least, slowest_ms=most, **needs(compiled))


def attention_work(
    heads: tuple[int, int], H: int, dtype: str, impl: str, T: int, n: int, name: str, order: str
) -> tuple[Callable, list[jax.Array], float]:
    """Returns a function that runs attention forward and backward on one sequence sharded over sp,
    its sharded operands and its FLOPs. Call it with the mesh set.
    """
    N, K = heads
    mask, pairs = Mask(causal=True), T * T / 2
    if order == "zigzag" and n > 1:
        positions = zigzag(T, STRATEGIES[name].split(N, n).tokens).astype(np.int32)
        mask = replace(mask, positions=positions)
    f = partial(attention, mask=mask, strategy="auto" if n == 1 else name, impl=impl)
    flops = 3.5 * 4 * N * H * pairs
    if name == "taylor":
        f, flops = taylor_attention, 3 * 2 * T * (N + K) * H * (H + 1)

    def both(q, k, v, dout):
        return jax.vjp(f, q, k, v)[1](dout)

    shapes = (1, T, N, H), (1, T, K, H), (1, T, K, H), (1, T, N, H)
    return both, arrays(jax.sharding.get_mesh(), jnp.dtype(dtype), *shapes), flops


def attention_row(args: argparse.Namespace, T: int, n: int, name: str, order: str) -> dict:
    """Measures attention alone."""
    N, K, H = *args.heads, args.head_size
    with jax.set_mesh(mesh_of("sp", n)):
        how = args.heads, H, args.dtype, args.impl, T, n, name, order
        both, operands, flops = attention_work(*how)
        row = timed(args, both, *operands, out_shardings=operands[0].sharding)
    about = dict(query_heads=N, key_heads=K, H=H, impl=args.impl, dtype=args.dtype)
    return about | row | dict(tflops_a_device=flops / n / row["ms"] / 1e9)


def encoder_row(args: argparse.Namespace, name: str, rows: int, T: int, n: int, split: str) -> dict:
    """Measures the loss of an encoder and its gradients."""
    config, mesh, dtype = ENCODERS[name], mesh_of(split, n), jnp.dtype(args.dtype)
    if args.layers:
        config = replace(config, num_layers=args.layers)
    if config.encoder.image_size is None:
        config = replace(config, max_position_embeddings=T)

    def loss(model, inputs, labels):
        execution = Execution(attention_implementation=args.impl)
        hidden, _ = model(inputs, dtype=dtype, execution=execution)
        logits = model.logits(hidden)
        picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - picked).mean()

    def data(key):
        if config.encoder.image_size is None:
            tokens = constrain(jax.random.randint(key, (rows, T), 0, config.V), "batch", "sequence")
            return tokens, tokens
        shape = rows, config.encoder.channels, *config.encoder.image_size
        images = jax.random.normal(key, shape, dtype)
        return constrain(images, "batch"), jnp.zeros(rows, jnp.int32)

    with jax.set_mesh(mesh):
        shared = NamedSharding(mesh, PartitionSpec())
        model = jax.jit(lambda key: Encoder(config, key), out_shardings=shared)(jax.random.key(0))
        operands = model, *jax.jit(data)(jax.random.key(1))
        row = timed(args, jax.value_and_grad(loss), *operands)
    about = dict(layers=config.num_layers, impl=args.impl, dtype=args.dtype)
    return about | row | dict(tokens_per_second_a_device=1e3 * rows * T / row["ms"] / n)


def step_row(args: argparse.Namespace, name: str, rows: int, T: int, n: int, split: str) -> dict:
    """Measures a full training step of a decoder."""
    model, mesh = DECODERS[name], mesh_of(split, n)
    model = replace(model, num_layers=args.layers or model.num_layers)
    each, rest = divmod(rows, mesh.shape["dp"])
    if rest:
        raise ValueError(f"{rows} rows do not divide among {n} devices")
    train = replace(args.config.train, seq_len=T, per_device_train_batch_size=each)
    spec = TrainSpec(replace(args.config, train=train), model, mesh)
    row = measure(spec, max(1, args.repeats))
    # The peak includes earlier work of this process.
    row = {name: x for name, x in row.items() if name not in ("peak_gib", "losses")}
    about = dict(layers=model.num_layers, impl=row.pop("attention"), dtype=train.compute_dtype)
    pairs = model.num_layers * rows * T**2 / 2
    flops = model_flops(model, matmul_parameters(spec), rows * T, pairs)
    speed = dict(
        tflops_a_device=flops / row["step_s"] / n / 1e12,
        tokens_per_second_a_device=row["tokens_per_second"] / n,
    )
    return about | row | speed


def draw(rows: list[dict[str, Any]], figure_of: str, file: Path) -> None:
    """Plots the figure and the temporary memory against the number of devices, without failed
    rows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines: dict[str, list[dict]] = {}
    for row in rows:
        lines.setdefault(row["line"], []).append(row)
    figure = Figure(figsize=(12, 5), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), (figure_of, "temporary_gib"), strict=True):
        for label, mine in lines.items():
            points = [(r["devices"], r[name]) for r in mine if name in r]
            axes.plot(*zip(*points, strict=True) if points else ((), ()), "o-", label=label)
        axes.set(xscale="log", xlabel="devices", ylabel=name.replace("_", " "))
        counts = sorted({r["devices"] for r in rows})
        axes.set_xticks(counts, [str(n) for n in counts])
        axes.set_xticks([], minor=True)
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="x-small")
    FigureCanvasAgg(figure).print_png(file)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=("attention", "encoder", "step"))
    parser.add_argument(
        "--devices", type=int, nargs="+", help="numbers of devices; by default 1 2 4 … up to all"
    )
    parser.add_argument("--scaling", nargs="+", choices=("strong", "weak"), default=["strong"])
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens in a sequence")
    parser.add_argument("--rows", type=int, help="sequences of an encoder or a step")
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=SPLITS)
    parser.add_argument(
        "--strategies",
        nargs="+",
        choices=(*STRATEGIES, "taylor"),
        default=["gather", "ring", "ulysses", "taylor"],
    )
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=list(ORDERS))
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="queries', keys'")
    parser.add_argument("--head_size", type=int, default=128)
    parser.add_argument("--impl", default="auto")
    parser.add_argument("--encoders", nargs="+", choices=ENCODERS, default=list(ENCODERS))
    parser.add_argument("--decoder", choices=DECODERS, default="1b")
    parser.add_argument("--layers", type=int, help="number of layers, if fewer than the model's")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of attention or an encoder")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="limit on the time of the runs of a row"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the rows and plots")
    args, options = parser.parse_known_args(argv)
    if options and args.study != "step":
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    try:
        args.config = parse(options, defaults=DEFAULTS)
    except ValueError as error:
        parser.error(str(error))
    available = len(select_devices("auto"))
    counts = args.devices or [2**i for i in range(available.bit_length())]
    if max(counts) > available:
        parser.error(f"--devices {max(counts)}: must be at most {available}")
    rows, found, file = [], {}, args.out / f"scaling_{args.study}.csv"

    def add(measured: Callable, what: tuple, T: int, n: int, how: tuple, **about: Any) -> None:
        # All splits are the same on one device.
        key = (*what, T, n, *(how if n > 1 or "taylor" in how else ()))
        if key not in found:
            found[key] = attempt(partial(measured, args, *what, T, n, *how))
        add_row(rows, file, **about, T=T, devices=n, **found[key])

    batch, length = SIZES[args.study]
    batch, lengths = args.rows or batch, args.lengths or [length]
    for base, scaling, n in itertools.product(lengths, args.scaling, counts):
        times = n if scaling == "weak" else 1
        each = " a device" if scaling == "weak" else ""
        if args.study == "attention":
            for name in args.strategies:
                for order in args.orders if name in SHARDED_KEYS else ("plain",):
                    about = dict(
                        line=f"{name} {order}, T={base:,}{each}", strategy=name, order=order
                    )
                    add(attention_row, (), base * times, n, (name, order), **about)
            continue
        measured = encoder_row if args.study == "encoder" else step_row
        models = args.encoders if args.study == "encoder" else [args.decoder]
        for model, split in itertools.product(models, args.splits):
            images = args.study == "encoder" and ENCODERS[model].encoder.image_size is not None
            if images and scaling == "weak" and split == "sp":
                continue  # An image has a fixed number of tokens.
            tokens = ENCODERS[model].encoder.patches + 1 if images else base
            line = f"{model} {split}, {batch} × {tokens:,}{each}"
            count, T = (batch * times, tokens) if split == "dp" else (batch, tokens * times)
            about = dict(line=line, model=model, split=split, batch=count)
            add(measured, (model, count), T, n, (split,), **about)
    name = "tokens_per_second_a_device" if args.study == "encoder" else "tflops_a_device"
    draw(rows, name, file.with_suffix(".png"))


if __name__ == "__main__":
    main()
