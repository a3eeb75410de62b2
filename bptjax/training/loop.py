"""The loop of a run: train, evaluate, save, resume, stop."""

import math
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

from bptjax.checkpoint import Best, Checkpoints
from bptjax.config import flatten, to_yaml
from bptjax.metrics import JsonlWriter, Progress, Silence, Throughput
from bptjax.ops.attention.choices import Choice, record_choices
from bptjax.parallel.distributed import (
    all_gather_json,
    all_reduce_max,
    exit_after_timeout,
    raise_together,
    shutdown,
    translate_peer_errors,
)
from bptjax.schedule import learning_rate
from bptjax.trackers import Trackers
from bptjax.training.guards import (
    RunFailed,
    exclusive,
    explain_out_of_memory,
    finite,
    stop_signals,
)
from bptjax.training.report import answers, export_adapter, report, sample
from bptjax.training.run_directory import record
from bptjax.training.setup import TrainingRun
from bptjax.training.spec import TrainSpec
from bptjax.training.state import (
    TrainState,
    abstract_state,
    checkpoint_view,
    from_checkpoint,
    init_state,
    parameter_counts,
)
from bptjax.training.step import compile_step, evaluator, matmul_parameters, model_flops

# Dense bf16 matmul peaks, FLOP/s, by the device's name: what MFU is counted against.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
# Among the signals that processes vote on: stop, for the data check has failed.
BAD_DATA = 1


@translate_peer_errors()
def train(run: TrainingRun) -> int:
    """Trains to the end, or until a signal: the exit code, 0, 130 (Ctrl-C) or 143 (SIGTERM).

    Raises:
      ValueError: the checkpoints are of another configuration, or number of rows a step.
      RunFailed: the loss is no longer finite, or memory ran out.
      PeerLost: another process has ended.
    """
    config, spec, first = run.config, run.spec, jax.process_index() == 0
    with ExitStack() as stack:
        stack.callback(run.batches.close)
        with raise_together():
            if first:
                stack.enter_context(exclusive(run.directory))
        checkpoints = Checkpoints(
            run.directory, save_total_limit=config.checkpoint.save_total_limit
        )
        stack.callback(checkpoints.close)
        stack.push(exit_after_timeout)
        stack.enter_context(explain_out_of_memory(spec))
        restored = checkpoints.restore(checkpoint_view(spec, abstract_state(spec)))
        start, state, extra = restored or (0, None, {"tokens_seen": 0})
        if restored:
            if extra.get("rows", spec.global_batch_size) != spec.global_batch_size:
                raise ValueError(
                    f"a step of the run in {run.directory} has {extra['rows']} rows, and here "
                    f"{spec.global_batch_size}; set train.per_device_train_batch_size and "
                    "train.gradient_accumulation_steps so that they make as many"
                )
            if start > spec.steps:
                name = "max_steps" if config.train.epochs is None else "epochs"
                raise ValueError(
                    f"train.{name}={getattr(config.train, name)}: must not end the run in "
                    f"{run.directory} before its step {start}; set more"
                )
            if run.base is not None and spec.pretrained is not None:
                spec.pretrained.check(extra.get("base"), run.directory)
            run.batches.set_state(extra["data"])
        if first:
            # Not before: what is refused leaves the run as it was.
            record(run.directory, config)
        writer = predictions = progress = Silence()
        if first:
            since = start if restored else None
            writer = JsonlWriter(run.directory, resume_step=since)
            if run.questions:
                predictions = JsonlWriter(
                    run.directory, name="predictions.jsonl", resume_step=since
                )
            progress = Progress(run.directory, spec.steps)
            if config.logging.report_to and start < spec.steps:
                names, keys = config.logging.report_to, flatten(config)
                writer = Trackers(writer, names, run.directory, keys, since, progress.log)
        stack.callback(writer.close)
        stack.callback(predictions.close)
        stack.enter_context(progress)
        stopped = stack.enter_context(stop_signals())
        if first and start < spec.steps:
            stack.callback(run.check.stop)
            run.check.start(run.directory)
            for note in (*run.check.lines(), *run.notes):
                progress.log(note)
        if restored:
            progress.log(f"resumed at step {start} of {spec.steps} in {run.directory}")
            if (before := extra.get("steps", spec.steps)) != spec.steps:
                progress.log(_extended(spec, start, before))
        if state is None or config.adapter.type != "none":
            how = f"loading {config.model.name_or_path}" if spec.pretrained else "initializing"
            progress.log(f"model: {how}")
        state = init_state(spec) if state is None else from_checkpoint(spec, state)
        tokens_seen = extra["tokens_seen"]
        loop = TrainLoop(run, checkpoints, writer, predictions, progress, state, start, tokens_seen)
        loop.best = Best(**extra.get("best", {}))
        loop.train(stopped)
        if loop.patience_is_spent:
            best = loop.best
            loss = math.nan if best.loss is None else best.loss
            progress.log(
                f"early stopping at step {loop.done}: eval/loss not below {loss:.4f}, the value of "
                f"step {best.step}, in {best.since} evaluations"
            )
        if loop.stopped:
            progress.log(
                f"saved step {loop.done} in {checkpoints.directory / str(loop.done)}; the same "
                "command continues from there"
            )
        else:
            export_adapter(run, loop.state, progress.log)
            text = sample(run, loop.state) if config.train.sample_tokens else ""
            if first:
                report(run, loop.state, text, progress.log)
    shutdown()
    return 128 + loop.stopped if loop.stopped else 0


def _extended(spec: TrainSpec, start: int, before: int) -> str:
    """Formats what another number of steps does to the learning rate of a resumed run."""
    old, new = (
        np.asarray(learning_rate(spec.config.optimizer, steps)(start)).item()
        for steps in (before, spec.steps)
    )
    text = f"{spec.steps:,} steps in place of {before:,}: the learning rate of step {start + 1} is "
    return text + (f"{new:.4g}, as before" if old == new else f"{new:.4g} in place of {old:.4g}")


class TrainLoop:
    """Steps, with the metrics of each one read while the next one runs."""

    def __init__(
        self,
        run: TrainingRun,
        checkpoints,
        writer,
        predictions,
        progress,
        state,
        start,
        tokens_seen,
    ):
        self.run, self.checkpoints, self.progress = run, checkpoints, progress
        self.writer, self.predictions = writer, predictions
        self.state: TrainState = state
        self.done, self.tokens_seen, self.last_saved = start, tokens_seen, start or None
        self.pending: tuple[int, dict] | None = None
        self.stopped = 0
        self.said: list[Choice] = []
        self.last_loss: tuple[int, float] | None = None
        self.throughput = Throughput()
        self.evaluate = evaluator(run.spec)
        self.parameters, self.trained = parameter_counts(run.spec)
        self.matmul_parameters = matmul_parameters(run.spec)
        self.best = Best()

    def train(self, stopped: list[int]) -> None:
        """Steps to the last one, or until a signal enters `stopped`, of any process; saves where it
        ends. Of several processes each learns of the others' a step later, so that none waits.
        """
        config, spec = self.run.config, self.run.spec
        total, every = spec.steps, config.train.eval_steps
        if self.patience_is_spent or self.done >= total:
            return
        if self.done == 0:
            self.eval()
        steps: dict[tuple, Callable] = {}
        votes: deque[Any] = deque([0] if jax.process_count() > 1 else [])
        while self.done < total and not self.stopped and not self.patience_is_spent:
            batch = self.next_batch()
            placed = spec.layout.put(batch, config.train.gradient_accumulation_steps)
            shape = placed["tokens"].shape
            if shape not in steps:
                self.flush()
                steps[shape] = self.compile(placed, tell=not steps)
                self.throughput.resume()
            self.state, metrics = steps[shape](self.state, placed)
            self.flush()
            self.done += 1
            self.pending = (self.done, metrics)
            if self.done == total or (every and self.done % every == 0):
                self.flush()
                self.eval()
            best = config.checkpoint.keep_best and self.best.step == self.done
            if best or self.done % config.checkpoint.save_steps == 0:
                self.save()
            bad_data = BAD_DATA if self.run.check.error else 0
            votes.append(all_reduce_max(max(stopped, default=bad_data), spec.mesh))
            self.stopped = int(votes.popleft())
        if self.stopped and self.stopped != BAD_DATA:
            name = signal.Signals(self.stopped).name
            self.progress.log(f"{name}: saving step {self.done}, then stopping")
        if self.done > (self.last_saved or 0):
            self.save()
        self.checkpoints.wait()
        self.stopped = self.stopped or int(all_reduce_max(max(stopped, default=0), spec.mesh))
        if self.stopped == BAD_DATA:
            found = self.run.check.error or "process 0 found a bad record"
            raise RunFailed(f"step {self.done}, saved: {found}")

    @property
    def patience_is_spent(self) -> bool:
        """Whether evaluations have not improved for train.early_stopping_patience."""
        patience = self.run.config.train.early_stopping_patience
        return 0 < patience <= self.best.since

    def next_batch(self) -> dict[str, np.ndarray]:
        try:
            return next(self.run.batches)
        except ValueError as error:
            text = f"step {self.done + 1}: {error}"
            # With shards of their own, the other processes do not fail here, and would not save.
            alone = jax.process_count() > 1 and self.run.config.data.num_shards > 1
            if self.done > (self.last_saved or 0) and not alone:
                self.save()
                self.checkpoints.wait()
                text += f"; step {self.done} is saved"
            raise RunFailed(text) from error

    def compile(self, batch, tell: bool) -> Callable:
        """The compiled step; with `tell`, says what it will need."""
        A, B, T = batch["tokens"].shape
        self.progress.log(f"compiling the step for {A} × {B} sequences of {T} tokens")
        start = time.perf_counter()
        with record_choices() as choices:
            compiled = compile_step(self.run.spec, self.state, batch)
        for choice in choices:
            if choice not in self.said:
                for line in choice.lines():
                    self.progress.log(line)
                self.said.append(choice)
        needs = compiled.memory_analysis()
        offload = self.run.config.execution.offload
        if offload and not (needs and needs.host_temp_size_in_bytes):
            raise RunFailed(f"execution.offload={offload} moves nothing to host memory here")
        if not tell:
            return compiled
        self.progress.log(f"compiled in {time.perf_counter() - start:.0f} s")
        text = f"model: {self.parameters:,} parameters"
        if self.trained < self.parameters:
            share = self.trained / self.parameters
            text += f", {self.trained:,} of them trained ({share:.3%})"
        self.progress.log(text)
        if needs is not None:
            held, extra = needs.argument_size_in_bytes, needs.temp_size_in_bytes
            text = f"a step holds {held / 2**30:.2f} GiB and needs {extra / 2**30:.2f} GiB more"
            self.progress.log(f"{text} a device")
            if host := needs.host_argument_size_in_bytes:
                self.progress.log(f"a step holds {host / 2**30:.2f} GiB on the host")
        return compiled

    def flush(self) -> None:
        """Reads and reports the metrics of the step before.

        Raises:
          RunFailed: they are not finite.
        """
        if self.pending is None:
            return
        (done, metrics), self.pending = self.pending, None
        metrics = {name: float(x) for name, x in jax.device_get(metrics).items()}
        tokens, attended = int(metrics.pop("tokens")), metrics.pop("attended")
        self.throughput.step(tokens)
        self.tokens_seen += tokens
        config = self.run.config
        metrics |= {"train/tokens_seen": self.tokens_seen}
        metrics |= self.throughput.metrics(self.run.spec.steps - done)
        metrics |= self._hardware(metrics, tokens, attended)
        if done % config.logging.steps == 0 or done == self.run.spec.steps:
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
            what = f"loss {loss:.4g}, gradient norm {norm:.4g}"
            what += f", learning rate {metrics['train/learning_rate']:.4g}"
            what += "" if scale is None else f", loss scale {scale:.4g}"
            raise self.diverged(f"step {done}: {what}")
        self.last_loss = done, loss

    def diverged(self, what: str) -> RunFailed:
        """Returns the error for a loss that is not finite, with what to change."""
        good = f"step {self.last_saved}" if self.last_saved else "none yet"
        before = (
            "" if self.last_loss is None else " (step {} had loss {:.4f})".format(*self.last_loss)
        )
        return RunFailed(
            f"{what}{before}; last good checkpoint: {good} in {self.checkpoints.directory}; start "
            "again in another run_dir with a lower optimizer.learning_rate, more "
            "optimizer.warmup_steps or a lower optimizer.max_grad_norm"
        )

    def _hardware(self, metrics: dict, tokens: int, attended: float) -> dict[str, float]:
        """Peak memory of a device in GiB, and model FLOP/s over the devices' peak, where known."""
        devices = self.run.spec.mesh.devices.reshape(-1)
        found = {}
        stats = self.run.spec.mesh.local_devices[0].memory_stats()
        if stats and "peak_bytes_in_use" in stats:
            found["memory/peak_gib"] = stats["peak_bytes_in_use"] / 2**30
        peak = next((f for n, f in PEAK_FLOPS.items() if n in devices[0].device_kind), None)
        seconds = metrics.get("throughput/step_time")
        if peak and seconds:
            flops = model_flops(self.run.spec.model, self.matmul_parameters, tokens, attended)
            found["throughput/mfu"] = flops / seconds / (peak * len(devices))
        return found

    def eval(self) -> None:
        """Measures the held-out loss and answers held-out chats, also before the first step.

        Raises:
          RunFailed: the loss and a parameter are not finite.
        """
        if not len(self.run.held_out):
            return
        total, batches = self.run.eval_total, self.run.eval_total
        text = f"step {self.done}: evaluating on "
        if self.run.eval_is_partial:
            batches = self.run.config.train.eval_batches or total
            text += f"{batches:,} of {total:,} batches; train.eval_batches: null takes all"
        else:
            text += f"{total:,} batches"
        self.progress.log(text)
        loss = self.evaluate(
            self.state.model,
            self.run.eval_batches(),
            lambda n: self.progress.status(f"evaluating: batch {n:,} of {batches:,}"),
        )
        if self.done:
            self.best.add(self.done, loss)
        metrics = {"eval/loss": loss, "train/tokens_seen": self.tokens_seen}
        text = f"step {self.done}: eval/loss {loss:.4f}"
        if not math.isfinite(loss):
            self.writer.write(self.done, metrics)
            if not finite(self.state.model):
                raise self.diverged(f"step {self.done}: eval/loss {loss}, parameters not finite")
            text += ": not finite, while all parameters are; try another train.compute_dtype"
            self.progress.log(text)
            return
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
        data = self.run.batches.get_state()
        if len(data) > 1:
            data = self.run.batches.whole_state(all_gather_json(data))
        extra = {
            "data": data,
            "tokens_seen": self.tokens_seen,
            "rows": self.run.spec.global_batch_size,
            "steps": self.run.spec.steps,
            "config": to_yaml(self.run.config),
            "base": self.run.base,
            "best": dict(vars(self.best)),
        }
        best = self.best if self.run.config.checkpoint.keep_best else None
        self.checkpoints.save(self.done, checkpoint_view(self.run.spec, self.state), extra, best)
        self.last_saved = self.done
        self.throughput.resume()
