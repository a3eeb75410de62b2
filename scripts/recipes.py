"""Plans configs/chat_24gb.yaml for popular models on one 24 GB GPU.

    python scripts/recipes.py --out rows.jsonl

Needs no GPU and no weights, but `pip install -e ".[plan]"`. Each row is appended when it is planned;
rows that are already in the file are not planned again.
"""

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from settings import GIB

from bptjax.cli.plan import open_spec
from bptjax.config_parser import parse
from bptjax.cost.auto import absent_limit
from bptjax.cost.devices import absent_devices
from bptjax.cost.estimate import Estimator
from bptjax.cost.memory import Plan, plan
from bptjax.cost.search import choose, with_execution
from bptjax.training.spec import TrainSpec
from bptjax.training.state import parameter_counts

CONFIG = Path(__file__).parents[1] / "configs" / "chat_24gb.yaml"
GPU = "rtx4090"
LENGTHS = 2048, 8192


def _rope(theta: float, kind: str = "default", **more: Any) -> dict[str, Any]:
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=theta, **more))


def _shape(
    family: str, V: int, D: int, L: int, N: int, K: int, F: int, T: int, **more: Any
) -> dict[str, Any]:
    """Returns the keys of config.json of a family, with these sizes and T positions."""
    name = "".join(part.capitalize() for part in family.removesuffix("_text").split("_"))
    name = {"GptOss": "GptOss", "Gemma3": "Gemma3", "Smollm3": "SmolLM3"}.get(name, name)
    sizes = dict(vocab_size=V, hidden_size=D, num_hidden_layers=L, num_attention_heads=N)
    sizes |= dict(num_key_value_heads=K, intermediate_size=F, max_position_embeddings=T)
    named = dict(model_type=family, architectures=[f"{name}ForCausalLM"], dtype="bfloat16")
    return named | sizes | more


def _llama3(factor: float) -> dict[str, Any]:
    more = dict(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0)
    return _rope(5e5, "llama3", original_max_position_embeddings=8192, **more)


TIED, UNTIED = dict(tie_word_embeddings=True), dict(tie_word_embeddings=False)
_OF_GEMMA = dict(sliding_window=1024, head_dim=256, query_pre_attn_scalar=256) | TIED
_OF_GEMMA |= dict(rope_parameters={
    "sliding_attention": dict(rope_type="default", rope_theta=1e4),
    "full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1e6),
})  # fmt: skip
_YARN = dict(factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False)
_OF_GPT_OSS = _rope(15e4, "yarn", original_max_position_embeddings=4096, **_YARN) | UNTIED
_OF_GPT_OSS |= dict(num_local_experts=32, num_experts_per_tok=4, head_dim=64, sliding_window=128)
_MIXED = ["sliding_attention"] * 5 + ["full_attention"]
# fmt: off
# config.json of each model, and the billions of its parameters (of the text model).
MODELS: dict[str, tuple[dict[str, Any], float]] = {
    "Llama-3.2-1B": (_shape("llama", 128256, 2048, 16, 32, 8, 8192, 131072, head_dim=64, **_llama3(32), **TIED), 1.236),
    "Llama-3.2-3B": (_shape("llama", 128256, 3072, 28, 24, 8, 8192, 131072, head_dim=128, **_llama3(32), **TIED), 3.213),
    "Llama-3.1-8B": (_shape("llama", 128256, 4096, 32, 32, 8, 14336, 131072, head_dim=128, **_llama3(8), **UNTIED), 8.030),
    "Qwen3-4B": (_shape("qwen3", 151936, 2560, 36, 32, 8, 9728, 40960, head_dim=128, **_rope(1e6), **TIED), 4.022),
    "Qwen3-8B": (_shape("qwen3", 151936, 4096, 36, 32, 8, 12288, 40960, head_dim=128, **_rope(1e6), **UNTIED), 8.191),
    "Qwen2.5-7B": (_shape("qwen2", 152064, 3584, 28, 28, 4, 18944, 32768, **_rope(1e6), **UNTIED), 7.616),
    "Mistral-7B-v0.3": (_shape("mistral", 32768, 4096, 32, 32, 8, 14336, 32768, head_dim=128, sliding_window=None, **_rope(1e6), **UNTIED), 7.248),
    "gemma-3-4b": (_shape("gemma3_text", 262208, 2560, 34, 8, 4, 10240, 131072, layer_types=(_MIXED * 6)[:34], **_OF_GEMMA), 3.880),
    "gemma-3-12b": (_shape("gemma3_text", 262208, 3840, 48, 16, 8, 15360, 131072, layer_types=_MIXED * 8, **_OF_GEMMA), 11.766),
    "phi-4": (_shape("phi3", 100352, 5120, 40, 40, 10, 17920, 16384, **_rope(25e4), **UNTIED), 14.660),
    "gpt-oss-20b": (_shape("gpt_oss", 201088, 2880, 24, 64, 8, 2880, 131072, layer_types=["sliding_attention", "full_attention"] * 12, **_OF_GPT_OSS), 20.915),
    "SmolLM3-3B": (_shape("smollm3", 128256, 2048, 36, 16, 4, 11008, 65536, **_rope(5e6), **TIED), 3.075),
}
# fmt: on
# Models with more parameters, in billions, leave no room for 16-bit weights.
LARGEST_LORA = 5.0


def cases() -> Iterator[tuple[str, str, int]]:
    """Yields a model, a method and a length for each row of the table."""
    for (model, (_, billions)), method in itertools.product(MODELS.items(), ("lora", "qlora")):
        if method == "qlora" or billions < LARGEST_LORA:
            yield from ((model, method, length) for length in LENGTHS)


def spec_of(model: str, method: str, length: int, *flags: str) -> TrainSpec:
    """Returns the step of the recipe for a model, on one 24 GB GPU that need not be there."""
    _, devices = absent_devices(GPU)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODELS[model][0]))
        flags = (f"--model.name_or_path={directory}", f"--adapter.type={method}", *flags)
        return open_spec(
            parse([f"--config={CONFIG}", f"--train.seq_len={length}", *flags]), devices
        )


def planned(model: str, method: str, length: int) -> dict[str, Any]:
    """Plans a step, with the execution that a run would choose. Returns its row."""
    spec = spec_of(model, method, length)
    kind, _ = absent_devices(GPU)
    limit = absent_limit(spec, kind)

    def measure(spec: TrainSpec) -> Plan:
        return plan(spec, GPU, limit.device, kind.platform)

    choice = choose(spec, limit, measure)
    estimate = Estimator(with_execution(spec, choice.execution))(choice.execution)
    return dict(
        model=model,
        method=method,
        T=length,
        parameters=parameter_counts(spec)[0],
        peak_gib=choice.plan.peak / GIB,
        host_gib=choice.plan.host / GIB,
        room_gib=limit.device / GIB,
        fits=choice.plan.fits,
        remat=choice.execution.remat,
        offload=choice.execution.offload,
        tokens_per_second=length * spec.global_batch_size / estimate.seconds,
        devices=GPU,
        jax=jax.__version__,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    known = {(row["model"], row["method"], row["T"]) for row in done}
    for case in cases():
        if case not in known:
            row = planned(*case)
            print(row, flush=True)
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
