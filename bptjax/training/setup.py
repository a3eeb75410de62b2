"""Sets up a run from a config: checks everything before anything is written."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bptjax.config import Config, to_yaml
from bptjax.cost.auto import complete_execution
from bptjax.data.batches import Batches
from bptjax.data.changes import count_and_size
from bptjax.data.chat import Chat
from bptjax.data.check import DataCheck
from bptjax.data.encode import prompt_and_answer
from bptjax.data.encoding import Processor
from bptjax.data.epochs import Limit
from bptjax.data.images import ImageProcessor
from bptjax.data.loader import Evaluation, data_check, eval_loader, train_loader
from bptjax.data.records import readable
from bptjax.data.rows import Compound, Document
from bptjax.data.sample import SEARCHED, random_order
from bptjax.data.templates import CLOCK, reads
from bptjax.data.text import Subset
from bptjax.data.tokenizer import Tokenizer, token_id
from bptjax.models.attention_pattern import find_tokens
from bptjax.models.config import ModelConfig
from bptjax.models.execution import ExecutionConfig
from bptjax.objectives import ObjectiveConfig, choose
from bptjax.optim.schedule import describe_schedule
from bptjax.parallel.distributed import (
    all_gather_json,
    assert_equal_across_processes,
    connect_along,
    initialize,
    raise_together,
    translate_peer_errors,
)
from bptjax.parallel.launch import find_process
from bptjax.parallel.members import Members
from bptjax.parallel.mesh import ParallelConfig, make_mesh, select_devices
from bptjax.parsing.keys import flatten
from bptjax.run.json_files import read_json
from bptjax.run.links import check_links
from bptjax.run.output import explain_full_disk, plural, replaced_files, write_atomically
from bptjax.tasks.sample import Sampler
from bptjax.training.checks import (
    check_arrays_on_host,
    check_best_metric,
    check_host_memory,
    check_model,
    check_spec,
)
from bptjax.training.data import RunData, open_data, say
from bptjax.training.eval_tasks import open_tasks
from bptjax.training.fewer_processes import describe_missing, join, keep_global_batch
from bptjax.training.notes import (
    describe_determinism,
    describe_devices,
    describe_model,
    describe_objective,
    describe_update,
)
from bptjax.training.run_directory import (
    START,
    acquire_run_dir,
    check_run_dir,
    saved_execution,
    saved_start,
    saved_values,
    with_old_values,
    write_start,
)
from bptjax.training.spec import TrainSpec, fit_to_images
from bptjax.training.step import check_kernel
from bptjax.weights.hf.checkpoint import SIDECARS, copy_sidecar_files
from bptjax.weights.hf.config_export import exported
from bptjax.weights.hf.families.encoders import class_names, with_classes
from bptjax.weights.pretrained import Pretrained


@dataclass(frozen=True)
class TrainingRun:
    """A checked config with its model, data and mesh.

    Attributes:
      held_out: documents for evaluation.
      batches: endless training batches `[global batch size, T]`.
      check: background scan of the records.
      eval_prompts: token ids (prompt, answer) of the chats that the model answers in evaluations,
        and the question.
      tasks: tasks that the model answers in evaluations.
      notes: lines for the log.
      data_size: number of files of training data, and their total bytes.
      base_fingerprint: hash of the base model's weights; None without adapters.
      members: the processes of a run that may go on with fewer; None for other runs.
    """

    config: Config
    spec: TrainSpec
    processor: Processor
    held_out: Any
    batches: Batches
    check: DataCheck
    eval_prompts: Sequence[tuple[np.ndarray, np.ndarray, str]]
    tasks: Sequence[Sampler]
    notes: list[str]
    data_size: list[int]
    base_fingerprint: str | None = None
    members: Members | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The processor of a run on text."""
        assert not isinstance(self.processor, ImageProcessor)
        return self.processor

    @property
    def directory(self) -> Path:
        return Path(os.path.expanduser(self.config.run_dir))

    @cached_property
    def evaluation(self) -> Evaluation:
        """The held-out batches `[B, T]`: all, or a sample of train.eval_batches, whose documents
        are read. Without some processes, the sample is that of all processes."""
        members, sampled = self.members, None
        if members is not None and members.missing and members.complete is not None:
            sampled = members.complete.micro_batch
        return eval_loader(
            self.held_out,
            self.processor,
            self.config.data,
            seq_len=self.config.train.seq_len,
            batch_size=self.spec.micro_batch_size,
            encoding=self.spec.encoding,
            max_batches=self.config.train.eval_batches,
            sampled_batch_size=sampled,
        )

    @property
    def eval_total(self) -> int:
        """Number of batches of an evaluation. Without a sample, only process 0 knows it, as an
        estimate until all records are checked."""
        if self.evaluation.sample is not None:
            return self.evaluation.sample.batches
        sequences = self.check.held_out.epoch(self.config.data.packing) or 0
        return -(-sequences // self.spec.micro_batch_size)

    @property
    def eval_is_partial(self) -> bool:
        """Whether train.eval_batches leaves out held-out data."""
        return self.evaluation.sample is not None and not self.evaluation.sample.complete


@translate_peer_errors()
def setup(config: Config, now: datetime | None = None) -> TrainingRun:
    """Checks everything, then creates the run directory, or continues the run in it. A refused
    config writes nothing. Only the first process writes.

    Args:
      now: date and time at which a new run starts; by default the present. Chat templates read the
        time of process 0; in a resumed run, the time of its first start.

    Raises:
      ValueError, NotImplementedError, OSError: one line about the wrong key or file.
      PeerLost: another process has ended.
    """
    process, members = join(config, find_process(config.parallel, os.environ))
    initialize(config.parallel, process)
    devices = select_devices(config.device)
    with raise_together():
        if (run_dir := Path(config.run_dir).expanduser()).is_dir():
            check_links(run_dir)
        if jax.process_index() == 0:  # Only the first process writes the config.
            check_run_dir(run_dir)
        date = saved_start(run_dir)
        lost = date is None and (run_dir / "checkpoints").exists()
        date = date or (now or datetime.now()).isoformat(timespec="seconds")
    date, lost = all_gather_json([date, lost])[0]
    with raise_together():
        given, config = config, _with_defaults(config, devices[0].platform)
        config = keep_global_batch(config, members)
        run = replace(_open_run(config, devices, date), members=members)
        run.notes.extend(describe_missing(given, run.spec, members))
        spaced = config.data.eval_split != given.data.eval_split
        if spaced and config.data.eval_path is None and len(run.held_out):
            run.notes.append(
                "held-out documents: evenly spaced (data.eval_split=spaced), because an older "
                "version of bptjax started this run"
            )
        config = fit_to_images(config, run.spec.model)
        if lost and not isinstance(run.processor, ImageProcessor) and reads(run.tokenizer, CLOCK):
            run.notes.append(
                f"warning: {START} of this run is missing, with the date that its chats read; from "
                f"here on they read {date}"
            )
    connect_along(run.spec.mesh)
    spec, notes = complete_execution(run.spec, say, first=saved_execution(config))
    run = replace(run, config=spec.config, spec=spec, notes=[*run.notes, *notes])
    if config.train.epochs is not None:
        run = _count_epoch(run)
    with raise_together():
        run.notes.extend(describe_schedule(config.optimizer, run.spec.steps))
        run = replace(run, base_fingerprint=_fingerprint(run.spec))
        passes = _check_records(run)
    run.notes.extend(all_gather_json(passes)[0])
    settings = to_yaml(replace(config, parallel=ParallelConfig()))
    with raise_together():
        assert_equal_across_processes(settings + "".join(run.notes), "config and data")
        if jax.process_index() == 0:
            with explain_full_disk(run.directory):
                _write_run_dir(run, config)
                write_start(run.directory, date)
    return run


def _write_run_dir(run: TrainingRun, config: Config) -> None:
    """Creates the run directory and writes the files that do not change during the run."""
    acquire_run_dir(run.directory, config, _unset(run.spec))
    pretrained = run.spec.pretrained
    with replaced_files(run.directory) as fresh:
        processor = run.processor
        if not isinstance(processor, ImageProcessor):
            processor.save(fresh)
        if pretrained and pretrained.sidecars:
            copy_sidecar_files(pretrained.sidecars, fresh / SIDECARS)
            file = fresh / SIDECARS / "config.json"
            raw = read_json(file)
            changed = with_classes(raw, pretrained.config.encoder.classes)
            if pretrained.read_as and pretrained.trained_as:
                start = replace(pretrained.trained_as, vocab_size=pretrained.read_as.vocab_size)
                changed = exported(changed, pretrained.read_as, start)
            if isinstance(processor, ImageProcessor):
                changed = changed | class_names(processor.names)
            if changed != raw:
                write_atomically(file, json.dumps(changed, indent=2) + "\n")
    if pretrained and pretrained.others and config.adapter.type == "none":
        pretrained.others.save(run.directory / SIDECARS)


def _unset(spec: TrainSpec) -> dict[str, Any]:
    """Returns the values that the keys of the objective have in this run if they are not set, by
    key."""
    group = spec.config.objective
    none: dict[str, Any] = dict.fromkeys(group.given)
    unset = replace(group, **none)
    objective = replace(spec, config=replace(spec.config, objective=unset)).objective
    values = {key: getattr(objective, name) for key, name in objective.settings().items()}
    values["type"] = choose(ObjectiveConfig(), spec.model).name
    return {f"objective.{key}": value for key, value in values.items()}


def _with_defaults(config: Config, platform: str) -> Config:
    """Returns the config with all defaults filled in. A resumed run keeps the saved adapter alpha
    and compute dtype, and `OLD_VALUES`. On a CPU it also keeps the saved execution;
    `complete_execution` does so on other devices.

    Raises:
      ValueError: the config in the run directory is damaged.
    """
    config = with_old_values(config)
    saved = saved_values(Path(config.run_dir).expanduser())
    if config.train.compute_dtype is None:
        dtype = saved.get("train.compute_dtype")
        config = replace(config, train=replace(config.train, compute_dtype=dtype))
    if config.adapter.alpha is None and saved.get("adapter.type") == config.adapter.type:
        alpha = saved.get("adapter.alpha")
        config = replace(config, adapter=replace(config.adapter, alpha=alpha))
    if platform == "cpu" and (execution := saved_execution(config)):
        offload = config.execution.offload or 0.0
        group = ExecutionConfig(**asdict(replace(execution, offload=offload)))
        config = replace(config, execution=group)
    return config.on(platform)


def _open_run(config: Config, devices: list[jax.Device], date: str) -> TrainingRun:
    """Opens data and checkpoint, and checks them against the config. Writes nothing. `date` is the
    start date of the run.

    Raises:
      ValueError, NotImplementedError, OSError: as `setup`.
    """
    if devices[0].platform == "cpu":
        for key, none in (("execution.offload", 0), ("memory.budget_gib", "null")):
            if value := flatten(config)[key]:
                raise ValueError(
                    f"{key}={value}: must be {none} on a CPU, whose memory is the host's"
                )
    mesh = make_mesh(config.parallel, devices)
    data = open_data(config, date)
    model, pretrained = _size_model(config, data)
    config = fit_to_images(config, model)
    check_model(model, pretrained)
    spec = TrainSpec(config, model, mesh, pretrained)
    check_spec(spec)
    check_arrays_on_host(spec)
    tasks = open_tasks(config, model, data.tokenizer) if config.train.eval_tasks else []
    check_best_metric(spec, data.held_out, tasks)
    check_host_memory(spec)
    if config.execution.attention_implementation != "auto":
        check_kernel(spec)
    seq_len, size = config.train.seq_len, spec.global_batch_size
    batches = train_loader(
        data.train,
        data.processor,
        config.data,
        seq_len=seq_len,
        batch_size=size,
        encoding=spec.encoding,
        local=spec.layout.addressable_indices(size),
    )
    return TrainingRun(
        config=config,
        spec=spec,
        processor=data.processor,
        held_out=data.held_out,
        batches=batches,
        check=data_check(
            data.train,
            data.held_out,
            data.processor,
            config.data,
            seq_len=seq_len,
            encoding=spec.encoding,
        ),
        eval_prompts=_eval_prompts(config, model, data),
        tasks=tasks,
        notes=[
            *describe_determinism(config, devices[0].platform),
            *describe_devices(spec, data),
            *describe_objective(spec),
            *describe_model(spec, data),
            *describe_update(spec),
            *data.notes,
        ],
        data_size=count_and_size(data.train),
    )


def _size_model(config: Config, data: RunData) -> tuple[ModelConfig, Pretrained | None]:
    """Returns the model and the checkpoint, with a vocabulary and markers that fit the tokenizer of
    a run on text.

    Raises:
      ValueError: the model has too few token embeddings or learned positions; a marker is not one
        token, or a landmark ends texts.
    """
    pretrained, tokenizer = data.pretrained, data.processor
    model = pretrained.config if pretrained else config.model
    if isinstance(tokenizer, ImageProcessor):
        return model, pretrained
    if pretrained and model.V >= tokenizer.vocab_size - len(data.added):
        model = replace(model, vocab_size=max(model.V, tokenizer.vocab_size))
    if model.vocab_size is None:
        model = replace(model, vocab_size=tokenizer.vocab_size)
    if model.V < tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size={model.V}: must be at least {tokenizer.vocab_size}, the size of the "
            "tokenizer's vocabulary"
        )
    pattern = find_tokens(model.attention_pattern, partial(token_id, tokenizer))
    model = replace(model, attention_pattern=pattern)
    ends = tokenizer.eos_id, *tokenizer.stop_ids
    if model.landmarks is not None and model.landmarks.token in ends:
        raise ValueError(
            f"model.attention_pattern.token={model.landmarks.token}: must not be a token that ends "
            "a text, because a landmark is never generated; add a token by model.add_tokens"
        )
    learned = model.position_embedding == "learned"
    if learned and config.train.seq_len > (model.max_position_embeddings or 0):
        raise ValueError(
            f"train.seq_len={config.train.seq_len}: must be at most "
            f"model.max_position_embeddings={model.max_position_embeddings}; set "
            "model.max_position_embeddings to extend the learned positions"
        )
    return model, replace(pretrained, config=model) if pretrained else None


def _count_epoch(run: TrainingRun) -> TrainingRun:
    """Returns the run with train.epochs converted to a number of steps.

    Raises:
      ValueError: a bad record.
    """
    epochs, check, size = run.config.train.epochs or 0.0, run.check, run.spec.global_batch_size
    pixels = run.spec.model.encoder.image_size
    if images := pixels is not None and run.config.data.bad_records == "error":
        # Each image is one sequence, or ends the run.
        check.count_images()
    else:
        say("train.epochs: reading all records, to count the sequences of an epoch")
    with raise_together():
        counts = None
        if jax.process_index() == 0:
            if not images:
                check.run(math.inf)
            limits = [asdict(limit) for limit in check.limits(epochs, size)]
            counts = limits, check.sequences_per_epoch, check.tokens_per_epoch
    limits, sequences, tokens = all_gather_json(counts)[0]
    limits = [Limit(**limit) for limit in limits]
    shard = size // len(limits)
    steps = max(-(-limit.sequences // shard) for limit in limits)
    run.batches.limit(limits, steps)
    note = f"train.epochs={epochs:g}: {plural(steps, 'step')} of {plural(size, 'sequence')}, "
    note += f"{epochs * tokens:,.0f} tokens; an epoch is {plural(sequences, 'sequence')}, "
    note += f"{tokens:,.0f} tokens"
    spec = replace(run.spec, epoch_steps=steps)
    return replace(run, spec=spec, notes=[*run.notes, note])


def _eval_prompts(
    config: Config, model: ModelConfig, data: RunData
) -> list[tuple[np.ndarray, np.ndarray, str]]:
    """Returns (prompt, answer, question) of `train.num_eval_generations` held-out chats, in random
    order. Tokenizes them now, so that a bad chat fails at the start, not at the first evaluation.
    A record of another format counts as a chat with its good answer, the better of a pair.

    Raises:
      ValueError: the held-out documents are not chats, or exceed the model's positions.
    """
    number = config.train.num_eval_generations
    order = random_order(len(data.held_out), config.data.seed)[: SEARCHED if number else 0]
    documents = readable(Subset(data.held_out, order), config.data.bad_records)
    chats = list(islice((chat for each in documents for chat in _answered(each)), number))
    if number and len(data.held_out) and not chats:
        raise ValueError(
            f"train.num_eval_generations={number}: requires held-out chats; see data.format "
            "and data.eval_fraction"
        )
    documents = [
        prompt_and_answer(chat, data.tokenizer, config.data.source_max_len) for chat in chats
    ]
    longest = sum(max(map(len, each)) for each in zip(*documents, strict=True))
    if model.position_embedding == "learned" and longest > (model.max_position_embeddings or 0):
        raise ValueError(
            f"train.num_eval_generations={number}: prompts and answers of up to {longest} tokens "
            f"must fit into model.max_position_embeddings={model.max_position_embeddings}; set "
            "data.source_max_len, or model.max_position_embeddings to extend them"
        )
    return [(*ids, chat.question) for ids, chat in zip(documents, chats, strict=True)]


def _answered(document: Document) -> Sequence[Chat]:
    """Returns the chat that a model can answer, if any."""
    if isinstance(document, Compound):
        return [document.good] if document.good and document.good.question else []
    return [document] if isinstance(document, Chat) else []


def _fingerprint(spec: TrainSpec) -> str | None:
    """Hashes the base model of adapters before its weights are loaded, because its files may be
    replaced before the first checkpoint records the hash."""
    if spec.config.adapter.type == "none" or spec.pretrained is None:
        return None
    say("hashing the base model's weights")
    return spec.pretrained.fingerprint


def _check_records(run: TrainingRun) -> list[str]:
    """Checks records for up to a minute, in the first process. Returns lines about the passes over
    the data.

    Raises:
      ValueError: a bad record, or held-out documents without a token in the loss.
    """
    if jax.process_index() != 0:
        return []
    say("checking the records: up to a minute now, the rest during training")
    run.check.run()
    held_out = run.check.held_out
    if len(run.held_out) and held_out.complete and not held_out.loss_tokens:
        raise ValueError(
            "held-out documents: must have a token that counts in the loss; see data.eval_path, "
            "data.eval_fraction and data.too_long"
        )
    size = run.spec.global_batch_size
    return run.check.describe_passes(
        epochs=run.config.train.epochs, sequences=run.spec.steps * size
    )
