"""Sparse patterns in place of full attention, by name."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from bptjax.ops.mask import Mask

Type = Literal["window", "strided", "fixed", "bigbird"]
# A block mask has the square of this number of entries.
MOST_BLOCKS = 2**13
# Keys that a type has beside the number of local tokens or blocks.
KEYS = {
    "window": ("window", "global_tokens"),
    "strided": ("block_size", "local", "stride"),
    "fixed": ("block_size", "local", "stride"),
    "bigbird": ("block_size", "local", "global_blocks", "random"),
}


@dataclass(frozen=True)
class AttentionPattern:
    """Tokens that a token may attend to, where causality and documents allow it too. Tokens and
    blocks are counted from the start of the document, so in causal attention a packed document has
    the pattern that it has alone.

    Attributes:
      type: window: the nearest tokens and the first ones, which attend to every token (Beltagy et
        al. 2020, arXiv 2004.05150, Section 3.1). The others are patterns of blocks, all with the
        nearest blocks: strided adds every stride-th block counted back from the query's; fixed
        adds every stride-th block of the document (Child et al. 2019, arXiv 1904.10509, Section
        4.2); bigbird adds the first blocks, which attend to every block, and random ones (Zaheer et
        al. 2020, arXiv 2007.14062, Section 2).
      window: tokens, the query's own included.
      global_tokens: number of first tokens of a document.
      block_size: tokens in a block.
      local: nearest blocks, the query's own included.
      stride: distance of two blocks.
      global_blocks: number of first blocks.
      random: random blocks of each block of queries, the same in every layer and run.
    """

    type: Type
    window: int = 512
    global_tokens: int = 1
    block_size: int = 128
    local: int = 4
    stride: int = 8
    global_blocks: int = 1
    random: int = 3

    @classmethod
    def parse(cls, values: Any) -> "AttentionPattern":
        """Reads the keys of `model.attention_pattern`.

        Raises:
          ValueError: an unknown type, a key that the type does not have, or a value that is not a
            positive number.
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
            least = 0 if key in ("global_tokens", "global_blocks", "random") else 1
            if key != "type" and (type(value) is not int or not least <= value < 2**31):
                raise ValueError(f"{name}.{key}={value}: must be a whole number, at least {least}")
        return cls(**values)

    def apply(
        self,
        mask: Mask,
        positions: Int[Array | np.ndarray, "*B T"],
        k_positions: Int[Array | np.ndarray, "*B S"],
        length: int,
    ) -> Mask:
        """Returns the mask with this pattern.

        Args:
          positions, k_positions: of the queries and the keys, in their document.
          length: a number of tokens that no document exceeds.
        """
        if self.type == "window":
            mask = replace(mask, window=self.window)
            if not self.global_tokens:
                return mask
            return replace(
                mask,
                global_tokens=positions < self.global_tokens,
                k_global_tokens=k_positions < self.global_tokens,
            )
        blocks = self.blocks(self._count(length), mask.causal)
        return replace(
            mask,
            positions=positions,
            k_positions=k_positions,
            block_mask=blocks,
            block_size=self.block_size,
        )

    def keys(self, positions: Int[Array | np.ndarray, "*B T"], length: int) -> Any:
        """Returns the number of keys to which the tokens at these positions of a document attend
        in causal attention. No document exceeds `length` tokens."""
        xp = np if isinstance(positions, np.ndarray) else jnp
        keys = positions + 1
        if self.type == "window":
            far = xp.clip(keys - self.window, 0, self.global_tokens)
            return xp.where(
                positions < self.global_tokens, keys, xp.minimum(keys, self.window) + far
            )
        size = self.block_size
        blocks = xp.asarray(self.blocks(self._count(length), True).sum(1))
        return blocks[positions // size] * size - (size - 1 - positions % size)

    def _count(self, length: int) -> int:
        """Returns the number of blocks of `length` tokens.

        Raises:
          ValueError: there are more than `MOST_BLOCKS`.
        """
        if (count := -(-length // self.block_size)) > MOST_BLOCKS:
            raise ValueError(
                f"model.attention_pattern.block_size={self.block_size}: must be at least "
                f"{-(-length // MOST_BLOCKS)} with {length} tokens"
            )
        return count

    @lru_cache(maxsize=4)  # noqa: B019 (large, and few at a time)
    def blocks(self, count: int, causal: bool) -> Bool[np.ndarray, "n n"]:
        """Returns which of the first `count` blocks attends to which. The rows of a document do not
        depend on its length if the pattern is causal."""
        row, column = np.arange(count)[:, None], np.arange(count)[None]
        allowed = np.abs(row - column) < self.local
        if self.type == "strided":
            allowed |= (row - column) % self.stride == 0
        elif self.type == "fixed":
            allowed |= column % self.stride == self.stride - 1
        else:
            allowed |= (column < self.global_blocks) | (row < self.global_blocks)
            for i in range(count):
                # Seeded by row.
                among = np.random.default_rng(i).integers(
                    0, i + 1 if causal else count, self.random
                )
                allowed[i, among] = True
        return allowed & (column <= row) if causal else allowed
