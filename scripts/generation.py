"""Times generation by decoders with random weights on this machine's GPU.

    python scripts/generation.py 1b 8192 --batch 8 --out rows.json

Random prompts of one length, bfloat16 weights and cache, greedy. A row has the time to the first
token, after compilation, and the mean time of the tokens beyond the first WARM.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from step import DECODERS
from timing import add_row

from bptjax.models.decoder import Decoder
from bptjax.models.generation import generate
from bptjax.models.sampling import Sampling

WARM, TIMED = 96, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("decoder", choices=DECODERS)
    parser.add_argument("lengths", type=int, nargs="+")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--layers", type=int, help="fewer layers, for a trial")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = DECODERS[args.decoder]
    config = replace(config, num_layers=args.layers or config.num_layers)
    rows = json.loads(args.out.read_text()) if args.out and args.out.exists() else []

    @jax.jit
    def new(key):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), Decoder(config, key))

    model, rng = new(jax.random.key(0)), np.random.default_rng(0)
    for length in args.lengths:
        for batch in args.batch:
            prompts = list(rng.integers(0, config.V, (batch, length)))

            def run(prompts=prompts):
                """Returns the time of each token since the start, in seconds."""
                start = time.perf_counter()
                tokens = generate(
                    model,
                    prompts,
                    new_tokens=WARM + TIMED,
                    sampling=Sampling(temperature=0.0),
                    dtype=jnp.bfloat16,
                )
                return [time.perf_counter() - start for _ in tokens]

            run()  # Compiles.
            times = run()
            # Several tokens come at once.
            last = np.flatnonzero(np.diff(times) > 1e-4)
            first = int(last[last >= WARM][0])
            a_token = (times[-1] - times[first]) / (len(times) - 1 - first)
            stats = jax.devices()[0].memory_stats() or {}
            add_row(
                rows,
                args.out,
                decoder=args.decoder,
                prompt=length,
                batch=batch,
                first_token_s=times[0],
                per_token_ms=1e3 * a_token,
                tokens_per_second=batch / a_token,
                peak_gib=stats.get("peak_bytes_in_use", 0) / 2**30,
            )


if __name__ == "__main__":
    main()
