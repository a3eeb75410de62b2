"""Times full fine-tuning steps of transformers' Llama with random weights, for comparison.

    python scripts/step_peer.py 8b 131072 --offload --tiled --out rows.jsonl
    python scripts/step_peer.py 8b 8192 --compile --float8 tensorwise --save_products

Needs torch and transformers, on a GPU also liger-kernel, and torchao for `--float8`. The decoders
and the tokens are those of scripts/step.py; parameters, gradients and moments are in bfloat16.

Steps have what its users would take to be fast: Liger's kernels, cuDNN's attention, gradient
checkpointing and the fused AdamW. `--offload` moves the inputs of layers to pinned host memory, and
`--tiled` runs the feed-forward networks in tiles. `--compile` compiles each layer instead of taking
Liger's kernels, but for its loss; with `--float8` and `--save_products`, which saves every second
product and attention, this is torchtitan's way. Appends a row to `--out`.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from step import DECODERS
from timing import append_row
from torch.nn.attention import SDPBackend, sdpa_kernel

from bptjax.models.config import ModelConfig


class _InHostMemory(torch.autograd.Function):
    """Runs a layer, whose input waits in host memory for the backward pass, which runs it again."""

    @staticmethod
    def forward(ctx, layer: Callable, x: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        ctx.host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
        ctx.host.copy_(x, non_blocking=True)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, *dy: Any) -> tuple[None, torch.Tensor | None]:
        x = ctx.host.to(dy[0].device, non_blocking=True).requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        torch.autograd.backward(y, dy[0])
        return None, x.grad


def offload(layer: Any) -> None:
    """Makes the layer keep its input in host memory."""
    run = layer.forward

    def forward(x: torch.Tensor, *args, **options):
        return _InHostMemory.apply(lambda x: run(x, *args, **options), x)

    layer.forward = forward


def every_second_product() -> Any:
    """Returns the contexts of a checkpoint that saves every second product, and attention."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    ops = torch.ops.aten
    products = ops.mm.default, ops._scaled_mm.default
    attention = (
        ops._scaled_dot_product_cudnn_attention.default,
        ops._scaled_dot_product_flash_attention_for_cpu.default,
    )
    # Largest elements, for the scales of float8.
    small = ops.max.default, ops.amax.default
    counts = {True: 0, False: 0}

    def policy(ctx, op, *args, **options):
        if op in products:
            counts[ctx.is_recompute] += 1
            saved = counts[ctx.is_recompute] % 2 == 1
        else:
            saved = op in attention + small
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def make(model: ModelConfig, args: argparse.Namespace, device: str) -> Any:
    """Returns the model of transformers with what the arguments say."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from transformers import LlamaConfig, LlamaForCausalLM

    if device == "cuda":
        from liger_kernel.transformers import LigerTiledSwiGLUMLP, apply_liger_kernel_to_llama

        kernels = not args.compile
        apply_liger_kernel_to_llama(rope=kernels, rms_norm=kernels, swiglu=kernels)
        if args.tiled:
            from transformers.models.llama import modeling_llama

            modeling_llama.LlamaMLP = LigerTiledSwiGLUMLP
    options: dict[str, Any] = dict(attn_implementation="sdpa", use_cache=False)
    config = LlamaConfig(
        vocab_size=model.V,
        hidden_size=model.hidden_size,
        intermediate_size=model.F,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.K,
        head_dim=model.H,
        tie_word_embeddings=model.tied_head,
        rope_parameters={"rope_type": "default"} | dict(model.rope_parameters or {}),
        max_position_embeddings=2**21,
        **options,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        made: Any = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    made.train()
    if args.float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe = Float8LinearConfig.from_recipe_name(args.float8)
        convert_to_float8_training(made.model, config=recipe)
    layers = made.model.layers
    for i, layer in enumerate(layers):
        if args.offload:
            offload(layer)
        else:
            contexts: Any = {"context_fn": every_second_product} if args.save_products else {}
            layers[i] = layer = checkpoint_wrapper(layer, preserve_rng_state=False, **contexts)
        if args.compile:
            layer.compile(dynamic=False)
    # An offloaded layer has a gradient only if its input has one.
    made.model.embed_tokens.register_forward_hook(lambda *of: of[-1].requires_grad_())
    return made


def measure(made: Any, T: int, steps: int) -> dict[str, Any]:
    """Returns seconds, memory and losses of `steps` steps on random tokens, after a warm-up."""
    cuda = made.device.type == "cuda"
    tokens = torch.randint(0, made.config.vocab_size, (1, T), device=made.device)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-5, fused=True)
    kernel = partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION) if cuda else contextlib.nullcontext
    losses, times = [], []
    for _ in range(1 + steps):
        start = time.perf_counter()
        with kernel():
            loss = made(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        if cuda and len(times) == 1:
            torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(times[1:])
    return dict(
        first_s=times[0],
        step_s=seconds,
        tokens_per_second=T / seconds,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        losses=losses,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("decoder", choices=("1b", "8b"))
    parser.add_argument("length", type=int)
    parser.add_argument("--steps", type=int, default=3, help="after a warm-up")
    parser.add_argument("--offload", action="store_true", help="inputs of layers in host memory")
    parser.add_argument("--tiled", action="store_true", help="feed-forward networks in tiles")
    parser.add_argument("--compile", action="store_true", help="layers with torch.compile")
    parser.add_argument("--float8", choices=("tensorwise", "rowwise"), help="torchao's recipe")
    parser.add_argument("--save_products", action="store_true", help="recompute less")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.offload and args.save_products:
        parser.error("--save_products: not with --offload")
    flags = ["offload", "tiled", "compile", "float8", "save_products"]
    said = {flag: getattr(args, flag) for flag in flags if getattr(args, flag)}
    row = dict(system="transformers + Liger", decoder=args.decoder, T=args.length, flags=said)
    row |= measure(make(DECODERS[args.decoder], args, "cuda"), args.length, args.steps)
    row |= dict(device=torch.cuda.get_device_name(), torch=torch.__version__)
    append_row(args.out, row)


if __name__ == "__main__":
    main()
