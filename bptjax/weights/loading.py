"""Loads a checkpoint with its tokenizer onto a device, or sharded over several devices."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from bptjax.data.hf_tokenizer import read_generation_config
from bptjax.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    add_tokens,
    has_tokenizer,
    load_tokenizer,
    token_id,
    vocabulary_warning,
)
from bptjax.models.architecture import new_model
from bptjax.models.attention_pattern import find_tokens
from bptjax.models.cache import Cache
from bptjax.models.config import ModelConfig
from bptjax.models.decoder import Decoder
from bptjax.models.encoder import Encoder
from bptjax.parallel.mesh import (
    ParallelConfig,
    available_memory,
    make_mesh,
    select_devices,
)
from bptjax.weights.pretrained import Pretrained, open_pretrained, resolve_checkpoint
from bptjax.weights.quantized_kernels import linear_kernels

log = logging.getLogger("bptjax")
# File patterns; every Hugging Face tokenizer has a file that matches.
TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model")
# Share of the available memory for parameters and cache.
FITS = 0.8


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
      tokenizer: byte, or a directory. Defaults to the checkpoint's tokenizer.
      dtype: dtype of the parameters. Defaults to the dtype that a run computes in, or that of
        another checkpoint's embedding; on a CPU to float32 if it fits in the available memory,
        because a CPU converts 16-bit parameters again for each token.
      device: a device, or its kind: gpu, cpu, or auto, which refuses the CPU of a machine with an
        NVIDIA GPU.
      tp: devices that shard heads, feed-forward network and vocabulary.
      sp: devices that shard the tokens of the key-value cache in generation. The parameters are
        replicated over them.
      warn: called with a line about tensors that were not read, a tokenizer that differs from the
        checkpoint's, or a dtype that the memory decides.

    Returns:
      The model (`Decoder` or `Encoder`); the tokenizer, or None if the checkpoint has none; the
      architecture.

    Raises:
      ValueError: one line about the error in the checkpoint, or about missing devices.
    """
    pretrained, text = _open(str(name), tokenizer, warn, "tokenizer=")
    return load_opened(pretrained, dtype, device, warn, tp=tp, sp=sp), text, pretrained.config


def open_decoder(
    name: str, tokenizer: str | None, warn: Callable[[str], None]
) -> tuple[Pretrained, Tokenizer]:
    """Opens a model that generates text, for `load_opened`, and loads its tokenizer; see `load`.

    Raises:
      ValueError: also for an encoder, or a checkpoint without a tokenizer.
    """
    pretrained, text = _open(name, tokenizer, warn, "--tokenizer=")
    if not pretrained.config.causal:
        raise ValueError(f"{name}: must be a decoder; an encoder generates no text")
    if text is None:
        raise ValueError(f"{name}: must have a tokenizer; choose one with --tokenizer")
    return pretrained, text


def tokenizer_directory(name: str, pretrained: Pretrained) -> Path:
    """Returns the directory of a checkpoint's tokenizer: the checkpoint itself if it has one,
    otherwise the directory of the base model's sidecar files."""
    here = resolve_checkpoint(name)
    return here if has_tokenizer(here) else pretrained.sidecars or here


def _open(
    name: str, tokenizer: str | Path | None, warn: Callable[[str], None], prefix: str
) -> tuple[Pretrained, Tokenizer | None]:
    """Opens the checkpoint and loads the tokenizer. `prefix` precedes the name of a chosen
    tokenizer in errors."""
    tokenizer = tokenizer or None
    pretrained = open_pretrained(ModelConfig(name_or_path=name))
    if pretrained.left_out:
        warn(pretrained.left_out)
    directory = tokenizer_directory(name, pretrained)
    if tokenizer is None and not _has_tokenizer(directory):
        return pretrained, None
    size = pretrained.config.vocab_size
    if tokenizer is None:
        text = load_tokenizer(directory, size)
    elif str(tokenizer) == "byte":
        text = ByteTokenizer()
    else:
        text = load_tokenizer(tokenizer, prefix=prefix)
    add_tokens(text, pretrained.config.add_tokens)
    if size is not None and size < text.vocab_size:
        raise ValueError(
            f"the tokenizer's vocabulary of {text.vocab_size}: must be at most {size}, the "
            f"vocabulary of {name}"
        )
    pattern = find_tokens(pretrained.config.attention_pattern, partial(token_id, text))
    pretrained = replace(pretrained, config=replace(pretrained.config, attention_pattern=pattern))
    if pretrained.sidecars is not None:
        # The model determines the sampling settings, whichever tokenizer was chosen.
        text.generation_config = read_generation_config(pretrained.sidecars)
    if tokenizer and (line := vocabulary_warning(text, directory)):
        warn(line)
    return pretrained, text


def _has_tokenizer(directory: Path) -> bool:
    files = (file for pattern in TOKENIZER_FILES for file in directory.glob(pattern))
    return has_tokenizer(directory) or any(file.is_file() for file in files)


def load_opened(
    pretrained: Pretrained,
    dtype: DTypeLike | None,
    device: str | jax.Device,
    warn: Callable[[str], None],
    *,
    tp: int = 1,
    sp: int = 1,
    cached: tuple[int, int] = (0, 0),
) -> Any:
    """Loads an opened checkpoint; see `load`.

    Args:
      cached: number of sequences in the key-value cache, and tokens per sequence.
    """
    devices = select_devices(device) if isinstance(device, str) else [device]
    where = _placement(pretrained.config, devices, tp, sp)
    if dtype is None:
        dtype = _default_dtype(pretrained, devices[0].platform, sp, cached, warn)
    return pretrained.load(where, jnp.dtype(dtype))


def _default_dtype(
    pretrained: Pretrained,
    platform: str,
    copies: int,
    cached: tuple[int, int],
    warn: Callable[[str], None],
) -> DTypeLike:
    """Returns the default dtype of `load`, for `copies` copies of the parameters."""
    specs, config = pretrained.source.specs, pretrained.config
    # Image encoders have no embedding.
    own = jnp.dtype((specs.get("embedding") or next(iter(specs.values()))).dtype)
    if platform != "cpu":
        return jnp.dtype(pretrained.computed_in or own)
    quantized: Any = ()
    if pretrained.adapters is not None and pretrained.adapters.config.type == "qlora":
        quantized = linear_kernels(jax.eval_shape(lambda: new_model(config, jax.random.key(0))))
    sizes = {
        path: math.prod(spec.shape) * (4, 1)[path in quantized] for path, spec in specs.items()
    }
    size = copies * sum(sizes.values())
    if all(cached):
        cache = jax.eval_shape(lambda: Cache.empty(config, *cached, jnp.float32))
        size += sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    available = available_memory()
    if size <= FITS * available:
        return jnp.float32
    small = own if own.itemsize < 4 else jnp.dtype(jnp.bfloat16)
    warn(
        f"warning: parameters and cache in float32 need {size / 2**30:.1f} GiB, but only "
        f"{available / 2**30:.1f} GiB of memory are available: using {small}, in which a CPU is "
        "several times slower"
    )
    return small


def _placement(config: ModelConfig, devices: list[jax.Device], tp: int, sp: int) -> Sharding | Mesh:
    """Returns the first device, or a mesh of several.

    Raises:
      ValueError: devices are missing, or do not divide the heads.
    """
    for name, size in (("tp", tp), ("sp", sp)):
        if size < 1:
            raise ValueError(f"{name}={size}: must be at least 1")
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
