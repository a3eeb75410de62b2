"""Config group of ALiBi."""

from dataclasses import dataclass

from bptjax.models.groups.group import Group, number


@dataclass(frozen=True)
class AlibiConfig(Group):
    """Slopes of ALiBi, for position_embedding=alibi.

    Attributes:
      scale: factor on the slopes.
      interleaved: order of the slopes if the number of heads is not a power of two. true takes
        every other slope of the next larger power, odd ones first.
    """

    scale: float = number(1.0, "positive")
    interleaved: bool = False
