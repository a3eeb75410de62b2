"""Writes GGUF files, one tensor at a time."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bptjax.data.hf_tokenizer import HFTokenizer
from bptjax.data.tokenizer import has_tokenizer, load_tokenizer
from bptjax.models.config import ModelConfig
from bptjax.models.params import Index
from bptjax.run.output import atomic_file
from bptjax.run.progress import Progress
from bptjax.weights.conversion import described, merging
from bptjax.weights.gguf.families import ROWS, row_name
from bptjax.weights.gguf.file import nbytes
from bptjax.weights.gguf.keys import Keys
from bptjax.weights.gguf.metadata import (
    differences,
    find_row,
    read_architecture,
    read_metadata,
    text_config,
    write_metadata,
)
from bptjax.weights.gguf.modelfile import modelfile, modelfile_path
from bptjax.weights.gguf.rope import rope_tensors
from bptjax.weights.gguf.row import Tensor, tensors
from bptjax.weights.gguf.tokenizer import write_tokenizer
from bptjax.weights.pretrained import (
    Pretrained,
    open_pretrained,
    resolve_checkpoint,
    trained_length,
)

# Types of a file, with the code of llama.cpp's LLAMA_FTYPE.
TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q5_1": 9, "q5_0": 8, "q4_1": 3, "q4_0": 2}
# Experts in MXFP4, as gpt-oss has them, and other matrices in bfloat16.
TYPES["mxfp4"] = 38
EXPERTS = "_exps.weight"
# Bytes of a file, above which the model is split into several.
SPLIT_BYTES = 40 * 10**9
# Tokens for which Ollama reserves memory, unless the run's sequences are longer or the model's
# context is shorter.
USUAL_CONTEXT = 8192
# Bytes of float32 values that are quantized at a time.
CHUNK_BYTES = 2**26
# Parts of names of matrices that llama.cpp reads as float32.
FLOAT32 = (
    "ffn_gate_inp.",
    "ffn_gate_inp_shexp.",
    "position_embd.",
    "ssm_conv1d.",
    "shortconv.conv.",
)


class Exported(NamedTuple):
    """Contents of a GGUF file except for the values of its tensors.

    Attributes:
      kind: model_type of the text model.
      metadata: metadata by whole key.
      tensors: tensors of parameters.
      others: small tensors that hold no parameters, by name.
    """

    kind: str
    metadata: dict[str, Any]
    tensors: list[Tensor]
    others: dict[str, np.ndarray]


def to_gguf(
    source: str, out: Path, *, type: str, pre: str | None = None, warn: Callable[[str], None]
) -> Pretrained:
    """Writes a model, with the adapter of `source` merged, to the new file `out`, and its Modelfile
    beside it; a model above 40 GB to several files.

    Args:
      type: type of the matrices, a key of TYPES.
      pre: name of the tokenizer's pre-tokenizer in llama.cpp; None to recognize it.

    Raises:
      ValueError: one line about the model or its tokenizer; nothing is written.
    """
    from gguf import GGML_QUANT_VERSION, GGUFWriter

    check_type(type, out)
    model = open_pretrained(ModelConfig(name_or_path=source))
    exported, tokenizer = describe(model, source, warn), find_tokenizer(source, model)
    keys = exported.metadata | write_tokenizer(tokenizer, model.config, pre)
    keys["general.type"] = "model"
    keys["general.name"] = Path(source).resolve().name
    keys["general.file_type"] = TYPES[type]
    keys["general.quantization_version"] = GGML_QUANT_VERSION
    read = merging(model) if model.adapters is not None else model.source.read
    # Experts that the checkpoint has in MXFP4 stay as they are.
    kept = model.adapters is None and bool(getattr(model.source, "decoded", ()))
    types = {
        t.name: tensor_type(t.name, t.shape, "mxfp4" if kept and EXPERTS in t.name else type)
        for t in exported.tensors
    }
    wider = [n for n, kind in types.items() if kind.name == "F16"] if type not in ("f16",) else []
    if wider:
        warn(
            f"{len(wider)} of {len(types)} tensors are written as f16, because their rows are not "
            f"multiples of {type}'s block"
        )
    with atomic_file(out) as file:
        total = sum(nbytes(t.shape, types[t.name]) for t in exported.tensors)
        split = SPLIT_BYTES if total > SPLIT_BYTES else 0
        writer = GGUFWriter(file, ROWS[exported.kind].arch, split_max_size=split)
        try:
            add_metadata(writer, keys)
            _write_tensors(writer, exported, types, read)
        finally:
            writer.close()
        text, notes = modelfile(out.name, tokenizer, usual_context(source, exported))
        modelfile_path(file).write_text(text, encoding="utf-8")
    for line in notes:
        warn(line)
    return replace(model, left_out=_left_out(model))


def _left_out(model: Pretrained) -> str:
    """Returns a line about tensors outside the text model, which the file lacks; "" for none."""
    names = model.others.names if model.others else ()
    if not names:
        return model.left_out
    groups = Counter(name.rpartition("layers.")[0] or name.partition(".")[0] for name in names)
    shown = ", ".join(f"{group.rstrip('.')} ({count})" for group, count in groups.items())
    return f"left out {len(names)} tensors outside the text model: {shown}"


def check_type(type: str, out: Path) -> None:
    """Checks the type of a file.

    Raises:
      ValueError: the package gguf does not write it.
    """
    if type in TYPES:
        return
    text = f"--type={type}: must be one of {', '.join(TYPES)}"
    if "_k" in type.lower() or type.lower().startswith("iq"):
        text += (
            f"; for {type}, write f16 and quantize it with llama.cpp: llama-quantize "
            f"{out} {out.with_suffix('')}-{type}.gguf {type}"
        )
    raise ValueError(text)


def describe(model: Pretrained, source: str, warn: Callable[[str], None]) -> Exported:
    """Returns the metadata and tensors of a model's GGUF file.

    Raises:
      ValueError: llama.cpp does not have the architecture, or not with the model's values.
    """
    raw, family, _ = described(model, source)
    config, kind = model.config, row_name(text_config(raw).model_type)
    if kind not in ROWS:
        raise ValueError(
            f"{source}: model_type={kind!r}: must be one of {', '.join(ROWS)} to be written to a "
            "GGUF file"
        )
    if config.attention_pattern is not None:
        raise ValueError(
            f"model.attention_pattern={config.attention_pattern}: must not be set, because "
            "llama.cpp computes full attention"
        )
    window = config.sliding_window
    if window and config.layer_types is None and "sliding_window" in ROWS[kind].fixed:
        # All layers have the window, so shorter texts are computed alike without one.
        length = min(window, config.max_position_embeddings or window)
        config = replace(config, sliding_window=None, max_position_embeddings=length)
        warn(
            f"context length {length}, the model's window, because llama.cpp attends to all tokens"
        )
    try:
        found = tensors(ROWS[kind], family, config)
        metadata, others = write_metadata(raw, config), rope_tensors(config)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    exported = Exported(kind, metadata, found, others)
    shapes = {t.name: t.shape for t in found}
    shapes |= {name: array.shape for name, array in exported.others.items()}
    keys = Keys(ROWS[kind].arch, exported.metadata, shapes, exported.others.__getitem__)
    read = read_architecture(read_metadata(keys, find_row(keys)[0]))
    if changed := differences(config, read):
        text = ", ".join(f"model.{key}={value}" for key, value in changed.items())
        raise ValueError(f"{source}: {text}: llama.cpp's {keys.arch} computes another function")
    return exported


def find_tokenizer(source: str, model: Pretrained) -> HFTokenizer:
    """Returns the tokenizer of `source`, or else of its original model.

    Raises:
      ValueError: there is none, or llama.cpp does not have it.
    """
    here = resolve_checkpoint(source)
    directory = here if has_tokenizer(here) else model.sidecars
    if directory is None or not has_tokenizer(directory):
        raise ValueError(f"{source}: must have a tokenizer to be written to a GGUF file")
    tokenizer = load_tokenizer(directory, model.config.V)
    if not isinstance(tokenizer, HFTokenizer):
        raise ValueError(
            f"{source}: must have a tokenizer of Hugging Face's format, because llama.cpp does not "
            "have bptjax's tokenizers byte and char"
        )
    return tokenizer


def usual_context(source: str, exported: Exported) -> int:
    """Returns the number of tokens for which Ollama reserves memory."""
    longest = exported.metadata.get(f"{ROWS[exported.kind].arch}.context_length") or USUAL_CONTEXT
    return max(min(longest, USUAL_CONTEXT), trained_length(resolve_checkpoint(source)))


def add_metadata(writer: Any, keys: dict[str, Any]) -> None:
    """Adds metadata to a GGUFWriter."""
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def tensor_type(name: str, shape: tuple[int, ...], type: str) -> Any:
    """Returns the type of a tensor in a file of this type: F32 for vectors and small matrices, F16
    if the rows are not multiples of the type's block."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    matrix = len(shape) > 1 and name.endswith(".weight") and not name.endswith("_norm.weight")
    if not matrix or any(part in name for part in FLOAT32):
        return GGMLQuantizationType.F32
    if type == "mxfp4" and not name.endswith(EXPERTS):
        type = "bf16"
    wanted = GGMLQuantizationType[type.upper()]
    block, _ = GGML_QUANT_SIZES[wanted]
    return wanted if shape[-1] % block == 0 else GGMLQuantizationType.F16


def _write_tensors(
    writer: Any,
    exported: Exported,
    types: dict[str, Any],
    read: Callable[[str, Index], np.ndarray],
) -> None:
    from gguf import GGMLQuantizationType

    for name, array in exported.others.items():
        writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes)
    sizes = {t.name: nbytes(t.shape, types[t.name]) for t in exported.tensors}
    for tensor in exported.tensors:
        name, float32 = tensor.name, np.dtype(np.float32)
        writer.add_tensor_info(name, tensor.shape, float32, sizes[name], raw_dtype=types[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for array in exported.others.values():
        writer.write_tensor_data(array)
    progress = Progress("writing tensors", sum(sizes.values()))
    try:
        for tensor in exported.tensors:
            array = tensor.join(read)
            data = quantized(array, types[tensor.name])
            if types[tensor.name] == GGMLQuantizationType.F16 and not np.isfinite(data).all():
                raise ValueError(
                    f"{tensor.name}: must have values that float16 holds; use --type bf16"
                )
            writer.write_tensor_data(data)
            progress.advance(sizes[tensor.name])
    finally:
        progress.close()


def quantized(array: np.ndarray, kind: Any) -> np.ndarray:
    """Returns the bytes of a tensor of this type, with the array's shape except for the last
    axis."""
    from gguf.quants import quant_shape_to_byte_shape, quantize

    shape = quant_shape_to_byte_shape(array.shape, kind)
    if kind.name in ("F32", "F16"):
        dtype = {"F32": np.float32, "F16": np.float16}[kind.name]
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(array, dtype)
    rows = array.reshape(-1, array.shape[-1])
    out = np.empty((len(rows), shape[-1]), np.uint8)
    step = max(CHUNK_BYTES // (4 * array.shape[-1]), 1)
    for i in range(0, len(rows), step):
        out[i : i + step] = quantize(rows[i : i + step].astype(np.float32), kind)
    return out.reshape(shape)
