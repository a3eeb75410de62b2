"""Attention on a mesh: rows of the batch over `dp` and `fsdp`, heads over `tp`, tokens over `sp` by
one of several strategies, any implementation as the kernel of each device.
"""

import math
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float

from bptjax.ops.arguments import check_chunk
from bptjax.ops.attention import IMPLEMENTATIONS, choose, differentiable, make_score
from bptjax.ops.attention import attention as on_one_device
from bptjax.ops.attention.tile import Score
from bptjax.ops.softmax import Partial
from bptjax.parallel import gather, ring, ulysses, ulysses_ring
from bptjax.parallel.mesh import RULES
from bptjax.parallel.ulysses import BY_TOKEN

# Each is a pair like an implementation's, of what one device of the axis does, whose first argument
# is the implementation; `unsupported(heads, devices)` says what it refuses.
# `auto` takes the first that refuses nothing.
STRATEGIES: dict[str, ModuleType] = {
    "ulysses": ulysses,
    "ulysses_ring": ulysses_ring,
    "ring": ring,
    "gather": gather,
}

BATCH, SEQUENCE, HEADS = (RULES[name] for name in ("batch", "sequence", "heads"))
# What rows are cut over once each device's tokens are rows of their own.
BY_DEVICE = (*SEQUENCE, *BATCH)


def by_device(tree: Any) -> Any:
    """`[B, T, ...]` to `[sp · B, T / sp, ...]`: the tokens of each device are rows of their own,
    so that a loop over chunks of a row is each device's own."""
    sp = devices_of_a_row()

    def folded(x):
        x = x.reshape(x.shape[0], sp, x.shape[1] // sp, *x.shape[2:]).swapaxes(0, 1)
        # sp outermost: what a device has stays where it is.
        x = x.reshape(-1, *x.shape[2:])
        return _pinned(x, BY_DEVICE, None)

    return tree if sp == 1 else jax.tree.map(folded, tree)


def from_devices(tree: Any) -> Any:
    """The inverse of `by_device`."""
    sp = devices_of_a_row()

    def unfolded(x):
        x = x.reshape(sp, x.shape[0] // sp, *x.shape[1:]).swapaxes(0, 1)
        x = x.reshape(x.shape[0], -1, *x.shape[3:])
        return _pinned(x, BATCH, SEQUENCE)

    return tree if sp == 1 else jax.tree.map(unfolded, tree)


def _pinned(x: Array, *tokens: tuple[str, ...] | None) -> Array:
    """`[B, T, ...]` with these axes' tokens; what is behind, heads for one, stays as it is cut."""
    behind = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - 2)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*tokens, *behind))


def devices_of_a_row() -> int:
    """Those along sp, in the mesh set by `jax.set_mesh`."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape["sp"]


def choose_strategy(name: str, heads: int, devices: int) -> tuple[str, str]:
    """The strategy that `name` stands for on `devices` along sp, with that many query heads on each
    device of tp, and why.

    Raises:
      ValueError: there is no such strategy.
      NotImplementedError: the named one cannot cut these heads.
    """
    if name == "auto":
        why = []
        for name, strategy in STRATEGIES.items():
            if (reason := strategy.unsupported(heads, devices)) is None:
                return name, "; ".join(why) or "whole rows in the kernel, and the least to send"
            why.append(f"not {name}: {reason}")
    if name not in STRATEGIES:
        raise ValueError(f"sequence strategy {name!r}; there are auto, {', '.join(STRATEGIES)}")
    if reason := STRATEGIES[name].unsupported(heads, devices):
        raise NotImplementedError(f"sequence strategy {name!r}: {reason}")
    return name, "named"


def groups(strategy: str, heads: int, devices: int) -> tuple[int, int]:
    """How many of the `devices` along sp exchange heads, and over how many groups of them tokens
    are then still cut: in `ring.zigzag` order, where that is more than one."""
    n = {"ulysses": devices, "ulysses_ring": math.gcd(heads, devices)}.get(strategy, 1)
    return n, devices // n


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    strategy: str = "auto",
    impl: str = "auto",
    q_chunk: int = 512,
    k_chunk: int = 512,
    offload: float = 0.0,
    **options: Any,
) -> Float[Array, "B T N H"]:
    """`ops.attention` on the mesh set by `jax.set_mesh`; without one, or on one device, itself.

    Args:
      strategy: how the sequence is cut, where sp > 1.
      impl, q_chunk, k_chunk, offload, options: as in `ops.attention`; the implementation is chosen
        for what each device gets.

    Raises:
      NotImplementedError: the strategy cannot cut these heads, or the implementation cannot honour
        the arguments.
      ValueError: as `ops.attention`; rows, tokens or heads that the mesh does not divide.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        chunks = dict(q_chunk=q_chunk, k_chunk=k_chunk)
        return on_one_device(q, k, v, impl=impl, offload=offload, **chunks, **options)
    check_chunk(q_chunk=q_chunk, k_chunk=k_chunk)
    score = make_score(q, k, v, **options)
    sizes = dict(mesh.shape)
    tp, sp = sizes["tp"], sizes["sp"]
    rows = sizes["dp"] * sizes["fsdp"]
    for what, size, devices in (
        ("rows", q.shape[0], rows),
        ("query heads", q.shape[2], tp),
        ("query tokens", q.shape[1], sp),
        ("key tokens", k.shape[1], sp),
    ):
        if size % devices:
            raise ValueError(f"{size} {what} do not divide among {devices} devices")
    strategy, _ = choose_strategy(strategy, q.shape[2] // tp, sp)
    return differentiable((OnMesh(strategy, impl), q_chunk, k_chunk, offload), q, k, v, score)


@dataclass(frozen=True)
class OnMesh:
    """A strategy and an implementation, as a pair over whole arrays."""

    strategy: str
    impl: str

    def forward(self, q: Array, k: Array, v: Array, score: Score, **chunks) -> Partial:
        return self._map("forward", (q, k, v), score, **chunks)

    def backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array,
        dout: Array,
        score: Score,
        **chunks,
    ) -> tuple[Array, Array, Array]:
        return self._map("backward", (q, k, v, out, lse, dout), score, **chunks)

    def _map(self, half: str, arrays: tuple[Array, ...], score: Score, **chunks) -> Any:
        sizes = jax.sharding.get_abstract_mesh().shape
        tp, sp = sizes["tp"], sizes["sp"]
        N, K = arrays[0].shape[2], arrays[1].shape[2]
        # Key heads that tp does not divide are whole on all of its devices.
        shared = K % tp != 0
        queries = PartitionSpec(BATCH, SEQUENCE, HEADS)
        keys = PartitionSpec(BATCH, SEQUENCE, None if shared else HEADS)
        whole = sp == 1 or self.strategy == "ulysses"
        full = score.mask.resolve(arrays[0].shape[1], arrays[1].shape[1])
        if not whole:
            # A part of a row has to say which.
            score = replace(score, mask=full)
        places = full.positions, full.k_positions
        arguments, specs = _arguments(score, known=whole)

        def local(arrays, arguments):
            q, k, v, *rest = arrays
            row, head = jax.lax.axis_index(BATCH) * q.shape[0], jax.lax.axis_index("tp")
            here = replace(_with(score, arguments), first_row=row, first_head=head * q.shape[2])
            mine = None
            if shared:
                # Those that this device's query heads read.
                several = 1 if tp % K == 0 else q.shape[2]
                mine = (head * q.shape[2] + jnp.arange(several)) // (N // K)
                k, v = (jnp.take(x, mine, axis=2) for x in (k, v))
            got = self._one_device(half, (q, k, v, *rest), here, sp, places, **chunks)
            if half == "forward" or mine is None:
                return tuple(got)
            dq, *others = got
            for i, x in enumerate(others):
                home = jnp.zeros((*x.shape[:2], K, x.shape[3]), jnp.float32)
                home = home.at[:, :, mine].add(x.astype(jnp.float32))
                others[i] = jax.lax.psum(home, "tp").astype(x.dtype)
            return dq, *others

        inputs = (queries, keys, keys, queries, queries, queries)[: len(arrays)]
        outputs = (queries, queries) if half == "forward" else (queries, keys, keys)
        mapped = jax.shard_map(local, in_specs=(inputs, specs), out_specs=outputs, check_vma=False)
        got = mapped(arrays, arguments)
        return Partial(*got) if half == "forward" else got

    def _one_device(
        self, half: str, arrays: tuple, score: Score, sp: int, places: tuple, **chunks
    ) -> Any:
        kernel = _Kernel(self.impl)
        if sp == 1:
            return getattr(kernel, half)(*arrays, score, **chunks)
        strategy = getattr(STRATEGIES[self.strategy], half)
        return strategy(kernel, *arrays, score, "sp", places, **chunks)


@dataclass(frozen=True)
class _Kernel:
    """The implementation that `impl` stands for, chosen by what it is given."""

    impl: str

    def forward(self, q, k, v, score, **chunks):
        name, _ = choose(self.impl, score, q, k)
        return IMPLEMENTATIONS[name].forward(q, k, v, score, **chunks)

    def backward(self, q, k, v, out, lse, dout, score, **chunks):
        name, _ = choose(self.impl, score, q, k)
        return IMPLEMENTATIONS[name].backward(q, k, v, out, lse, dout, score, **chunks)


def _arguments(score: Score, known: bool) -> tuple[dict[str, Any], dict[str, PartitionSpec]]:
    """The score's arrays by name, and how the mesh cuts them. Positions that kernels of whole rows
    may go on to have `known` while tracing are left out."""
    arrays, specs = {}, {}
    for name in BY_TOKEN:
        x = getattr(score.mask, name)
        if x is None or (known and x.ndim == 1 and isinstance(x, np.ndarray)):
            continue
        batch = [] if x.ndim == 1 else [BATCH if x.shape[0] > 1 else None]
        arrays[name], specs[name] = jnp.asarray(x), PartitionSpec(*batch, SEQUENCE)
    for name, x, spec in (
        ("alibi", score.alibi, PartitionSpec(HEADS)),
        ("dropout_key", score.dropout_key, PartitionSpec()),
    ):
        if x is not None:
            arrays[name], specs[name] = x, spec
    return arrays, specs


def _with(score: Score, arrays: dict[str, Any]) -> Score:
    of_mask = {name: x for name, x in arrays.items() if name in BY_TOKEN}
    others = {name: x for name, x in arrays.items() if name not in BY_TOKEN}
    return replace(score, mask=replace(score.mask, **of_mask), **others)
