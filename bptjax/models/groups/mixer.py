"""The base class of choices of a kind of layer that mixes tokens otherwise than attention does."""

from dataclasses import dataclass
from typing import Any, ClassVar

from bptjax.models.groups.group import Group


@dataclass(frozen=True)
class MixerGroup(Group):
    """Choices of a kind of layer. The group has the name of the kind in `layer_types`."""

    # Name of the part of `Layer` that such layers have in place of attention; PART_layer is the
    # field of their numbers in names of tensors.
    PART: ClassVar[str]

    def widths(self, model: Any, tp: int = 1) -> dict[str, int]:
        """Returns the elements per token of the result of each matrix product on one of `tp`
        devices, by the name under which the result can be saved. `attended` is the input of the
        output projection; `gates` are not saved."""
        raise NotImplementedError

    def flops(self, model: Any) -> float:
        """Returns the FLOPs per token of the forward pass without products with matrices."""
        raise NotImplementedError

    def saved(self, size: int) -> dict[str, float]:
        """Returns the bytes per token of other results that can be saved, by name.

        Args:
          size: bytes of an element in the dtype of the computation.
        """
        return {}
