"""A sequence strategy with a kernel on each device, as a kernel itself."""

from dataclasses import dataclass

from jax import Array
from jaxtyping import Float

from bptjax.ops.attention.contract import (
    QKV,
    AttentionSpec,
    AttentionState,
    Kernel,
    SequenceStrategy,
    Shards,
)


@dataclass(frozen=True)
class StrategyKernel:
    """Attention from a device's queries to the keys of all shards."""

    strategy: SequenceStrategy
    kernel: Kernel
    shards: Shards

    def unsupported(self, x: QKV, spec: AttentionSpec) -> str | None:
        return self.kernel.unsupported(x, spec)

    def forward(self, x: QKV, spec: AttentionSpec) -> AttentionState:
        return self.strategy.forward(self.kernel, x, spec, self.shards)

    def backward(
        self, x: QKV, state: AttentionState, dout: Float[Array, "B T N H"], spec: AttentionSpec
    ) -> QKV:
        return self.strategy.backward(self.kernel, x, state, dout, spec, self.shards)
