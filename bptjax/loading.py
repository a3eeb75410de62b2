"""Loads a checkpoint with its tokenizer onto a device, or sharded over several."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from bptjax.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    add_tokens,
    has_tokenizer,
    load_tokenizer,
    token_id,
    vocabulary_warning,
)
from bptjax.models.attention_pattern import find_tokens
from bptjax.models.config import ModelConfig
from bptjax.models.decoder import Decoder
from bptjax.models.encoder import Encoder
from bptjax.parallel.mesh import ParallelConfig, make_mesh, select_devices
from bptjax.pretrained import Pretrained, open_pretrained, resolve_checkpoint

log = logging.getLogger("bptjax")
# Patterns of files; every Hugging Face tokenizer has one that matches.
TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model")


def load(
    name: str | Path,
    *,
    tokenizer: str | Path | None = None,
    dtype: DTypeLike | None = None,
    device: str | jax.Device = "auto",
    tp: int = 1,
    sp: int = 1,
    warn: Callable[[str], None] = log.warning,
) -> tuple[Decoder | Encoder, Tokenizer | None, ModelConfig]:
    """Loads a checkpoint onto one device, or onto the first tp · sp devices.

    Args:
      name: Hugging Face directory or hub id, directory of `bptjax convert`, run directory, or PEFT
        directory of an adapter. Adapters are loaded with their base model, and not merged.
      tokenizer: byte, or a directory. By default the tokenizer of the checkpoint.
      dtype: dtype of the parameters. By default the dtype of the checkpoint's embedding.
      device: a device, or its kind: gpu, cpu, or auto, which refuses the CPU of a machine with an
        NVIDIA GPU.
      tp: devices that shard heads, feed-forward network and vocabulary.
      sp: devices that shard the tokens of the key-value cache in generation. The parameters are
        replicated over them.
      warn: called with a line about tensors that were not read, or about a tokenizer that differs
        from the checkpoint's.

    Returns:
      The model (`Decoder` or `Encoder`); the tokenizer, or None if the checkpoint has none; the
      architecture.

    Raises:
      ValueError: one line about the error in the checkpoint, or about devices that are not there.
    """
    found, text = _open(str(name), tokenizer, warn, "tokenizer=")
    return _load(found, dtype, device, tp, sp), text, found.config


def load_decoder(
    name: str,
    *,
    tokenizer: str | None,
    dtype: DTypeLike | None,
    device: str,
    warn: Callable[[str], None],
    tp: int = 1,
    sp: int = 1,
) -> tuple[Decoder, Tokenizer, ModelConfig]:
    """Loads a model that generates text; see `load`.

    Raises:
      ValueError: also for an encoder, or a checkpoint without a tokenizer.
    """
    found, text = _open(name, tokenizer, warn, "--tokenizer=")
    if not found.config.causal:
        raise ValueError(f"{name}: must be a decoder; an encoder generates no text")
    if text is None:
        raise ValueError(f"{name}: must have a tokenizer; choose one with --tokenizer")
    return _load(found, dtype, device, tp, sp), text, found.config


def tokenizer_directory(name: str, found: Pretrained) -> Path:
    """Returns the directory of a checkpoint's tokenizer: the checkpoint itself if it has one,
    otherwise the directory of the base model's sidecar files."""
    here = resolve_checkpoint(name)
    return here if has_tokenizer(here) else found.sidecars or here


def _open(
    name: str, tokenizer: str | Path | None, warn: Callable[[str], None], prefix: str
) -> tuple[Pretrained, Tokenizer | None]:
    """Opens the checkpoint, and loads the tokenizer. `prefix` precedes the name of a chosen
    tokenizer in errors."""
    tokenizer = tokenizer or None
    found = open_pretrained(ModelConfig(name_or_path=name))
    if found.left_out:
        warn(found.left_out)
    directory = tokenizer_directory(name, found)
    if tokenizer is None and not _has_tokenizer(directory):
        return found, None
    size = found.config.vocab_size
    if tokenizer is None:
        text = load_tokenizer(directory, size)
    elif str(tokenizer) == "byte":
        text = ByteTokenizer()
    else:
        text = load_tokenizer(tokenizer, prefix=prefix)
    add_tokens(text, found.config.add_tokens)
    if size is not None and size < text.vocab_size:
        raise ValueError(
            f"the tokenizer's vocabulary of {text.vocab_size}: must be at most {size}, the "
            f"vocabulary of {name}"
        )
    pattern = find_tokens(found.config.attention_pattern, partial(token_id, text))
    found = replace(found, config=replace(found.config, attention_pattern=pattern))
    if tokenizer and (line := vocabulary_warning(text, directory)):
        warn(line)
    return found, text


def _has_tokenizer(directory: Path) -> bool:
    files = (file for pattern in TOKENIZER_FILES for file in directory.glob(pattern))
    return has_tokenizer(directory) or any(file.is_file() for file in files)


def _load(
    found: Pretrained, dtype: DTypeLike | None, device: str | jax.Device, tp: int, sp: int
) -> Any:
    where = _placement(found.config, device, tp, sp)
    specs = found.source.specs
    # An image encoder has no embedding.
    spec = specs.get("embedding") or next(iter(specs.values()))
    return found.load(where, jnp.dtype(dtype or spec.dtype))


def _placement(config: ModelConfig, device: str | jax.Device, tp: int, sp: int) -> Sharding | Mesh:
    """Returns the device, or a mesh of several.

    Raises:
      ValueError: the devices are not there, or do not divide the heads.
    """
    for name, size in (("tp", tp), ("sp", sp)):
        if size < 1:
            raise ValueError(f"{name}={size}: must be at least 1")
    devices = select_devices(device) if isinstance(device, str) else [device]
    if tp * sp == 1:
        return SingleDeviceSharding(devices[0])
    if jax.process_count() > 1:
        raise ValueError(f"tp={tp}, sp={sp}: must be 1 in a run of several processes")
    if tp * sp > len(devices):
        raise ValueError(
            f"tp={tp}, sp={sp}: must multiply to at most {len(devices)}, the number of devices"
        )
    if config.num_heads % tp:
        raise ValueError(f"tp={tp}: must divide the model's {config.num_heads} heads")
    return make_mesh(ParallelConfig(fsdp=1, tp=tp, sp=sp), devices[: tp * sp])
