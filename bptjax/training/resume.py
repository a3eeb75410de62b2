"""Finds the start of a run: step 0 or its newest checkpoint."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from bptjax.data.changes import ChangedRecord
from bptjax.optim.schedule import learning_rate
from bptjax.parallel.distributed import (
    all_gather_json,
    describe_process,
    exit_with,
    raise_together,
)
from bptjax.run.checkpoint import Best, Checkpoints
from bptjax.run.heartbeat import beat
from bptjax.run.local_checkpoints import local_directory, make_local_directory
from bptjax.run.metrics import NullLogger, RunProgress
from bptjax.run.output import describe, plural
from bptjax.run.versions import describe_changes
from bptjax.training.guards import exclusive
from bptjax.training.setup import TrainingRun
from bptjax.training.spec import TrainSpec
from bptjax.training.spikes import Spikes
from bptjax.training.state import (
    TrainState,
    abstract_state,
    checkpoint_view,
    from_checkpoint,
    init_state,
)


class Start(NamedTuple):
    """The point from which a run starts.

    Attributes:
      step: 0 for a new run.
      state: `checkpoint_view` of the state; None for a new run.
      extra: values saved with the state.
    """

    step: int
    state: TrainState | None
    extra: dict[str, Any]


@contextmanager
def open_checkpoints(run: TrainingRun) -> Iterator[Checkpoints]:
    """Yields the checkpoints of a run, locks their directories, and finishes the last save at the
    end.

    Raises:
      ValueError: another process uses the run directory, or checkpoint.local_dir cannot be used.
    """
    config, first, local = run.config.checkpoint, jax.process_index() == 0, None
    several = jax.process_count() > 1
    with ExitStack() as stack:
        with raise_together():
            if first:
                stack.enter_context(exclusive(run.directory))
        if config.local_dir is not None:
            where = config.local_dir, run.directory, jax.process_index() if several else None
            local = local_directory(*where)
            with raise_together():
                make_local_directory(*where)
                stack.enter_context(exclusive(local))
        checkpoints = Checkpoints(
            run.directory,
            save_total_limit=config.save_total_limit,
            keep_every=config.keep_every,
            local=local,
            failed=_exit if several else None,
            gather=all_gather_json if several else None,
        )
        stack.callback(checkpoints.close)
        yield checkpoints


def _exit(error: Exception) -> None:
    """Ends this process after its part of a save has failed; the others then lose a peer."""
    exit_with(OSError(f"{describe_process(jax.process_index())}: {describe(error)}"))


def find_start(run: TrainingRun, checkpoints: Checkpoints) -> Start:
    """Restores the newest checkpoint, if any, and the position in the data.

    Raises:
      ValueError: the checkpoint has another configuration, global batch size, data or base model,
        or is beyond the last step.
    """
    config, spec = run.config, run.spec
    beat("looking for a checkpoint")
    restored = checkpoints.restore(checkpoint_view(spec, abstract_state(spec)))
    if restored is None:
        return Start(0, None, {})
    start = Start(*restored)
    if (saved := start.extra.get("rows", spec.global_batch_size)) != spec.global_batch_size:
        raise ValueError(
            f"global batch size: the checkpoint in {run.directory} has {saved}, this run "
            f"{spec.global_batch_size}; keep per_device_train_batch_size × "
            f"gradient_accumulation_steps × dp × fsdp × ep = {saved}"
        )
    if start.step > spec.steps:
        name = "max_steps" if config.train.epochs is None else "epochs"
        raise ValueError(
            f"train.{name}={getattr(config.train, name)}: must not end the run in "
            f"{run.directory} before its step {start.step}; set a larger number"
        )
    if run.base_fingerprint is not None and spec.pretrained is not None:
        spec.pretrained.check(start.extra.get("base"), run.directory)
    saved_size = start.extra.get("data_size", run.data_size)
    with _of_this_version(run):
        files, size = map(int, saved_size)
        int(start.extra.get("steps", spec.steps))
    if saved_size != run.data_size:
        raise ValueError(
            f"data: must be the {plural(files, 'file')} of {size:,} bytes of the run in "
            f"{run.directory}, not {run.data_size[0]:,} of {run.data_size[1]:,} bytes; restore the "
            "files, or choose another run_dir"
        )
    with _of_this_version(run):
        run.batches.set_state(start.extra["data"])
        Best.continued(config.checkpoint.best_metric, start.extra.get("best", {}))
        Spikes(config.train.on_spike, start.extra.get("spikes", {}))
    return start


@contextmanager
def _of_this_version(run: TrainingRun) -> Iterator[None]:
    """Refuses values saved by another version or edited by hand, which can raise any exception."""
    try:
        yield
    except ChangedRecord as error:
        raise ValueError(error) from error
    except Exception as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(
            f"the checkpoint in {run.directory}: must be of this version of bptjax ({reason}); "
            "finish the run with the version that saved it, or choose another run_dir"
        ) from error


def complete_state(
    run: TrainingRun, start: Start, progress: RunProgress | NullLogger
) -> TrainState:
    """Returns the state with which the run starts, and logs its origin."""
    spec, log = run.spec, progress.log
    if start.state is not None:
        log(f"resumed at step {start.step} of {spec.steps} in {run.directory}")
        if changes := describe_changes(start.extra.get("versions")):
            text = f"step {start.step} was saved by other versions, so the run is no longer "
            log(f"{text}bit-exact: {changes}")
        if (before := start.extra.get("steps", spec.steps)) != spec.steps:
            log(describe_extension(spec, start.step, before))
    if start.state is None or run.config.adapter.type != "none":
        name = run.config.model.name_or_path
        log("model: " + (f"loading {name}" if spec.pretrained else "initializing"))
    if start.state is None:
        return init_state(spec, show=progress.status)
    return from_checkpoint(spec, start.state, progress.status)


def describe_extension(spec: TrainSpec, start: int, before: int) -> str:
    """Formats how the new number of steps changes the learning rate of a resumed run."""
    old, new = (
        np.asarray(learning_rate(spec.config.optimizer, steps)(start)).item()
        for steps in (before, spec.steps)
    )
    text = f"{spec.steps:,} steps in place of {before:,}: the learning rate of step {start + 1} is "
    return text + (f"{new:.4g}, as before" if old == new else f"{new:.4g} in place of {old:.4g}")
