"""Documents of a sequence, for operations that carry a state from token to token."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int


def check_previous(segments: object, previous: object, carried: object) -> None:
    """Checks that a carried state comes with the document that it belongs to.

    Raises:
      ValueError: `carried` and segments without `previous`, or `previous` without segments.
    """
    if segments is None and previous is not None:
        raise ValueError("previous: must be left out without segments")
    if segments is not None and carried is not None and previous is None:
        raise ValueError("previous: must be set with segments; give the document of `carried`")


def number_documents(
    B: int,
    T: int,
    segments: Int[Array | np.ndarray, "B T"] | None,
    previous: Int[Array, "B"] | None,
) -> tuple[Int[Array, "{B} {T}"], Bool[Array, "{B} {T}"] | None]:
    """Returns each token's document as numbered by `count_documents`, and which tokens are padding;
    None if there is none.

    Args:
      segments: None if a sequence is one document.
      previous: None without a carried state.
    """
    if segments is None:
        return jnp.zeros((B, T), jnp.int32), None
    segments = jnp.asarray(segments)
    previous = jnp.zeros_like(segments[:, 0]) if previous is None else previous
    return count_documents(segments, previous), segments == 0


def count_documents(segments: Int[Array, "B T"], previous: Int[Array, "B"]) -> Int[Array, "B T"]:
    """Returns the number of documents that have begun up to and including each token. Tokens that
    continue the document `previous` have 0; padding (segment 0) counts as the document before it.
    """
    segments = jnp.concatenate([previous[:, None].astype(segments.dtype), segments], 1)
    indices = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
    # Index of the last token so far other than padding.
    last = jax.lax.cummax(jnp.where(segments != 0, indices, 0), axis=1)
    owners = jnp.take_along_axis(segments, last, 1)
    return jnp.cumsum(owners[:, 1:] != owners[:, :-1], axis=1, dtype=jnp.int32)


def last_segment(segments: Int[Array, "B T"], previous: Int[Array, "B"]) -> Int[Array, "B"]:
    """Returns the segment of the last token other than padding; `previous` if all are padding."""
    last = segments.shape[1] - 1 - jnp.argmax(segments[:, ::-1] != 0, axis=1, keepdims=True)
    last_segments = jnp.take_along_axis(segments, last, 1)[:, 0]
    return jnp.where(last_segments == 0, previous.astype(last_segments.dtype), last_segments)


class Chains(NamedTuple):
    """Trees of tokens with up to two branches, as documents whose tokens follow each other.

    Attributes:
      segments: numbers of documents, 0 for padding: each tree without its second branch is one.
      order: indices that move second branches before first ones.
      moved: numbers of documents in this order: each tree without its first branch is one.
      second: true for tokens of second branches.
      more: true for sequences that have a tree with more branches.
    """

    segments: Int[Array, "B T"]
    order: Int[Array, "B T"]
    moved: Int[Array, "B T"]
    second: Bool[Array, "B T"]
    more: Bool[Array, "B"]


def chains(ends: Int[Array, "B T"]) -> Chains:
    """Takes trees apart, given `Mask.ends` of tokens that are in the order of the sequence."""
    B, T = ends.shape
    padding, last = ends == 0, jax.lax.cummax(ends, axis=1)
    earlier = jnp.pad(last[:, :-1], ((0, 0), (1, 0)))
    tree = jnp.cumsum(~padding & (jnp.arange(T)[None] >= earlier), axis=1, dtype=jnp.int32)

    def after(branch):
        """Returns whether a token of this branch comes before, in the same tree."""
        return jax.lax.cummax(jnp.where(branch, tree, 0), axis=1) == tree

    # Only the last branch ends with its tree.
    first = ~padding & (ends < last)
    second = ~padding & ~first & after(first)
    key = jnp.where(padding, 2 * T + 2, 2 * tree + first.astype(jnp.int32))
    order = jnp.argsort(key, axis=1, stable=True)
    moved = jnp.take_along_axis(jnp.where(padding, 0, key), order, 1)
    others = first[:, 1:] & first[:, :-1] & (tree[:, 1:] == tree[:, :-1])
    others &= ends[:, 1:] != ends[:, :-1]
    more = others.any(1) | (first & after(second)).any(1)
    return Chains(
        jnp.where(padding, 0, 2 * tree + second.astype(jnp.int32)), order, moved, second, more
    )
