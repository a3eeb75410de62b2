"""Writes an adapter as a GGUF file, which llama.cpp and Ollama add to the base model's."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from bptjax.run.output import atomic_file
from bptjax.weights.adapter_export import open_adapter
from bptjax.weights.gguf.export import TYPES, add_metadata, check_type, describe, quantized
from bptjax.weights.gguf.families import ROWS
from bptjax.weights.gguf.row import Tensor
from bptjax.weights.hf.config import changes
from bptjax.weights.hf.peft_modules import is_linear, joined, kernels_in
from bptjax.weights.lora import Adapters
from bptjax.weights.pretrained import Pretrained

# Types of a file; an adapter is too small to gain from fewer bits.
LORA_TYPES = "f32", "f16", "bf16"


def lora_to_gguf(source: str, out: Path, *, type: str, warn: Callable[[str], None]) -> Pretrained:
    """Writes the adapter of a run or of PEFT to the new file `out`, without its base model.

    Raises:
      ValueError: a GGUF file cannot express the adapter, which the error says; nothing is written.
    """
    from gguf import GGMLQuantizationType, GGUFWriter

    if type not in LORA_TYPES:
        check_type(type, out)
        raise ValueError(f"--type={type}: must be one of {', '.join(LORA_TYPES)} with --lora")
    model = open_adapter(source)
    check_base(model, source)
    assert model.adapters is not None
    exported = describe(model, source, warn)
    pairs, alpha = matrices(model.adapters, exported.tensors, source)
    keys = {
        "general.type": "adapter",
        "general.name": Path(source).resolve().name,
        "general.file_type": TYPES[type],
        "adapter.type": "lora",
        "adapter.lora.alpha": alpha,
    }
    own = GGMLQuantizationType[type.upper()]
    with atomic_file(out) as file:
        writer = GGUFWriter(file, ROWS[exported.kind].arch)
        try:
            add_metadata(writer, keys)
            for name, array in pairs.items():
                writer.add_tensor(name, quantized(array, own), raw_dtype=own)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()
    return model


def check_base(model: Pretrained, source: str) -> None:
    """Checks that the adapter belongs to the base model as it is.

    Raises:
      ValueError: training changed the base model otherwise.
    """
    assert model.adapters is not None and model.read_as is not None
    remedy = "; write base model and adapter to one file, without --lora"
    if model.adapters.modules:
        names = ", ".join(sorted(model.adapters.modules))
        raise ValueError(
            f"{source}: {names}: must not be trained in full, because a GGUF adapter holds "
            f"low-rank products alone{remedy}"
        )
    if changed := changes(model.read_as, model.config):
        raise ValueError(
            f"{source}: model.{next(iter(changed))}: must be the base model's, because llama.cpp "
            f"reads it from the base model's file{remedy}"
        )


def matrices(
    adapters: Adapters, found: list[Tensor], source: str
) -> tuple[dict[str, np.ndarray], float]:
    """Returns the adapter's matrices by their names in a GGUF file, and alpha. llama.cpp multiplies
    each product by alpha / rank.

    Raises:
      ValueError: a GGUF file has no separate matrix for a kernel with an adapter.
    """
    pairs: dict[str, np.ndarray] = {}
    alpha, left = 0.0, set(adapters.values)
    for tensor in found:
        rule, transform = tensor.rule, tensor.transform
        if not is_linear(rule) or adapters.values.keys().isdisjoint(rule.ours):
            continue
        if transform.axis is None:
            continue
        kernels, each = kernels_in(rule), []
        for index in tensor.indices:
            A, B, scale = joined(kernels, adapters.values, index)
            alpha = alpha or scale * len(A)
            B = B * np.float32(scale * len(A) / alpha)
            if transform.axis:
                A = transform.there(A, tensor.config)
            else:
                B = transform.there(B, tensor.config)
            each.append((A, B))
        a, b = (np.stack(x) if tensor.stacked else x[0] for x in zip(*each, strict=True))
        pairs |= {f"{tensor.name}.lora_a": a, f"{tensor.name}.lora_b": b}
        left -= set(rule.ours)
    if left:
        raise ValueError(
            f"{source}: {', '.join(sorted(left))}: must have no adapter, because llama.cpp adds "
            "none there; write base model and adapter to one file, without --lora"
        )
    return pairs, alpha
