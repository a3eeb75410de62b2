"""Documents of a sequence, for operations that carry a state from token to token."""

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
