"""A config made ready for the devices: state, train step, evaluation."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bptjax.config import Config
from bptjax.hf.peft import embeddings, modules
from bptjax.hf.place import put
from bptjax.hf.pretrained import Pretrained
from bptjax.lora import (
    AdapterConfig,
    Saved,
    Values,
    attach,
    embeddings_to_train,
    is_saved,
    is_trained,
    join,
    linears,
    new_adapters,
    quantize,
    quantizer,
    split,
    targets,
    train_in_full,
)
from bptjax.models.config import ModelConfig
from bptjax.models.decoder import Decoder
from bptjax.ops.attention import choose
from bptjax.ops.attention.contract import QKV, AttentionSpec
from bptjax.ops.loss import cross_entropy_and_z_loss
from bptjax.ops.mask import Mask
from bptjax.optim import AdamState, AdamW, LossScale, learning_rate
from bptjax.parallel.full_tiles import make_schedule
from bptjax.parallel.layout import Layout
from bptjax.parallel.mesh import CUT, sharding
from bptjax.parallel.sequence import FOLDED_BATCH, fold_sequence_shards

Batch = dict[str, Any]
# What the key of a step is folded with for the optimizer's rounding: no micro-batch's number.
ROUNDING = 2**31
# Where devices read and write by themselves.
HOST = "pinned_host"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a step reads and writes.

    Attributes:
      step: int32 scalar, optimizer steps done.
      key: uint32 `[2]`, data of the key that those of dropout and rounding come from.
      loss_scale: for float16; else None.
    """

    model: Decoder
    opt_state: AdamState
    step: Array
    key: Array
    loss_scale: LossScale | None


@dataclass(frozen=True)
class Task:
    """A config made ready: what the step, the evaluation and the checkpoints share.

    Attributes:
      epoch_steps: optimizer steps that train.epochs takes, once the data are counted.
    """

    config: Config
    model: ModelConfig
    mesh: Mesh
    pretrained: Pretrained | None = None
    epoch_steps: int | None = None

    @property
    def rows(self) -> int:
        """Rows of an optimizer step."""
        train = self.config.train
        return self.micro_rows * train.gradient_accumulation_steps

    @property
    def micro_rows(self) -> int:
        """Rows of one micro-batch, over all devices."""
        return (
            self.config.train.per_device_train_batch_size
            * self.mesh.shape["dp"]
            * self.mesh.shape["fsdp"]
        )

    @property
    def dtype(self) -> jnp.dtype:
        """
        Raises:
          ValueError: train.compute_dtype has no value, which to NumPy means float64.
        """
        if self.config.train.compute_dtype is None:
            raise ValueError(
                "train.compute_dtype: must be set; Config.on(platform) sets its default"
            )
        return jnp.dtype(self.config.train.compute_dtype)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run.

        Raises:
          ValueError: train.epochs is set and the data are not yet counted.
        """
        steps = self.config.train.max_steps or self.epoch_steps
        if steps is None:
            raise ValueError("train.epochs: the steps of an epoch are not known; set max_steps")
        return steps

    @property
    def optimizer(self) -> AdamW:
        return AdamW(self.config.optimizer, self.steps)

    def attention(self) -> tuple[str, dict[str, str]]:
        """The implementation that a device's attention takes, and why not the others.

        Raises:
          NotImplementedError: the named one cannot honour the model's.
        """
        model, execution, sizes = self.model, self.config.execution, self.mesh.shape
        rows, T = self.config.train.per_device_train_batch_size, self.config.train.seq_len
        layout = self.layout
        T, (exchange, cut) = T + -T % layout.multiple, layout.split
        order, heads = layout.order(T), model.num_heads // sizes["tp"] // exchange
        # Where a part of a row stands is known only as the program runs.
        place = None if order is None else jax.ShapeDtypeStruct((T // cut,), jnp.int32)
        segments = jax.ShapeDtypeStruct((rows, T // cut), jnp.int32)
        spec = AttentionSpec(
            mask=Mask(causal=True, segments=segments, positions=place).within(model.windows, 0),
            scale=1.0,
            softcap=model.attention_softcap,
            dropout=model.attention_dropout or 0.0,
            alibi=jnp.zeros(heads) if model.position_embedding == "alibi" else None,
        )
        q = jax.ShapeDtypeStruct((rows, T // cut, heads, model.H), self.dtype)
        # Algorithm 1 is cut over the mesh by the compiler.
        with jax.set_mesh(self.mesh) if execution.schedule == "fused" else nullcontext():
            chosen = choose(execution.attention_implementation, QKV(q, q, q), spec)
            if order is None or make_schedule(spec, (order, order), cut) is None:
                return chosen
            # Taken but by documents that end within a device's tokens.
            return choose(
                execution.attention_implementation,
                QKV(q, q, q),
                replace(spec, mask=Mask(causal=True)),
            )

    @cached_property
    def layout(self) -> Layout:
        """How rows lie on the mesh.

        Raises:
          ValueError: parallel.tp does not divide the model's heads, or the schedule needs whole
            rows.
          NotImplementedError: the named strategy cannot cut the heads.
        """
        execution, sp = self.config.execution, self.mesh.shape["sp"]
        if sp > 1 and execution.schedule == "fused":
            raise ValueError(
                f"execution.schedule=fused works on whole rows; parallel.sp={sp} cuts them"
            )
        return Layout(self.mesh, self.model.num_heads, self.config.parallel.sequence_strategy)

    @property
    def adapter(self) -> AdapterConfig:
        return self.config.adapter

    @cached_property
    def targets(self) -> set[str]:
        """Paths of the kernels that have an adapter.

        Raises:
          ValueError: adapter.target_modules names what there is not, or nothing.
        """
        plain = jax.eval_shape(self._plain, jax.random.key(0))
        own = {path.removesuffix(".kernel"): (path,) for path in linears(plain)}
        family = self.pretrained and self.pretrained.family
        return targets(self.adapter.target_modules, modules(self.model, family) or own)

    @cached_property
    def saved_modules(self) -> set[str]:
        """Paths of the embeddings that are trained in full beside adapters.

        Raises:
          ValueError: adapter.modules_to_save names something else.
        """
        if self.adapter.type == "none":
            return set()
        pretrained = self.pretrained
        loaded = pretrained.adapters if pretrained else None
        found = embeddings_to_train(
            self.adapter.modules_to_save,
            embeddings(self.model, pretrained.family if pretrained else None),
            bool(self.model.add_tokens),
        )
        return found | (set(loaded.modules) if loaded else set())

    @property
    def _loaded(self) -> dict[str, Values] | None:
        """Adapters to go on with."""
        found = self.pretrained.adapters if self.pretrained else None
        return found.values if found else None

    @cached_property
    def parameters(self) -> tuple[int, int]:
        """How many the model has, adapters included, and how many of them are trained."""
        plain = jax.eval_shape(self._plain, jax.random.key(0))
        base = sum(x.size for x in jax.tree.leaves(plain))
        if self.adapter.type == "none":
            return base, base
        trained, _ = self.split(jax.eval_shape(self._new_state, None, self._loaded).model)
        in_full, low_rank = split(trained, lambda v: isinstance(v, Saved))
        own, low = (sum(x.size for x in jax.tree.leaves(x)) for x in (in_full, low_rank))
        return base + low, own + low

    def flops(self, tokens: int, pairs: float) -> float:
        """Model FLOPs of a step over so many tokens and query-key pairs that attention sees: of the
        forward pass, of the gradients of what is read, and of those of what is trained."""
        total, trained = self.parameters
        attention = 12.0 * pairs * self.model.num_heads * self.model.H * self.model.num_layers
        return (4.0 * total + 2.0 * trained) * tokens + attention

    def saved(self, state: TrainState) -> TrainState:
        """What of a state a checkpoint holds: with adapters, of the model no more than these."""
        if self.adapter.type == "none":
            return state
        return replace(state, model=split(state.model, is_saved)[0])

    def resumed(self, saved: TrainState) -> TrainState:
        """The state of which this was `saved`; the model beside the adapters comes from where it
        first came from."""
        if self.adapter.type == "none":
            return saved
        rest = split(self.init_state().model, is_saved)[1]
        return replace(saved, model=join(saved.model, rest))

    def split(self, model: Decoder) -> tuple[Any, Any]:
        """What of the model is trained, and the rest; `join` is the inverse."""
        if self.adapter.type == "none":
            return split(model, lambda v: True)
        return split(model, is_trained)

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state; nothing is allocated."""
        state = jax.eval_shape(self._new_state, None, self._loaded)
        model = self._placed(state.model, cut=self.config.parallel.zero_stage == 3)
        state = replace(self._placed(state), model=model)
        if self.config.optimizer.state_memory_kind == "device":
            return state
        mu, nu = jax.tree.map(_in_host_memory, (state.opt_state.mu, state.opt_state.nu))
        return replace(state, opt_state=state.opt_state._replace(mu=mu, nu=nu))

    def init_state(self) -> TrainState:
        """A new state, made or loaded where it lives."""
        model = None
        if self.pretrained is not None:
            plain = self._placed(jax.eval_shape(self._plain, jax.random.key(0)))
            how = quantizer(plain, self.adapter) if self.adapter.type == "qlora" else put
            model = self.pretrained.fill(plain, how)
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state())
        with jax.set_mesh(self.mesh):
            new = jax.jit(self._new_state, out_shardings=shardings, donate_argnums=0)
            return new(model, self._loaded)

    def _plain(self, key: Array) -> Decoder:
        """A new model without adapters; with them, it is not trained, and kept as it is used."""
        train = self.config.train
        kept = train.param_dtype if self.adapter.type == "none" else self.dtype
        model = Decoder(self.model, key, jnp.dtype(kept))
        return train_in_full(model, self.saved_modules, jnp.dtype(train.param_dtype))

    def _new_state(self, model: Decoder | None = None, adapters: Any = None) -> TrainState:
        model_key, key = jax.random.split(jax.random.key(self.config.seed))
        if model is None:
            model = self._plain(model_key)
            if self.adapter.type == "qlora":
                model = quantize(model, self.adapter)
        if self.adapter.type != "none":
            dtype = jnp.dtype(self.config.train.param_dtype)
            if adapters is None:
                adapters = new_adapters(model, self.targets, self.adapter, dtype, model_key)
            else:
                adapters = {
                    path: (a.astype(dtype), b.astype(dtype), scale)
                    for path, (a, b, scale) in adapters.items()
                }
            model = attach(model, adapters, self.adapter.dropout)
        return TrainState(
            model=model,
            opt_state=self.optimizer.init(self.split(model)[0]),
            step=jnp.zeros((), jnp.int32),
            key=jax.random.key_data(key),
            loss_scale=LossScale.start() if self.dtype == jnp.float16 else None,
        )

    def _placed(self, tree: Any, cut: bool = True) -> Any:
        """The abstract leaves with their shardings: of parameters by their logical axes, and over
        fsdp and sp where those are to cut them.
        """
        whole = () if cut else CUT

        def placed(leaf):
            if not isinstance(leaf, nnx.Variable):
                where = NamedSharding(self.mesh, PartitionSpec())
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
            value = leaf.get_value()
            where = sharding(self.mesh, leaf.axes, value.shape, whole)
            return leaf.replace(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=where))

        return jax.tree.map(placed, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))

    def _pinned(self, tree: Any, cut: bool) -> Any:
        """The tree where `_placed` says, in a program."""
        where = jax.tree.map(lambda x: x.sharding, self._placed(tree, cut))
        return jax.lax.with_sharding_constraint(tree, where)

    def loss_sum(
        self, model: Decoder, batch: Batch, key: Array | None, z_loss: float
    ) -> tuple[Array, Array]:
        """Sums the loss over the labelled tokens of a micro-batch `[B, T]`, in nats: (sum, the part
        of it that `z_loss` adds)."""
        execution = self.config.execution
        hidden = model(
            batch["tokens"],
            positions=batch["positions"],
            segments=batch["segments"],
            order=self.layout.order(batch["tokens"].shape[1]),
            dropout_key=key,
            dtype=self.dtype,
            execution=execution,
            sequence_strategy=self.config.parallel.sequence_strategy,
        )
        hidden, labels = fold_sequence_shards((hidden, batch["labels"]))
        return cross_entropy_and_z_loss(
            hidden,
            model.head_matrix,
            labels,
            z_loss=z_loss,
            softcap=model.config.logits_softcap,
            chunk=execution.ce_chunk,
            axes=FOLDED_BATCH,
        )

    def gradients(self, state: TrainState, batch: Batch) -> tuple[tuple[Array, Array], Any, Array]:
        """Computes ((Σ loss, z-loss's part of it), gradients of Σ loss, count of labelled tokens)
        over micro-batches `[A, B, T]`: sums, to be divided once. The gradients are those of the
        trainable parameters, and of several micro-batches they add up in float32. With a loss
        scale the gradients, not the losses, are multiplied by it.
        """
        key = self._step_key(state)
        factor = 1.0 if state.loss_scale is None else state.loss_scale.value
        trained, rest = self.split(state.model)

        def scaled(trained, micro, number):
            step_key = jax.random.fold_in(key, number)
            model = join(trained, rest)
            losses = self.loss_sum(model, micro, step_key, self.config.train.z_loss)
            return losses[0] * factor, losses

        pinned = partial(self._pinned, cut=self.config.parallel.zero_stage > 1)

        def both(model, micro, number):
            gradients, losses = jax.grad(scaled, has_aux=True)(model, micro, number)
            return pinned(gradients), losses

        def add(sums, micro_and_number):
            gradients, losses = both(trained, *micro_and_number)
            return jax.tree.map(lambda s, g: s + g.astype(s.dtype), sums, (losses, gradients)), None

        A = batch["labels"].shape[0]
        if A == 1:
            gradients, losses = both(trained, jax.tree.map(lambda x: x[0], batch), 0)
        else:
            zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), trained)
            zero = jnp.zeros((), jnp.float32)
            start = ((zero, zero), pinned(zeros))
            (losses, gradients), _ = jax.lax.scan(add, start, (batch, jnp.arange(A)))
        return losses, gradients, (batch["labels"] != -100).sum()

    def _step_key(self, state: TrainState) -> Array:
        """What dropout and rounding draw from in this step."""
        return jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        """One optimizer step over micro-batches `[A, B, T]`.

        Its metrics are means per labelled token: `train/loss` is the cross-entropy alone. Beside
        them it gives `tokens`, the tokens that are not padding, and `attended`, the query-key pairs
        of causal attention within documents.
        """
        (loss, z_loss), gradients, count = self.gradients(state, batch)
        count = jnp.maximum(count, 1).astype(jnp.float32)
        loss_scale = state.loss_scale
        trained, rest = self.split(state.model)
        trained, opt_state, norm = self.optimizer.update(
            gradients,
            state.opt_state,
            # Each device its part of the update, as of the moments.
            self._pinned(trained, cut=True),
            divisor=count if loss_scale is None else count * loss_scale.value,
            key=jax.random.fold_in(self._step_key(state), ROUNDING),
        )
        if loss_scale is not None:
            loss_scale = loss_scale.update(jnp.isfinite(norm))
        real = batch["segments"] != 0
        pairs = jnp.where(real, batch["positions"] + 1.0, 0.0)
        metrics = {
            "tokens": real.sum(),
            "attended": pairs.sum(),
            "train/loss": (loss - z_loss) / count if self.config.train.z_loss else loss / count,
            "train/grad_norm": norm,
            "train/learning_rate": learning_rate(self.config.optimizer, self.steps)(
                state.opt_state.count
            ),
        }
        if self.config.train.z_loss:
            metrics["train/z_loss"] = z_loss / count
        if loss_scale is not None:
            metrics["train/loss_scale"] = loss_scale.value
        state = replace(
            state,
            model=join(trained, rest),
            opt_state=opt_state,
            step=state.step + 1,
            loss_scale=loss_scale,
        )
        return state, metrics

    def compile_step(self, state: TrainState, batch: Batch) -> jax.stages.Compiled:
        """`step`, compiled for this state and batch `[A, B, T]`; it donates the state.

        Raises:
          RuntimeError: optimizer.state_memory_kind=pinned_host, and the moments are not in host
            memory.
        """
        offloaded = self.config.optimizer.state_memory_kind == "pinned_host"
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state.mu)}
        if offloaded and kinds != {HOST}:
            raise RuntimeError(
                f"optimizer.state_memory_kind=pinned_host, but the moments are in {kinds}"
            )
        where = jax.tree.map(lambda x: x.sharding, self.abstract_state())
        step = jax.jit(self.step, donate_argnums=0, out_shardings=(where, None))
        with jax.set_mesh(self.mesh):
            compiled = step.lower(state, batch).compile()
        # To the CPU's backend, host memory is the device's.
        if offloaded and jax.default_backend() != "cpu":
            needs = compiled.memory_analysis()
            if needs is None or not needs.host_argument_size_in_bytes:
                raise RuntimeError(
                    "optimizer.state_memory_kind=pinned_host, but the step reads none of it"
                )
        return compiled

    def evaluator(self) -> Callable[[Decoder, Any, Callable[[int], None]], float]:
        """Returns a function from a model and batches `[B, T]` to the mean loss per token, in nats.

        Its third argument is called with the number of batches done. At most two batches are in
        flight, so that they do not fill the device's memory.
        """

        @jax.jit
        def one(model, batch):
            batch = jax.tree.map(lambda x: x[0], batch)
            loss, _ = self.loss_sum(model, batch, None, 0.0)
            return loss, (batch["labels"] != -100).sum()

        def evaluate(model, batches, progress=lambda done: None):
            parts = []
            with jax.set_mesh(self.mesh):
                for batch in batches:
                    parts.append(one(model, self.layout.put(batch)))
                    if len(parts) > 1:
                        jax.block_until_ready(parts[-2])
                        progress(len(parts) - 1)
            losses, counts = (
                np.array(jax.device_get(x), np.float64) for x in zip(*parts, strict=True)
            )
            return float(losses.sum() / max(counts.sum(), 1.0))

        return evaluate


def _in_host_memory(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind(HOST))
