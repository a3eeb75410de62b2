"""Starts and lengths of packed documents, and of the parts of trees, which FlashAttention-4 reads
in place of a mask. Shapes: B sequences of T tokens, M documents."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from bptjax.ops.attention.library_kernels import document_starts

# Bounds on the number of documents that the kernels are called for, and tokens per document between
# the bounds. Each document costs empty blocks and up to 128 tokens of memory. With a thousand
# documents, Triton is faster.
DOCUMENTS, TOKENS_PER_DOCUMENT = (16, 256), 256


class Documents(NamedTuple):
    """Documents in the concatenated sequences.

    Attributes:
      fit: whether they are contiguous and fewer than M. If not, all lengths are 0.
      starts: 0 for an empty document, starts of the documents, and the end of the tokens. Empty
        documents at the end pad their number to M.
      lengths: lengths of the documents in tokens.
    """

    fit: Bool[Array, ""]
    starts: Int[Array, "M+1"]
    lengths: Int[Array, "M"]


class Trees(NamedTuple):
    """Trees of tokens in the concatenated sequences, each a prompt and its answers. Their attention
    is causal inside each chain, and whole from `later` to `prompts`.

    Attributes:
      fit: whether each tree branches at one token at most, and there are fewer chains than M. If
        not, all lengths are 0.
      chains: the prompt with its first answer, and each other answer: causal.
      later: the other answers of a tree, one document; they attend to all of `prompts`.
      prompts: the prompts of the trees in `later`, in the same order.
      real: tokens that are not padding.
      in_later, in_prompts: tokens of these documents.
    """

    fit: Bool[Array, ""]
    chains: Documents
    later: Documents
    prompts: Documents
    real: Bool[Array, "B T"]
    in_later: Bool[Array, "B T"]
    in_prompts: Bool[Array, "B T"]


def documents(segments: Int[Array, "B T"]) -> Documents:
    """Finds the documents: runs of equal segment numbers other than padding."""
    starts = document_starts(segments)
    # A document is contiguous if its number exceeds all earlier ones, as in packed sequences.
    fit = (~starts | (segments > _before(jax.lax.cummax(segments, 1)))).all()
    # A document goes on until another one, or padding, begins.
    change = starts | (segments == 0)
    return _listed(starts, _next(change), fit & (starts.sum() <= _most(segments)))


def trees(ends: Int[Array, "B T"]) -> Trees:
    """Finds the trees from the ends of their tokens, as in `Mask.ends`."""
    T = ends.shape[1]
    token = jnp.arange(T, dtype=jnp.int32)[None]
    real = ends > token
    first = real & (_before(jax.lax.cummax(ends, 1)) <= token)  # Of a tree.
    start = real & (_before(ends) <= token)  # Of a chain.
    chain = jnp.cumsum(start, 1)
    chain -= jax.lax.cummax(jnp.where(first, chain, 0), 1)  # Number in the tree.
    chain_end, tree_end = (_next(y | ~real) for y in (start, first))
    prompt = real & (chain == 0) & (ends == tree_end)
    second = start & (chain == 1)
    fit = (~real | prompt | (ends == chain_end)).all()
    fit &= (~real | start | (ends <= _before(ends))).all()
    fit &= start.sum() <= _most(ends)
    # The first and last token of the prompt in each token's tree, the last one plus 1.
    begin = jax.lax.cummax(jnp.where(first, token, 0), 1)
    stop = jax.lax.cummax(jnp.where(prompt, token + 1, 0), 1)
    return Trees(
        fit,
        _listed(start, chain_end, fit),
        _listed(second, tree_end, fit),
        _listed(second, stop, fit, begin),
        real,
        real & (chain > 0),
        prompt & (chain_end < tree_end),
    )


def _most(x: Array) -> int:
    least, most = DOCUMENTS
    return min(max(x.size // TOKENS_PER_DOCUMENT, least), most)


def _before(x: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns for each token the value of the token before it; 0 for the first."""
    return jnp.pad(x, ((0, 0), (1, 0)))[:, :-1]


def _next(at: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns for each token the index of the next one in its sequence that is marked, or T."""
    T = at.shape[1]
    place = jnp.where(at, jnp.arange(T, dtype=jnp.int32), T)
    following = jax.lax.cummin(place, 1, reverse=True)[:, 1:]
    return jnp.pad(following, ((0, 0), (0, 1)), constant_values=T)


def _listed(
    at: Bool[Array, "B T"],
    stops: Int[Array, "B T"],
    fit: Bool[Array, ""],
    begins: Int[Array, "B T"] | None = None,
) -> Documents:
    """Lists one document for each marked token. It begins there, or at the token's index in
    `begins`, and ends before the token's index in `stops`."""
    (B, T), size, count = at.shape, at.size, _most(at)
    row = jnp.arange(B, dtype=jnp.int32)[:, None] * T
    begins = jnp.arange(T, dtype=jnp.int32)[None] if begins is None else begins
    token = jnp.nonzero(at.reshape(-1), size=count, fill_value=size)[0]
    starts, ends = (
        jnp.broadcast_to(y + row, (B, T)).reshape(-1).at[token].get(mode="fill", fill_value=size)
        for y in (begins, stops)
    )
    lengths = jnp.where(fit, ends - starts, 0)
    # fa4-jax needs a document that starts at 0, where there may be padding.
    return Documents(fit, jnp.pad(starts, (1, 1)).at[-1].set(size), jnp.pad(lengths, (1, 0)))
