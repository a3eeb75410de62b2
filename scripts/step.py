"""Times training steps of decoders with random weights on this machine's GPUs.

    python scripts/step.py 1b 32768 --out rows.json --execution.remat=save_attention

Uses one sequence of random tokens, bfloat16 parameters and AdamW. Every config key can be set, as
`--adapter.type=qlora`; keys of execution that are not set are chosen as in a run, except with
`--plain`, which takes the values that they have on a CPU. Prints a row of measurements, and appends
it to `--out`.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from timing import append_row, needs

from bptjax.config import Config
from bptjax.config_parser import parse
from bptjax.cost.auto import complete_execution
from bptjax.cost.search import with_execution
from bptjax.data.examples import Example, sequence
from bptjax.data.preferences import side_by_side, with_shared_prompt
from bptjax.models.config import ModelConfig
from bptjax.models.groups.attention import AttentionConfig
from bptjax.models.groups.experts import ExpertsConfig
from bptjax.models.groups.full_attention import FullAttentionConfig
from bptjax.models.groups.linear_attention import LinearAttentionConfig
from bptjax.models.groups.norms import NormsConfig
from bptjax.models.params import fill_model, param_path
from bptjax.ops.choices import record_choices
from bptjax.ops.labels import IGNORED
from bptjax.parallel.mesh import make_mesh, select_devices
from bptjax.parsing.keys import flatten
from bptjax.training.spec import TrainSpec
from bptjax.training.state import abstract_state, init_state
from bptjax.training.step import Batch, compile_step, random_batch

LLAMA_8B = ModelConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    tied_head=False,
    rope_parameters={"rope_theta": 500_000.0},
)
QWEN_14B = ModelConfig(
    vocab_size=151_936,
    hidden_size=5120,
    intermediate_size=17_408,
    num_layers=40,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    tied_head=False,
    norms=NormsConfig(eps=1e-6),
    attention=AttentionConfig(qk_norm=True),
    rope_parameters={"rope_theta": 1_000_000.0},
)
DECODERS = {
    # Qwen3-30B-A3B.
    "30b-a3b": replace(
        QWEN_14B,
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        feed_forward="experts",
        experts=ExpertsConfig(count=128, per_token=8, size=768),
    ),
    # Gemma 4 26B-A4B. An MLP beside the experts; every sixth layer has full attention.
    "26b-a4b": ModelConfig(
        vocab_size=262_144,
        hidden_size=2816,
        intermediate_size=2112,
        num_layers=30,
        num_heads=16,
        num_kv_heads=8,
        head_dim=256,
        full_attention=FullAttentionConfig(head_dim=512, kv_heads=2, keys_as_values=True),
        layer_types=list(5 * (*(5 * ("sliding_attention",)), "full_attention")),
        sliding_window=1024,
        norms=NormsConfig(eps=1e-6, position="sandwich"),
        attention=AttentionConfig(qk_norm=True, value_norm=True, scale=1.0),
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
        },
        activation="gelu_tanh",
        embedding_scale=2816**0.5,
        layer_scale=True,
        logits_softcap=30.0,
        feed_forward="experts",
        experts=ExpertsConfig(count=128, per_token=8, size=704, shared_size=2112, norms=True),
    ),
    # Qwen3.5-9B, whose layers of linear attention and of attention take turns.
    "qwen3.5-9b": ModelConfig(
        vocab_size=248_320,
        hidden_size=4096,
        intermediate_size=12_288,
        num_layers=32,
        num_heads=16,
        num_kv_heads=4,
        head_dim=256,
        layer_types=list(8 * (*(3 * ("linear_attention",)), "full_attention")),
        linear_attention=LinearAttentionConfig(
            key_heads=16, value_heads=32, key_size=128, value_size=128
        ),
        norms=NormsConfig(eps=1e-6, unit_offset=True),
        attention=AttentionConfig(qk_norm=True, gate=True),
        tied_head=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
        },
    ),
    "gpt-oss-20b": ModelConfig(
        vocab_size=201_088,
        hidden_size=2880,
        intermediate_size=2880,
        num_layers=24,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        tied_head=False,
        rope_parameters={"rope_theta": 150_000.0},
        sliding_window=128,
        layer_types=list(12 * ("sliding_attention", "full_attention")),
        attention=AttentionConfig(sinks=True, qkv_bias=True, out_bias=True),
        activation="quick_gelu",
        feed_forward="experts",
        experts=ExpertsConfig(
            count=32, per_token=4, router_bias=True, glu_limit=7.0, glu_offset=1.0
        ),
        mlp_bias=True,
    ),
    "1b": replace(
        LLAMA_8B,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        head_dim=64,
        tied_head=True,
    ),
    "8b": LLAMA_8B,
    "14b": QWEN_14B,
    "32b": replace(QWEN_14B, intermediate_size=25_600, num_layers=64, num_heads=64),
    "70b": replace(
        LLAMA_8B, hidden_size=8192, intermediate_size=28_672, num_layers=80, num_heads=64
    ),
    "bloom-560m": ModelConfig(
        vocab_size=250_880,
        hidden_size=1024,
        num_layers=24,
        num_heads=16,
        norms=NormsConfig("layer", bias=True, embedding=True),
        position_embedding="alibi",
        activation="gelu_tanh",
        gated=False,
        attention=AttentionConfig(qkv_bias=True, out_bias=True),
        mlp_bias=True,
    ),
}
# Groups of keys that a row contains, if they do not have their defaults.
SETTINGS = (
    "execution.",
    "memory.",
    "objective.",
    "optimizer.",
    "adapter.",
    "train.",
    "parallel.",
)
DEFAULTS = (
    "--train.compute_dtype=bfloat16",
    "--train.param_dtype=bfloat16",
    "--train.max_steps=100",
)


class RandomWeights:
    """Stands in for a checkpoint whose layers have the same weights, so that QLoRA need not hold
    the weights of all layers in 16 bits."""

    family = adapters = None

    def __init__(self, config: ModelConfig):
        self.config = config

    def fill(self, model: Any, put: Callable, show: Any = None) -> Any:
        """Returns the abstract model with weights."""
        return fill_model(model, self._weights(model), self.config, put)

    def _weights(self, model: Any) -> Iterator[tuple[str, np.ndarray]]:
        rng = np.random.default_rng(0)
        leaves = jax.tree.leaves_with_path(model, is_leaf=lambda x: isinstance(x, nnx.Variable))
        for at, leaf in leaves:
            path, shape = param_path(at), leaf.get_value().shape
            own = shape[1:] if path.startswith("layers.") else shape
            if len(own) > 1:
                array = rng.standard_normal(own, np.float32) * np.float32(self.config.init_std)
            else:
                ones = path.endswith(("scale", "factors"))
                array = np.full(own, 1.0 if ones else 0.0, np.float32)
            yield path, np.broadcast_to(array.astype(jnp.bfloat16), shape)


def pair_batch(spec: TrainSpec, answer: int) -> Batch:
    """Returns a batch with one pair of random answers of `answer` tokens, to a prompt that fills
    each sequence: once with `objective.share_prompt`, else once for each answer."""
    rng, T = np.random.default_rng(0), spec.config.train.seq_len
    shared = "ends" in spec.encoding.fields
    prompt = T + 1 - 2 * answer if shared else T // 2 + 1 - answer

    def row() -> Example:
        tokens = rng.integers(0, spec.model.V, prompt + 2 * answer, np.int32)
        start, *own = np.split(tokens, [prompt, prompt + answer])
        ignored = np.full(prompt - 1, IGNORED, np.int32)
        pair = side_by_side(
            [[{"tokens": np.append(start, x[:-1]), "labels": np.append(ignored, x)}] for x in own]
        )
        return sequence([with_shared_prompt(pair) if shared else pair], T)

    rows = [row() for _ in range(spec.global_batch_size)]
    batch = {name: np.stack([each[name] for each in rows]) for name in rows[0]}
    return spec.layout.put(batch, spec.config.train.gradient_accumulation_steps)


def measure(
    spec: TrainSpec,
    steps: int,
    profile: Path | None = None,
    warmup: int = 1,
    batch: Batch | None = None,
) -> dict[str, Any]:
    """Returns measurements of the compiled step, and of `steps` steps after a warm-up on `batch`,
    by default random tokens: memory per device, tokens of all devices.
    """
    batch = batch or random_batch(spec)
    start = time.perf_counter()
    with record_choices() as choices:
        step = compile_step(spec, abstract_state(spec), batch)
    names = dict.fromkeys(c.name for c in choices if c.operation == "attention")
    row: dict[str, Any] = dict(
        attention=" ".join(names),
        compile_s=time.perf_counter() - start,
        **needs(step),
    )
    if not steps:
        return row
    state, times, losses = init_state(spec), [], []
    for _ in range(warmup + steps):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        losses.append(float(metrics["train/loss"]))
        times.append(time.perf_counter() - start)
        print(f"step {len(times)}: {times[-1]:.2f} s", file=sys.stderr)
    stats = jax.devices()[0].memory_stats() or {}
    if profile:
        with jax.profiler.trace(str(profile)):
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
    seconds = float(np.median(times[warmup:]))
    return row | dict(
        step_s=seconds,
        fastest_s=min(times[warmup:]),
        tokens_per_second=spec.global_batch_size * spec.config.train.seq_len / seconds,
        peak_gib=stats.get("peak_bytes_in_use", 0) / 2**30,
        losses=losses,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("decoder", choices=DECODERS)
    parser.add_argument("length", type=int)
    parser.add_argument("--layers", type=int, help="number of layers, if fewer than the decoder's")
    parser.add_argument("--answer", type=int, help="tokens of each answer, for preference losses")
    parser.add_argument("--steps", type=int, default=3, help="0 compiles only")
    parser.add_argument("--warmup", type=int, default=1, help="steps before the timed steps")
    parser.add_argument("--profile", type=Path, help="write a profile of one step here")
    parser.add_argument("--plain", action="store_true", help="do not choose execution keys")
    parser.add_argument("--out", type=Path)
    args, options = parser.parse_known_args()
    default = flatten(Config().on("cpu"))
    T, model = args.length, DECODERS[args.decoder]
    if args.layers:
        kinds = model.layer_types and model.layer_types[: args.layers]
        model = replace(model, num_layers=args.layers, layer_types=kinds)
    config: Config = parse(options, defaults=[*DEFAULTS, f"--train.seq_len={T}"])
    weights: Any = RandomWeights(model) if config.adapter.type != "none" else None
    spec = TrainSpec(
        replace(config, model=model),
        model,
        make_mesh(config.parallel, select_devices(config.device)),
        weights,
    )
    start = time.perf_counter()
    if args.plain:
        spec, notes = with_execution(spec, spec.execution), []
    else:
        spec, notes = complete_execution(spec, lambda line: print(line, file=sys.stderr))
    batch = pair_batch(spec, args.answer) if args.answer else None
    row = dict(
        decoder=args.decoder,
        layers=model.num_layers,
        T=T,
        answer=args.answer,
        settings={
            k: v
            for k, v in flatten(spec.config).items()
            if k.startswith(SETTINGS) and v != default.get(k)
        },
        chosen=notes,
        choice_s=time.perf_counter() - start,
        devices=spec.mesh.size,
        **measure(spec, args.steps, args.profile, args.warmup, batch),
    )
    row |= dict(device=jax.devices()[0].device_kind, jax=jax.__version__)
    append_row(args.out, row)


if __name__ == "__main__":
    main()
