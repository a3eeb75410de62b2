"""Times one layer of BLOOM-560m's shape, forward and backward, on this machine's GPU.

    python scripts/layer.py --lengths 2048 8192 --out rows.json

Eight sequences, bfloat16, gradients of the parameters and of the input, with and without ALiBi.
Python loops in PyTorch (chunks of 512 tokens, no ALiBi) took 21.7 ms at 2,048 tokens and 256.5 ms
at 8,192 on one H200.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from timing import add_row, milliseconds

from bptjax.models.config import ModelConfig
from bptjax.models.execution import Execution
from bptjax.models.groups.attention import AttentionConfig
from bptjax.models.groups.norms import NormsConfig
from bptjax.models.layers import TokenContext
from bptjax.models.stack import new_layers, run
from bptjax.ops.mask import Mask

LAYER = ModelConfig(
    hidden_size=1024,
    num_layers=1,
    num_heads=16,
    norms=NormsConfig("layer", bias=True),
    position_embedding="alibi",
    activation="gelu_tanh",
    gated=False,
    attention=AttentionConfig(qkv_bias=True, out_bias=True),
    mlp_bias=True,
)
MASK = Mask(causal=True)
LOOPS_MS = {2048: 21.7, 8192: 256.5}
BATCH = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--impls", nargs="+", default=["auto", "triton"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for T in args.lengths:
        for config in (LAYER, replace(LAYER, position_embedding="none")):
            for impl in args.impls:
                layers = new_layers(config, jax.random.key(0), jnp.bfloat16)
                shape = (BATCH, T, config.hidden_size)
                x, dy = (
                    jax.random.normal(k, shape, jnp.bfloat16) for k in map(jax.random.key, (1, 2))
                )
                tokens = jnp.broadcast_to(jnp.arange(T), (BATCH, T))
                how = Execution(attention_implementation=impl, ffn_chunk=T)

                @jax.jit
                def both(layers, x, dy, config=config, tokens=tokens, how=how):
                    def f(layers, x):
                        context = TokenContext(tokens, tokens)
                        return run(layers, config, x, context, mask=MASK, execution=how).x

                    y, pull = jax.vjp(f, layers, x)
                    return y, pull(dy)

                ms, *_ = milliseconds(both, layers, x, dy, repeats=10)
                add_row(
                    rows,
                    args.out,
                    attention=impl,
                    alibi=config.position_embedding == "alibi",
                    T=T,
                    batch=BATCH,
                    ms=ms,
                    loops_over_this=LOOPS_MS[T] / ms if T in LOOPS_MS else None,
                )


if __name__ == "__main__":
    main()
