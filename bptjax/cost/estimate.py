"""Time and memory of a training step, estimated from shapes.

The compiler knows the memory of a step exactly, but takes seconds to minutes per setting. These
estimates take microseconds. They order the settings that `auto` compiles, and `auto` corrects them
by the results.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bptjax.cost.devices import KINDS, kind_of
from bptjax.cost.flops import mixing_flops
from bptjax.cost.memory import absent_host_bytes, gradient_bytes, tree_bytes
from bptjax.models.execution import UNCHUNKED, Execution
from bptjax.models.feed_forward import FeedForward
from bptjax.models.feed_forwards import FEED_FORWARDS
from bptjax.ops import attention
from bptjax.parallel.mesh import num_shards
from bptjax.training.spec import TrainSpec
from bptjax.training.state import abstract_state, kernel_sizes, split_trained

# These constants are fitted to the steps in scripts/results/step_h200.json and qlora_h200.json.
# Memory traffic in elements per token and layer: STREAM_TRAFFIC · D for norms, rotary embeddings
# and residuals, FEED_FORWARD_TRAFFIC · F for activation functions.
STREAM_TRAFFIC, FEED_FORWARD_TRAFFIC = 80, 19
# Workspace of a layer in elements per token: STREAM_WORKSPACE · D + FEED_FORWARD_WORKSPACE · F.
STREAM_WORKSPACE, FEED_FORWARD_WORKSPACE = 12, 3.5
# In a mixture of experts, a token has a row in each of its experts. Memory traffic and workspace of
# a row, in elements / D, and the bytes that each chunk moves for each weight of all experts. Fitted
# to the steps in mixture_h200.json.
ROW_TRAFFIC, ROW_WORKSPACE, EXPERTS_TRAFFIC = 68, 5, 13
# Bytes moved by rounding to 8 bits, per element of the inputs and outputs of linear layers, in a
# compiled step of an 8B decoder.
FLOAT8_TRAFFIC = 4.4
# Heads' share of STREAM_WORKSPACE, which groups of heads divide, from compiled steps of an 8B
# decoder on 131,072 tokens, with projections in chunks. Traffic of each further group in elements
# per token and layer, / D: reads of the stream, and reads and writes of two sums; counted, not
# measured.
HEADS_WORKSPACE, GROUP_TRAFFIC = 9, 30
# Share of the loss's memory that is lost to the layers, because its buffers leave gaps.
FRAGMENTED = 0.02
# Products of a layer whose results no policy saves by name.
NEVER_SAVED = {"down", "gates"}
# FLOPs of attention, forward and backward, relative to the forward pass.
ATTENTION = 3.5
# FLOPs of a linear layer relative to its forward pass: trained, and frozen under an adapter.
TRAINED, FROZEN = 3.0, 2.25
# Bytes moved per byte of saved activations that are split between device and host, if the copies
# ran at the full bandwidth; XLA's concatenations are slower. Steps on an H200 imply about 30 for
# QLoRA and 5 to 25 for full fine-tuning.
SPLIT = 20
# Share of a transfer to host memory that computation does not hide, by the tokens of a sequence:
# the profile in int8_update_h200.jsonl, and steps with offload 1 in adapter_products_h200.jsonl.
EXPOSED = {8192: 0.45, 32_768: 0.35}
# Time of a step for optimizer states in host memory, relative to their transfer in one direction,
# from the int8 states of in_backward_h200.jsonl.
EXPOSED_STATES = 0.75


@dataclass(frozen=True)
class Estimate:
    """Estimate of a step on one device.

    Attributes:
      seconds: duration.
      flops: FLOPs of matrix products and attention, with recomputation.
      saved: bytes of saved activations in device memory.
      host: bytes of saved activations in host memory.
      workspace: bytes that a layer, or a chunk of the loss, needs while it runs.
    """

    seconds: float
    flops: float
    saved: int
    host: int
    workspace: int


class Estimator:
    """Estimates the steps of a run for any `execution`. Assumes one document per sequence.

    Attributes:
      held: bytes of parameters and optimizer state on a device; with float8, also of the linear
        layers in 8 bits, except with QLoRA.
      states_on_host: bytes per device of optimizer state in host memory.
      gradients: bytes of gradients on a device.
      tokens: tokens of a micro-batch on a device.
      sequence: tokens of a sequence on a device.
    """

    def __init__(self, spec: TrainSpec):
        self.model, self.size = spec.model, spec.compute_dtype.itemsize
        self.estimates: dict[Execution, Estimate] = {}  # A search asks for the same ones again.
        train, state = spec.config.train, abstract_state(spec)
        self.trained = tree_bytes(split_trained(spec, state.model)[0])
        absent = absent_host_bytes(spec)
        self.held = tree_bytes(state.model) + tree_bytes(state.opt_state) - absent
        self.states_on_host = tree_bytes(state.opt_state, host=True) + absent
        # Experts are not converted, and take most of a step.
        linear = FEED_FORWARDS[self.model.feed_forward].LINEAR
        self.float8 = train.linear == "float8" and linear
        self.quantized = spec.config.adapter.type == "qlora"
        # The quantized kernels of QLoRA are dequantized to 8 bits one layer at a time.
        if train.linear == "float8" and not self.quantized:
            sizes = kernel_sizes(spec, sharded=spec.config.parallel.zero_stage == 3)
            self.held += sum(math.prod(x) for x in sizes.values())
        self.frozen = spec.config.adapter.type != "none"
        self.reference_passes = spec.objective.reference_passes
        # Losses of single tokens compute the logits again if the head is trained.
        self.logits_again = spec.objective.token_losses and not self.frozen
        self.in_backward = spec.in_backward
        self.micro_batches = train.gradient_accumulation_steps
        self.gradients = gradient_bytes(spec)
        kind = kind_of(spec.mesh.devices.reshape(-1)[0].device_kind)
        self.measured = kind is not None and KINDS[kind].measured is not None
        # Only the ratios of the rates affect the order of settings, so an H200's rates serve for an
        # unknown kind.
        self.rates = KINDS[kind or "h200"].rates
        self.attention_rate = self.rates.attention(self.model.mean_head_dim)
        self.tp, self.ep = (num_shards(spec.mesh, axis) for axis in ("heads", "experts"))
        self.sequence = -(-train.seq_len // num_shards(spec.mesh, "sequence"))
        self.tokens = train.per_device_train_batch_size * self.sequence
        pairs, T = 0.0, train.seq_len
        for (window, pattern), count in self.model.attended.items():
            window = min(window or T, T)
            if pattern is None and self.model.causal:
                pairs += count * (window * T - window * window / 2)
            elif pattern is None:
                pairs += count * (T * T if window == T else (2 * T - window) * window)
            else:
                pairs += count * float(pattern.keys(np.arange(T), T).sum())
        self.exposed = float(np.interp(T, [*EXPOSED], [*EXPOSED.values()]))
        batch = self.tokens / train.seq_len
        # FLOPs of attention's forward pass, over all layers.
        self.attention = 4.0 * batch * pairs * self.model.num_heads * self.model.H / self.tp
        self.attention += mixing_flops(self.model) * self.tokens / self.tp

    @cached_property
    def products(self) -> dict[str, tuple[float, float]]:
        """Parameters on a device, and result in bytes per token, of each matrix product of a layer,
        by the name under which the result can be saved, if it can. `gates` covers the gates of
        attention and other results of mixers."""
        m, size, D = self.model, self.size, self.model.hidden_size
        F = m.active_F // self.tp
        # Means over the layers.
        mean: dict[str, float] = defaultdict(float)
        for layers, group in m.mixing:
            for name, width in group.widths(m, self.tp).items():
                mean[name] += len(layers) / m.num_layers * width
        sizes = {
            name: (D * width, size * (D if name == "attended" else width))
            for name, width in mean.items()
        }
        sizes |= {"up": (D * F, F * size), "down": (F * D, D * size)}
        return sizes | ({"gate": sizes["up"]} if m.gated else {})

    @cached_property
    def widths(self) -> dict[str, float]:
        """Bytes per token and layer of each activation that can be saved."""
        m = self.model
        widths = {name: x for name, (_, x) in self.products.items() if name not in NEVER_SAVED}
        if m.residual != "sequential":
            del widths["attended"]
        if self.ep > 1:
            widths = {k: x for k, x in widths.items() if k not in FeedForward.RESIDUAL_NAMES}
        for layers, group in m.mixing:
            for name, width in group.saved(m, self.size).items():
                widths[name] = len(layers) / m.num_layers * width / self.tp
        return widths

    def saved_names(self, execution: Execution) -> set[str]:
        """Returns the names of the activations that are saved in each layer."""
        names = set(self.widths) if execution.policy is None else {*execution.saved}
        if execution.ffn_chunk < self.sequence:
            names -= UNCHUNKED
        return names & self.widths.keys()

    def __call__(self, execution: Execution) -> Estimate:
        if execution not in self.estimates:
            self.estimates[execution] = self._estimate(execution)
        return self.estimates[execution]

    def _estimate(self, execution: Execution) -> Estimate:
        m, n, rates, L = self.model, self.tokens, self.rates, self.model.num_layers
        names, size, tp, nested = self.saved_names(execution), self.size, self.tp, execution.nested
        layer = n * (m.hidden_size * size + sum(self.widths[name] for name in names))
        # Nested policies save the inputs of groups, and the layers of one group at a time.
        outer = n * m.hidden_size * size * (L // nested) if nested else 0
        inner = layer * (nested or L)
        if self.in_backward:
            # Each layer processes all micro-batches before the next layer.
            outer, inner = outer * self.micro_batches, inner * self.micro_batches
        moved = int(execution.offload * (outer or inner))
        # Activations of the layer that runs are on the device, though the host saves them.
        moving = 0 if nested else int(execution.offload * (layer - n * m.hidden_size * size))

        def products(names):
            return 2.0 * n * L * sum(self.products[name][0] for name in names)

        classes = m.encoder.classes or m.V
        none = execution.remat == "none"
        every, kernel, vocab = products(self.products), self.attention, classes * m.E / tp
        again = self.products.keys() - names - (NEVER_SAVED if none else {"down"})
        passes = (FROZEN if self.frozen else TRAINED) + self.reference_passes
        layers = passes * every + products(again) + (every if nested else 0.0)
        head = (passes + self.logits_again) * 2.0 * n * vocab
        attending = ATTENTION * kernel + (0.0 if names >= {*attention.RESIDUAL_NAMES} else kernel)
        attending += (kernel if nested else 0.0) + self.reference_passes * kernel
        groups = execution.head_groups
        if groups > 1:
            # The backward pass of each group computes unsaved activations of its heads again.
            layers += products({"query", "key", "value"} & self.products.keys() - names)
            attending += 0.0 if names >= {*attention.RESIDUAL_NAMES} else kernel
        seconds = head / rates.products + attending / self.attention_rate
        seconds += layers / (rates.float8 if self.float8 else rates.products)

        passes = 1.0 + 0.3 * bool(again) + 0.4 * bool(nested) + 0.3 * self.reference_passes
        gates = (2 + m.gated) * m.active_F / tp
        stream = STREAM_TRAFFIC * m.hidden_size + FEED_FORWARD_TRAFFIC * gates
        traffic = n * L * size * stream * passes / 2
        traffic += n * L * size * GROUP_TRAFFIC * m.hidden_size * (groups - 1)
        chunks = math.ceil(self.sequence / execution.ffn_chunk)
        chunked = self.products.keys() & {*UNCHUNKED, "down"}
        # Count all experts on the device, not only routed ones.
        stored = m.stored_F / m.active_F / self.ep
        of_mlp = chunked & {"gate", "up", "down"}
        mlp = stored * sum(self.products[k][0] for k in of_mlp)
        weights = mlp + sum(self.products[k][0] for k in chunked - of_mlp)
        rows = m.experts.per_token if m.feed_forward == "experts" else 0
        if rows:
            traffic += size * ROW_TRAFFIC * n * L * rows * m.hidden_size
            traffic += EXPERTS_TRAFFIC * L * mlp * chunks
        # Each chunk reads and writes float32 gradients.
        if not self.frozen:
            traffic += 8 * vocab * math.ceil(n / execution.ce_chunk)
            traffic += 8 * L * weights * chunks if chunks > 1 else 0
        if self.float8:
            widths = ((p, width / size) for p, width in self.products.values())
            traffic += FLOAT8_TRAFFIC * n * L * sum(p / width + width for p, width in widths)
        if 0.0 < execution.offload < 1.0:
            traffic += SPLIT * (outer or inner)
        seconds += traffic / rates.bandwidth
        # One transfer runs during the forward pass, another during the backward pass.
        transfer = moved / rates.link
        seconds += 2 * self.exposed * transfer + 2 * max(0.0, transfer - seconds / 4)
        seconds *= self.micro_batches
        seconds += 2 * (self.trained + self.held) / rates.bandwidth
        seconds += EXPOSED_STATES * self.states_on_host / rates.link

        chunk = n * min(execution.ffn_chunk / self.sequence, 1.0)
        heads = max(m.hidden_size, m.num_heads * m.H // tp)
        stream = (STREAM_WORKSPACE - HEADS_WORKSPACE) * n * m.hidden_size
        stream += HEADS_WORKSPACE / groups * n * heads
        stream += FEED_FORWARD_WORKSPACE * chunk * m.active_F / tp
        stream += ROW_WORKSPACE * chunk * rows * m.hidden_size
        # Tokens of all devices that share the experts, their gradients, and a float32 sum.
        stream += (2 + 4 / size) * chunk * m.hidden_size * self.ep if self.ep > 1 else 0
        if self.quantized and not none:
            # `Execution.prepare` dequantizes a layer's kernels for all chunks.
            stream += mlp + sum(p for k, (p, _) in self.products.items() if k not in of_mlp)
        workspace = size * stream + (4 * weights if chunks > 1 and not self.frozen else 0)
        loss = 6 * min(execution.ce_chunk, n) * classes / tp + (0 if self.frozen else 4 * vocab)
        # The hidden states of a reference are beside those of the model.
        loss += self.reference_passes * n * m.E * size
        # Most gradients do not exist yet during the loss.
        workspace = max(workspace, loss - self.gradients) + FRAGMENTED * loss
        flops = self.micro_batches * (layers + head + attending)
        saved = int(outer + inner - moved) + moving
        return Estimate(seconds, flops, saved, moved, int(workspace))
