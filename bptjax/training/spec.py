"""The fixed parts of a run: config, model and mesh, with the arithmetic of batches and steps."""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax.numpy as jnp
from jax.sharding import Mesh

from bptjax.config import Config
from bptjax.data.encoding import Encoding
from bptjax.data.references import References
from bptjax.models.config import ModelConfig
from bptjax.models.execution import Execution
from bptjax.objectives import choose
from bptjax.objectives.objective import Objective
from bptjax.parallel.layout import Layout
from bptjax.parallel.mesh import data_shards, num_shards
from bptjax.weights.pretrained import Pretrained


def fit_to_images(config: Config, model: ModelConfig) -> Config:
    """Returns the config with the sequence length of a model of images: one image per sequence.
    Other configs are returned unchanged."""
    if model.encoder.image_size is None:
        return config
    train = replace(config.train, seq_len=model.encoder.patches + 1)
    return replace(config, train=train, data=replace(config.data, packing="none"))


@dataclass(frozen=True)
class TrainSpec:
    """A config with the model and the mesh that it trains on.

    Attributes:
      model: the architecture, with the sizes from the tokenizer and the checkpoint.
      pretrained: the checkpoint to start from; None for a new model.
      epoch_steps: train.epochs in optimizer steps; None until the data are counted.
      references: log-probabilities from before training, for an objective that reads them.
    """

    config: Config
    model: ModelConfig
    mesh: Mesh
    pretrained: Pretrained | None = None
    epoch_steps: int | None = None
    references: References = field(default_factory=References)

    @cached_property
    def execution(self) -> Execution:
        """Settings of how a step is computed, with defaults for unset keys."""
        return self.config.execution.complete()

    @property
    def in_backward(self) -> bool:
        """Whether the gradients of all layers never exist at once on a device; see
        `OptimizerConfig`."""
        chosen = self.config.optimizer.in_backward
        possible = (self.in_backward_obstacle or self.exact_clipping) is None
        return possible if chosen is None else chosen

    @property
    def gradients_on_host(self) -> bool:
        """Whether the gradients of the layers move to host memory in the backward pass."""
        return self.in_backward and self.exact_clipping is not None

    @property
    def in_backward_obstacle(self) -> str | None:
        """The key and its value that optimizer.in_backward cannot be combined with, or None."""
        if self.compute_dtype == jnp.float16:
            # An overflow in the last layers must skip the updates of all.
            return "train.compute_dtype=float16"
        if self.execution.remat == "none":
            return "execution.remat=none"
        return None

    @property
    def exact_clipping(self) -> str | None:
        """The keys that require the norm of all gradients before the first update, or None."""
        optimizer = self.config.optimizer
        if optimizer.clip == "exact" and optimizer.max_grad_norm:
            return f"optimizer.clip=exact and optimizer.max_grad_norm={optimizer.max_grad_norm}"
        return None

    @cached_property
    def objective(self) -> Objective:
        """What the model is trained to do.

        Raises:
          ValueError: the model has no head for it, or the adapters do not work with it.
        """
        continued = self.pretrained is not None and self.pretrained.adapters is not None
        adapter = self.config.adapter
        if self.model.add_tokens and adapter.type != "none":
            # All embeddings are trained, as if they were named.
            adapter = replace(adapter, modules_to_save=["model.add_tokens"])
        return choose(self.config.objective, self.model).for_adapters(adapter, continued)

    @cached_property
    def encoding(self) -> Encoding:
        """How documents become examples."""
        return replace(self.objective.encoding(self.model), references=self.references)

    @property
    def micro_batch_size(self) -> int:
        """Number of sequences in a micro-batch, over all devices."""
        return self.config.train.per_device_train_batch_size * data_shards(self.mesh)

    @property
    def global_batch_size(self) -> int:
        """Number of sequences in an optimizer step."""
        return self.micro_batch_size * self.config.train.gradient_accumulation_steps

    @property
    def steps(self) -> int:
        """Number of optimizer steps of the run.

        Raises:
          ValueError: train.epochs is set and the data are not yet counted.
        """
        steps = self.config.train.max_steps or self.epoch_steps
        if steps is None:
            raise ValueError("train.epochs: must be counted by `setup` first; or set max_steps")
        return steps

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Dtype of the computation.

        Raises:
          ValueError: train.compute_dtype is None, which NumPy would read as float64.
        """
        if self.config.train.compute_dtype is None:
            raise ValueError(
                "train.compute_dtype: must be set; Config.on(platform) sets its default"
            )
        return jnp.dtype(self.config.train.compute_dtype)

    @cached_property
    def layout(self) -> Layout:
        """Layout of batches on the mesh.

        Raises:
          ValueError: parallel.tp does not divide the model's heads, parallel.ep does not divide its
            experts, or the schedule needs unsharded sequences.
          NotImplementedError: the named strategy cannot divide the heads.
        """
        execution, sp = self.execution, num_shards(self.mesh, "sequence")
        if sp > 1 and execution.schedule == "fused":
            raise ValueError(
                f"execution.schedule=fused: must not be set with parallel.sp={sp}, which shards "
                "sequences; set schedule=split or sp=1"
            )
        ep, experts = num_shards(self.mesh, "experts"), self.model.experts.count
        if ep > 1 and not experts:
            raise ValueError(
                f"parallel.ep={ep}: must be 1 for a model without experts; use parallel.fsdp"
            )
        if experts % ep:
            # Name a divisor of the devices too, so that fsdp can use the rest.
            raise ValueError(
                f"parallel.ep={ep}: must divide model.experts.count={experts}; use "
                f"{math.gcd(ep, experts)}, with the other devices on parallel.fsdp"
            )
        # A sequence strategy divides the heads of one group.
        heads = self.model.num_heads // execution.head_groups
        return Layout(self.mesh, heads, self.config.parallel.sequence_strategy)
