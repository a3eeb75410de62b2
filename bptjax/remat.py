"""Remat policies: the activations that are saved for the backward pass, and where."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import checkpoint_policies as policies

from bptjax.models.config import ModelConfig
from bptjax.models.feed_forward import FeedForward
from bptjax.models.feed_forwards import FEED_FORWARDS
from bptjax.models.layer_loops import Execution, scan_layers
from bptjax.models.mixers import MIXERS
from bptjax.ops import attention
from bptjax.ops.checkpoint_names import ON_HOST, checkpoint_named
from bptjax.quantized_kernels import dequantize_layer

# Names of the results of attention, and of other kinds of layers.
RESIDUAL_NAMES = (
    *attention.RESIDUAL_NAMES,
    *(name for mixer in MIXERS.values() for name in mixer.RESIDUAL_NAMES),
)
# Names of the activations of a layer that can be saved: outputs of matrix products and attention.
NAMES = ("query", "key", "value", *RESIDUAL_NAMES, "attended", *FeedForward.RESIDUAL_NAMES)
# Activations that exist only if the feed-forward network runs in a single chunk.
UNCHUNKED = {"attended", *FeedForward.RESIDUAL_NAMES}
# Activations that each policy saves in addition to the input of a layer. None means no remat.
REMAT: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "dots": NAMES,
    "save_attention": RESIDUAL_NAMES,
    "full": (),
}


@dataclass(frozen=True)
class TrainingExecution(Execution):
    """How a training step is computed; `ExecutionConfig` describes the keys."""

    remat: str = "save_attention"
    save: tuple[str, ...] = ()
    ce_chunk: int = 2048

    def __post_init__(self):
        super().__post_init__()
        if self.ce_chunk < 1:
            raise ValueError(f"execution.ce_chunk={self.ce_chunk}: must be at least 1")
        if self.remat not in REMAT and not self.nested:
            raise ValueError(
                f"execution.remat={self.remat}: must be one of {', '.join(REMAT)}, or nested(k) "
                "with k > 1"
            )
        for name in self.save:
            if name not in NAMES:
                raise ValueError(f"execution.save={name}: must be among {', '.join(NAMES)}")
        if self.offload and self.remat == "none":
            raise ValueError(
                f"execution.offload={self.offload}: must be 0 with remat=none, which names no "
                "activations"
            )
        if self.save and self.remat == "none":
            raise ValueError(
                f"execution.save={', '.join(self.save)}: must be empty with remat=none, which "
                "saves all activations"
            )

    @property
    def nested(self) -> int | None:
        """k of nested(k)."""
        found = re.fullmatch(r"nested\((\d+)\)", self.remat)
        return int(found[1]) if found and int(found[1]) > 1 else None

    def check(self, model: ModelConfig) -> None:
        """Checks the policy against the model's layers.

        Raises:
          ValueError: as `groups`, or a name to save that the layers do not have.
        """
        later, k = model.later_layers, self.nested or 1
        if later and (later % k or model.num_layers % k):
            raise ValueError(
                f"execution.remat={self.remat}: k must divide both the {model.num_layers} layers "
                f"and the last {later} of them, which have no keys of their own"
            )
        self.groups(model.num_layers)
        has = {"gate": model.gated, "attended": model.residual == "sequential"}
        for kind, mixer in MIXERS.items():
            has |= dict.fromkeys(mixer.RESIDUAL_NAMES, kind in model.mixers)
        for name in self.save:
            if not has.get(name, True):
                raise ValueError(f"execution.save={name}: must exist in the model's layers")

    def groups(self, layers: int) -> int:
        """Returns the number of groups into which nested(k) divides the layers.

        Raises:
          ValueError: k does not divide the number of layers.
        """
        if layers % (self.nested or 1):
            raise ValueError(f"execution.remat={self.remat}: k must divide the {layers} layers")
        return layers // (self.nested or 1)

    def prepare(self, layer: Any, dtype: jax.typing.DTypeLike) -> Any:
        # Dequantize once for all chunks, and again in the backward pass. Without remat, the results
        # of all layers would be saved for it, so each product dequantizes by itself.
        return layer if self.remat == "none" else dequantize_layer(layer, dtype)

    def scan(self, step: Callable, carry: Any, kinds: Sequence[Any]) -> tuple[Any, Any]:
        """Runs `scan_layers`, and saves the activations that the policy names.

        Raises:
          ValueError: as `groups`.
        """
        if self.remat == "none":
            return super().scan(step, carry, kinds)
        if self.nested is None:
            checkpoint = self._checkpoint(REMAT[self.remat] or ())
            return scan_layers(step, carry, kinds, checkpoint=checkpoint)
        count, inner = self.groups(len(kinds)), self._checkpoint(RESIDUAL_NAMES, offload=False)
        size = len(kinds) // count

        def group(carry, index, kind):
            # Named on the first line of the scanned body: the name of a carry is not seen.
            x, *others = carry
            carry = checkpoint_named(x, "group_input", self.offload), *others
            return scan_layers(step, carry, kind, first=index * size, checkpoint=inner)

        groups = [tuple(kinds[i : i + size]) for i in range(0, len(kinds), size)]
        outer = self._checkpoint((), "group_input")
        carry, outputs = scan_layers(group, carry, groups, checkpoint=outer)
        return carry, jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), outputs)

    def _checkpoint(
        self, saved: tuple[str, ...], given: str = "layer_input", offload: bool = True
    ) -> Callable[..., Callable]:
        """`jax.checkpoint` that saves the input of a function, whose name is `given`, and the
        activations named `saved`."""
        names = [given, *saved, *self.save]
        if {*FeedForward.RESIDUAL_NAMES} & {*names}:
            names += [name for kind in FEED_FORWARDS.values() for name in kind.SAVED_WITH]
        on_host = [name + ON_HOST for name in names]
        # Without offload, activations with a name for host memory are saved on the device.
        policy = policies.save_only_these_names(*names[1:], *on_host[1:])
        if offload and self.offload:
            # Save the input by its name too, because a carry of the scan would stay on the device.
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=names,
                names_which_can_be_offloaded=on_host,
                offload_src="device",
                offload_dst="pinned_host",
            )
        return partial(jax.checkpoint, policy=policy)
