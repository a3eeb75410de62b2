"""Attention on a mesh that shards batch, heads and tokens: one of several strategies shards the
tokens, with any kernel on each device."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from bptjax.ops.arguments import check_sinks
from bptjax.ops.attention import (
    KERNELS,
    attend,
    choose,
    differentiable,
    make_spec,
    triton_flash,
)
from bptjax.ops.attention.contract import (
    QKV,
    AttentionSpec,
    AttentionState,
    Kernel,
    SequenceStrategy,
    Shards,
)
from bptjax.ops.blockwise import blockwise
from bptjax.parallel import gather, ring, ulysses, ulysses_ring
from bptjax.parallel.mesh import RULES, data_shards, num_shards
from bptjax.parallel.strategy_kernel import StrategyKernel
from bptjax.parallel.ulysses import TOKEN_FIELDS

# `auto` takes the first strategy that can divide the heads.
STRATEGIES: dict[str, SequenceStrategy] = {
    "ulysses": ulysses,
    "ulysses_ring": ulysses_ring,
    "ring": ring,
    "gather": gather,
}

BATCH, SEQUENCE, HEADS = (RULES[name] for name in ("batch", "sequence", "heads"))
# Strategies number the shards of a sequence along a single mesh axis.
(SEQUENCE_AXIS,) = SEQUENCE
# Mesh axes of the batch dimension after fold_sequence_shards().
FOLDED_BATCH = (*SEQUENCE, *BATCH)


def fold_sequence_shards(tree: Any) -> Any:
    """Reshapes `[B, T, ...]` to `[sp · B, T / sp, ...]`: the tokens of each shard become separate
    sequences, so that a loop over chunks of a sequence stays on its device."""
    sp = sequence_shards()

    def fold(x):
        x = x.reshape(x.shape[0], sp, x.shape[1] // sp, *x.shape[2:]).swapaxes(0, 1)
        # sp is the outermost axis, so that no token moves to another device.
        x = x.reshape(-1, *x.shape[2:])
        return _constrain(x, FOLDED_BATCH, None)

    return tree if sp == 1 else jax.tree.map(fold, tree)


def unfold_sequence_shards(tree: Any) -> Any:
    """Inverts `fold_sequence_shards`."""
    sp = sequence_shards()

    def unfold(x):
        x = x.reshape(sp, x.shape[0] // sp, *x.shape[1:]).swapaxes(0, 1)
        x = x.reshape(x.shape[0], -1, *x.shape[3:])
        return _constrain(x, BATCH, SEQUENCE)

    return tree if sp == 1 else jax.tree.map(unfold, tree)


def in_chunks(f: Callable[..., Any], params: Any, x: Any, **options: Any) -> Any:
    """Computes `blockwise(f, params, x, **options)`. On a mesh, each device divides its own tokens
    into chunks.

    Args:
      x: pytree of `[B, T, ...]` arrays.

    Returns:
      what `blockwise` returns.
    """
    # The mesh may not evenly divide the tokens or sequences of a decoding step.
    if not divides(jax.tree.leaves(x)[0]):
        return blockwise(f, params, x, **options)
    y = blockwise(f, params, fold_sequence_shards(x), axes=FOLDED_BATCH, **options)
    if options.get("has_aux"):
        return unfold_sequence_shards(y[0]), y[1]
    return unfold_sequence_shards(y)


def _constrain(x: Array, *axes: tuple[str, ...] | None) -> Array:
    """Shards the first dimensions over these mesh axes, and leaves the rest to the compiler."""
    others = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - len(axes))
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes, *others))


def sequence_shards() -> int:
    """Returns the number of devices that share a sequence, in the mesh set by `jax.set_mesh`."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else num_shards(mesh, "sequence")


def tensor_shards() -> int:
    """Returns the number of devices that share the heads, in the mesh set by `jax.set_mesh`."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else num_shards(mesh, "heads")


def divides(x: Array) -> bool:
    """Returns whether the mesh set by `jax.set_mesh` divides the sequences and tokens of an array
    `[B, T, ...]`."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or not (x.shape[0] % data_shards(mesh) or x.shape[1] % sequence_shards())


def choose_strategy(name: str, heads: int, shards: int) -> tuple[str, str]:
    """Returns the strategy to use for `name` with `heads` query heads per device and `shards`
    devices along sp, and the reason.

    Raises:
      ValueError: an unknown strategy.
      NotImplementedError: the named strategy cannot divide the heads.
    """
    if name == "auto":
        reasons = []
        for name, strategy in STRATEGIES.items():
            if (reason := strategy.unsupported(heads, shards)) is None:
                least = "complete sequences in the kernel, and the least communication"
                return name, "; ".join(reasons) or least
            reasons.append(f"not {name}: {reason}")
    if name not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise ValueError(f"sequence strategy {name!r}: must be one of auto, {known}")
    if reason := STRATEGIES[name].unsupported(heads, shards):
        raise NotImplementedError(f"sequence strategy {name!r}: {reason}")
    return name, "named"


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    strategy: str = "auto",
    impl: str = "auto",
    sinks: Float[Array | np.ndarray, "N"] | None = None,
    offload: float = 0.0,
    state: AttentionState | None = None,
    **options: Any,
) -> Float[Array, "B T N H"]:
    """Computes `ops.attention` on the mesh set by `jax.set_mesh`, or directly on one device or
    without a mesh.

    Args:
      strategy: how attention communicates across the shards of a sequence if sp > 1.
      state: the result of `attention_state` on the same arguments, with which the kernel does not
        run forward.
      impl, sinks, offload, options: as in `ops.attention`; `auto` chooses for the arrays of one
        device.

    Raises:
      NotImplementedError: the strategy cannot divide the heads, or the kernel cannot honor the
        arguments.
      ValueError: as in `ops.attention`; the mesh does not divide the batch, the tokens or the
        heads.
    """
    x = QKV(q, k, v)
    kernel, spec = _kernel_and_spec(x, strategy, impl, sinks, **options)
    return differentiable(kernel, x, spec, sinks=sinks, offload=offload, state=state)


def attention_state(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    strategy: str = "auto",
    impl: str = "auto",
    sinks: Float[Array | np.ndarray, "N"] | None = None,
    **options: Any,
) -> AttentionState:
    """Computes the state of `attention`, without a gradient."""
    x = QKV(q, k, v)
    kernel, spec = _kernel_and_spec(x, strategy, impl, sinks, **options)
    return attend(kernel, x, spec, None if sinks is None else jnp.asarray(sinks, jnp.float32))


def _kernel_and_spec(
    x: QKV,
    strategy: str,
    impl: str,
    sinks: Array | np.ndarray | None,
    *,
    head_numbers: Int[Array, "N"] | None = None,
    **options: Any,
) -> tuple[Kernel, AttentionSpec]:
    """Returns the kernel for the mesh set by `jax.set_mesh`, and the checked options.

    Args:
      head_numbers: index of each query head among the heads of the layer, if these are only some
        of them; consecutive on each device.
    """
    q, k, _ = x
    spec = make_spec(x, **options)
    check_sinks(sinks, q.shape[2])
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        if head_numbers is not None:
            spec = replace(spec, first_head=head_numbers[0])
        return KERNELS[choose(impl, x, spec)[0]], spec
    if head_numbers is not None:
        spec = replace(spec, first_head=head_numbers)
    dp, tp, sp = (num_shards(mesh, axis) for axis in ("batch", "heads", "sequence"))
    for name, size, devices in (
        ("sequences", q.shape[0], dp),
        ("query heads", q.shape[2], tp),
        ("query tokens", q.shape[1], sp),
        ("key tokens", k.shape[1], sp),
    ):
        if size % devices:
            raise ValueError(f"{size} {name}: must be a multiple of {devices} devices")
    chosen, _ = choose_strategy(strategy, q.shape[2] // tp, sp)
    return ShardedAttention(chosen, impl), spec


@dataclass(frozen=True)
class ShardedAttention:
    """A kernel for arrays on a mesh: a sequence strategy, with a kernel on each device."""

    strategy: str
    impl: str

    def unsupported(self, x: QKV, spec: AttentionSpec) -> str | None:
        """Returns None: each device chooses a kernel for its own arrays."""
        return None

    def forward(self, x: QKV, spec: AttentionSpec) -> AttentionState:
        layout = _Layout(self, x, spec)

        def local(x, arrays):
            return layout.kernel().forward(layout.local_qkv(x), layout.local_spec(arrays, x))

        mapped = jax.shard_map(
            local,
            in_specs=(layout.qkv, layout.specs),
            out_specs=AttentionState(layout.queries, layout.queries),
            check_vma=False,
        )
        return mapped(x, layout.arrays)

    def backward(
        self, x: QKV, state: AttentionState, dout: Float[Array, "B T N H"], spec: AttentionSpec
    ) -> QKV:
        layout = _Layout(self, x, spec)

        def local(x, state, dout, arrays):
            spec = layout.local_spec(arrays, x)
            return layout.sum_shared(
                layout.kernel().backward(layout.local_qkv(x), state, dout, spec)
            )

        of_queries = AttentionState(layout.queries, layout.queries), layout.queries
        mapped = jax.shard_map(
            local,
            in_specs=(layout.qkv, *of_queries, layout.specs),
            out_specs=layout.qkv,
            check_vma=False,
        )
        return mapped(x, state, dout, layout.arrays)


class _Layout:
    """Division of the arrays of `ShardedAttention` over the mesh.

    Attributes:
      queries, qkv: partition specs of arrays `[B, T, N, ...]`, and of the QKV.
      arrays, specs: the spec's traced arrays, by name, and their partition specs.
    """

    def __init__(self, attention: ShardedAttention, x: QKV, spec: AttentionSpec):
        mesh = jax.sharding.get_abstract_mesh()
        self.tp, sp = num_shards(mesh, "heads"), num_shards(mesh, "sequence")
        (_, T, self.N, _), (_, S, self.K, _) = x.q.shape, x.k.shape
        # tp replicates key heads that it does not divide.
        self.shared_keys = self.K % self.tp != 0
        queries: Any = PartitionSpec(BATCH, SEQUENCE, HEADS)
        keys: Any = PartitionSpec(BATCH, SEQUENCE, None if self.shared_keys else HEADS)
        self.queries, self.qkv = queries, QKV(queries, keys, keys)
        resolved = spec.mask.resolve(T, S)
        self.shards = Shards(
            SEQUENCE_AXIS, sp, positions=(resolved.positions, resolved.k_positions)
        )
        self.strategy, self.impl = STRATEGIES[attention.strategy], attention.impl
        sharded = sp > 1 and self.strategy.split(self.N // self.tp, sp).tokens > 1
        # Inside the kernel a shard does not know its offset, so make absolute positions explicit.
        self.spec = replace(spec, mask=resolved) if sharded else spec
        self.arrays, self.specs = _traced_arrays(self.spec, keep_static=not sharded)

    def kernel(self) -> Kernel:
        """Returns the kernel over this device's arrays."""
        kernel = AutoKernel(self.impl)
        if self.shards.size == 1:
            return kernel
        return StrategyKernel(self.strategy, kernel, self.shards)

    def local_spec(self, arrays: dict[str, Any], x: QKV) -> AttentionSpec:
        """Returns the spec of this device's arrays."""
        batch, _, heads, _ = x.q.shape
        of_mask = {name: y for name, y in arrays.items() if name in TOKEN_FIELDS}
        others = {name: y for name, y in arrays.items() if name not in TOKEN_FIELDS}
        numbers = others.pop("first_head", None)
        first = jax.lax.axis_index(HEADS) * heads if numbers is None else numbers[0]
        return replace(
            self.spec,
            mask=replace(self.spec.mask, **of_mask),
            first_sequence=jax.lax.axis_index(BATCH) * batch,
            first_head=first,
            **others,
        )

    def local_qkv(self, x: QKV) -> QKV:
        """Selects the key heads that this device's query heads read."""
        if not self.shared_keys:
            return x
        heads = own_key_heads(self.N, self.K, self.tp)
        return QKV(x.q, jnp.take(x.k, heads, axis=2), jnp.take(x.v, heads, axis=2))

    def sum_shared(self, gradients: QKV) -> QKV:
        """Sums the gradients of replicated key heads over tp."""
        if not self.shared_keys:
            return gradients
        heads = own_key_heads(self.N, self.K, self.tp)

        def total(x):
            full = jnp.zeros((*x.shape[:2], self.K, x.shape[3]), jnp.float32)
            full = full.at[:, :, heads].add(x.astype(jnp.float32))
            return jax.lax.psum(full, HEADS).astype(x.dtype)

        return QKV(gradients.q, total(gradients.k), total(gradients.v))


def own_key_heads(N: int, K: int, tp: int) -> Int[Array, "R"]:
    """Returns which of K key heads, replicated over tp devices, this device's query heads read."""
    heads = N // tp
    count = 1 if tp % K == 0 else heads
    return (jax.lax.axis_index(HEADS) * heads + jnp.arange(count)) // (N // K)


@dataclass(frozen=True)
class AutoKernel:
    """The kernel for `impl`, chosen by the arguments of each call."""

    impl: str

    def _choose(self, x: QKV, spec: AttentionSpec) -> Kernel:
        return KERNELS[choose(self.impl, x, spec)[0]]

    def unsupported(self, x: QKV, spec: AttentionSpec) -> str | None:
        return None if self.impl == "auto" else KERNELS[self.impl].unsupported(x, spec)

    def forward(self, x: QKV, spec: AttentionSpec) -> AttentionState:
        return self._choose(x, spec).forward(x, spec)

    def forward_from(self, x: QKV, spec: AttentionSpec, first: Int[Array, ""]) -> AttentionState:
        """Attends to the sequences of `x.k` and `x.v` from `first`, as many as `x.q` has."""
        count = x.q.shape[0]
        own = [jax.lax.dynamic_slice_in_dim(y, first, count) for y in (x.k, x.v)]
        part = QKV(x.q, *own)
        kernel = self._choose(part, spec)
        if kernel is triton_flash:
            return triton_flash.forward(x, spec, first=first)
        return kernel.forward(part, spec)

    def backward(
        self, x: QKV, state: AttentionState, dout: Float[Array, "B T N H"], spec: AttentionSpec
    ) -> QKV:
        return self._choose(x, spec).backward(x, state, dout, spec)


def _traced_arrays(
    spec: AttentionSpec, keep_static: bool
) -> tuple[dict[str, Any], dict[str, PartitionSpec]]:
    """Returns the spec's arrays by name, and their partition specs. With `keep_static`, NumPy
    positions stay static, for kernels that get complete sequences."""
    arrays, specs = {}, {}
    for name in TOKEN_FIELDS:
        x = getattr(spec.mask, name)
        if x is None or (keep_static and x.ndim == 1 and isinstance(x, np.ndarray)):
            continue
        batch = [] if x.ndim == 1 else [BATCH if x.shape[0] > 1 else None]
        arrays[name], specs[name] = jnp.asarray(x), PartitionSpec(*batch, SEQUENCE)
    for name, x, partition in (
        ("alibi", spec.alibi, PartitionSpec(HEADS)),
        ("dropout_key", spec.dropout_key, PartitionSpec()),
        # Here one number per query head; each device keeps the first of its own.
        ("first_head", spec.first_head, PartitionSpec(HEADS)),
    ):
        if x is not None:
            arrays[name], specs[name] = x, partition
    return arrays, specs
