"""The loop of a run: train, evaluate, save, resume, stop."""

import math
import signal
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

from bptjax.config import to_yaml
from bptjax.cost.flops import hardware_metrics, matmul_parameters, model_flops
from bptjax.cost.step_profile import DIRECTORY, TRACED, ProfiledStep
from bptjax.parallel.distributed import (
    all_gather_json,
    all_reduce_max,
    exit_after_timeout,
    shutdown,
    translate_peer_errors,
)
from bptjax.run.checkpoint import Best, Checkpoints
from bptjax.run.heartbeat import AGAIN, beat
from bptjax.run.metrics import Throughput
from bptjax.run.output import plural
from bptjax.run.progress import Progress
from bptjax.run.versions import computing_versions
from bptjax.training.compilation import StepCompiler
from bptjax.training.eval_tasks import METRIC, measure
from bptjax.training.fewer_processes import begin
from bptjax.training.guards import (
    RunFailed,
    diverged,
    explain_out_of_memory,
    finite,
    stop_signals,
)
from bptjax.training.histogram import MARGINS
from bptjax.training.html_report import memory_of, reporting
from bptjax.training.logs import Logs, open_logs, with_repeated_evaluation
from bptjax.training.references import complete_references, load_references
from bptjax.training.report import export_adapter, log_summary, predict_answers, sample_text
from bptjax.training.resume import Start, complete_state, find_start, open_checkpoints
from bptjax.training.run_directory import write_config
from bptjax.training.setup import TrainingRun
from bptjax.training.slow_hosts import find_slow_hosts
from bptjax.training.spikes import Spike, Spikes
from bptjax.training.state import TrainState, checkpoint_view, split_trained
from bptjax.training.step import evaluator

# Stands for a failed data check among the signal numbers on which processes vote.
BAD_DATA = 1


@translate_peer_errors()
def train(run: TrainingRun, *, profile: bool = False) -> int:
    """Trains to the last step or until a signal. Returns the exit code: 0, 130 (Ctrl-C), 143
    (SIGTERM), or `AGAIN` if missing processes have returned.

    Args:
      profile: profile a step; see `ProfiledStep`.

    Raises:
      ValueError: the newest checkpoint has another configuration, global batch size or base model,
        or is beyond the last step.
      RunFailed: the loss is no longer finite, a record is bad, or memory ran out.
      PeerLost: another process has ended.
    """
    first = jax.process_index() == 0
    with ExitStack() as stack:
        stack.callback(run.batches.close)
        checkpoints = stack.enter_context(open_checkpoints(run))
        stack.push(exit_after_timeout)
        facts = stack.enter_context(reporting(run))
        stack.enter_context(explain_out_of_memory(run.spec))
        load_references(run)
        start = with_repeated_evaluation(run, find_start(run, checkpoints))
        if first:
            # Write only after every check: a refused start must not touch the run directory.
            write_config(run.directory, run.config)
        begin(run.spec, run.members)
        logs = stack.enter_context(open_logs(run, start))
        stopped = stack.enter_context(stop_signals())
        if first and start.step < run.spec.steps:
            stack.callback(run.check.stop)
            run.check.start(run.directory)
            for line in (*run.check.lines(), *run.notes):
                logs.progress.log(line)
        state = complete_state(run, start, logs.progress)
        if number := complete_references(run, state, start.step, logs.progress, stopped):
            code = 128 + number
        else:
            # All processes profile a step, or none.
            profile = any(all_gather_json(profile))
            loop = TrainLoop(run, checkpoints, logs, start, state, facts, profile)
            loop.train(stopped)
            _finish(loop)
            code = 128 + loop.stopped if loop.stopped else AGAIN if loop.returned else 0
    shutdown()
    return code


class TrainLoop:
    """The training loop. It reads the metrics of each step while the next step runs.

    Attributes:
      done: number of optimizer steps done.
      stopped: number of the signal that ended the run, or 0.
      returned: hosts of missing processes that have returned; empty if there are none.
      best: best evaluation.
    """

    def __init__(
        self,
        run: TrainingRun,
        checkpoints: Checkpoints,
        logs: Logs,
        start: Start,
        state: TrainState,
        facts: dict[str, Any],
        profile: bool = False,
    ):
        """Continues from the state of a start.

        Args:
          facts: facts for the report; see `reporting`.
          profile: profile the third step from here, or the last step of a shorter run.
        """
        self.run, self.checkpoints, self.logs = run, checkpoints, logs
        self.state, self.stopped, self.returned, self.facts = state, 0, "", facts
        self._continue(start)
        self._throughput = Throughput()
        self._evaluate = evaluator(run.spec)
        self._matmul_parameters = matmul_parameters(run.spec)
        self._compiler = StepCompiler(run.spec, logs.progress.log, facts.get("compile_seconds"))
        # The compiled step for each shape of the batch.
        self._compiled: dict[tuple[int, ...], Callable[..., Any]] = {}
        self._profiled = min(self.done + TRACED, run.spec.steps) if profile else None

    def _continue(self, start: Start) -> None:
        """Continues from the values saved with the state of a start or of a rollback."""
        self.done, extra = start.step, start.extra
        self.tokens_seen = extra.get("tokens_seen", 0)
        metric = self.run.config.checkpoint.best_metric
        self.best = Best.continued(metric, extra.get("best", {}))
        self.spikes = Spikes(self.run.config.train.on_spike, extra.get("spikes", {}))
        self._last_saved = self.done or None
        # The evaluation of this step failed before the save.
        self._unevaluated = extra.get("unevaluated", False)
        # Step, metrics, and position in the data after the step's batch.
        self._pending: tuple[int, dict[str, Any], Any] | None = None
        self._cursor: Any = None
        self._last_loss: tuple[int, float] | None = None

    def train(self, stopped: list[int]) -> None:
        """Trains to the last step, or until a process gets a signal in `stopped`, and saves the
        last state. Rolls back after spikes.

        Raises:
          RunFailed: the loss is no longer finite, or a record is bad.
        """
        finished = self.done >= self.run.spec.steps and not self._unevaluated
        if self.patience_is_spent or finished:
            return
        self._name_slow_hosts()
        if not self.run.spec.execution.offload:  # Else a save takes the memory of activations.
            self.checkpoints.prepare(checkpoint_view(self.run.spec, self.state))
        if self.done == 0:
            self._eval()
        while True:
            try:
                return self._train(stopped)
            except Spike as spike:
                self._roll_back(spike)

    def _train(self, stopped: list[int]) -> None:
        """Trains like `train`, without rollbacks. Processes learn of each other's signals one step
        late, so that no process waits."""
        config, spec = self.run.config, self.run.spec
        every = config.train.eval_steps
        votes: deque[Any] = deque([0] if jax.process_count() > 1 else [])
        if self._unevaluated:
            self._eval()
            self._unevaluated = False
            if config.checkpoint.keep_best and self.best.step == self.done:
                self._save()
        while self.done < spec.steps and not self.stopped and not self.patience_is_spent:
            if self.returned:
                break
            self._step()
            if self.done == spec.steps or (every and self.done % every == 0):
                self._flush()
                self._eval()
            best = config.checkpoint.keep_best and self.best.step == self.done
            if best or self.done % config.checkpoint.save_steps == 0:
                self._save()
                self._find_returned()
            bad_data = BAD_DATA if self.run.check.error else 0
            votes.append(all_reduce_max(max(stopped, default=bad_data), spec.mesh))
            self.stopped = int(votes.popleft())
        if self.stopped and self.stopped != BAD_DATA:
            name = signal.Signals(self.stopped).name
            self.logs.progress.log(f"{name}: saving step {self.done}, then stopping")
        if self.done > (self._last_saved or 0):
            self._save()
        self.checkpoints.wait()
        self.stopped = self.stopped or int(all_reduce_max(max(stopped, default=0), spec.mesh))
        if self.stopped == BAD_DATA:
            cause = self.run.check.error or "process 0 found a bad record"
            raise RunFailed(f"step {self.done}, saved: {cause}")

    @property
    def patience_is_spent(self) -> bool:
        """Whether the last train.early_stopping_patience evaluations brought no improvement."""
        patience = self.run.config.train.early_stopping_patience
        return 0 < patience <= self.best.since

    def _step(self) -> None:
        """Starts an optimizer step, and reads the metrics of the previous step."""
        if self._pending is None:  # Just back from evaluating or saving.
            beat("training", self.done)
        batch = self.run.spec.layout.put(
            self._next_batch(), self.run.config.train.gradient_accumulation_steps
        )
        shape = batch["tokens"].shape
        if shape not in self._compiled:
            self._flush()
            self._compiled[shape] = compiled = self._compiler.compile(self.state, batch)
            self.facts |= dict(
                kernels=self._compiler.kernels,
                compile_seconds=self._compiler.compilations.seconds,
                memory=memory_of(self.run, self.state, compiled),
            )
            if self._profiled and self.done < self._profiled:
                text = f"compiling the step again, for the profile of step {self._profiled}"
                with self._compiler.compilations.announce(text):
                    self._compiled[shape] = ProfiledStep(
                        compiled,
                        self.run.spec,
                        self.state,
                        batch,
                        self.run.directory / DIRECTORY,
                        self._profiled - self.done,
                        self.logs.progress.log,
                    )
            self._throughput.resume()
        profiled = self.done + 1 == self._profiled
        if profiled:
            self._flush()
        self.state, metrics = self._compiled[shape](self.state, batch)
        self._flush()
        if profiled:
            self._throughput.skip()
        self.done += 1
        cursor = self.run.batches.get_state() if self.spikes.on else None
        self._pending = (self.done, metrics, cursor)

    def _next_batch(self) -> dict[str, np.ndarray]:
        try:
            return next(self.run.batches)
        except (ValueError, OSError) as error:  # A bad record, template or disk.
            # With several data shards, other processes do not fail here and would not save.
            alone = jax.process_count() > 1 and self.run.config.data.num_shards > 1
            raise self._saved(f"step {self.done + 1}: {error}", alone) from error

    def _saved(self, text: str, alone: bool) -> RunFailed:
        """Returns the error of a run that cannot read its data. Saves the last step first, unless
        only this process failed."""
        if self.done > (self._last_saved or 0) and not alone:
            self._save()
            self.checkpoints.wait()
            text += f"; step {self.done} is saved"
        return RunFailed(text)

    def _flush(self) -> None:
        """Reads and logs the metrics of the previous step.

        Raises:
          RunFailed: the loss or the gradient is not finite; Spike if the run may roll back.
        """
        if self._pending is None:
            return
        (done, metrics, self._cursor), self._pending = self._pending, None
        metrics = {name: float(x) for name, x in jax.device_get(metrics).items()}
        beat("training", done)
        tokens, attended = int(metrics.pop("tokens")), metrics.pop("attended")
        self._throughput.step(tokens)
        self.tokens_seen += tokens
        config = self.run.config
        metrics |= {"train/tokens_seen": self.tokens_seen} | self.spikes.metrics()
        metrics |= self._throughput.metrics(self.run.spec.steps - done)
        passes = self.run.spec.objective.reference_passes
        flops = model_flops(self.run.spec.model, self._matmul_parameters, tokens, attended, passes)
        metrics |= hardware_metrics(self.run.spec.mesh, flops, metrics.get("throughput/step_time"))
        if done % config.logging.steps == 0 or done == self.run.spec.steps:
            self.logs.metrics.write(done, metrics)
        self.logs.progress.update(done, metrics)
        if spike := self.spikes.find(metrics):
            raise self._diverged(done, spike)
        self._last_loss = done, metrics["train/loss"]

    def _diverged(self, step: int, values: str) -> RunFailed:
        """Returns the error for a step's values that are not finite or a spike: a `Spike` if the
        run may roll back, else an error that names keys to change."""
        values = f"step {step}: {values}"
        if step and self.spikes.may_roll_back:
            return Spike(values, step, self._cursor)
        if self._last_loss is not None:
            values += " (step {} had loss {:.4f})".format(*self._last_loss)
        return diverged(values, self._last_saved, self.checkpoints.directory, self.spikes.on)

    def _roll_back(self, spike: Spike) -> None:
        """Restores the last checkpoint, or step 0 if there is none, and continues after the spike's
        batch. A run that is killed before its next checkpoint meets the spike again."""
        before = self.spikes
        self.checkpoints.wait()
        # Free this state, because two may not fit in memory. The running step finishes first.
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()
        start = find_start(self.run, self.checkpoints)
        self._continue(start)
        self.logs.progress.log(f"{spike}; {self.spikes.roll_back(before, start.step, spike.step)}")
        self.state = complete_state(self.run, start, self.logs.progress)
        self.run.batches.set_state(spike.cursor)
        self.logs.rewind(start.step, start.extra.get("logged", {}))
        self._throughput.resume()

    def _eval(self) -> None:
        """Measures the held-out loss, and lets the model answer held-out chats and tasks.

        Raises:
          RunFailed: the loss and a parameter are not finite, or held-out data cannot be read.
        """
        run, progress = self.run, self.logs.progress
        if not len(run.held_out) and not run.tasks:
            return
        metrics = self._losses() if len(run.held_out) else {}
        text = f"step {self.done}: "
        shown = {name: value for name, value in metrics.items() if name != MARGINS}
        text += ", ".join(f"{name} {value:.4f}" for name, value in shown.items())
        if is_finite := math.isfinite(loss := metrics.get("eval/loss", 0.0)):
            if run.eval_prompts:
                answers = predict_answers(run, self.state, progress.status)
                for answer in answers:
                    self.logs.predictions.write(self.done, answer)
                right = [answer["prediction"] == answer["reference"] for answer in answers]
                metrics["eval/exact_match"] = float(np.mean(right))
                answer = answers[0]
                text += f", eval/exact_match {metrics['eval/exact_match']:.3f}; for "
                text += f"{answer['reference'][:60]!r} it predicts {answer['prediction'][:60]!r}"
            if run.tasks:
                arguments = run.spec, self.state, run.tokenizer, run.tasks
                rows, scores = measure(*arguments, progress.status)
                for row in rows:
                    self.logs.tasks.write(self.done, row)
                text += ", " * bool(metrics) + f"{METRIC} {scores[METRIC]:.3f}"
                metrics |= scores
        else:
            text += ": not finite, but all parameters are; try another train.compute_dtype"
        if self.done:
            self.best.add(self.done, metrics.get(self.best.metric, math.nan))
        self.logs.metrics.write(self.done, metrics | {"train/tokens_seen": self.tokens_seen})
        if not is_finite and not finite(self.state.model):
            raise self._diverged(self.done, f"eval/loss {loss}, parameters not finite")
        progress.log(text)
        self._throughput.resume()

    def _losses(self) -> dict[str, Any]:
        """Returns the metrics of the held-out loss; see `evaluator`.

        Raises:
          RunFailed: held-out data cannot be read.
        """
        progress = self.logs.progress
        total, drawn = self.run.eval_total, self.run.evaluation.sample
        text = f"step {self.done}: evaluating on {plural(total, 'batch', 'es')}"
        if drawn is not None and not drawn.complete:
            text += f", a sample of {drawn.documents:,} of {len(self.run.held_out):,} held-out "
            text += "documents; train.eval_batches: null evaluates all"
        progress.log(text)
        try:
            with Progress("evaluating", total, progress.status) as shown:
                return self._evaluate(self.state.model, self.run.evaluation.sources, shown.advance)
        except (ValueError, OSError) as error:
            text, self._unevaluated = f"step {self.done}: evaluating: {error}", True
            raise self._saved(text, jax.process_count() > 1) from error

    def _name_slow_hosts(self) -> None:
        if text := find_slow_hosts(self.run.spec.mesh):
            self.logs.progress.log(text)

    def _find_returned(self) -> None:
        """Finds out whether missing processes have returned."""
        members = self.run.members
        if members is not None and members.missing and self.done < self.run.spec.steps:
            self.returned = all_gather_json(members.returned())[0]

    def _save(self) -> None:
        """Starts writing a checkpoint of the last step.

        Raises:
          RunFailed: the loss, the gradient or a trained parameter is not finite.
        """
        self._flush()
        beat(f"saving step {self.done}")
        self._name_slow_hosts()
        if not finite(split_trained(self.run.spec, self.state.model)[0]):
            raise self._diverged(self.done, "parameters not finite")
        data = self.run.batches.get_state()
        if len(data) > 1:
            data = self.run.batches.merge_states(all_gather_json(data))
        extra = {
            "data": data,
            "data_size": self.run.data_size,
            "tokens_seen": self.tokens_seen,
            "rows": self.run.spec.global_batch_size,
            "steps": self.run.spec.steps,
            "config": to_yaml(self.run.config),
            "base": self.run.base_fingerprint,
            "best": dict(vars(self.best)),
            "spikes": self.spikes.state(),
            "versions": computing_versions(),
            "logged": self.logs.sizes(),
            "unevaluated": self._unevaluated,
        }
        best = self.best if self.run.config.checkpoint.keep_best else None
        self.checkpoints.save(self.done, checkpoint_view(self.run.spec, self.state), extra, best)
        self._last_saved = self.done
        self._throughput.resume()


def _finish(loop: TrainLoop) -> None:
    """Logs why the run ended. Unless it was stopped, exports the adapter and logs a summary."""
    run, log, best = loop.run, loop.logs.progress.log, loop.best
    beat("finishing")
    end = f"finished {loop.done:,} steps"
    if loop.patience_is_spent:
        value = math.nan if best.value is None else best.value
        end = (
            f"early stopping at step {loop.done}: {best.metric} not "
            f"{'below' if best.lowest else 'above'} {value:.4f}, the value of "
            f"step {best.step}, in {best.since} evaluations"
        )
        log(end)
    if loop.stopped or loop.returned:
        where = loop.checkpoints.directory / str(loop.done)
        end = f"saved step {loop.done} in {where}; the same command continues from there"
        if not loop.stopped:
            end = f"with {loop.returned} again: going on from step {loop.done}"
        log(end)
        loop.facts["end"] = end
        return
    export_adapter(run, loop.state, log)
    text = sample_text(run, loop.state) if run.config.train.sample_tokens else ""
    if jax.process_index() == 0:
        results = log_summary(run, loop.state, text, log)
        loop.facts |= dict(end=end, results=results, sample=text)
