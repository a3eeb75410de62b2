"""A decoder as a list of orthogonal choices. Model families are settings of it, and named
elsewhere.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModelConfig:
    """Architecture.

    Attributes:
      vocab_size: V; the tokenizer's if left out.
      hidden_size: D, width of the residual stream.
      intermediate_size: F, width of the feed-forward; 4·D if left out.
      num_layers: L.
      num_heads: N query heads.
      num_kv_heads: K key and value heads, a divisor of N; N if left out.
      head_dim: H; D / N if left out.
      norm: root-mean-square or layer norm.
      norm_eps: added to the variance.
      position: rotary, ALiBi, or a learned embedding of max_positions.
      rope_theta: base of the rotary frequencies.
      max_positions: tokens; needed for learned positions, which end there.
      activation: of the feed-forward; gelu_tanh is the tanh approximation.
      gated: the feed-forward is down(activation(gate(x)) · up(x)).
      bias: linear layers and layer norms have biases.
      tied_head: the output embedding is the input embedding.
      embedding_dropout, attention_dropout, residual_dropout: probabilities, in training.
      init_std: standard deviation of new weights; of those that write to the residual stream, over
        √(2·L).
    """

    vocab_size: int | None = None
    hidden_size: int = 256
    intermediate_size: int | None = None
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    head_dim: int | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    position: Literal["rope", "alibi", "learned"] = "rope"
    rope_theta: float = 10_000.0
    max_positions: int | None = None
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated: bool = True
    bias: bool = False
    tied_head: bool = True
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    init_std: float = 0.02

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"model.{name}={value} is not positive")
        if self.num_heads % self.K:
            raise ValueError(
                f"model.num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}"
            )
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} does not divide hidden_size={self.hidden_size}; "
                "choose another, or set head_dim"
            )
        if self.position == "rope" and self.H % 2:
            raise ValueError(f"model.head_dim={self.H} is odd; rotary positions turn pairs")
        if self.position == "learned" and self.max_positions is None:
            raise ValueError("model.position=learned needs model.max_positions")
        for name in ("embedding_dropout", "attention_dropout", "residual_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"model.{name}={getattr(self, name)} is not in [0, 1)")

    @property
    def V(self) -> int:
        if self.vocab_size is None:
            raise ValueError("model.vocab_size is not set")
        return self.vocab_size

    @property
    def F(self) -> int:
        return 4 * self.hidden_size if self.intermediate_size is None else self.intermediate_size

    @property
    def K(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def H(self) -> int:
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim


@dataclass(frozen=True)
class Execution:
    """How a model is computed: nothing here changes the result beyond rounding.

    Attributes:
      attention: implementation, by name or auto.
      schedule: split: attention over the whole sequence, then the feed-forward in chunks; fused:
        Algorithm 1, both for one block of queries at a time.
      q_chunk, k_chunk, ffn_chunk: tokens in a block.
    """

    attention: str = "auto"
    schedule: Literal["split", "fused"] = "split"
    q_chunk: int = 512
    k_chunk: int = 512
    ffn_chunk: int = 2048

    def __post_init__(self):
        for name in ("q_chunk", "k_chunk", "ffn_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"memory.{name}={getattr(self, name)} is not positive")
