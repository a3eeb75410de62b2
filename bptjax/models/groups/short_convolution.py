"""Config group of layers with a short convolution."""

from dataclasses import dataclass
from typing import Any, ClassVar

from bptjax.models.groups.group import MOST_HEAD, MixerGroup, integer


@dataclass(frozen=True)
class ShortConvolutionConfig(MixerGroup):
    """Short convolution: a convolution of each channel between two gates.

    Attributes:
      size: tokens that the convolution covers; 0 without such layers.
    """

    PART: ClassVar[str] = "convolution"

    SWITCH: ClassVar[str] = "size"

    size: int = integer(0, 0, MOST_HEAD)

    def widths(self, model: Any, tp: int = 1) -> dict[str, int]:
        return dict.fromkeys(("key", "value", "attended", "gates"), model.hidden_size // tp)

    def flops(self, model: Any) -> float:
        return 2.0 * self.size * model.hidden_size
