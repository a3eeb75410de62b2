"""Config group of mixtures of experts."""

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar, Literal

from bptjax.models.groups.group import Group, integer, number


@dataclass(frozen=True)
class ExpertsConfig(Group):
    """Mixture of experts, for feed_forward=experts.

    Attributes:
      count: number of experts; 0 for none.
      per_token: number of experts that a token is routed to.
      size: feed-forward width of an expert. If not set, intermediate_size.
      mlp_only_layers: indices, from 0, of the layers with an MLP of intermediate_size instead of
        experts.
      router_bias: the router has a bias.
      scores: softmax over the experts, or the sigmoid of each expert's logit.
      correction: a constant per expert, added to its score when the experts of a token are chosen,
        but not to its weight. It is not trained.
      groups: number of groups of neighboring experts. The experts of a token are in the
        groups_per_token groups whose two highest scores have the largest sums.
      groups_per_token: number of groups that the experts of a token are in.
      renormalized: the weights of a token's experts are divided by their sum.
      scale: factor on the weights of a token's experts.
      shared_size: width of an MLP whose output is added to the experts' for every token; 0 for
        none.
      shared_gate: multiplies the output of the shared expert by the sigmoid of the token's dot
        product with a learned vector.
      norms: router and experts each have a norm of the residual stream, and the outputs of experts
        and shared expert have norms; each expert has a learned factor on its weight.
      aux_loss: factor on the load-balancing loss of Switch Transformers, over all layers and the
        global batch. If not set, the checkpoint's factor if its output_router_logits is set, else
        0.
      z_loss: factor on the mean square of the log-sum-exp of the router's logits.
      glu_limit: clips the output of gate to at most this value, and the output of up to ± this
        value.
      glu_offset: constant added to up.
    """

    SWITCH: ClassVar[str] = "count"

    count: int = integer(0, 0, 2**16)
    per_token: int = integer(2)
    size: int | None = integer(None)
    mlp_only_layers: list[int] = field(default_factory=list)
    router_bias: bool = False
    scores: Literal["softmax", "sigmoid"] = "softmax"
    correction: bool = False
    groups: int = integer(1)
    groups_per_token: int = integer(1)
    renormalized: bool = True
    scale: float = number(1.0)
    shared_size: int = integer(0, 0)
    shared_gate: bool = False
    norms: bool = False
    aux_loss: float | None = number(None)
    z_loss: float = number(0.0)
    glu_limit: float | None = number(None)
    glu_offset: float = number(0.0, "")

    def check(self, model: Any) -> None:
        if not model.gated:
            raise ValueError("model.gated=false: must be true with feed_forward=experts")
        if self.shared_gate and not self.shared_size:
            raise ValueError("model.experts.shared_gate=true: requires shared_size")
        if self.norms and (not self.shared_size or model.norms.position != "sandwich"):
            raise ValueError(
                "model.experts.norms=true: requires shared_size and norms.position=sandwich"
            )
        if self.per_token > self.count:
            raise ValueError(
                f"model.experts.per_token={self.per_token}: must be at most count={self.count}"
            )
        groups, chosen = self.groups, self.groups_per_token
        size, uneven = divmod(self.count, groups)
        if uneven or chosen > groups or groups > 1 and size < 2:
            raise ValueError(
                f"model.experts.groups={groups}: must divide count={self.count} into groups of at "
                f"least 2, and be at least groups_per_token={chosen}"
            )
        if chosen * size < self.per_token:
            raise ValueError(
                f"model.experts.groups_per_token={chosen}: must be groups of at least "
                f"per_token={self.per_token} experts, not {chosen * size}"
            )
        own, last = set(self.mlp_only_layers), model.num_layers - 1
        if not own < set(range(last + 1)) or len(own) < len(self.mlp_only_layers):
            raise ValueError(
                f"model.experts.mlp_only_layers={self.mlp_only_layers}: must name some of the "
                f"layers 0 to {last} once, but not all"
            )

    def share(self, path: str) -> Fraction:
        own = path.startswith(tuple(f"layers.mlp.{name}." for name in ("gate", "up", "down")))
        return Fraction(self.per_token, self.count) if own and self.on else Fraction(1)
