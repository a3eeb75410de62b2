"""A model on disk, whatever wrote it: a Hugging Face directory, a converted one, or a run."""

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bptjax.checkpoint import MANIFEST, Checkpoints
from bptjax.command_line import new_name
from bptjax.hf.config import merge, read_config
from bptjax.hf.families import Family
from bptjax.hf.fingerprint import fingerprint, sampled
from bptjax.hf.io import SINGLE, Checkpoint, Tensors, left_out
from bptjax.hf.peft import CONFIG as PEFT_CONFIG
from bptjax.hf.peft import read_base, read_peft
from bptjax.hf.place import place, put
from bptjax.hf.tensor_rules import Index
from bptjax.lora import AdapterConfig, Adapters, attach, quantizer
from bptjax.models.config import EncoderConfig, ModelConfig
from bptjax.models.decoder import Decoder
from bptjax.models.encoder import Encoder

log = logging.getLogger("bptjax")
# What came with a checkpoint from Hugging Face, in a run and in a converted directory.
COMPANIONS = "hf"


@dataclass(frozen=True)
class Pretrained:
    """
    Attributes:
      config: the architecture, as it is to be run; its name_or_path is that of the parameters.
      family: of Hugging Face; None for a model that never was one.
      read_as: the architecture of config.json.
      companions: the directory of config.json and tokenizer; None likewise.
      kinds: (dtype, shape) of each parameter by path, with its stacked axes.
      pieces: all parameters in turn, as (path, index into the stacked axes, array).
      params: likewise, stacked, as (path, array).
      read: reads one of them, by path and index into the stacked axes.
      files: those that hold the parameters; of a run, the manifest with their checksums.
      adapters: beside the parameters, which are then those of the model that they are for.
      left_out: one line about tensors of the files that were not read; empty without any.
    """

    config: ModelConfig
    family: Family | None
    read_as: ModelConfig | None
    companions: Path | None
    kinds: dict[str, tuple[str, tuple[int, ...]]]
    pieces: Callable[[], Iterator[tuple[str, Index, np.ndarray]]]
    params: Callable[[], Iterator[tuple[str, np.ndarray]]]
    read: Callable[[str, Index], np.ndarray]
    files: tuple[Path, ...]
    adapters: Adapters | None = None
    left_out: str = ""

    @cached_property
    def fingerprint(self) -> str:
        """Tells the parameters, without adapters, from any others."""
        return fingerprint(self.files)

    def load(self, where: jax.sharding.Sharding, dtype: jnp.dtype = jnp.float32) -> Any:
        """The model, in `dtype`, all of it on `where`."""

        def new():
            key = jax.random.key(0)
            if isinstance(self.config, EncoderConfig):
                return Encoder(self.config, key, dtype)
            return Decoder(self.config, key, dtype)

        def placed(leaf):
            value = leaf.get_value()
            return leaf.replace(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=where))

        model = jax.tree.map(
            placed, jax.eval_shape(new), is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
        if self.adapters is None:
            return self.fill(model)
        config = self.adapters.config
        model = self.fill(model, quantizer(model, config) if config.type == "qlora" else put)
        values = jax.device_put(jax.tree.map(np.asarray, self.adapters.values), where)
        return attach(model, values, config.dropout)

    def check(self, saved: str | int | None, directory: Path) -> None:
        """Compares with the fingerprint that was saved with the adapters of the run in `directory`.

        Raises:
          ValueError: they differ.
        """
        own = self.fingerprint
        if isinstance(saved, int):
            own = sampled(find(str(self.config.name_or_path)))
            log.warning(
                "%s was saved by an older version, which recorded only samples of the base model: "
                "changes of %s between the samples go unnoticed",
                directory,
                self.config.name_or_path,
            )
        if saved != own:
            raise ValueError(
                f"model.name_or_path={self.config.name_or_path} has other weights than those that "
                f"the adapters in {directory} were trained beside"
            )

    def changed(self, wanted: ModelConfig) -> "Pretrained":
        """The same checkpoint, under its own name, with what else `wanted` sets."""
        config = merge(self.config, wanted)
        return replace(self, config=replace(config, name_or_path=self.config.name_or_path))

    def adapted(self, adapters: Adapters) -> "Pretrained":
        """The same checkpoint with adapters; embeddings among them bring their vocabulary."""
        sizes = [len(array) for array in adapters.modules.values()]
        config = replace(self.config, vocab_size=max([self.config.V, *sizes]))
        return replace(self, config=config, adapters=adapters)

    def fill(self, model: Any, put: Callable[[str, Any, np.ndarray], Any] = put) -> Any:
        """The abstract `model` (ShapeDtypeStructs with shardings) with the parameters in it, each
        `put` there."""
        own = self.adapters.modules if self.adapters else {}
        params = ((path, own.get(path, array)) for path, array in self.params())
        return place(model, params, self.config, put)


def open_pretrained(wanted: ModelConfig) -> Pretrained:
    """The checkpoint `wanted.name_or_path`, with what else `wanted` sets.

    Raises:
      ValueError: what is wrong with it, in one line.
    """
    directory = find(str(wanted.name_or_path))
    if (directory / PEFT_CONFIG).exists():
        trained_beside = read_base(directory)
        name = str(trained_beside.name_or_path)
        adapter = (find(name) / PEFT_CONFIG).exists()
        base = None if adapter else open_pretrained(trained_beside)
        if base is None or base.family is None or base.adapters is not None:
            raise ValueError(f"{directory}: its base, {name}, is none of a family")
        adapters = read_peft(directory, base.family, base.config)
        return base.changed(wanted).adapted(adapters)
    if (directory / "config.json").exists():
        family, config = read_config(directory)
        found = Checkpoint(directory, family, config)
        how = found.kinds(), found.pieces, found.params, found.read, tuple(found.tensors.files)
        text = left_out(found.left_out)
        return Pretrained(merge(config, wanted), family, config, directory, *how, left_out=text)
    companions = directory / COMPANIONS
    family, read_as = read_config(companions) if companions.is_dir() else (None, None)
    if (directory / "checkpoints").is_dir():
        if adapted := _open_adapters(directory, wanted):
            return adapted
        config, kinds, read, files = _open_run(directory, read_as)
    elif read_as is not None and (directory / SINGLE).exists():
        tensors = Tensors(directory)
        config, kinds, files, read = read_as, tensors.kinds, tuple(tensors.files), tensors.read
    else:
        raise ValueError(
            f"{directory} is neither a Hugging Face checkpoint (no config.json), nor a converted "
            "one, nor a run with checkpoints"
        )

    def params():
        for path in kinds:
            yield path, read(path, ())

    def pieces():
        for path, array in params():
            yield path, (), array

    companions = companions if read_as else None
    merged = merge(config, wanted)
    return Pretrained(merged, family, read_as, companions, kinds, pieces, params, read, files)


def find(name: str) -> Path:
    """The local directory, or that of the hub's copy where `name` is a hub id.

    Raises:
      ValueError: there is neither.
    """
    directory = Path(os.path.expanduser(name))
    if directory.is_dir():
        return directory
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or directory.exists():
        raise ValueError(f"model.name_or_path={name} is no directory")
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        # The hub's client raises what its transport raises.
        raise ValueError(
            f"model.name_or_path={name} is no directory here, and the hub does not give it: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _run_config(directory: Path) -> dict[str, Any]:
    """
    Raises:
      ValueError: it is not a run's.
    """
    import yaml

    file = directory / "config.yaml"
    try:
        config = yaml.safe_load(file.read_text())
        model = {new_name(f"model.{key}"): value for key, value in config["model"].items()}
        model = {key.removeprefix("model."): value for key, value in model.items()}
        return config | {"model": ModelConfig(**model)}
    except (OSError, TypeError, KeyError, yaml.YAMLError) as error:
        raise ValueError(f"{file} is not the config of a run: {error}") from error


def _newest(directory: Path) -> tuple[Checkpoints, int]:
    """The run's newest whole checkpoint."""
    checkpoints = Checkpoints(directory)
    step = checkpoints.newest()
    if step is None:
        raise ValueError(f"{checkpoints.directory} has no finished checkpoint")
    return checkpoints, step


def _names(saved: Iterable[str]) -> dict[str, str]:
    """The arrays of a checkpoint that are the model's, by the path of the parameter."""
    return {
        name.split("/", 1)[1].removesuffix("/value").replace("/", "."): name
        for name in saved
        if name.startswith("model/")
    }


def _open_adapters(directory: Path, wanted: ModelConfig) -> Pretrained | None:
    """The model of a run that trained adapters, which are in its newest checkpoint; None for
    another run."""
    config = _run_config(directory)
    adapter = AdapterConfig(**config.get("adapter", {}))
    if adapter.type == "none":
        return None
    base = open_pretrained(config["model"])
    checkpoints, step = _newest(directory)
    base.check(checkpoints.extra(step).get("base"), directory)
    values: dict[str, dict[str, np.ndarray]] = {}
    for path, name in _names(checkpoints.kinds(step)).items():
        kernel, _, part = path.rpartition(".")
        values.setdefault(kernel, {})[part] = checkpoints.read(step, name)
    modules = values.pop("", {})
    found = {path: (each["a"], each["b"], each["scale"]) for path, each in values.items()}
    return base.changed(wanted).adapted(Adapters(adapter, found, modules))


def _open_run(directory: Path, read_as: ModelConfig | None):
    """The model of a run's newest whole checkpoint."""
    run, (checkpoints, step) = _run_config(directory), _newest(directory)
    wanted = run["model"]
    saved = checkpoints.kinds(step)
    names = _names(saved)
    kinds = {path: saved[name] for path, name in names.items()}
    if read_as is None:
        config = replace(wanted, vocab_size=kinds["embedding"][1][0])
        if config.position_embedding == "rope" and config.max_position_embeddings is None:
            # Rotary positions are good for the length that they were trained on.
            config = replace(config, max_position_embeddings=run["train"]["seq_len"])
    else:
        config = replace(merge(read_as, wanted), vocab_size=kinds["embedding"][1][0])

    @lru_cache(maxsize=3)
    def whole(path):
        return checkpoints.read(step, names[path])

    def read(path, index):
        return whole(path)[index]

    return config, kinds, read, (checkpoints.directory / str(step) / MANIFEST,)
