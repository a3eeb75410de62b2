"""Learning-rate schedules: from a step to its learning rate."""

import math

import optax

from bptjax.optimizer import OptimizerConfig

# Default of decay_ratio.
DECAY_RATIO = 0.1


def phases(config: OptimizerConfig, steps: int) -> tuple[int, int]:
    """Returns the number of steps of the warm-up and of the decay in a run of `steps` steps.

    Raises:
      ValueError: the run is shorter.
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
    """Returns a share of the steps, rounded up; 0.07 × 100 is 7 despite its last bit."""
    return math.ceil(round(ratio * steps, 6))


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the function from a step, 0-based, to its learning rate, in a run of `steps` steps.

    Raises:
      ValueError: the warm-up, or the warm-up and the decay, are longer than the run.
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
    # The first step already moves: the rise ends at `peak` after `warmup` steps.
    rise = optax.linear_schedule(peak / warmup, peak, warmup - 1)
    return optax.join_schedules([rise, after], [warmup])


def describe_schedule(config: OptimizerConfig, steps: int) -> str:
    """Formats the schedule of a run, and its learning rate if the run is extended, for people.

    Raises:
      ValueError: as `learning_rate`.
    """
    peak, (warmup, decay) = config.known("learning_rate"), phases(config, steps)
    text = f"schedule: {config.lr_scheduler_type} over {steps:,} steps, learning rate {peak:g}"
    text += f", warm-up {warmup:,} steps" if warmup else ""
    if not decay:
        return f"{text}; extending the run later does not change the learning rate"
    text += f", decay to {peak * config.min_lr_ratio:g} in the last {decay:,}"
    if config.lr_scheduler_type == "wsd":
        return f"{text}; extending the run before the decay does not change the learning rate"
    return f"{text}; extending the run later makes the learning rate jump"
