"""The base class of choices of a kind of layer that mixes tokens otherwise than attention does."""

from dataclasses import dataclass
from typing import ClassVar

from bptjax.models.groups.group import Group


@dataclass(frozen=True)
class MixerGroup(Group):
    """Choices of a kind of layer. The group has the name of the kind in `layer_types`."""

    # Name of the part of `Layer` that such layers have in place of attention; PART_layer is the
    # field of their numbers in names of tensors.
    PART: ClassVar[str]
