"""Plans the steps in rows of scripts/step.py, on devices like those that measured them.

    python scripts/plans.py rows.jsonl --out plans.json

Needs no GPU, but `pip install -e ".[plan]"` with the jax version of the rows. Writes the predicted
memory of each step beside the measured one.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import jax
from step import DECODERS, DEFAULTS

from bptjax.config_parser import parse
from bptjax.cost.devices import absent_devices, kind_of
from bptjax.cost.memory import plan
from bptjax.parallel.mesh import make_mesh
from bptjax.training.spec import TrainSpec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    made = []
    for line in (line for path in args.rows for line in path.read_text().splitlines()):
        row = json.loads(line)
        text = f"{kind_of(row['device'])}:{row['devices']}"
        settings = [
            f"--{key}={value if isinstance(value, str) else json.dumps(value)}"
            for key, value in row["settings"].items()
        ]
        if " " not in row["attention"]:  # The same kernel in all layers.
            settings.append(f"--execution.attention_implementation={row['attention']}")
        kind, devices = absent_devices(text)
        model = replace(DECODERS[row["decoder"]], num_layers=row["layers"])
        config = parse(settings, defaults=DEFAULTS)
        config = replace(config, model=model)
        spec = TrainSpec(config, model, make_mesh(config.parallel, devices))
        start = time.perf_counter()
        found = plan(spec, text, platform=kind.platform)
        made.append(
            dict(
                decoder=row["decoder"],
                layers=model.num_layers,
                T=row["T"],
                devices=text,
                settings={
                    k: v
                    for k, v in row["settings"].items()
                    if k == "train.linear" or not k.startswith("train.")
                },
                attention=row["attention"],
                planned_gib=found.peak / 2**30,
                planned_host_gib=found.host / 2**30,
                measured_gib=row.get("peak_gib") or row["program_gib"],
                measured_host_gib=row["host_gib"],
                ran="peak_gib" in row,
                plan_s=time.perf_counter() - start,
                jax=jax.__version__,
            )
        )
        print(made[-1], flush=True)
        args.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
