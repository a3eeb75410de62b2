"""Opens a model on disk: a Hugging Face or converted directory, a run, or a PEFT adapter."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from bptjax.models.architecture import new_model
from bptjax.models.config import ModelConfig
from bptjax.models.params import (
    ArraySpec,
    Index,
    ParameterSource,
    fill_model,
    is_variable,
    stacked,
)
from bptjax.parallel.mesh import STATE_AXIS, sharding
from bptjax.parsing.tree_parser import parse_tree
from bptjax.run.json_files import read_json
from bptjax.run.links import check_links
from bptjax.run.yaml_files import RUN_CONFIG, read_yaml
from bptjax.weights.hf.checkpoint import SIDECARS, HFCheckpoint, describe_left_out
from bptjax.weights.hf.config import OLD_LEAST_THETA, merge, read_config
from bptjax.weights.hf.families.encoders import with_classes
from bptjax.weights.hf.families.family import Family
from bptjax.weights.hf.fingerprint import fingerprint
from bptjax.weights.hf.other_tensors import OtherTensors, open_others
from bptjax.weights.hf.peft import read_peft
from bptjax.weights.hf.peft_config import ADAPTER_CONFIG, read_base
from bptjax.weights.hf.tensors import SINGLE
from bptjax.weights.lora import AdapterConfig, Adapters, attach
from bptjax.weights.quantized_kernels import quantizer
from bptjax.weights.saved_parameters import ConvertedCheckpoint, RunCheckpoint


@dataclass(frozen=True)
class Pretrained:
    """A model on disk, opened but not read.

    Attributes:
      config: architecture to run, with the name_or_path of the parameters.
      source: the parameters; with adapters, the base model's parameters.
      family: Hugging Face family; None for a model trained from scratch.
      read_as: architecture in config.json; None for a model trained from scratch.
      trained_as: architecture of a run, which may differ from that in its config.json; None for
        another checkpoint, and for a run of adapters.
      sidecars: directory of config.json and the tokenizer; None for a model trained from scratch.
      adapters: adapters of the parameters, if any.
      left_out: one line about tensors in the files that were not read; empty if all were read.
      others: tensors outside the model that exports keep; None if there are none.
      new: shapes of a classifier head's parameters that the files do not hold, by path.
      seed: seed of the new parameters.
      computed_in: dtype that a run's steps compute in on a GPU; None for another checkpoint, and
        for a run of adapters.
    """

    config: ModelConfig
    source: ParameterSource
    family: Family | None = None
    read_as: ModelConfig | None = None
    trained_as: ModelConfig | None = None
    sidecars: Path | None = None
    adapters: Adapters | None = None
    left_out: str = ""
    others: OtherTensors | None = None
    new: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    seed: int = 0
    computed_in: str | None = None

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the parameters, without adapters."""
        return fingerprint(self.source.files)

    def load(
        self,
        where: Sharding | Mesh,
        dtype: DTypeLike = jnp.float32,
        params: Iterator[tuple[str, np.ndarray]] | None = None,
    ) -> Any:
        """Returns the model with its adapters, in `dtype`.

        Args:
          where: sharding of every parameter; or a mesh, whose axis tp alone shards parameters.
          params: (path, array) of every parameter, instead of the parameters on disk and the
            adapters.
        """

        def placed(leaf):
            value = leaf.get_value()
            own = where
            if isinstance(where, Mesh):
                own = sharding(where, leaf.axes, value.shape, (STATE_AXIS,))
            return leaf.replace(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=own))

        model = jax.tree.map(
            placed,
            jax.eval_shape(lambda: new_model(self.config, jax.random.key(0), dtype)),
            is_leaf=is_variable,
        )
        if params is not None:
            return fill_model(model, params, self.config)
        if self.adapters is None:
            return self.fill(model)
        config = self.adapters.config
        put = None
        if config.type == "qlora":
            put = quantizer(model, config.codebook, config.double_quant, (STATE_AXIS,))
        model = self.fill(model, put)
        where = NamedSharding(where, PartitionSpec()) if isinstance(where, Mesh) else where
        values = jax.device_put(jax.tree.map(np.asarray, self.adapters.values), where)
        return attach(model, values, config.dropout)

    def fill(
        self,
        model: Any,
        put: Callable[[str, Any, np.ndarray], Any] | None = None,
        show: Callable[[str], None] | None = None,
    ) -> Any:
        """Fills the abstract `model` with the parameters; see `fill_model`, and `Progress` for
        `show`. Embeddings that were trained with adapters replace the base model's."""
        own = self.adapters.modules if self.adapters else {}
        params = ((path, own.get(path, array)) for path, array in stacked(self.source, show))
        return fill_model(model, chain(params, self._new_params()), self.config, put)

    def _new_params(self) -> Iterator[tuple[str, np.ndarray]]:
        rng = np.random.default_rng(self.seed)
        for path, shape in self.new.items():
            # In a head, only norms have a scale.
            mean, random = float(path.endswith("scale")), path.endswith("kernel")
            std = self.config.init_std if random else 0.0
            yield path, rng.normal(mean, std, shape).astype(np.float32)

    def check(self, saved: object, directory: Path) -> None:
        """Compares the fingerprint with the one that the run in `directory` saved.

        Raises:
          ValueError: the fingerprints differ.
        """
        if saved != self.fingerprint:
            raise ValueError(
                f"model.name_or_path={self.config.name_or_path}: must have the weights that the "
                f"adapters in {directory} were trained with; restore them"
            )

    def changed(self, wanted: ModelConfig) -> "Pretrained":
        """Returns the same checkpoint with the keys that `wanted` sets, except name_or_path."""
        config = merge(self.config, wanted)
        return replace(self, config=replace(config, name_or_path=self.config.name_or_path))

    def adapted(self, adapters: Adapters) -> "Pretrained":
        """Returns the same checkpoint with adapters. Embeddings trained with the adapters determine
        the vocabulary size."""
        sizes = [len(array) for array in adapters.modules.values()]
        config = replace(self.config, vocab_size=max([self.config.V, *sizes]))
        return replace(self, config=config, adapters=adapters)


def open_pretrained(wanted: ModelConfig, seed: int = 0) -> Pretrained:
    """Opens the checkpoint `wanted.name_or_path`, with the other keys that `wanted` sets.

    Args:
      seed: seed of parameters that the checkpoint does not hold: the classes that `wanted` adds to
        an encoder without classes.

    Raises:
      ValueError: one line about the error in the checkpoint.
    """
    directory = resolve_checkpoint(str(wanted.name_or_path))
    if (directory / ADAPTER_CONFIG).exists():
        return _open_peft(directory, wanted)
    if (directory / "config.json").exists():
        family, config = read_config(directory, wanted.encoder.classes)
        raw = read_json(directory / "config.json")
        new_classes = with_classes(raw, wanted.encoder.classes) is not raw
        checkpoint = HFCheckpoint(directory, family, config, new_classes)
        return Pretrained(
            merge(checkpoint.config, wanted),
            checkpoint,
            family,
            read_as=checkpoint.config,
            sidecars=directory,
            left_out=describe_left_out(checkpoint),
            others=checkpoint.others,
            new=checkpoint.absent,
            seed=seed,
        )
    sidecars = directory / SIDECARS if (directory / SIDECARS).is_dir() else None
    family, read_as = read_config(sidecars) if sidecars else (None, None)
    computed_in = trained_as = None
    if (directory / "checkpoints").is_dir():
        run = _run_config(directory)
        if run.adapter.type != "none":
            return _open_adapters(directory, run.model, run.adapter, wanted)
        source, computed_in = RunCheckpoint(directory), run.compute_dtype
        config = trained_as = _trained_config(run, read_as, source)
    elif read_as is not None and (directory / SINGLE).exists():
        source, config = ConvertedCheckpoint(directory), read_as
    else:
        raise ValueError(
            f"{directory}: must be a Hugging Face checkpoint (with a config.json), a converted "
            "checkpoint, or a run with checkpoints"
        )
    others = open_others(sidecars) if sidecars else None
    if "head" in source.specs:
        # A multimodal model's config may say that there is no head; see `HFCheckpoint`.
        config = replace(config, tied_head=False)
    return Pretrained(
        merge(config, wanted),
        source,
        family,
        read_as,
        trained_as,
        sidecars,
        others=others,
        computed_in=computed_in,
    )


class NoParameters:
    """A `ParameterSource` without parameters, for an architecture whose weights are not needed."""

    specs: dict[str, ArraySpec] = {}
    files: tuple[Path, ...] = ()

    def read(self, path: str, index: Index = ()) -> np.ndarray:
        raise KeyError(path)

    def slices(self) -> Iterator[tuple[str, Index, np.ndarray]]:
        return iter(())


def open_config(wanted: ModelConfig) -> Pretrained:
    """Opens the architecture of `wanted.name_or_path`, with the other keys that `wanted` sets.
    Needs config.json, but no weights.

    Raises:
      ValueError: one line about the error in the checkpoint.
    """
    directory = resolve_checkpoint(str(wanted.name_or_path), weights=False)
    if (directory / ADAPTER_CONFIG).exists() or not (directory / "config.json").exists():
        return open_pretrained(wanted)
    family, config = read_config(directory, wanted.encoder.classes)
    source = NoParameters()
    return Pretrained(merge(config, wanted), source, family, read_as=config, sidecars=directory)


def resolve_checkpoint(name: str, weights: bool = True) -> Path:
    """Returns the local directory `name`, or the directory that the hub id `name` is downloaded to;
    without `weights`, downloads only its config and tokenizer.

    Raises:
      ValueError: the name is neither a directory nor a hub id that can be downloaded, or a link
        leads out of the directory.
    """
    directory = Path(os.path.expanduser(name))
    if directory.is_dir():
        check_links(directory)
        return directory
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) or directory.exists():
        raise ValueError(f"model.name_or_path={name}: must be a directory or a hub id")
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.txt", "*.model", "*.jinja"] + ["*.safetensors"] * weights
        # Second copies of the weights, in other programs' formats.
        others = ["*/*", "consolidated*"]
        directory = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=others))
    except Exception as error:
        # The hub's client passes on every exception of its transport.
        raise ValueError(
            f"model.name_or_path={name}: not a directory, and cannot be downloaded from the hub: "
            f"{str(error).splitlines()[0]}"
        ) from error
    check_links(directory)
    return directory


def _open_peft(directory: Path, wanted: ModelConfig) -> Pretrained:
    """Opens the PEFT adapter in `directory` with its base model."""
    base_model = read_base(directory)
    name = str(base_model.name_or_path)
    adapter = (resolve_checkpoint(name) / ADAPTER_CONFIG).exists()
    base = None if adapter else open_pretrained(base_model)
    if base is None or base.family is None or base.adapters is not None:
        raise ValueError(
            f"{directory}: base_model_name_or_path={name}: must be a checkpoint of a supported "
            "family"
        )
    adapters = read_peft(directory, base.family, base.config)
    return base.changed(wanted).adapted(adapters)


@dataclass(frozen=True)
class _RunConfig:
    """The part of a run's config that determines its model."""

    model: ModelConfig
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    seq_len: int = 0
    # Not in the file if it is the default of fine-tuning, which depends on the platform.
    compute_dtype: str = "bfloat16"


def _run_config(directory: Path) -> _RunConfig:
    """Reads the config of the run in `directory`.

    Raises:
      ValueError: the file is not the config of a run.
    """
    file = directory / RUN_CONFIG
    try:
        tree = read_yaml(file)
        groups = {"model": tree["model"], "adapter": dict(tree.get("adapter", {}).items())}
        if groups["model"].get("extend_to"):  # A run of an older version lacks the other key.
            groups["model"] = {"extend_theta": OLD_LEAST_THETA} | groups["model"]
        groups["seq_len"] = tree["train"]["seq_len"]
        if dtype := tree["train"].get("compute_dtype"):
            groups["compute_dtype"] = dtype
        return parse_tree(groups, _RunConfig)
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
        raise ValueError(f"{file}: must be the config of a run: {error}") from error


def trained_length(directory: Path) -> int:
    """Returns the sequence length of the run in `directory`; 0 for another checkpoint."""
    return _run_config(directory).seq_len if (directory / "checkpoints").is_dir() else 0


def _open_adapters(
    directory: Path, base_model: ModelConfig, config: AdapterConfig, wanted: ModelConfig
) -> Pretrained:
    """Opens the base model of the run in `directory` with the adapters of its newest checkpoint."""
    base, source = open_pretrained(base_model), RunCheckpoint(directory)
    base.check(source.extra.get("base"), directory)
    values: dict[str, dict[str, np.ndarray]] = {}
    for path in source.specs:
        kernel, _, part = path.rpartition(".")
        values.setdefault(kernel, {})[part] = source.read(path)
    modules = values.pop("", {})
    adapters = {path: (each["a"], each["b"], each["scale"]) for path, each in values.items()}
    return base.changed(wanted).adapted(Adapters(config, adapters, modules))


def _trained_config(
    run: _RunConfig, read_as: ModelConfig | None, source: ParameterSource
) -> ModelConfig:
    """Returns the architecture of a run's checkpoint, with its vocabulary size."""
    embedding = source.specs.get("embedding")  # Encoders of images have none.
    vocab_size = embedding.shape[0] if embedding else None
    if read_as is None and (base := run.model.name_or_path):
        # The run started from another run that was trained from scratch.
        read_as = open_pretrained(ModelConfig(name_or_path=base)).config
    if read_as is not None:
        return replace(merge(read_as, run.model), vocab_size=vocab_size)
    config = replace(run.model, vocab_size=vocab_size)
    if config.position_embedding == "rope" and config.max_position_embeddings is None:
        # Rotary positions are valid up to the length that the model was trained on.
        config = replace(config, max_position_embeddings=run.seq_len)
    return config
