"""A config made ready to run: everything checked before anything is written."""

import math
import os
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bptjax.config import Config, defaults, flatten, to_yaml
from bptjax.data.batches import Batches
from bptjax.data.chat import Chat
from bptjax.data.check import DataCheck
from bptjax.data.encode import question
from bptjax.data.loader import data_check, eval_loader, train_loader
from bptjax.data.records import readable
from bptjax.data.sources import count
from bptjax.data.tokenizer import Tokenizer
from bptjax.hf.checkpoint import SIDECARS, copy_sidecar_files
from bptjax.hf.config import read_json
from bptjax.hf.config_export import exported
from bptjax.hf.from_scratch import family_of
from bptjax.lora import AdapterConfig
from bptjax.models.config import ModelConfig
from bptjax.models.layers import rotary
from bptjax.parallel.distributed import (
    all_gather_json,
    assert_equal_across_processes,
    initialize,
    raise_together,
    translate_peer_errors,
)
from bptjax.parallel.mesh import ParallelConfig, make_mesh, num_shards, select_devices
from bptjax.pretrained import Pretrained
from bptjax.schedule import describe_schedule
from bptjax.training.data import open_data, say
from bptjax.training.run_directory import claim, saved_keys
from bptjax.training.spec import TrainSpec
from bptjax.training.state import adapted_kernels, embeddings_in_full
from bptjax.training.step import check_kernel


@dataclass(frozen=True)
class TrainingRun:
    """A checked config with its data, devices and directory: all that can be wrong with it has been
    looked at.
    """

    config: Config
    spec: TrainSpec
    tokenizer: Tokenizer
    held_out: Any
    batches: Batches
    check: DataCheck
    notes: list[str]

    @cached_property
    def questions(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(prompt, answer) of the first `train.num_eval_generations` held-out chats, token ids.

        Raises:
          ValueError: what is held out are no chats, or they reach beyond the model's positions.
        """
        data, count = self.config.data, self.config.train.num_eval_generations
        chats = list(islice(readable(self.held_out, data.bad_records), count))
        if count and not all(isinstance(chat, Chat) for chat in chats or [None]):
            raise ValueError(
                f"train.num_eval_generations={count} needs held-out chats; see data.format and "
                "data.eval_fraction"
            )
        found = [question(chat, self.tokenizer, data.source_max_len) for chat in chats]
        model = self.spec.model
        reach = sum(max(map(len, each)) for each in zip(*found, strict=True))
        if model.position_embedding == "learned" and reach > (model.max_position_embeddings or 0):
            raise ValueError(
                f"train.num_eval_generations={count}: prompts and answers of up to {reach} tokens "
                f"are more than model.max_position_embeddings={model.max_position_embeddings}; set "
                "data.source_max_len, or model.max_position_embeddings to extend them"
            )
        return found

    @property
    def directory(self) -> Path:
        return Path(os.path.expanduser(self.config.run_dir))

    @cached_property
    def base(self) -> str | None:
        """The fingerprint of the checkpoint that adapters are trained beside."""
        pretrained = self.spec.pretrained
        if self.config.adapter.type == "none" or pretrained is None:
            return None
        return pretrained.fingerprint

    def eval_batches(self) -> Any:
        """Returns the held-out batches `[B, T]` in fixed order, up to train.eval_batches."""
        return eval_loader(
            self.held_out,
            self.tokenizer,
            self.config.data,
            seq_len=self.config.train.seq_len,
            rows=self.spec.micro_batch_size,
            max_batches=self.config.train.eval_batches,
        )

    @property
    def eval_total(self) -> int:
        """Batches that hold all held-out data, in process 0; an estimate until it is checked."""
        sequences = self.check.held_out.epoch(self.config.data.packing) or 0
        return -(-sequences // self.spec.micro_batch_size)

    @property
    def eval_is_partial(self) -> bool:
        """Whether train.eval_batches leaves out held-out data."""
        limit = self.config.train.eval_batches
        return limit is not None and limit < self.eval_total


@translate_peer_errors()
def setup(config: Config) -> TrainingRun:
    """Checks everything, then claims the run directory; a config that is refused leaves no trace.
    Of several processes, the first claims it for all.

    Raises:
      ValueError, NotImplementedError, OSError: what is wrong, in one line.
      PeerLost: another process has ended.
    """
    initialize(config.parallel)
    devices = select_devices(config.device)
    with raise_together():
        config = _with_defaults(config, devices[0].platform)
        run = _checked(config, devices)
    if config.train.epochs is not None:
        run = _counted(run)
    with raise_together():
        run.notes.append(describe_schedule(config.optimizer, run.spec.steps))
        _check_data(run)
    settings = to_yaml(replace(config, parallel=ParallelConfig()))
    with raise_together():
        assert_equal_across_processes(settings + "".join(run.notes), "config and data")
        if jax.process_index() == 0:
            claim(run.directory, config)
            run.tokenizer.save(run.directory)
            if run.spec.pretrained and run.spec.pretrained.sidecars:
                copy_sidecar_files(run.spec.pretrained.sidecars, run.directory / SIDECARS)
    return run


def _with_defaults(config: Config, platform: str) -> Config:
    """Returns the config with every default. A resumed run keeps its dtype on another platform.

    Raises:
      ValueError: the config in the run directory is damaged.
    """
    if config.train.compute_dtype is None:
        dtype = saved_keys(Path(config.run_dir).expanduser()).get("train.compute_dtype")
        config = replace(config, train=replace(config.train, compute_dtype=dtype))
    return config.on(platform)


def _checked(config: Config, devices: list[jax.Device]) -> TrainingRun:
    """The run, once this process has found nothing wrong with it; nothing is written.

    Raises:
      ValueError, NotImplementedError, OSError: what is wrong, in one line.
    """
    if config.execution.offload and devices[0].platform == "cpu":
        raise ValueError(
            f"execution.offload={config.execution.offload} moves from a GPU; a CPU's "
            "memory is the host's"
        )
    mesh = make_mesh(config.parallel, devices)
    data = open_data(config)
    pretrained, tokenizer = data.pretrained, data.tokenizer
    for key in config.needs_evaluations:
        if not len(data.held_out):
            raise ValueError(f"{key} needs held-out data; set data.eval_fraction or data.eval_path")
    model = pretrained.config if pretrained else config.model
    if pretrained and model.V >= tokenizer.vocab_size - len(data.added):
        model = replace(model, vocab_size=max(model.V, tokenizer.vocab_size))
        pretrained = replace(pretrained, config=model)
    if model.vocab_size is None:
        model = replace(model, vocab_size=tokenizer.vocab_size)
    if model.V < tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size={model.V} is less than the tokenizer's {tokenizer.vocab_size}"
        )
    if model.position_embedding == "learned" and config.train.seq_len > (
        model.max_position_embeddings or 0
    ):
        raise ValueError(
            f"train.seq_len={config.train.seq_len} is more than "
            f"model.max_position_embeddings={model.max_position_embeddings}; set "
            "model.max_position_embeddings to extend them"
        )
    check_model(model, pretrained)
    config.execution.check(model)
    spec = TrainSpec(config, model, mesh, pretrained)
    _check_adapter(config, spec)
    if config.execution.attention_implementation != "auto":
        check_kernel(spec)
    batches = train_loader(
        data.train,
        tokenizer,
        config.data,
        seq_len=config.train.seq_len,
        rows=spec.global_batch_size,
        here=spec.layout.here(spec.global_batch_size),
    )
    axes = " ".join(f"{name}={size}" for name, size in mesh.shape.items())
    if num_shards(mesh, "sequence") > 1:
        axes += f", the sequence by {': '.join(spec.layout.strategy)}"
    where = f"{len(devices)} × {devices[0].device_kind}"
    where += f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    notes = [
        f"devices: {where}, jax {jax.__version__}, mesh {axes}",
        f"data: {count(data.train)} documents, {len(data.held_out):,} held out, "
        f"vocabulary {model.V}",
    ]
    if model.add_tokens:
        known = [token for token in model.add_tokens if token not in data.added]
        text = f"model.add_tokens: {len(data.added)} new, the vocabulary has {tokenizer.vocab_size}"
        notes.append(text + (f"; in it already: {', '.join(map(repr, known))}" if known else ""))
    if not pretrained:
        try:
            family_of(model)
        except ValueError as error:
            notes.append(f"this model cannot be exported to Hugging Face's format: {error}")
    else:
        notes.append(f"model: from {config.model.name_or_path}")
        own, used = defaults(config, devices[0].platform), flatten(config)
        own.pop("train.max_steps", None)  # The same without a checkpoint.
        kept = ", ".join(f"{key}={used[key]}" for key in own if used[key] == own[key])
        notes += [f"fine-tuning defaults: {kept}"] * bool(kept)
        notes += [pretrained.left_out] * bool(pretrained.left_out)
        if model.exceeds_positions(config.train.seq_len):
            notes.append(
                f"train.seq_len={config.train.seq_len} is beyond the model's "
                f"{model.max_position_embeddings} positions; scale them by model.rope_parameters, "
                "and set model.max_position_embeddings to record the new length"
            )
    notes += data.notes
    check = data_check(
        data.train, data.held_out, tokenizer, config.data, seq_len=config.train.seq_len
    )
    return TrainingRun(config, spec, tokenizer, data.held_out, batches, check, notes)


def _counted(run: TrainingRun) -> TrainingRun:
    """Returns the run with the number of steps that train.epochs takes.

    Raises:
      ValueError: a bad record.
    """
    epochs, check, rows = run.config.train.epochs or 0.0, run.check, run.spec.global_batch_size
    say("train.epochs: reading all records, to count the sequences of an epoch")
    with raise_together():
        if jax.process_index() == 0:
            check.run(math.inf)
    tokens = sum(account.tokens for account in check.accounts)
    sequences, tokens = all_gather_json([check.sequences_per_epoch, tokens])[0]
    steps = max(1, math.ceil(round(epochs * sequences / rows, 6)))
    note = f"train.epochs={epochs:g}: {steps:,} steps of {rows} sequences, {epochs * tokens:,.0f} "
    note += f"tokens; an epoch is {sequences:,} sequences, {tokens:,} tokens"
    spec = replace(run.spec, epoch_steps=steps)
    return replace(run, spec=spec, notes=[*run.notes, note])


def _check_data(run: TrainingRun) -> None:
    """
    Raises:
      ValueError: the data or the base model cannot be trained on.
    """
    config, spec, held_out, check = run.config, run.spec, run.held_out, run.check
    _ = run.questions  # Refuses what is no chat.
    if spec.pretrained and config.adapter.type != "none":
        say("hashing the base model's weights")
    _ = run.base  # Hashed before it is read: it may be replaced before the first checkpoint.
    if jax.process_index() == 0:
        say("checking the records: up to a minute now, the rest beside training")
        check.run()
        if len(held_out) and check.held_out.complete and not check.held_out.loss_tokens:
            raise ValueError(
                "the held-out documents contain no token that counts in the loss; see "
                "data.eval_path, data.eval_fraction and data.too_long"
            )


def check_model(model: ModelConfig, pretrained: Pretrained | None) -> None:
    """Checks rotary positions before a run starts.

    Raises:
      ValueError: a scaling that cannot be, or one that transformers could not read from an export.
    """
    if model.position_embedding == "rope":
        rotary(model, 0, None)
    if pretrained and pretrained.sidecars and pretrained.read_as:
        exported(read_json(pretrained.sidecars / "config.json"), pretrained.read_as, model)


def _check_adapter(config: Config, spec: TrainSpec) -> None:
    """
    Raises:
      ValueError: an adapter beside no checkpoint or beside what there is not, or none for one.
    """
    adapter, pretrained = config.adapter, spec.pretrained
    if adapter.type == "none":
        if pretrained and pretrained.adapters:
            raise ValueError(
                f"model.name_or_path={config.model.name_or_path} is an adapter; set adapter.type "
                "to lora or qlora to go on with it, or merge it first"
            )
        return
    if pretrained is None:
        raise ValueError(
            f"adapter.type={adapter.type} trains beside a checkpoint; set model.name_or_path"
        )
    for name in ("r", "alpha", "use_rslora", "target_modules", "modules_to_save"):
        value = getattr(adapter, name)
        if pretrained.adapters and value != getattr(AdapterConfig(), name):
            raise ValueError(
                f"adapter.{name}={value}: model.name_or_path={config.model.name_or_path} is an "
                "adapter, which decides it; leave it out"
            )
    _ = adapted_kernels(spec), embeddings_in_full(spec)  # Refuses names that there are not.
