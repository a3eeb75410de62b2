"""FLOPs of a step as counted for model FLOPs utilization; memory and utilization of devices."""

import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from bptjax.cost.devices import GIB, KINDS, kind_of
from bptjax.models.config import ModelConfig
from bptjax.ops.position import document_lengths
from bptjax.training.spec import TrainSpec
from bptjax.training.state import ParameterCounts, parameter_counts


def hardware_metrics(mesh: Mesh, flops: float, seconds: float | None) -> dict[str, float]:
    """Returns the peak memory of one device in GiB, and the share of the mesh's peak FLOP/s that a
    step of `flops` in `seconds` reaches. Leaves out each metric whose inputs are unknown."""
    found: dict[str, float] = {}
    stats = mesh.local_devices[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        found["memory/peak_gib"] = stats["peak_bytes_in_use"] / GIB
    kind = kind_of(mesh.devices.reshape(-1)[0].device_kind)
    if kind and seconds:
        found["throughput/mfu"] = flops / seconds / (KINDS[kind].flops * mesh.size)
    return found


def matmul_parameters(spec: TrainSpec) -> ParameterCounts:
    """Counts the parameters that a token is multiplied by. Look-up tables do not count: learned
    positions, per-layer embeddings, and the input embedding unless it is also the head. Experts
    count in proportion to routed tokens."""
    model = spec.model
    lookups = {"positions"} if model.tied_head else {"positions", "embedding"}

    def share(path):
        shares = (group.share(path) for group in model.groups.values())
        return math.prod(shares, start=Fraction(path not in lookups))

    return parameter_counts(spec, share)


def attended_pairs(
    model: ModelConfig,
    positions: Array,
    segments: Array,
    tokens: Array | None = None,
    order: np.ndarray | None = None,
) -> Array:
    """Returns the number of query-key pairs that the masks of all attention layers allow, float32:
    causal in decoders, within documents, and within each layer's window or pattern. Patterns of
    encoders count as full attention. If a layer's head size differs from head_dim, its pairs are
    scaled by the ratio, like their FLOPs.

    Args:
      tokens: token ids, which locate the markers of a pattern.
      order: position of each token in its sequence, if the tokens are in another order.
    """
    marked = None
    if tokens is not None and model.pattern is not None:
        marked = model.pattern.marked(tokens.reshape(-1, tokens.shape[-1]))
    positions, segments = (x.reshape(-1, x.shape[-1]) for x in (positions, segments))
    if marked is not None and order is not None:
        marked, positions, segments = (
            x[:, np.argsort(order)] for x in (marked, positions, segments)
        )
    pairs, after = jnp.zeros(()), None
    if not model.causal:
        after = document_lengths(positions, segments) - 1 - positions
    for (window, pattern), count in model.attended.items():
        keys = positions + 1 if window is None else jnp.minimum(positions + 1, window)
        if after is not None:
            keys += after if window is None else jnp.minimum(after, window - 1)
        elif pattern is not None:
            keys = pattern.keys(positions, positions.shape[1], marked)
        each = jnp.where(segments != 0, keys.astype(jnp.float32), 0.0).sum()
        pairs += count * each
    return pairs


def model_flops(
    model: ModelConfig,
    parameters: ParameterCounts,
    tokens: int,
    pairs: float,
    reference_passes: int = 0,
) -> float:
    """Returns the FLOPs of a step as counted for model FLOPs utilization (MFU): the forward pass
    and the gradients of activations and trained parameters, without recomputation, and forward
    passes of a reference.

    Args:
      parameters: result of `matmul_parameters`.
      tokens: number of tokens without padding.
      pairs: result of `attended_pairs`.

    Chowdhery et al. 2022, arXiv 2204.02311, Appendix B, but only with the pairs that the mask
    allows.
    """
    total, trained = parameters
    attention = (12.0 + 4.0 * reference_passes) * pairs * model.num_heads * model.H
    attention += (3.0 + reference_passes) * mixing_flops(model) * tokens
    return ((4.0 + 2.0 * reference_passes) * total + 2.0 * trained) * tokens + attention


def mixing_flops(model: ModelConfig) -> float:
    """Returns the forward FLOPs per token of all layers without attention, in addition to their
    matrix products."""
    return sum(len(layers) * group.flops(model) for layers, group in model.mixing)
