"""Plans configs/chat_24gb.yaml for popular models on one 24 GB GPU.

    python scripts/recipes.py --out rows.jsonl

Needs no GPU and no weights, but `pip install -e ".[plan]"`. Each row is appended when it is
planned; rows that are already in the file are not planned again.
"""

import argparse
import json
import tempfile
from dataclasses import asdict
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
LENGTH = 8192


def _rope(theta: float, kind: str = "default", **more: Any) -> dict[str, Any]:
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=theta, **more))


def _shape(
    family: str,
    sizes: tuple[int, int, int, int, int, int],
    context: int,
    parts: dict[str, Any],
    **more: Any,
) -> dict[str, Any]:
    """Returns config.json of a model.

    Args:
      sizes: vocabulary, width, layers, heads, key heads, width of the feed-forward network.
      parts: further keys, such as rotary positions.
    """
    architecture = {"gemma3_text": "Gemma3", "smollm3": "SmolLM3", "gpt_oss": "GptOss"}
    names = "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"
    names += "num_key_value_heads", "intermediate_size"
    return dict(
        model_type=family,
        architectures=[f"{architecture.get(family, family.capitalize())}ForCausalLM"],
        dtype="bfloat16",
        max_position_embeddings=context,
        **dict(zip(names, sizes, strict=True)),
        **parts,
        **more,
    )


def _llama3(factor: float) -> dict[str, Any]:
    more = dict(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0)
    return _rope(5e5, "llama3", original_max_position_embeddings=8192, **more)


TIED, UNTIED = dict(tie_word_embeddings=True), dict(tie_word_embeddings=False)
GEMMA = dict(sliding_window=1024, head_dim=256, query_pre_attn_scalar=256) | TIED
GEMMA |= dict(
    rope_parameters={
        "sliding_attention": dict(rope_type="default", rope_theta=1e4),
        "full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1e6),
    }
)
WINDOWS = ["sliding_attention"] * 5 + ["full_attention"]
LLAMA_1B, LLAMA_3B = (128256, 2048, 16, 32, 8, 8192), (128256, 3072, 28, 24, 8, 8192)
LLAMA_8B, MISTRAL = (128256, 4096, 32, 32, 8, 14336), (32768, 4096, 32, 32, 8, 14336)
QWEN3_4B, QWEN3_8B = (151936, 2560, 36, 32, 8, 9728), (151936, 4096, 36, 32, 8, 12288)
GEMMA_4B, GEMMA_12B = (262208, 2560, 34, 8, 4, 10240), (262208, 3840, 48, 16, 8, 15360)
SMOLLM3, QWEN2 = (128256, 2048, 36, 16, 4, 11008), (152064, 3584, 28, 28, 4, 18944)
PHI4, GPT_OSS = (100352, 5120, 40, 40, 10, 17920), (201088, 2880, 24, 64, 8, 2880)
YARN = dict(factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False)
EXPERTS = dict(num_local_experts=32, num_experts_per_tok=4, sliding_window=128, head_dim=64)
EXPERTS |= dict(quantization_config=dict(quant_method="mxfp4"), attention_bias=True)
WIDE = dict(head_dim=128)
# config.json of each model, the number of its parameters (of a multimodal model, of its text
# model), and the methods to plan.
MODELS: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "Llama-3.2-1B": (
        _shape("llama", LLAMA_1B, 131072, _llama3(32) | TIED, head_dim=64),
        1_235_814_400,
        ("lora",),
    ),
    "Llama-3.2-3B": (
        _shape("llama", LLAMA_3B, 131072, _llama3(32) | TIED | WIDE),
        3_212_749_824,
        ("lora",),
    ),
    "SmolLM3-3B": (_shape("smollm3", SMOLLM3, 65536, _rope(5e6) | TIED), 3_075_098_624, ("lora",)),
    "Qwen3-4B": (
        _shape("qwen3", QWEN3_4B, 40960, _rope(1e6) | TIED | WIDE),
        4_022_468_096,
        ("lora", "qlora"),
    ),
    "gemma-3-4b": (
        _shape("gemma3_text", GEMMA_4B, 131072, GEMMA, layer_types=(WINDOWS * 6)[:34]),
        3_880_263_168,
        ("lora", "qlora"),
    ),
    "Mistral-7B-v0.3": (
        _shape("mistral", MISTRAL, 32768, _rope(1e6) | UNTIED | WIDE, sliding_window=None),
        7_248_023_552,
        ("qlora",),
    ),
    "Qwen2.5-7B": (_shape("qwen2", QWEN2, 32768, _rope(1e6) | UNTIED), 7_615_616_512, ("qlora",)),
    "Llama-3.1-8B": (
        _shape("llama", LLAMA_8B, 131072, _llama3(8) | UNTIED | WIDE),
        8_030_261_248,
        ("qlora",),
    ),
    "Qwen3-8B": (
        _shape("qwen3", QWEN3_8B, 40960, _rope(1e6) | UNTIED | WIDE),
        8_190_735_360,
        ("qlora",),
    ),
    "gemma-3-12b": (
        _shape("gemma3_text", GEMMA_12B, 131072, GEMMA, layer_types=WINDOWS * 8),
        11_766_034_176,
        ("qlora",),
    ),
    "phi-4": (
        _shape("phi3", PHI4, 16384, _rope(2.5e5) | UNTIED, sliding_window=None),
        14_659_507_200,
        ("qlora",),
    ),
    "gpt-oss-20b": (
        _shape(
            "gpt_oss",
            GPT_OSS,
            131072,
            _rope(1.5e5, "yarn", original_max_position_embeddings=4096, **YARN) | UNTIED | EXPERTS,
            layer_types=["sliding_attention", "full_attention"] * 12,
        ),
        20_914_757_184,
        ("qlora",),
    ),
}


def spec_of(model: str, method: str) -> TrainSpec:
    """Returns the step of the recipe for a model, on one 24 GB GPU that need not be there."""
    _, devices = absent_devices(GPU)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODELS[model][0]))
        flags = [f"--model.name_or_path={directory}", f"--adapter.type={method}"]
        flags += [f"--config={CONFIG}", f"--train.seq_len={LENGTH}"]
        return open_spec(parse(flags), devices)


def planned(model: str, method: str) -> dict[str, Any]:
    """Plans a step, with the execution that a run would choose. Returns its row."""
    spec = spec_of(model, method)
    kind, _ = absent_devices(GPU)
    limit = absent_limit(spec, kind)

    def measure(spec: TrainSpec) -> Plan:
        return plan(spec, GPU, limit.device, kind.platform)

    choice = choose(spec, limit, measure)
    estimate = Estimator(with_execution(spec, choice.execution))(choice.execution)
    return dict(
        model=model,
        method=method,
        T=LENGTH,
        parameters=parameter_counts(spec)[0],
        peak_gib=choice.plan.peak / GIB,
        host_gib=choice.plan.host / GIB,
        room_gib=limit.device / GIB,
        execution=asdict(choice.execution),
        tokens_per_second=LENGTH * spec.global_batch_size / estimate.seconds,
        devices=GPU,
        jax=jax.__version__,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    known = {(row["model"], row["method"]) for row in done}
    for case in ((model, method) for model, (*_, methods) in MODELS.items() for method in methods):
        if case not in known:
            row = planned(*case)
            print(row, flush=True)
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
