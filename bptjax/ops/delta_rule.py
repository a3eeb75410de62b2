"""The gated delta rule: linear attention whose state forgets and corrects itself.

The state S of a head maps keys to values. Token t decays the state, and moves the value stored for
the token's key toward the token's value:

  S ← exp(g_t) · S
  S ← S + k_t u_tᵀ     with u_t = β_t (v_t - Sᵀ k_t)
  o_t = scale · Sᵀ q_t

In a chunk of tokens that starts with the state S, let d_ij be the decay from token j to token i,
and c_i the decay from the start of the chunk to token i. The writes u solve the triangular system

  u_i + β_i Σ_{j<i} d_ij (k_i·k_j) u_j = β_i (v_i - c_i Sᵀ k_i).

Its right-hand side is affine in S, so the systems of many chunks are solved at once before the loop
over the chunks, which has three matrix products per chunk. Where a document starts, d and c are
exactly 0, so finite values in one document never change a bit of another.

Yang et al. 2024, https://arxiv.org/abs/2412.06464, Section 3.3, and
https://arxiv.org/abs/2406.06484, Section 3.2 (there T is the inverse of the system).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.lax import Precision
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from bptjax.ops import delta_triton
from bptjax.ops.arguments import check_chunk
from bptjax.ops.choices import record
from bptjax.ops.chunks import join_chunks, split_chunks
from bptjax.ops.delta_triton import Shaped
from bptjax.ops.documents import check_previous, number_documents

# Names of the output and of the saved states. If a remat policy saves them, the rule does not run
# again.
RESIDUAL_NAMES = ("delta_rule_out", "delta_rule_states")
# Tokens per chunk, and chunks whose systems are solved at once. The forward pass saves the state
# before each such group.
CHUNK, GROUP = 64, 8


class _Inputs(NamedTuple):
    """Differentiable arrays `[B, T, heads, ...]`."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array


def gated_delta_rule(
    q: Float[Array, "B T K H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T N W"],
    g: Float[Array, "B T N"],
    beta: Float[Array, "B T N"],
    *,
    segments: Int[Array | np.ndarray, "B T"] | None = None,
    state: Float[Array, "B N H W"] | None = None,
    previous: Int[Array, "B"] | None = None,
    scale: float | None = None,
    chunk: int = CHUNK,
    impl: str = "auto",
) -> tuple[Float[Array, "B T N W"], Float[Array, "B N H W"]]:
    """Applies the gated delta rule in O(T) memory. Returns the output, in v's dtype, and the
    float32 state after the last token.

    `impl="auto"` takes the Triton kernels if they support the arguments and a chunk is full,
    otherwise `scan`, XLA's loop over the chunks; a named `impl` is used or raises.

    Value head n reads query and key head n // (N / K). The state, the decays and the systems are
    float32. With float32 q, products are float32. With a shorter q, `scan` uses the device's
    default precision, and the kernels round operands to q's dtype, and to 16 bits when they invert
    the systems. The caller normalizes q and k (`l2_norm`).

    The backward pass saves the inputs and one state per `GROUP` chunks. The kernels also save
    2 · CHUNK numbers in q's dtype per token and value head, which are cheap to recompute.

    Args:
      g: log of the decay, finite and at most 0.
      beta: share of the difference that is written, 0 to 1 (to 2 with negative eigenvalues).
      segments: document numbers, 0 for padding. The state starts at 0 in each document. Padding
        gives 0, and does not change the state. If left out, a sequence is one document.
      state: state before the first token; 0 if left out.
      previous: segment of the document that `state` belongs to, which may continue here; no other
        document reads the state. Required with segments and state.
      scale: factor on the output; H^-0.5 if left out.
      chunk: tokens per chunk; T need not be a multiple. The kernels always use `CHUNK`.

    Raises:
      NotImplementedError: the named implementation cannot honor the arguments.
      ValueError: mismatched shapes, N is not a multiple of K, or a chunk below 1; a state and
        segments without `previous`, or `previous` without segments; an unknown `impl`.
    """
    check_chunk(chunk=chunk)
    check_delta_rule(q, k, v, g, beta, state)
    check_previous(segments, previous, state)
    (B, T, _, H), (N, W) = q.shape, v.shape[2:]
    g, beta = g.astype(jnp.float32), beta.astype(jnp.float32)
    documents, padding = number_documents(B, T, segments, previous)
    if padding is not None:
        g, beta = (jnp.where(padding[..., None], 0.0, x) for x in (g, beta))
    if state is None:
        state = jnp.zeros((B, N, H, W))
    scale = H**-0.5 if scale is None else scale
    impl = choose(impl, q, k, v)
    chunk = CHUNK if impl == "triton" else min(chunk, T)
    inputs, width = _Inputs(q, k, v, g, beta), (0, -T % chunk)
    inputs = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), width] + [(0, 0)] * (x.ndim - 2)), inputs)
    documents = jnp.pad(documents, ((0, 0), width), mode="edge")
    out, end = _run(impl, scale, chunk, inputs, documents, state.astype(jnp.float32))
    out = out[:, :T]
    if padding is not None:
        out = jnp.where(padding[..., None, None], jnp.zeros((), out.dtype), out)
    return out, end


def choose(impl: str, q: Shaped, k: Shaped, v: Shaped) -> str:
    """Returns the implementation to use for `impl`, scan or triton. An open `record_choices`
    records it.

    Raises:
      ValueError: an unknown implementation.
      NotImplementedError: the named implementation cannot honor the arguments.
    """
    if impl not in ("auto", "scan", "triton"):
        raise ValueError(f"impl={impl!r}: must be one of auto, scan, triton")
    chosen, refusals = impl, {}
    if impl != "scan":
        reason = delta_triton.unsupported(q, k, v)
        if impl == "triton" and reason:
            raise NotImplementedError(f"gated delta rule {impl!r}: {reason}")
        if impl == "auto":
            if q.shape[1] < CHUNK:
                reason = reason or f"computes {CHUNK} tokens at once, and there are fewer"
            chosen, refusals = ("scan", {"triton": reason}) if reason else ("triton", {})
    record("gated delta rule", chosen, refusals)
    return chosen


def precision_of(dtype: DTypeLike) -> Precision:
    """Returns the precision of products of float32 operands, for q of this dtype."""
    return Precision.HIGHEST if dtype == jnp.float32 else Precision.DEFAULT


def check_delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array | None
) -> None:
    """Checks the shapes.

    Raises:
      ValueError: mismatched shapes, or an empty array.
    """
    if q.ndim != 4 or v.ndim != 4 or 0 in (*q.shape, *v.shape):
        raise ValueError(
            f"q {q.shape}, v {v.shape}: must be [batch, tokens, heads, head size], not empty"
        )
    (B, T, K, H), (N, W) = q.shape, v.shape[2:]
    for name, x, shape in (
        ("k", k, q.shape),
        ("v", v, (B, T, N, W)),
        ("g", g, (B, T, N)),
        ("beta", beta, (B, T, N)),
        ("state", state, (B, N, H, W)),
    ):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name}: must be {shape}, not {x.shape}")
    if N % K:
        raise ValueError(f"{N} value heads: must be a multiple of {K} key heads")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _run(impl, scale, chunk, inputs, documents, start):
    return _forward(impl, scale, chunk, inputs, documents, start)[0]


def _forward(impl, scale, chunk, inputs, documents, start):
    if impl == "triton":
        sizes = dict(scale=scale, chunk=chunk, group=GROUP)
        q, k, v, g, beta = inputs
        given = q, k, v, g, beta, documents
        out, end, states, systems = delta_triton.forward(*given, start, **sizes)
    else:
        out, end, states = _scan_forward(scale, chunk, inputs, documents, start)
        systems = ()
    out, states = map(checkpoint_name, (out, states), RESIDUAL_NAMES)
    return (out, end), (inputs, documents, states, systems)


def _backward(impl, scale, chunk, residuals, cotangents):
    (inputs, documents, states, systems), (dout, dend) = residuals, cotangents
    if impl == "triton":
        sizes = dict(scale=scale, chunk=chunk, group=GROUP)
        q, k, v, g, beta = inputs
        given = q, k, v, g, beta, documents
        dinputs, dstart = delta_triton.backward(*given, states, systems, dout, dend, **sizes)
        return _Inputs(*dinputs), None, dstart
    dinputs, dstart = _scan_backward(scale, chunk, inputs, documents, states, dout, dend)
    return dinputs, None, dstart


_run.defvjp(_forward, _backward)


def _scan_forward(scale, chunk, inputs, documents, start):
    """Returns the output, the last state, and the state before each group."""

    def visit(state, group):
        inputs, documents, before = group
        out, after = _group(inputs, documents, before, state, scale=scale, chunk=chunk)
        return after, (out, state)

    (B, T), (N, H, W), K = documents.shape, start.shape[1:], inputs.q.shape[2]
    start = start.reshape(B, K, N // K, H, W)
    end, (out, states) = jax.lax.scan(visit, start, _split(chunk, inputs, documents))
    return join_chunks(out, T), end.reshape(B, N, H, W), states


def _scan_backward(scale, chunk, inputs, documents, states, dout, dend):
    """Returns the gradients of the inputs and of the first state."""

    def visit(dafter, group):
        (inputs, documents, before), state, dout = group
        _, pull = jax.vjp(
            lambda inputs, state: _group(
                inputs, documents, before, state, scale=scale, chunk=chunk
            ),
            inputs,
            state,
        )
        dinputs, dstate = pull((dout, dafter))
        return dstate, dinputs

    T = documents.shape[1]
    groups = _split(chunk, inputs, documents), states, split_chunks(dout, _length(T, chunk))
    dstart, dinputs = jax.lax.scan(visit, dend.reshape(states.shape[1:]), groups, reverse=True)
    return jax.tree.map(lambda x: join_chunks(x, T), dinputs), dstart.reshape(dend.shape)


def _length(T: int, chunk: int) -> int:
    """Returns the tokens per group, chosen so that the last group needs little padding."""
    chunks = T // chunk
    return chunk * -(-chunks // -(-chunks // GROUP))


def _split(chunk: int, inputs: _Inputs, documents: Array) -> tuple[_Inputs, Array, Array]:
    """Splits the tokens into groups of chunks: inputs, each token's document, and the document of
    the token before it."""
    T = documents.shape[1]
    length = _length(T, chunk)
    # Padding joins the last document, so it does not change the state.
    documents = jnp.pad(documents, ((0, 0), (0, -T % length)), mode="edge")
    before = jnp.pad(documents, ((0, 0), (1, 0)))[:, :-1]
    inputs, documents, before = jax.tree.map(
        lambda x: split_chunks(x, length), (inputs, documents, before)
    )
    return inputs, documents, before


def _group(
    inputs: _Inputs,
    documents: Int[Array, "B T"],
    before: Int[Array, "B T"],
    state: Float[Array, "B K G H W"],
    *,
    scale: float,
    chunk: int,
) -> tuple[Float[Array, "B T N W"], Float[Array, "B K G H W"]]:
    """Returns the output of a group of full chunks, and the state after it."""
    dtype, (B, T, K, _) = inputs.v.dtype, inputs.q.shape
    precision = precision_of(inputs.q.dtype)
    multiply = partial(jnp.matmul, precision=precision)

    def by_head(x):
        """Reshapes `[B, T, heads, ...]` to float32 `[B, chunks, K, heads / K, chunk, ...]`."""
        x = x.reshape(B, -1, chunk, K, x.shape[2] // K, *x.shape[3:])
        return jnp.moveaxis(x, 2, 4).astype(jnp.float32)

    q, k, v, g, beta = (by_head(x) for x in inputs)
    documents = documents.reshape(B, -1, 1, 1, chunk)
    own = documents[..., :, None] == documents[..., None, :]
    carried = documents == before.reshape(B, -1, 1, 1, chunk)[..., :1]
    keys = k.mT
    # Leading axes as in the arrays that they multiply.
    lower, below = (np.tri(chunk, k=k, dtype=np.float32)[(None,) * 4] for k in (0, -1))
    # Sums over the tokens after j up to i. Differences of running sums would lose small decays
    # after a strong one, and make a document's decays depend on the documents before it.
    sums = jnp.matmul(lower, g[..., None] * below, precision=Precision.HIGHEST)
    decay = jnp.where(own & (lower > 0), jnp.exp(sums), 0.0)
    from_start = jnp.where(carried, jnp.exp(jnp.cumsum(g, -1)), 0.0)[..., None]

    system = beta[..., None] * decay * below * multiply(k, keys)
    right = beta[..., None] * jnp.concatenate([v, from_start * k], -1)
    solved = _solve(precision, system, right)
    writes, reads = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    to_end, state_decay = (decay[..., -1, :, None] * k).mT, from_start[..., -1:, :]

    def advance(state, chunk):
        writes, reads, to_end, state_decay = chunk
        writes = writes - multiply(reads, state)
        return state_decay * state + multiply(to_end, writes), (state, writes)

    chunks = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (writes, reads, to_end, state_decay))
    state, stacked = jax.lax.scan(advance, state, chunks)
    states, writes = (jnp.moveaxis(x, 0, 1) for x in stacked)
    out = multiply(from_start * q, states) + multiply(multiply(q, keys) * decay, writes)
    out = jnp.moveaxis(scale * out, 4, 2).reshape(B, T, -1, v.shape[-1])
    return out.astype(dtype), state


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _solve(precision, system, right):
    """Solves (1 + system) u = right for a strictly lower triangular system."""
    return jnp.matmul(_inverse(system), right, precision=precision)


def _solve_forward(precision, system, right):
    inverse = _inverse(system)
    solved = jnp.matmul(inverse, right, precision=precision)
    return solved, (inverse, solved)


def _solve_backward(precision, residuals, dsolved):
    inverse, solved = residuals
    dright = jnp.matmul(inverse.mT, dsolved, precision=precision)
    return -jnp.matmul(dright, solved.mT, precision=precision), dright


_solve.defvjp(_solve_forward, _solve_backward)


def _inverse(system: Float[Array, "*b C C"]) -> Float[Array, "*b C C"]:
    """Inverts 1 + system for a strictly lower triangular system. The inverse of the blocks (a 0; b
    c) is (a⁻¹ 0; -c⁻¹ b a⁻¹ c⁻¹).

    Matrix products only, and as stable as substitution. jaxlib's batched triangular solver waits
    for threads of the pool that it runs in: on CPUs, two solves at a time may deadlock.
    """
    size = system.shape[-1]
    if size == 1:
        return jnp.ones_like(system)
    if size % 2:
        padded = jnp.pad(system, ((0, 0),) * (system.ndim - 2) + ((0, 1), (0, 1)))
        return _inverse(padded)[..., :size, :size]
    half = size // 2
    first, second = _inverse(jnp.stack([system[..., :half, :half], system[..., half:, half:]]))
    multiply = partial(jnp.matmul, precision=Precision.HIGHEST)
    corner = -multiply(second, multiply(system[..., half:, :half], first))
    zeros = jnp.zeros_like(corner)
    upper = jnp.concatenate([first, zeros], -1)
    return jnp.concatenate([upper, jnp.concatenate([corner, second], -1)], -2)
