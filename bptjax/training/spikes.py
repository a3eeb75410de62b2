"""Spikes of the loss and the gradient norm, and the batches that rollbacks skip."""

import math
import statistics
from collections import deque
from typing import Any

from bptjax.config import SpikeConfig
from bptjax.training.guards import RunFailed


class Spike(RunFailed):
    """A spike, which a rollback may undo.

    Attributes:
      step: step of the spike.
      cursor: position in the data after this step's batch.
    """

    def __init__(self, message: str, step: int, cursor: Any):
        super().__init__(message)
        self.step, self.cursor = step, cursor


class Spikes:
    """Recent losses and gradient norms, and the rollbacks so far. All processes see the same values
    and so decide alike.

    Attributes:
      rollbacks: number of rollbacks of the run.
      skipped: first and last batch of each skipped range, in the order of the data and counted from
        1. Without rollbacks, step n has batch n.
    """

    def __init__(self, config: SpikeConfig, saved: dict[str, Any]):
        """Continues from the `state()` of an earlier part of the run; empty for a new run."""
        self._config = config
        recent = saved.get("recent", {})
        self._recent = {
            name: deque(recent.get(name, ()), config.window) for name in ("loss", "gradient norm")
        }
        self.rollbacks: int = saved.get("rollbacks", 0)
        self.skipped: list[list[int]] = saved.get("skipped", [])

    @property
    def on(self) -> bool:
        """Whether finite values can be spikes, and rollbacks are counted."""
        return self._config.max_rollbacks > 0

    def metrics(self) -> dict[str, float]:
        return {"train/rollbacks": self.rollbacks} if self.on else {}

    @property
    def may_roll_back(self) -> bool:
        return self.rollbacks < self._config.max_rollbacks

    def find(self, metrics: dict[str, float]) -> str:
        """Returns a description of metrics that are not finite or form a spike. If the metrics are
        normal, adds them to the recent metrics and returns an empty string."""
        loss, norm = metrics["train/loss"], metrics["train/grad_norm"]
        scale = metrics.get("train/loss_scale")
        # In float16 an overflow only lowers the loss scale, until the scale is too small.
        if (
            not math.isfinite(loss)
            or (scale is None and not math.isfinite(norm))
            or (scale and scale < 2**-24)
        ):
            values = f"loss {loss:.4g}, gradient norm {norm:.4g}"
            values += f", learning rate {metrics['train/learning_rate']:.4g}"
            return values + ("" if scale is None else f", loss scale {scale:.4g}")
        return self._find_outlier({"loss": loss, "gradient norm": norm})

    def _find_outlier(self, values: dict[str, float]) -> str:
        if not self.on:
            return ""
        for name, value in values.items():
            recent = self._recent[name]
            if len(recent) < self._config.window or not math.isfinite(value):
                continue
            median = statistics.median(recent)
            if value > self._config.factor * median:
                return (
                    f"{name} {value:.4g} is more than {self._config.factor:g} × {median:.4g}, the "
                    f"median of {len(recent)} steps"
                )
        for name, value in values.items():
            if math.isfinite(value):
                self._recent[name].append(value)
        return ""

    def batch(self, step: int) -> int:
        """Returns the number of the batch of a step after the last rollback."""
        return step + sum(last - first + 1 for first, last in self.skipped)

    def roll_back(self, before: "Spikes", step: int, spike: int) -> str:
        """Skips the batches after `step`, which was restored, up to the batch of the spike.
        Describes the skipped batches.

        Args:
          before: the spikes before the restore; `self` is from the checkpoint of `step`.
          spike: step of the spike.
        """
        first, last = self.batch(step + 1), before.batch(spike)
        self.skipped = [*self.skipped, [first, last]]
        self.rollbacks = before.rollbacks + 1
        return (
            f"rolling back to step {step}, without batches {first} to {last} of the data (rollback "
            f"{self.rollbacks} of {self._config.max_rollbacks})"
        )

    def state(self) -> dict[str, Any]:
        """Returns the state as JSON."""
        recent = {name: list(values) for name, values in self._recent.items()}
        return {"recent": recent, "rollbacks": self.rollbacks, "skipped": self.skipped}
