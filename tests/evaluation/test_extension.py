"""The example of docs/long_context.md: a model is extended, and uses its new positions."""

import json
import subprocess
import sys
from pathlib import Path

import extension
import jax
import pytest

from bptjax.config_parser import parse

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.thorough
def test_a_tiny_model_is_extended(tmp_path, monkeypatch):
    """At half the width, in a third of the steps, with short evaluations, on one device. The text
    is JAX's source code, as in the documentation."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_FLAGS")
    few = "--train.eval_batches=2", "--train.sample_tokens=0"
    sizes = dict(hidden_size=64, num_heads=2, num_kv_heads=1, intermediate_size=192)
    flags = *few, "--train.max_steps=120", *(f"--model.{key}={x}" for key, x in sizes.items())
    for command in (
        f"train --config {CONFIGS}/quickstart.yaml --device=cpu {' '.join(flags)}",
        "convert bptjax-to-hf runs/quickstart exports/quickstart",
    ):
        subprocess.run([sys.executable, "-m", "bptjax", *command.split()], check=True)
    extension.main(
        [
            *("--model=exports/quickstart", "--train=python-stdlib", "--device=cpu"),
            *("--out=rows.jsonl", "--runs=runs", f"--config={CONFIGS}/extend_tiny.yaml"),
            *(f"--held_out={Path(jax.__file__).parent}/_src/*.py", "--measures=perplexity"),
            *("--variants", "before", "theta", "--train.max_steps=16", *few),
        ]
    )
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    assert {row["length_trained"] for row in rows} == {2048} and "/" not in str(rows[0])
    (trained,) = (row for row in rows if row["measure"] == "train")
    assert trained["tokens"] == 16 * 2 * 2048
    assert trained["held_out"]["16"] < trained["held_out"]["0"]
    perplexity = [row for row in rows if row["measure"] == "perplexity"]
    before, after = (
        [row for row in perplexity if row["variant"] == name] for name in ("before", "theta")
    )
    assert (
        [row["end"] for row in before]
        == [row["end"] for row in after]
        == [*range(256, 2048, 256), 2047]
    )
    # At the last positions, the full context harmed.
    assert before[-1]["perplexity"] > 1.1 * before[-1]["short_perplexity"]
    assert after[-1]["perplexity"] < 1.05 * after[-1]["short_perplexity"]
    assert after[-1]["perplexity"] < before[-1]["perplexity"] / 1.1


def test_variants_have_the_keys_of_their_names(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8192}')
    commands, flags = {}, []
    monkeypatch.setattr(
        extension, "train", lambda command, run: commands.update({run.name: command}) or {}
    )
    monkeypatch.setattr(extension, "evaluate", lambda model, some, out: flags.append(some) or [])
    command = [f"--model={tmp_path}", "--train=t.jsonl", "--held_out=h.jsonl", "--measures=chats"]
    command += [f"--out={tmp_path / 'rows.jsonl'}", f"--runs={tmp_path}"]
    command += [f"--config={CONFIGS / 'smollm2_128k.yaml'}", "--variants", *extension.VARIANTS]
    with pytest.raises(SystemExit):
        extension.main(command)
    extension.main([*command, f"--chats={tmp_path}"])
    assert {flag for each in flags for flag in each if "held_out_chats.jsonl" in flag}
    configs = {name.removesuffix("_131072"): parse(each) for name, each in commands.items()}
    assert configs.keys() == extension.VARIANTS.keys()
    for name, config in configs.items():
        assert (config.train.max_steps == 50) == (name.endswith("_50") or name == "fewer_steps")
        assert bool(config.data.path) != bool(config.data.sources)
    assert [(x.path, x.weight) for x in configs["chats_25"].data.sources] == [
        ("t.jsonl", 0.75),
        (f"{tmp_path}/chats.jsonl", 0.25),
    ]
    assert configs["yarn_50"].model.rope_parameters["factor"] == 16
    assert configs["yarn_50"].model.max_position_embeddings == 131072
