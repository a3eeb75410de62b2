"""How a model is computed: kernels, chunk sizes and saved activations. The config groups
`execution` and `memory`."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import checkpoint_policies as policies

from bptjax.models.config import ModelConfig
from bptjax.models.feed_forward import FeedForward
from bptjax.models.feed_forwards import FEED_FORWARDS
from bptjax.models.layer_backward import Backward, LayerRunner
from bptjax.models.layer_loops import scan_layers
from bptjax.models.linear import dequantize
from bptjax.models.mixers import MIXERS
from bptjax.ops import attention
from bptjax.ops.attention.contract import PREPARED
from bptjax.ops.checkpoint_names import ON_HOST, checkpoint_named
from bptjax.ops.stacked import save_all_but_slices

# Names of the results of attention and of attention-free layers.
RESIDUAL_NAMES = (
    *attention.RESIDUAL_NAMES,
    *(name for mixer in MIXERS.values() for name in mixer.RESIDUAL_NAMES),
)
# Names of the activations that can be saved: outputs of matrix products and attention.
NAMES = ("query", "key", "value", *RESIDUAL_NAMES, "attended", *FeedForward.RESIDUAL_NAMES)
# Activations that exist only if the feed-forward network runs in a single chunk.
UNCHUNKED = {"attended", *FeedForward.RESIDUAL_NAMES}
# Activations that each policy saves besides the input of a layer. None means no remat.
REMAT: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "dots": NAMES,
    "save_attention": RESIDUAL_NAMES,
    "full": (),
}


@dataclass(frozen=True)
class Execution:
    """Ways to compute a model, described by `ExecutionConfig`. Results differ only by rounding."""

    attention_implementation: str = "auto"
    schedule: Literal["split", "fused"] = "split"
    q_chunk: int = 512
    k_chunk: int = 512
    ffn_chunk: int = 2048
    offload: float = 0.0
    remat: str = "none"
    save: tuple[str, ...] = ()
    ce_chunk: int = 2048
    head_groups: int = 1

    def __post_init__(self):
        if not 0.0 <= self.offload <= 1.0:
            raise ValueError(f"execution.offload={self.offload}: must be in [0, 1]")
        for name in ("q_chunk", "k_chunk", "ffn_chunk", "ce_chunk", "head_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"execution.{name}={getattr(self, name)}: must be at least 1")
        if self.remat not in REMAT and not self.nested:
            raise ValueError(
                f"execution.remat={self.remat}: must be one of {', '.join(REMAT)}, nested(k) and "
                "nested_full(k) with k > 1"
            )
        for name in self.save:
            if name not in NAMES:
                raise ValueError(f"execution.save={name}: must be among {', '.join(NAMES)}")
        if self.head_groups > 1 and self.schedule == "fused":
            raise ValueError(
                f"execution.head_groups={self.head_groups}: must be 1 with schedule=fused, which "
                "computes all heads of one chunk of queries at a time"
            )
        if self.head_groups > 1 and self.remat == "none":
            raise ValueError(
                f"execution.head_groups={self.head_groups}: must be 1 with remat=none, which saves "
                "the queries, keys and values of all heads"
            )
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
        """The k of nested(k) and nested_full(k); None for other policies and k = 1."""
        match = re.fullmatch(r"nested(?:_full)?\((\d+)\)", self.remat)
        return int(match[1]) if match and int(match[1]) > 1 else None

    @property
    def policy(self) -> tuple[str, ...] | None:
        """Names of the activations of each layer that the policy saves; None without remat. With
        nested(k) and nested_full(k), while the backward pass of a group of layers runs."""
        if self.nested:
            return REMAT["full" if self.remat.startswith("nested_full") else "save_attention"]
        return REMAT[self.remat]

    @property
    def saved(self) -> tuple[str, ...]:
        """Names of the activations of each layer that are saved, as in `policy`."""
        return NAMES if self.policy is None else (*self.policy, *self.save)

    def check(self, model: ModelConfig) -> None:
        """Checks the policy against the model's layers.

        Raises:
          ValueError: as in `groups`, or the layers lack an activation to save.
        """
        later, k = model.later_layers, self.nested or 1
        if later and (later % k or model.num_layers % k):
            raise ValueError(
                f"execution.remat={self.remat}: k must divide both the {model.num_layers} layers "
                f"and the last {later}, which share the keys and values of earlier layers"
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
        """Returns the layer to run, with quantized kernels dequantized where that is cheaper."""
        # Dequantizes once for all chunks, and again in the backward pass. Without remat the results
        # of all layers would be saved, so each product dequantizes on the fly instead.
        return layer if self.remat == "none" else dequantize(layer, dtype)

    def scans_stack(self, kinds: Sequence[Any]) -> bool:
        """Returns whether one loop runs these layers, and all of them have one kind."""
        return self.nested is None and all(kind == kinds[0] for kind in kinds)

    def scan(
        self, step: Callable, carry: Any, kinds: Sequence[Any], stack: Any = None
    ) -> tuple[Any, Any]:
        """Runs `scan_layers` and saves the activations that the policy names.

        Args:
          stack: as for `scan_layers`, if `scans_stack`.

        Raises:
          ValueError: as in `groups`.
        """
        if self.remat == "none":
            checkpoint = partial(jax.checkpoint, policy=save_all_but_slices)
            return scan_layers(step, carry, kinds, stack=stack, checkpoint=checkpoint)
        if self.nested is None:
            checkpoint = self._checkpoint(self.policy or ())
            return scan_layers(step, carry, kinds, stack=stack, checkpoint=checkpoint)
        count, inner = self.groups(len(kinds)), self._checkpoint(self.policy or (), offload=False)
        size = len(kinds) // count

        def group(carry, index, _, kind):
            # Name it inside the scanned body: the policy does not see the name of a carry.
            x, *others = carry
            carry = checkpoint_named(x, "group_input", self.offload), *others
            return scan_layers(step, carry, kind, first=index * size, checkpoint=inner)

        groups = [tuple(kinds[i : i + size]) for i in range(0, len(kinds), size)]
        outer = self._checkpoint((), "group_input")
        carry, outputs = scan_layers(group, carry, groups, checkpoint=outer)
        return carry, jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), outputs)

    def run(
        self, runner: LayerRunner, carry: Any, kinds: Sequence[Any], first: int = 0
    ) -> tuple[Any, Any, Backward]:
        """Runs layers as `LayerRunner.run`, and saves the activations that the policy names.

        Raises:
          ValueError: as in `groups`.
          NotImplementedError: remat=none, whose saved activations include casts of parameters.
        """
        if self.remat == "none":
            raise NotImplementedError("execution.remat=none: saves no activations by name")
        if self.nested is None:
            checkpoint = self._checkpoint(self.policy or ())
            return runner.run(carry, kinds, first=first, checkpoint=checkpoint)
        size = len(kinds) // self.groups(len(kinds))
        inner = self._checkpoint(self.policy or (), offload=False)

        def save(carry):
            x, *others = carry
            split = round(self.offload * x.shape[2])
            host = jax.device_put(x[:, :, :split], jax.memory.Space.Host) if split else None
            return [host, x[:, :, split:], *others]

        def load(saved):
            host, rest, *others = saved
            if host is not None:
                rest = jnp.concatenate([jax.device_put(host, jax.memory.Space.Device), rest], 2)
            return rest, *others

        options = dict(size=size, save=save, load=load, checkpoint=inner)
        return runner.run_groups(carry, kinds, first=first, **options)

    def _checkpoint(
        self, saved: tuple[str, ...], given: str = "layer_input", offload: bool = True
    ) -> Callable[..., Callable]:
        """Returns `jax.checkpoint` that saves a function's input, named `given`, and the
        activations named `saved`."""
        names = [given, *saved, *self.save, PREPARED]
        if {*FeedForward.RESIDUAL_NAMES} & {*names}:
            names += [name for kind in FEED_FORWARDS.values() for name in kind.SAVED_WITH]
        on_host = [name + ON_HOST for name in names]
        # Without offload, activations named for host memory stay on the device.
        policy = policies.save_only_these_names(*names[1:], *on_host[1:])
        if offload and self.offload:
            # Save the input by name too: as a carry of the scan it would stay on the device.
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=names,
                names_which_can_be_offloaded=on_host,
                offload_src="device",
                offload_dst="pinned_host",
            )
        return partial(jax.checkpoint, policy=policy)


@dataclass(frozen=True)
class ExecutionConfig:
    """Implementations, chunk sizes and activation memory.

    On a GPU, keys that are not set, or all keys with `execution: auto`, take the fastest values
    that fit in memory. The run prints the values and writes them to its config. On a CPU they are
    save_attention, [], 2048, 2048, 0 and 1.

    Attributes:
      attention_implementation: fa4, cudnn, triton, scan, products, loop or reference. auto picks by
        device and supported features.
      schedule: split runs attention on the full sequence, then the feed-forward network in chunks;
        fused runs both on one chunk of queries at a time (Algorithm 1 of the paper).
      q_chunk: query tokens processed at a time by attention.
      k_chunk: key tokens processed at a time by attention.
      remat: activations of each layer that are saved for the backward pass. none saves all; dots
        saves the outputs of matrix products and attention; save_attention saves the output of
        attention, so that its kernel does not run again; full saves the input of the layer;
        nested(k) saves the input of every k-th layer and recomputes k layers at a time;
        nested_full(k) also recomputes their attention once more, one layer at a time.
      save: activations to save in addition, by name. query, key, value, attended (the stream after
        attention), gate, up. schedule=fused has only key and value. The last three need ffn_chunk
        of at least seq_len. With parallel.ep above 1, gate and up of experts are never saved.
      ffn_chunk: tokens processed at a time by the feed-forward network.
      ce_chunk: tokens per device whose logits exist at the same time.
      offload: share of the tokens whose saved activations move to host memory, 0 to 1.
      head_groups: groups of heads that attention computes one after the other, from the projections
        to the output projection. Must divide the key heads of a device. More groups take less
        memory per token; with remat=full or nested_full(k), the forward kernel then runs once more.
    """

    attention_implementation: str = "auto"
    schedule: Literal["split", "fused"] = "split"
    q_chunk: int = 512
    k_chunk: int = 512
    remat: str | None = None
    save: tuple[str, ...] | None = None
    ffn_chunk: int | None = None
    ce_chunk: int | None = None
    offload: float | None = None
    head_groups: int | None = None

    def __post_init__(self):
        self.complete()

    @property
    def unset(self) -> tuple[str, ...]:
        """Names of the keys that are not set."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is None)

    def complete(self, **values: Any) -> Execution:
        """Returns the execution; keys that are not set take these values, or else the defaults.

        Raises:
          ValueError: a value out of range, or values that exclude each other.
        """
        chosen: dict[str, Any] = {"remat": "save_attention"} | values
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return Execution(**chosen | {k: value for k, value in own.items() if value is not None})


@dataclass(frozen=True)
class MemoryConfig:
    """Device memory that a run may use.

    Attributes:
      budget_gib: peak memory of a training step in GiB per device. Keys of execution that are not
        set take the fastest values within it. If not set, all of a device's memory.
    """

    budget_gib: float | None = None

    def __post_init__(self):
        if self.budget_gib is not None and not 0 < self.budget_gib < math.inf:
            raise ValueError(f"memory.budget_gib={self.budget_gib}: must be finite and positive")
