"""Exports every rotary override of every family, computes it by transformers, and reads it back.

python scripts/rope_exports.py --out scripts/results/rope_exports.json [--python V4/bin/python]

Needs torch. Each row is a family and an override: `ok`, with the largest error of float32 logits
relative to the largest logit (transformers against ours, and ours against the export read back),
or `refused` and the reason. With `--python`, the interpreter of an environment with another
version of transformers reads the same directories, and the rows say how far its logits are off.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

# The models are trained on 32 positions and tested on 45; the overrides extend them to 64.
TRAINED, LONGER, TOKENS = 32, 64, 45
SIZES = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
MODERN = SIZES | dict(intermediate_size=48, num_key_value_heads=2)
IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
FAMILIES = {
    "llama": ("LlamaConfig", MODERN),
    "mistral": ("MistralConfig", MODERN | dict(sliding_window=None)),
    "qwen2": ("Qwen2Config", MODERN),
    "qwen3": ("Qwen3Config", MODERN | dict(head_dim=8)),
    "gemma": ("GemmaConfig", MODERN | dict(head_dim=8)),
    "gemma2": ("Gemma2Config", MODERN | dict(head_dim=8, sliding_window=7)),
    "gemma3_text": ("Gemma3TextConfig", MODERN | dict(head_dim=8, sliding_window=7)),
    "phi3": ("Phi3Config", MODERN | IDS | dict(original_max_position_embeddings=TRAINED)),
    "gpt_neox": ("GPTNeoXConfig", SIZES | dict(intermediate_size=48)),
    "falcon": ("FalconConfig", SIZES | dict(ffn_hidden_size=48)),
}
MORE = {
    "gpt_neox": dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=1.0)),
    "gemma3_text": dict(layer_types=["sliding_attention", "full_attention"]),
}
LLAMA3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
LISTS = dict(short_factor=[1.0, 1.1, 1.3, 1.5], long_factor=[2.0, 3.0, 4.0, 8.0])
LONGROPE = dict(rope_type="longrope") | LISTS
ORIGINAL, REACH = dict(original_max_position_embeddings=16), dict(max_position_embeddings=LONGER)


def rope(kind: str, **more) -> dict:
    return dict(rope_parameters=dict(rope_type=kind, **more))


OVERRIDES = {
    "theta": rope("default", rope_theta=5e4),
    "theta, max": rope("default", rope_theta=5e4) | REACH,
    "extend_to": dict(extend_to=LONGER),
    "linear": rope("linear", factor=2.0),
    "linear, max": rope("linear", factor=2.0) | REACH,
    "dynamic": rope("dynamic", factor=2.0),
    "dynamic, max": rope("dynamic", factor=2.0) | REACH,
    "dynamic, original": rope("dynamic", factor=2.0, **ORIGINAL),
    "yarn": rope("yarn", factor=4.0),
    "yarn, original": rope("yarn", factor=4.0, **ORIGINAL),
    "yarn, max": rope("yarn", factor=4.0) | REACH,
    "yarn without factor": rope("yarn"),
    "yarn without factor, max": rope("yarn") | REACH,
    "yarn without factor, original": rope("yarn", **ORIGINAL),
    "llama3": dict(rope_parameters=LLAMA3),
    "llama3, original, max": dict(rope_parameters=LLAMA3 | ORIGINAL) | REACH,
    "longrope": dict(rope_parameters=LONGROPE),
    "longrope, original, max": dict(rope_parameters=LONGROPE | ORIGINAL) | REACH,
    "longrope, original, factor": dict(rope_parameters=LONGROPE | ORIGINAL | dict(factor=8.0)),
}
# Program for another environment: computes logits of each directory with its own transformers.
READER = """
import json, sys
import numpy as np, torch, transformers
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
tokens = torch.tensor(np.load(sys.argv[1]))
for directory in sys.argv[2:]:
    try:
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(directory, attn_implementation="eager").eval()
        with torch.no_grad():
            np.save(directory + "/theirs.npy", model(tokens).logits.numpy())
        said = "ok"
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
    print(json.dumps([transformers.__version__, directory, said]), flush=True)
"""


def base(family: str, directory: Path) -> None:
    """Saves a random model of the family. Its weights are large, so that positions matter."""
    import torch
    import transformers

    name, keys = FAMILIES[family]
    keys = keys | MORE.get(family, {}) | dict(max_position_embeddings=TRAINED)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**keys))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(directory)


def export(directory: Path, override: dict, out: Path, tokens: np.ndarray) -> np.ndarray:
    """Writes the export of a run with this override. Returns our logits.

    Raises:
      ValueError: the override is refused.
    """
    import jax

    from bptjax.models.config import ModelConfig
    from bptjax.training.checks import check_model
    from bptjax.weights.conversion import write
    from bptjax.weights.pretrained import open_pretrained

    model = open_pretrained(ModelConfig(name_or_path=str(directory), **override))
    check_model(model.config, model)
    write(model, str(directory), out, model.source.read, None, "5GB")
    return logits(model.load(jax.sharding.SingleDeviceSharding(jax.devices()[0])), tokens)


def read_back(out: Path, tokens: np.ndarray) -> np.ndarray:
    """Returns our logits of the export, read back."""
    import jax

    from bptjax.models.config import ModelConfig
    from bptjax.weights.pretrained import open_pretrained

    model = open_pretrained(ModelConfig(name_or_path=str(out)))
    return logits(model.load(jax.sharding.SingleDeviceSharding(jax.devices()[0])), tokens)


def logits(decoder, tokens: np.ndarray) -> np.ndarray:
    import jax

    found = jax.jit(lambda decoder: decoder.logits(decoder(tokens)[0]))(decoder)
    return np.asarray(found)


def off(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


def read(python: str, tokens: Path, directories: list[Path]) -> dict[str, tuple[str, str]]:
    """Returns (version of transformers, "ok" or its error) of each directory, read by an
    interpreter."""
    command = [python, "-W", "ignore", "-c", READER, str(tokens), *map(str, directories)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [json.loads(line) for line in said.splitlines() if line.startswith("[")]
    return {directory: (version, text) for version, directory, text in rows}


def compare(families: list[str], names: list[str], pythons: list[str], work: Path) -> list[dict]:
    """Returns a row for each family and override, read by each interpreter."""
    tokens = np.random.default_rng(0).integers(3, 61, (2, TOKENS))
    np.save(work / "tokens.npy", tokens)
    rows, ours = [], {}
    for family in families:
        base(family, work / family)
        for name in names:
            row: dict[str, Any] = dict(family=family, override=name)
            out = work / f"{family}, {name}"
            rows.append(row)
            try:
                ours[str(out)] = export(work / family, OVERRIDES[name], out, tokens)
            except ValueError as error:
                row["refused"] = str(error)
                continue
            row["read_back"] = off(read_back(out, tokens), ours[str(out)])
    for python in pythons:
        for out, (version, said) in read(
            python, work / "tokens.npy", list(map(Path, ours))
        ).items():
            row = next(r for r in rows if out == str(work / f"{r['family']}, {r['override']}"))
            theirs = Path(out) / "theirs.npy"
            row[version] = off(np.load(theirs), ours[out]) if said == "ok" else said
            theirs.unlink(missing_ok=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file of the rows")
    parser.add_argument("--python", action="append", default=[], help="another interpreter")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        pythons = [sys.executable, *args.python]
        rows = compare(args.families, list(OVERRIDES), pythons, Path(work))
        text = "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
        # Remove the directories of this run from errors.
        text = text.replace(work, "DIR")
    if args.out:
        args.out.write_text(text)
    for row in rows:
        print("  ".join(f"{v:.1e}" if isinstance(v, float) else str(v) for v in row.values()))


if __name__ == "__main__":
    main()
