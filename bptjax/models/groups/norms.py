"""Config group of norms."""

from dataclasses import dataclass
from typing import Any, Literal

from bptjax.models.groups.group import Group, number


@dataclass(frozen=True)
class NormsConfig(Group):
    """Norms.

    Attributes:
      type: RMS norm or layer norm.
      eps: constant added to the variance.
      position: position of the norms. pre normalizes the input of a sublayer; post normalizes the
        sum of its output and the residual; output normalizes its output before it is added;
        sandwich normalizes its input and its output.
      scale: norms have a learned scale.
      bias: norms have a learned bias.
      unit_offset: norms multiply by 1 + scale.
      first: the first layer normalizes the input of attention, as other layers do.
      final: normalizes the output of the last layer.
      embedding: normalizes the token embeddings.
    """

    type: Literal["rms", "layer"] = "rms"
    eps: float = number(1e-5)
    position: Literal["pre", "post", "output", "sandwich"] = "pre"
    scale: bool = True
    bias: bool = False
    unit_offset: bool = False
    first: bool = True
    final: bool = True
    embedding: bool = False

    def check(self, model: Any) -> None:
        if self.position != "pre" and (model.residual != "sequential" or model.residual_normed):
            raise ValueError(
                f"model.norms.position={self.position}: requires residual=sequential, not "
                f"{model.residual}, and residual_normed=false"
            )
        shape = self.position, model.residual
        if not self.first and (shape != ("pre", "sequential") or model.num_layers < 2):
            raise ValueError(
                "model.norms.first=false: requires norms.position=pre, residual=sequential and "
                f"at least 2 layers, not {shape[0]}, {shape[1]} and {model.num_layers}"
            )
