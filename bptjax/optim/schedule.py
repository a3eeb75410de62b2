"""Learning-rate schedules: functions from a step to its learning rate."""

import math

import optax

from bptjax.optim.optimizer import OptimizerConfig

# Default of decay_ratio.
DECAY_RATIO = 0.1


def phases(config: OptimizerConfig, steps: int) -> tuple[int, int]:
    """Returns the number of warm-up steps and of decay steps in a run of `steps` steps.

    Raises:
      ValueError: the run is shorter than the warm-up, or than warm-up and decay together.
    """
    warmup, name = config.warmup_steps or 0, "warmup_steps"
    if config.warmup_ratio is not None:
        warmup, name = _share(config.warmup_ratio, steps), "warmup_ratio"
    if warmup > steps:
        raise ValueError(
            f"optimizer.{name}={getattr(config, name)}: the warm-up must end within the {steps} "
            "steps of the run; set fewer"
        )
    if config.lr_scheduler_type != "wsd":
        return warmup, 0 if config.lr_scheduler_type == "constant" else steps - warmup
    ratio = DECAY_RATIO if config.decay_ratio is None else config.decay_ratio
    decay = _share(ratio, steps)
    if warmup + decay > steps:
        raise ValueError(
            f"optimizer.decay_ratio={ratio}: {warmup} steps of warm-up and {decay} of decay must "
            f"fit into the {steps} steps of the run; lower optimizer.decay_ratio or {name}"
        )
    return warmup, decay


def _share(ratio: float, steps: int) -> int:
    """Returns a share of the steps, rounded up, ignoring floating-point errors: 0.07 × 100 is 7."""
    return math.ceil(round(ratio * steps, 6))


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the function from a 0-based step to its learning rate, in a run of `steps` steps.

    Raises:
      ValueError: as `phases`.
    """
    peak, (warmup, decay) = config.known("learning_rate"), phases(config, steps)
    floor = peak * config.min_lr_ratio
    after = optax.constant_schedule(peak)
    if config.lr_scheduler_type == "cosine" and decay:
        after = optax.cosine_decay_schedule(peak, decay, config.min_lr_ratio)
    elif decay:
        after = optax.linear_schedule(peak, floor, decay)
    if stable := steps - warmup - decay:
        after = optax.join_schedules([optax.constant_schedule(peak), after], [stable])
    if not warmup:
        return after
    # The first step's rate is not 0: the rate rises to `peak` over `warmup` steps.
    rise = optax.linear_schedule(peak / warmup, peak, warmup - 1)
    return optax.join_schedules([rise, after], [warmup])


def describe_schedule(config: OptimizerConfig, steps: int) -> list[str]:
    """Formats the schedule of a run, and the effect of extending the run later, as lines.

    Raises:
      ValueError: as `phases`.
    """
    peak, (warmup, decay) = config.known("learning_rate"), phases(config, steps)
    head = f"schedule: {config.lr_scheduler_type} over {steps:,} steps, learning rate {peak:g}"
    parts = [f"warm-up {warmup:,} steps"] * bool(warmup)
    if decay:
        parts.append(f"decay to {peak * config.min_lr_ratio:g} in the last {decay:,}")
    extension = "extending the run later does not change the learning rate"
    if decay and config.lr_scheduler_type == "wsd":
        extension = "extending the run before the decay does not change the learning rate"
    elif decay:
        extension = "extending the run later makes the learning rate jump"
    return [head, *(f"  {line}" for line in (", ".join(parts), extension) if line)]
