"""Metadata of one architecture in a GGUF file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

# Largest integer of metadata, as llama.cpp reads it.
MOST = 2**31 - 1


@dataclass(frozen=True)
class Keys:
    """The metadata after the architecture's name, and the tensors, of a file.

    Attributes:
      arch: name of the architecture.
      metadata: values by whole key.
      shapes: shapes of the tensors by name, in the order of NumPy.
      read: reads a small tensor by name.
    """

    arch: str
    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]

    def get(self, key: str) -> Any:
        """Returns the value of a key, an array as a list; None if it is missing."""
        value = self.metadata.get(f"{self.arch}.{key}")
        return value.tolist() if isinstance(value, np.ndarray) else value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a number that is not negative.

        Raises:
          ValueError: the key is missing and has no default, or has another value.
        """
        value = self.get(key)
        value = default if value is None else value
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value <= MOST:
            raise ValueError(f"{self.arch}.{key}={value!r}: must be a number from 0 to {MOST}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not isinstance(value, int):
            raise ValueError(f"{self.arch}.{key}={value!r}: must be an integer")
        return value

    def per_layer(self, key: str) -> list[int]:
        """Returns an integer for each layer, from an array or from one value for all layers."""
        value, layers = self.get(key), self.integer("block_count")
        if not isinstance(value, list):
            return [self.integer(key)] * layers
        if len(value) != layers or any(type(x) is not int or not 0 <= x <= MOST for x in value):
            raise ValueError(
                f"{self.arch}.{key}: must have one integer for each of {layers} layers"
            )
        return value

    def has(self, tensor: str) -> bool:
        """Returns whether any layer has a tensor of this name, or the file has it."""
        return tensor in self.shapes or any(
            name.startswith("blk.") and name.split(".", 2)[2] == tensor for name in self.shapes
        )
