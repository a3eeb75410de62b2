"""A run from config to trained model: set up, train, save, resume, report."""

import fcntl
import math
import os
import shutil
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bptjax.checkpoint import Checkpoints
from bptjax.config import Config, claim, record, to_yaml
from bptjax.data.chat import Chat, question
from bptjax.data.loader import TrainIterator, eval_loader, open_split, train_loader
from bptjax.data.text import byte_baselines
from bptjax.data.tokenizer import ByteTokenizer, Tokenizer, make_tokenizer
from bptjax.generation import Sampling, generate
from bptjax.hf.io import copy_companions, fingerprint
from bptjax.hf.pretrained import COMPANIONS, export_adapter, find, open_pretrained
from bptjax.lora import AdapterConfig
from bptjax.metrics import (
    JsonlWriter,
    Progress,
    Silence,
    Throughput,
    plot_loss,
    printable,
    read_metrics,
)
from bptjax.models.layers import rotary
from bptjax.parallel.mesh import ParallelConfig, make_mesh, select_devices
from bptjax.parallel.processes import hurry, join, largest, part, same, watched
from bptjax.trainer import Task, TrainState

# Dense bf16 matmul peaks, FLOP/s, by the device's name: what MFU is counted against.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
# What a run of adapters leaves for PEFT.
ADAPTER = "adapter"


class RunFailed(RuntimeError):
    """The run cannot go on; the message says where it stands."""


@dataclass(frozen=True)
class Run:
    """A checked config with its data, devices and directory: all that can be wrong with it has been
    looked at.
    """

    config: Config
    task: Task
    tokenizer: Tokenizer
    held_out: Any
    batches: TrainIterator
    notes: list[str]

    @cached_property
    def questions(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(prompt, answer) of the first `train.eval_predictions` held-out chats, token ids.

        Raises:
          ValueError: what is held out are no chats.
        """
        data, count = self.config.data, self.config.train.eval_predictions
        chats = [self.held_out[i] for i in range(min(count, len(self.held_out)))]
        if count and not all(isinstance(chat, Chat) for chat in chats or [None]):
            raise ValueError(
                f"train.eval_predictions={count} needs held-out chats; see data.format and "
                "data.eval_fraction"
            )
        return [question(chat, self.tokenizer, data.source_max_len) for chat in chats]

    @property
    def directory(self) -> Path:
        return Path(self.config.run_dir)

    @cached_property
    def base(self) -> int | None:
        """What tells the checkpoint that adapters are trained beside from others."""
        pretrained = self.task.pretrained
        if self.config.adapter.type == "none" or pretrained is None:
            return None
        directory = find(str(self.config.model.name_or_path))
        if pretrained.adapters and pretrained.companions:
            directory = pretrained.companions
        return fingerprint(directory)

    def check_base(self, saved: int | None) -> None:
        """
        Raises:
          ValueError: it is not that of the run's checkpoint.
        """
        if saved != self.base:
            raise ValueError(
                f"model.name_or_path={self.config.model.name_or_path} has other weights than those "
                f"that the adapters in {self.directory} were trained beside"
            )

    def eval_batches(self) -> Any:
        """The held-out batches `[rows, T]`, in fixed order."""
        return eval_loader(
            self.held_out,
            self.tokenizer,
            self.config.data,
            seq_len=self.config.train.seq_len,
            rows=self.task.micro_rows,
            max_batches=self.config.train.eval_batches,
        )


@watched()
def prepare(config: Config) -> Run:
    """Checks everything, then claims the run directory; a config that is refused leaves no trace.
    Of several processes, the first claims it for all.

    Raises:
      ValueError, NotImplementedError, OSError: what is wrong, in one line.
      PeerLost: another process has ended.
    """
    join(config.parallel)
    devices = select_devices(config.device)
    if config.memory.offload and devices[0].platform == "cpu":
        raise ValueError(
            f"memory.offload={config.memory.offload} moves from a GPU; a CPU's memory is the host's"
        )
    mesh = make_mesh(config.parallel, devices)
    train, held_out = open_split(config.data)
    pretrained = open_pretrained(config.model) if config.model.name_or_path else None
    companions = pretrained.companions if pretrained else None
    name = config.data.tokenizer or str(companions or "byte")
    tokenizer = make_tokenizer(name, chain(train, held_out))
    model = pretrained.config if pretrained else config.model
    if model.vocab_size is None:
        model = replace(model, vocab_size=tokenizer.vocab_size)
    if model.V < tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size={model.V} is less than the tokenizer's {tokenizer.vocab_size}"
        )
    if model.position == "learned" and config.train.seq_len > (model.max_positions or 0):
        raise ValueError(
            f"train.seq_len={config.train.seq_len} is more than "
            f"model.max_positions={model.max_positions}; set model.max_positions to extend them"
        )
    if model.position == "rope":
        rotary(model, 0, None)  # Refuses scalings that cannot be.
    config.memory.groups(model.num_layers)  # Refuses a nested(k) that cannot be.
    task = Task(config, model, mesh, pretrained)
    _check_adapter(config, task)
    picked, others = task.attention()
    batches = train_loader(
        train, tokenizer, config.data, seq_len=config.train.seq_len, rows=task.rows
    )
    why = "".join(f"; not {name}: {reason}" for name, reason in others.items())
    axes = " ".join(f"{name}={size}" for name, size in mesh.shape.items())
    axes += f", the sequence by {': '.join(task.strategy)}" if mesh.shape["sp"] > 1 else ""
    where = f"{len(devices)} × {devices[0].device_kind}"
    where += f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    notes = [
        f"devices: {where}, jax {jax.__version__}, mesh {axes}",
        f"data: {len(train)} documents, {len(held_out)} held out, vocabulary {model.V}",
        f"attention: {picked}{why}",
    ]
    if pretrained:
        notes.append(f"model: from {config.model.name_or_path}")
        reach = model.max_positions
        if model.position == "rope" and reach and config.train.seq_len > reach:
            notes.append(
                f"train.seq_len={config.train.seq_len} is beyond the {reach} positions of the "
                "checkpoint; model.rope_parameters scales them, model.max_positions records it"
            )
    run = Run(config, task, tokenizer, held_out, batches, notes)
    _ = run.questions  # Refuses what is no chat.
    same(to_yaml(replace(config, parallel=ParallelConfig())) + "".join(notes), "a config or data")
    if jax.process_index() == 0:
        claim(Path(config.run_dir), config)
        tokenizer.save(config.run_dir)
        if companions is not None:
            copy_companions(companions, Path(config.run_dir) / COMPANIONS)
    return run


def _check_adapter(config: Config, task: Task) -> None:
    """
    Raises:
      ValueError: an adapter beside no checkpoint or beside what there is not, or none for one.
    """
    adapter, pretrained = config.adapter, task.pretrained
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
    for name in ("r", "alpha", "use_rslora", "target_modules"):
        value = getattr(adapter, name)
        if pretrained.adapters and value != getattr(AdapterConfig(), name):
            raise ValueError(
                f"adapter.{name}={value}: model.name_or_path={config.model.name_or_path} is an "
                "adapter, which decides it; leave it out"
            )
    _ = task.targets  # Refuses names that there are not.


@watched()
def fit(run: Run) -> int:
    """Trains to the end, or until a signal: the exit code, 0, 130 (Ctrl-C) or 143 (SIGTERM).

    Raises:
      ValueError: the checkpoints are of another configuration, or number of rows a step.
      RunFailed: the loss is no longer finite, or memory ran out.
      PeerLost: another process has ended.
    """
    config, task, first = run.config, run.task, jax.process_index() == 0
    with ExitStack() as stack:
        stack.callback(run.batches.close)
        if first:
            stack.enter_context(_alone(run.directory))
        checkpoints = Checkpoints(
            run.directory, save_total_limit=config.checkpoint.save_total_limit
        )
        stack.callback(checkpoints.close)
        stack.push(hurry)
        stack.enter_context(_out_of_memory(run))
        restored = checkpoints.restore(task.saved(task.abstract_state()))
        start, state, extra = restored or (0, None, {"tokens_seen": 0})
        if restored:
            if extra.get("rows", task.rows) != task.rows:
                raise ValueError(
                    f"a step of the run in {run.directory} has {extra['rows']} rows, and here "
                    f"{task.rows}; set train.per_device_train_batch_size and "
                    "train.gradient_accumulation_steps so that they make as many"
                )
            run.check_base(extra.get("base"))
            run.batches.set_state(extra["data"])
        if first:
            # Not before: what is refused leaves the run as it was.
            record(run.directory, config)
        state = task.init_state() if state is None else task.resumed(state)
        writer = predictions = progress = Silence()
        if first:
            since = start if restored else None
            writer = JsonlWriter(run.directory, resume_step=since)
            if run.questions:
                predictions = JsonlWriter(
                    run.directory, name="predictions.jsonl", resume_step=since
                )
            progress = Progress(run.directory, config.train.max_steps)
        stack.callback(writer.close)
        stack.callback(predictions.close)
        stack.enter_context(progress)
        stopped = stack.enter_context(_signals())
        for note in run.notes if start < config.train.max_steps else ():
            progress.log(note)
        if restored:
            progress.log(f"resumed at step {start} of {config.train.max_steps} in {run.directory}")
        tokens_seen = extra["tokens_seen"]
        loop = _Loop(run, checkpoints, writer, predictions, progress, state, start, tokens_seen)
        loop.train(stopped)
        if not loop.stopped:
            text = sample(run, loop.state) if config.train.sample_tokens else ""
            if first:
                export(run)
                report(run, loop.state, text, progress.log)
    part()
    return 128 + loop.stopped if loop.stopped else 0


class _Loop:
    """Steps, with the metrics of each one read while the next one runs."""

    def __init__(
        self, run: Run, checkpoints, writer, predictions, progress, state, start, tokens_seen
    ):
        self.run, self.checkpoints, self.progress = run, checkpoints, progress
        self.writer, self.predictions = writer, predictions
        self.state: TrainState = state
        self.done, self.tokens_seen, self.last_saved = start, tokens_seen, start or None
        self.pending: tuple[int, dict, int, float, dict] | None = None
        self.stopped = 0
        self.throughput = Throughput()
        self.evaluate = run.task.evaluator()
        self.parameters, self.trained = run.task.parameters

    def train(self, stopped: list[int]) -> None:
        """Steps to the last one, or until a signal enters `stopped`, of any process; saves where it
        ends. Of several processes each learns of the others' a step later, so that none waits.
        """
        config, task = self.run.config, self.run.task
        total, every = config.train.max_steps, config.train.eval_steps
        if self.done >= total:
            return
        if self.done == 0:
            self.eval()
        steps: dict[tuple, Callable] = {}
        votes: deque[Any] = deque([0] if jax.process_count() > 1 else [])
        while self.done < total and not self.stopped:
            batch = self.next_batch()
            placed = task.put(batch, config.train.gradient_accumulation_steps)
            shape = placed["tokens"].shape
            if shape not in steps:
                self.flush()
                steps[shape] = self.compile(placed, tell=not steps)
                self.throughput.resume()
            self.state, metrics = steps[shape](self.state, placed)
            self.flush()
            self.done += 1
            self.pending = (self.done, metrics, *_work(batch), self.run.batches.get_state())
            if self.done == total or (every and self.done % every == 0):
                self.flush()
                self.eval()
            if self.done % config.checkpoint.save_steps == 0:
                self.save()
            votes.append(largest(max(stopped, default=0), task.mesh))
            self.stopped = int(votes.popleft())
        if self.done > (self.last_saved or 0):
            self.save()
        self.checkpoints.wait()
        self.stopped = self.stopped or int(largest(max(stopped, default=0), task.mesh))

    def next_batch(self) -> dict[str, np.ndarray]:
        try:
            return next(self.run.batches)
        except ValueError as error:
            raise RunFailed(f"step {self.done + 1}: {error}") from error

    def compile(self, batch, tell: bool) -> Callable:
        """The compiled step; with `tell`, says what it will need."""
        compiled = self.run.task.compile_step(self.state, batch)
        needs = compiled.memory_analysis()
        offload = self.run.config.memory.offload
        if offload and not (needs and needs.host_temp_size_in_bytes):
            raise RunFailed(f"memory.offload={offload} moves nothing to host memory here")
        if not tell:
            return compiled
        text = f"model: {self.parameters:,} parameters"
        if self.trained < self.parameters:
            share = self.trained / self.parameters
            text += f", {self.trained:,} of them trained ({share:.3%})"
        if needs is not None:
            held, extra = needs.argument_size_in_bytes, needs.temp_size_in_bytes
            text += f"; a step holds {held / 2**30:.2f} GiB and needs {extra / 2**30:.2f} GiB more"
            text += " a device"
            if needs.host_argument_size_in_bytes:
                text += f", {needs.host_argument_size_in_bytes / 2**30:.2f} GiB on the host"
        self.progress.log(text)
        return compiled

    def flush(self) -> None:
        """Reads and tells the metrics of the step before; ends the run where they are not
        finite.
        """
        if self.pending is None:
            return
        (done, metrics, tokens, attended, cursor), self.pending = self.pending, None
        metrics = {name: float(x) for name, x in jax.device_get(metrics).items()}
        self.throughput.step(tokens)
        self.tokens_seen += tokens
        config = self.run.config
        metrics |= {"train/tokens_seen": self.tokens_seen}
        metrics |= self.throughput.metrics(config.train.max_steps - done)
        metrics |= self._hardware(metrics, tokens, attended)
        if done % config.logging.steps == 0 or done == config.train.max_steps:
            self.writer.write(done, metrics)
        self.progress.update(done, metrics)
        loss, norm = metrics["train/loss"], metrics["train/grad_norm"]
        scale = metrics.get("train/loss_scale")
        # An overflow in float16 is not the end: it lowers the scale, unless that is spent.
        if (
            not math.isfinite(loss)
            or (scale is None and not math.isfinite(norm))
            or (scale and scale < 2**-24)
        ):
            what = f"loss {loss}, gradient norm {norm}"
            what += "" if scale is None else f", loss scale {scale}"
            good = f"step {self.last_saved}" if self.last_saved else "none yet"
            raise RunFailed(
                f"step {done}: {what}; data cursor after its batch: {cursor}; last good "
                f"checkpoint: {good} in {self.checkpoints.directory}; lower "
                "optimizer.learning_rate, or look at that batch"
            )

    def _hardware(self, metrics: dict, tokens: int, attended: float) -> dict[str, float]:
        """Peak memory of a device in GiB, and model FLOP/s over the devices' peak, where known."""
        devices = self.run.task.mesh.devices.reshape(-1)
        found = {}
        stats = self.run.task.mesh.local_devices[0].memory_stats()
        if stats and "peak_bytes_in_use" in stats:
            found["memory/peak_gib"] = stats["peak_bytes_in_use"] / 2**30
        peak = next((f for n, f in PEAK_FLOPS.items() if n in devices[0].device_kind), None)
        seconds = metrics.get("throughput/step_time")
        if peak and seconds:
            model = self.run.task.model
            attention = 12.0 * attended * model.num_heads * model.H * model.num_layers
            # Forward, gradients of what is read, and those of what is trained.
            flops = (4.0 * self.parameters + 2.0 * self.trained) * tokens + attention
            found["throughput/mfu"] = flops / seconds / (peak * len(devices))
        return found

    def eval(self) -> None:
        """Held-out loss, and answers to held-out chats, before the first step as well."""
        if not len(self.run.held_out):
            return
        loss = self.evaluate(self.state.model, self.run.eval_batches())
        metrics = {"eval/loss": loss, "train/tokens_seen": self.tokens_seen}
        text = f"step {self.done}: eval/loss {loss:.4f}"
        if self.run.questions:
            found = answers(self.run, self.state)
            for one in found:
                self.predictions.write(self.done, one)
            metrics["eval/exact_match"] = float(
                np.mean([one["prediction"] == one["reference"] for one in found])
            )
            text += f", eval/exact_match {metrics['eval/exact_match']:.3f}; for "
            text += f"{found[0]['reference'][:60]!r} it writes {found[0]['prediction'][:60]!r}"
        self.writer.write(self.done, metrics)
        self.progress.log(text)
        self.throughput.resume()

    def save(self) -> None:
        """Starts a checkpoint of the state after the last step, which is known to be finite."""
        self.flush()
        extra = {
            "data": self.run.batches.get_state(),
            "tokens_seen": self.tokens_seen,
            "rows": self.run.task.rows,
            "config": to_yaml(self.run.config),
            "base": self.run.base,
        }
        self.checkpoints.save(self.done, self.run.task.saved(self.state), extra)
        self.last_saved = self.done
        self.throughput.resume()


def export(run: Run) -> None:
    """`adapter/` as PEFT reads it, where adapters of a Hugging Face family's model were trained."""
    pretrained = run.task.pretrained
    if run.base is None or pretrained is None or pretrained.family is None:
        return
    shutil.rmtree(run.directory / ADAPTER, ignore_errors=True)
    export_adapter(str(run.directory), run.directory / ADAPTER)


def report(run: Run, state: TrainState, text: str, say: Callable[[str], None]) -> None:
    """What came of it: held-out loss (for bytes, in bits beside the baselines), sample, files."""
    config = run.config
    losses = [
        r["eval/loss"] for r in read_metrics(run.directory / "metrics.jsonl") if "eval/loss" in r
    ]
    texts = list(run.held_out) if losses and config.train.eval_batches is None else []
    if isinstance(run.tokenizer, ByteTokenizer) and texts and isinstance(texts[0], str):
        size = sum(len(run.tokenizer.encode(text)) for text in texts)
        labels = sum(int((b["labels"] != -100).sum()) for b in run.eval_batches())
        before, after = (losses[i] * labels / size / math.log(2) for i in (0, -1))
        base = byte_baselines(texts)
        say(f"held-out text: {size:,} bytes")
        say(f"bits per byte: {before:.3f} before training, {after:.3f} after")
        say("baselines on the same bytes: " + ", ".join(f"{n} {b:.3f}" for n, b in base.items()))
    elif losses:
        say(f"held-out nats per token: {losses[0]:.4f} before training, {losses[-1]:.4f} after")
    if text:
        say("sample: " + text)
    plot_loss(run.directory / "metrics.jsonl", run.directory / "loss.png")
    say(f"checkpoint: {run.directory / 'checkpoints' / str(int(state.step))}")
    if (run.directory / ADAPTER).exists():
        say(f"adapter:    {run.directory / ADAPTER}")
    say(f"metrics:    {run.directory / 'metrics.jsonl'}")
    say(f"plot:       {run.directory / 'loss.png'}")


def answers(run: Run, state: TrainState) -> list[dict[str, str]]:
    """`prompt`, `prediction` and `reference` of each of the run's questions. A prediction ends with
    the longest reference, which no longer one could equal.
    """
    prompts, wanted = zip(*run.questions, strict=True)
    with jax.set_mesh(run.task.mesh):
        new = generate(
            state.model,
            prompts,
            new_tokens=max(map(len, wanted)),
            sampling=Sampling(temperature=0.0),
            stop=run.tokenizer.stop_ids,
            dtype=run.task.dtype,
        )
        written = np.stack(list(new), axis=1)

    def text(ids):
        ends = np.flatnonzero(np.isin(ids, run.tokenizer.stop_ids))
        return run.tokenizer.decode(ids[: ends[0] if ends.size else None]).strip()

    return [
        {"prompt": run.tokenizer.decode(p), "prediction": text(w), "reference": text(r)}
        for p, w, r in zip(prompts, written, wanted, strict=True)
    ]


def sample(run: Run, state: TrainState) -> str:
    """New text from the start of a document, or from a line's end where documents have no mark; no
    longer than the rows of training.
    """
    first = run.tokenizer.bos_id
    prompt = [first] if first is not None else run.tokenizer.encode("\n")
    train = run.config.train
    with jax.set_mesh(run.task.mesh):
        new = list(
            generate(
                state.model,
                [prompt],
                new_tokens=min(train.sample_tokens, max(train.seq_len - len(prompt), 1)),
                sampling=Sampling(temperature=0.8),
                seed=run.config.seed,
                dtype=run.task.dtype,
            )
        )
    return printable(run.tokenizer.decode([int(token[0]) for token in new]))


def _work(batch: dict[str, np.ndarray]) -> tuple[int, float]:
    """Tokens that are not padding, and query-key pairs of causal attention within documents."""
    real = batch["segments"] != 0
    return int(real.sum()), float((batch["positions"][real].astype(np.float64) + 1).sum())


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Holds the run directory against other processes; the lock goes with the process."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ValueError(f"another process is running in {directory}") from error
    finally:
        os.close(handle)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """A list that the first SIGINT or SIGTERM enters; the second does what it did before."""
    got: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def note(number, frame):
        got.append(number)
        for kind, handler in before.items():
            signal.signal(kind, handler)

    for kind in kinds:
        signal.signal(kind, note)
    try:
        yield got
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


@contextmanager
def _out_of_memory(run: Run) -> Iterator[None]:
    """Says what took the memory, and which knob to turn next."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        state = run.task.abstract_state()
        held = {
            name: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(getattr(state, name)))
            / 2**30
            for name in ("model", "opt_state")
        }
        train, memory = run.config.train, run.config.memory
        rows = train.per_device_train_batch_size
        raise RunFailed(
            f"out of memory: parameters take {held['model']:.2f} GiB and the optimizer "
            f"{held['opt_state']:.2f} GiB over all devices, the rest is a step of {rows} × "
            f"{train.seq_len} tokens a device with memory.remat={memory.remat}, "
            f"ffn_chunk={memory.ffn_chunk}, ce_chunk={memory.ce_chunk}: try remat=full, a smaller "
            "per_device_train_batch_size, smaller chunks, param_dtype=bfloat16, "
            "optimizer.state_dtype=int8, optimizer.state_memory=host or adapter.type=qlora"
        ) from error
