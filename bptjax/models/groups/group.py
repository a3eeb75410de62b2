"""The base class of the model's config groups, and bounds of values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, ClassVar

# Several times the sizes of the largest existing models.
MOST_SIZE, MOST_HEAD = 2**24, 2**16
# Limit of token counts, which may stand for "no limit".
UNLIMITED = 2**31 - 1


def integer(default: int | None, least: int = 1, most: int = MOST_SIZE) -> Any:
    """Declares an integer within these bounds."""
    return field(default=default, metadata=dict(bounds=(least, most)))


def number(default: float | None, sign: str = "not negative") -> Any:
    """Declares a finite number that is positive, not negative, or any if `sign` is empty."""
    return field(default=default, metadata=dict(sign=sign))


def check_bounds(config: Any, prefix: str) -> None:
    """Checks the fields of a dataclass that are declared with bounds.

    Args:
      prefix: precedes the field's name in errors.

    Raises:
      ValueError: a value is out of bounds.
    """
    for f in fields(config):
        value, key = getattr(config, f.name), f"{prefix}{f.name}"
        if not f.metadata or value is None:
            continue
        if (sign := f.metadata.get("sign")) is not None:
            wrong = value < 0 or value == 0 and sign == "positive"
            if not math.isfinite(value) or sign and wrong:
                raise ValueError(f"{key}={value}: must be finite{' and ' * bool(sign)}{sign}")
            continue
        least, most = f.metadata["bounds"]
        if value < least:
            raise ValueError(f"{key}={value}: must be at least {least}")
        if value > most:
            raise ValueError(f"{key}={value}: must be at most {most:,}")


def check_sandwich(model: Any, key: str) -> None:
    """Checks that a `ModelConfig` with `key` set has the layers that `key` requires: causal and
    sequential, with sandwich norms.

    Raises:
      ValueError: the model has other layers.
    """
    shape = model.norms.position, model.residual
    if shape != ("sandwich", "sequential") or not model.causal or not model.norms.first:
        raise ValueError(
            f"model.{key}: requires norms.position=sandwich, residual=sequential and causal=true"
        )


@dataclass(frozen=True)
class Group:
    """Config group of one part of the model. The defaults are the values without the part."""

    # Key that turns on an optional part.
    SWITCH: ClassVar[str] = ""

    @property
    def on(self) -> bool:
        """Whether the model has the part."""
        return not self.SWITCH or bool(getattr(self, self.SWITCH))

    @property
    def changed(self) -> Mapping[str, Any]:
        """Values that differ from their defaults."""
        usual = vars(type(self)())
        return {name: value for name, value in vars(self).items() if value != usual[name]}

    def check(self, model: Any) -> None:
        """Checks the values of a part that a `ModelConfig` has, after `check_bounds`.

        Raises:
          ValueError: values that exclude each other, or other choices of the model.
        """

    def share(self, path: str) -> Fraction:
        """Returns the share of the parameter at `path` that each token is multiplied by."""
        return Fraction(1)

    def entry(self, model: Any) -> int:
        """Returns the elements per vocabulary entry in the part's lookup tables."""
        return 0

    def widths(self, model: Any, tp: int = 1) -> Mapping[str, float]:
        """Returns the output elements per token of each matrix product of this token-mixing part on
        one of `tp` devices, by the name under which the output can be saved. `attended` is the
        input of the output projection; `gates` are not saved."""
        return {}

    def flops(self, model: Any) -> float:
        """Returns the FLOPs per token of a layer's forward pass, other than products with matrices
        and pairs of tokens."""
        return 0.0

    def saved(self, model: Any, size: int) -> Mapping[str, float]:
        """Returns the bytes per token of other savable results, by name.

        Args:
          size: bytes per element in the compute dtype.
        """
        return {}


@dataclass(frozen=True)
class MixerGroup(Group):
    """Config group of an attention-free kind of layer. The group is named like the kind in
    `layer_types`."""

    # Name of the part of `Layer` that replaces attention in such layers; PART_layer is the field
    # for their index in tensor names.
    PART: ClassVar[str]
