"""Sparse attention patterns, by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from bptjax.data.landmarks import Landmarks
from bptjax.ops.mask import Mask

Type = Literal["window", "strided", "fixed", "bigbird", "landmark"]
# Maximum number of blocks n in a sequence; a block mask is [n, n].
MOST_BLOCKS = 2**13
# Keys that each type accepts.
KEYS = {
    "window": ("window", "global_tokens", "global_markers"),
    "strided": ("block_size", "local", "stride"),
    "fixed": ("block_size", "local", "stride"),
    "bigbird": ("block_size", "local", "global_blocks", "random"),
    "landmark": ("block_size", "token"),
}


@dataclass(frozen=True)
class AttentionPattern:
    """A sparse choice of the tokens to attend to, besides causality and documents. Tokens and
    blocks are counted from the start of the document, so packing does not change the pattern.

    Attributes:
      type: window: the nearest tokens and global tokens, which attend to every token (Beltagy et
        al. 2020, arXiv 2004.05150, Section 3.1). strided, fixed and bigbird work on blocks and
        always include the nearest ones: strided adds every stride-th block counted back from the
        query's; fixed adds every stride-th block of the document (Child et al. 2019, arXiv
        1904.10509, Section 4.2); bigbird adds the first blocks, which attend to every block, and
        random ones (Zaheer et al. 2020, arXiv 2007.14062, Section 2). landmark replaces attention
        by `landmark_attention`; the last token of every block is the landmark.
      window: number of nearest tokens, including the query's.
      global_tokens: number of first tokens of a document that are global.
      global_markers: tokens, as text or as ids, that are global wherever they occur.
      block_size: tokens per block, including any landmark.
      local: number of nearest blocks, including the query's.
      stride: distance between the added blocks.
      global_blocks: number of first blocks.
      random: random earlier blocks per block of queries, the same in every layer and run. In
        encoders, the random earlier blocks also attend to the block that drew them.
      token: the landmark, as text or as an id.
    """

    type: Type
    window: int = 512
    global_tokens: int = 1
    global_markers: tuple[str | int, ...] = ()
    block_size: int = 128
    local: int = 4
    stride: int = 8
    global_blocks: int = 1
    random: int = 3
    token: str | int | None = None

    @classmethod
    def parse(cls, values: Any) -> "AttentionPattern":
        """Parses `model.attention_pattern`.

        Raises:
          ValueError: an unknown type, a key that the type does not accept, a value that is not a
            positive number, or a marker that is neither text nor an id.
        """
        name = "model.attention_pattern"
        if not isinstance(values, dict):
            raise ValueError(f"{name}={values}: must be keys and values, {{type: …}}")
        kind = values.get("type")
        if not isinstance(kind, str) or kind not in KEYS:
            raise ValueError(f"{name}.type={kind}: must be one of {', '.join(get_args(Type))}")
        for key, value in values.items():
            if key != "type" and key not in KEYS[kind]:
                known = ", ".join(KEYS[kind])
                raise ValueError(f"{name}.{key}: must be one of {known} with type={kind}")
            if key in ("type", "global_markers", "token"):
                continue
            least = 0 if key in ("global_tokens", "global_blocks", "random") else 1
            if type(value) is not int or not least <= value < 2**31:
                raise ValueError(f"{name}.{key}={value}: must be an integer, at least {least}")
        markers = values.get("global_markers", [])
        if not isinstance(markers, list | tuple) or not all(_is_token(x) for x in markers):
            raise ValueError(
                f"{name}.global_markers={markers}: must be a list of tokens, as text or as ids"
            )
        token, size = values.get("token"), values.get("block_size", cls.block_size)
        if kind == "landmark" and not _is_token(token):
            raise ValueError(f"{name}.token={token}: must be the landmark, as text or as an id")
        if kind == "landmark" and size < 2:
            raise ValueError(
                f"{name}.block_size={size}: must be at least 2, a token and its landmark"
            )
        return cls(**values | {"global_markers": tuple(markers)})

    @property
    def landmarks(self) -> Landmarks | None:
        """The landmark token and its block size; None without landmark attention.

        Raises:
          ValueError: the landmark is text; `find_tokens` converts text to ids.
        """
        if self.type != "landmark":
            return None
        self._check_ids([self.token])
        return Landmarks(self.block_size, int(self.token or 0))

    @property
    def landmark_block(self) -> int | None:
        """Tokens per block of landmark attention; None in other patterns."""
        return self.block_size if self.type == "landmark" else None

    def marked(self, tokens: Int[Array | np.ndarray, "B T"]) -> Bool[Array, "B T"] | None:
        """Returns a mask of the global markers; None if the pattern has none.

        Raises:
          ValueError: a marker is text; `find_tokens` converts text to ids.
        """
        if not self.global_markers:
            return None
        self._check_ids(self.global_markers)
        return jnp.isin(jnp.asarray(tokens), jnp.asarray(self.global_markers))

    def apply(
        self,
        mask: Mask,
        positions: Int[Array | np.ndarray, "*B T"],
        k_positions: Int[Array | np.ndarray, "*B S"],
        length: int,
        marked: Bool[Array, "B T"] | None = None,
        k_marked: Bool[Array, "B S"] | None = None,
    ) -> Mask:
        """Returns `mask` restricted by this pattern.

        Args:
          positions, k_positions: positions of queries and keys in their documents.
          length: upper bound on document length in tokens.
          marked, k_marked: results of `marked` for queries and keys; both or neither.
        """
        if self.type == "window":
            mask = replace(mask, window=self.window)
            if not self.global_tokens and marked is None:
                return mask
            return replace(
                mask,
                global_tokens=self._is_global(positions, marked),
                k_global_tokens=self._is_global(k_positions, k_marked),
            )
        if self.type == "landmark":
            return replace(mask, positions=positions, k_positions=k_positions)
        blocks = self.blocks(self._count(length), mask.causal)
        return replace(
            mask,
            positions=positions,
            k_positions=k_positions,
            block_mask=blocks,
            block_size=self.block_size,
        )

    def keys(
        self,
        positions: Int[Array | np.ndarray, "*B T"],
        length: int,
        marked: Bool[Array, "B T"] | None = None,
    ) -> Any:
        """Counts the keys that the tokens at these positions attend to under causal attention.

        Args:
          length: upper bound on document length in tokens.
          marked: result of `marked` for sequences `[B, T]` in order; if left out, markers do not
            count.
        """
        xp = np if isinstance(positions, np.ndarray) else jnp
        keys = positions + 1
        if marked is not None:
            is_global, end = self._is_global(positions, marked), jnp.arange(keys.shape[1])[None] + 1
            before = jnp.pad(jnp.cumsum(is_global, 1), ((0, 0), (1, 0)))
            # Count global tokens between the start of the document and the window.
            first, last = (jnp.maximum(end - x, 0) for x in (keys, jnp.minimum(keys, self.window)))
            first, last = (jnp.take_along_axis(before, x, 1) for x in (first, last))
            return jnp.where(is_global, keys, jnp.minimum(keys, self.window) + last - first)
        if self.type == "window":
            far = xp.clip(keys - self.window, 0, self.global_tokens)
            return xp.where(
                positions < self.global_tokens, keys, xp.minimum(keys, self.window) + far
            )
        if self.type == "landmark":
            return keys
        size = self.block_size
        blocks = xp.asarray(self.blocks(self._count(length), True).sum(1))
        return blocks[positions // size] * size - (size - 1 - positions % size)

    def _check_ids(self, tokens: Sequence[Any]) -> None:
        if texts := [x for x in tokens if isinstance(x, str)]:
            raise ValueError(
                f"model.attention_pattern: {texts}: must be token ids in a model without a "
                "tokenizer"
            )

    def _is_global(self, positions: Any, marked: Bool[Array, "B T"] | None) -> Any:
        first = positions < self.global_tokens
        return first if marked is None else marked | jnp.broadcast_to(first, marked.shape)

    def _count(self, length: int) -> int:
        """Returns the number of blocks in `length` tokens.

        Raises:
          ValueError: more than `MOST_BLOCKS` blocks.
        """
        if (count := -(-length // self.block_size)) > MOST_BLOCKS:
            raise ValueError(
                f"model.attention_pattern.block_size={self.block_size}: must be at least "
                f"{-(-length // MOST_BLOCKS)} with {length} tokens"
            )
        return count

    @lru_cache(maxsize=4)  # noqa: B019 (large, and few at a time)
    def blocks(self, count: int, causal: bool) -> Bool[np.ndarray, "n n"]:
        """Returns the block mask of the first `count` blocks. Entries do not depend on `count`, so
        padding and other documents do not change a document's pattern."""
        row, column = np.arange(count)[:, None], np.arange(count)[None]
        allowed = np.abs(row - column) < self.local
        if self.type == "strided":
            allowed |= (row - column) % self.stride == 0
        elif self.type == "fixed":
            allowed |= column % self.stride == self.stride - 1
        else:
            allowed |= (column < self.global_blocks) | (row < self.global_blocks)
            drawn = np.zeros_like(allowed)
            for i in range(count):
                drawn[i, np.random.default_rng(i).integers(0, i + 1, self.random)] = True
            allowed |= drawn | drawn.T
        return allowed & (column <= row) if causal else allowed


def find_tokens(values: dict[str, Any] | None, find: Callable[[str], int]) -> dict[str, Any] | None:
    """Returns `model.attention_pattern` with token texts replaced by their ids."""

    def resolved(x):
        if isinstance(x, list | tuple):
            return [resolved(one) for one in x]
        return find(x) if isinstance(x, str) else x

    return values and {
        key: resolved(x) if key in ("global_markers", "token") else x for key, x in values.items()
    }


def _is_token(value: Any) -> bool:
    return value != "" if isinstance(value, str) else type(value) is int and 0 <= value < 2**31
