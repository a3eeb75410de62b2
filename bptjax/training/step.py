"""The train step (loss, gradients, optimizer update), its compilation, and evaluation."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from bptjax.cost.flops import attended_pairs
from bptjax.cost.hlo import check_float8_products
from bptjax.data.examples import WEIGHTS
from bptjax.models.feed_forward import Auxiliary
from bptjax.models.feed_forwards import FEED_FORWARDS
from bptjax.models.transformer import Transformer
from bptjax.objectives.answers import score_answers, sum_by_document
from bptjax.objectives.cross_entropy import ForwardPass
from bptjax.ops.attention import fa4
from bptjax.ops.determinism import compiler_options, deterministic
from bptjax.ops.target import HOPPER, capability, is_absent, platform
from bptjax.optim.optimizer import apply_gradients
from bptjax.optim.schedule import learning_rate
from bptjax.training.histogram import MARGINS, histogram
from bptjax.training.in_backward import (
    Losses,
    StepInputs,
    gradients_in_host_memory,
    step_in_backward,
)
from bptjax.training.spec import TrainSpec
from bptjax.training.state import (
    HOST,
    TrainState,
    abstract_state,
    constrain,
    split_trained,
)
from bptjax.weights.float8_kernels import quantize_kernels, with_float8
from bptjax.weights.lora import join

Batch = dict[str, Any]
# fold_in constant for the key of stochastic rounding; larger than any micro-batch index.
ROUNDING = 2**31
# Key of the losses and counts of single records in the result of `evaluator`.
RECORDS = "records"


class AuxiliarySums(NamedTuple):
    """Sums over a batch, without a gradient.

    Attributes:
      sums: sums of the feed-forward networks over tokens, without padding.
      tokens: number of these tokens.
      labeled: `Objective.count` of the batch.
    """

    sums: Auxiliary
    tokens: Array
    labeled: Array


class Totals(NamedTuple):
    """Sums over the global batch that the loss of a micro-batch reads, without a gradient.

    Attributes:
      auxiliary: sums for the auxiliary loss.
      objective: `Objective.batch_sums`.
    """

    auxiliary: AuxiliarySums
    objective: Array


class LossSums(NamedTuple):
    """Sums over a batch, in nats.

    Attributes:
      loss, z_loss, metrics: as in `Losses`.
      auxiliary: auxiliary loss of the feed-forward networks, which `loss` does not include.
      counts: sums from which the auxiliary loss and the networks' metrics are computed.
    """

    loss: Array
    z_loss: Array
    metrics: dict[str, Array]
    auxiliary: Array
    counts: AuxiliarySums


def _run_model(
    spec: TrainSpec, model: Transformer, batch: Batch, key: Array | None
) -> tuple[Array, Auxiliary]:
    """Returns the hidden states of the inputs of a micro-batch `[B, T]`, and the sums of the
    feed-forward networks."""
    return model(
        **_model_inputs(spec, batch),
        dropout_key=key,
        execution=spec.execution,
        sequence_strategy=spec.config.parallel.sequence_strategy,
    )


def _model_inputs(spec: TrainSpec, batch: Batch) -> dict[str, Any]:
    """Returns the arguments of the model, and of its `begin`, for a micro-batch `[B, T]`."""
    inputs = spec.objective.inputs(batch)
    # If there is only one token type, both texts of a pair have it.
    several = spec.model.encoder.token_types > 1
    return dict(
        tokens=inputs["tokens"],
        positions=inputs["positions"],
        segments=inputs["segments"],
        ends=inputs.get("ends"),
        token_types=inputs.get("token_types") if several else None,
        order=spec.layout.order(inputs["tokens"].shape[1]),
        dtype=spec.compute_dtype,
    )


def _counts(spec: TrainSpec, aux: Auxiliary, batch: Batch) -> AuxiliarySums:
    objective = spec.objective
    tokens, labeled = (objective.inputs(batch)["segments"] != 0).sum(), objective.count(batch)
    aux = jax.lax.stop_gradient(aux)
    return AuxiliarySums(aux, tokens.astype(jnp.float32), labeled.astype(jnp.float32))


def loss_sums(
    spec: TrainSpec,
    model: Transformer,
    batch: Batch,
    key: Array | None,
    z_loss: float,
    totals: Totals | None = None,
    outputs: tuple[Array, Auxiliary] | None = None,
) -> LossSums:
    """Sums the losses over a micro-batch `[B, T]`.

    Args:
      key: dropout key; None turns dropout off.
      totals: sums of the global batch; None if it has only this micro-batch.
      outputs: results of the model, if it has already run.
    """
    hidden, aux = _run_model(spec, model, batch, key) if outputs is None else outputs
    forward = _forward_pass(spec, model, batch, hidden)._replace(z_loss=z_loss)
    if totals is not None:
        forward = forward._replace(totals=totals.objective)
    losses = spec.objective.loss(forward)
    with jax.named_scope("loss"):
        auxiliary, counts = jnp.zeros(()), _counts(spec, aux, batch)
        feed_forward = FEED_FORWARDS[spec.model.feed_forward]
        if feed_forward.has_auxiliary_loss(spec.model):
            total = counts if totals is None else totals.auxiliary
            tokens = jnp.maximum(total.tokens, 1.0)
            share = feed_forward.auxiliary_loss(spec.model, aux, total.sums, tokens)
            auxiliary = total.labeled * share
    return LossSums(*losses[:3], auxiliary, counts)


def _forward_pass(spec: TrainSpec, model: Transformer, batch: Batch, hidden: Array) -> ForwardPass:
    def again(other):
        return _run_model(spec, other, batch, None)[0]

    return ForwardPass(model, batch, hidden, again, 0.0, spec.execution.ce_chunk)


def _totals(
    spec: TrainSpec, model: Transformer, batch: Batch, hidden: Array, aux: Auxiliary
) -> Totals:
    """Returns a micro-batch's summands of the totals, given the results of the model."""
    sums = jnp.zeros(0)
    if spec.objective.totals:
        sums = spec.objective.batch_sums(_forward_pass(spec, model, batch, hidden))
    return Totals(_counts(spec, aux, batch), jax.lax.stop_gradient(sums))


def _reads_totals(spec: TrainSpec) -> bool:
    """Returns whether the loss of a micro-batch depends on the other micro-batches."""
    return spec.objective.totals or FEED_FORWARDS[spec.model.feed_forward].has_auxiliary_loss(
        spec.model
    )


def _in_float8(spec: TrainSpec, model: Transformer) -> Callable[[Transformer], Transformer]:
    """Returns a function that gives models of these values the products of train.linear."""
    config, weights = spec.config, {}
    if config.train.linear == "float8":
        # Quantize once for all micro-batches. Devices gather shards of the results, layer by layer.
        sharded = config.parallel.zero_stage == 3
        weights = constrain(spec, quantize_kernels(model), sharded)
    return partial(with_float8, weights=weights, trained=config.adapter.type == "none")


def gradients(spec: TrainSpec, state: TrainState, batch: Batch) -> tuple[LossSums, Any, Array]:
    """Computes (Σ losses, gradients of Σ losses, `Objective.count`) over micro-batches `[A, B, T]`:
    sums, to be divided once.

    Gradients are with respect to the trained parameters, and are summed in float32 over several
    micro-batches. A loss scale multiplies the gradients, not the losses.

    The auxiliary loss, and the losses of some objectives, are not sums over tokens. With several
    micro-batches, an additional forward pass over each computes the global batch's sums that such a
    loss needs.
    """
    key = _step_key(state)
    factor = 1.0 if state.loss_scale is None else state.loss_scale.value
    trained, frozen = split_trained(spec, state.model)
    config, in_float8 = spec.config, _in_float8(spec, state.model)

    def scaled_loss(trained, micro_batch, number, totals):
        micro_key = jax.random.fold_in(key, number)
        model, z_loss = in_float8(join(trained, frozen)), config.train.z_loss
        losses = loss_sums(spec, model, micro_batch, micro_key, z_loss, totals)
        return (losses.loss + losses.auxiliary) * factor, losses

    constrained = partial(constrain, spec, sharded=config.parallel.zero_stage > 1)

    def losses_and_gradients(micro_batch, number, totals=None):
        grads, losses = jax.grad(scaled_loss, has_aux=True)(trained, micro_batch, number, totals)
        return losses, constrained(grads)

    def summed(f, zeros):
        def add(sums, micro_batch_and_number):
            new = f(*micro_batch_and_number)
            return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, new), None

        return jax.lax.scan(add, zeros, (batch, jnp.arange(A)))[0]

    def summands(micro_batch, number):
        micro_key, model = jax.random.fold_in(key, number), in_float8(state.model)
        outputs = _run_model(spec, model, micro_batch, micro_key)
        return _totals(spec, model, micro_batch, *outputs)

    A = batch["labels"].shape[0]
    if A == 1:
        losses, grads = losses_and_gradients(jax.tree.map(lambda x: x[0], batch), 0)
    else:
        first = jax.tree.map(lambda x: x[0], batch)
        start = jax.tree.map(jnp.zeros_like, jax.eval_shape(summands, first, 0))
        totals = summed(summands, start) if _reads_totals(spec) else None
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), trained)
        nothing = jnp.zeros(())
        metrics = dict.fromkeys(spec.objective.sums, nothing)
        start = LossSums(nothing, nothing, metrics, nothing, start.auxiliary), constrained(zeros)
        losses, grads = summed(partial(losses_and_gradients, totals=totals), start)
    return losses, grads, spec.objective.count(batch)


def _step_key(state: TrainState) -> Array:
    """Returns the key for this step's dropout and rounding."""
    return jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)


def train_step(
    spec: TrainSpec, state: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, Array]]:
    """Takes one optimizer step over micro-batches `[A, B, T]`.

    Metrics are means per labeled token, or per other unit of the objective; `train/loss` excludes
    z-loss. `tokens` counts tokens without padding; for `attended` see `attended_pairs`.
    """
    config, loss_scale = spec.config, state.loss_scale
    trained, frozen = split_trained(spec, state.model)
    # After an overflow in float16, `count` and so the schedule stay the same.
    schedule = learning_rate(config.optimizer, spec.steps)
    rate = jnp.asarray(schedule(state.opt_state.count.astype(jnp.float32)))
    rounding = jax.random.fold_in(_step_key(state), ROUNDING)
    count = jnp.maximum(spec.objective.count(batch), 1).astype(jnp.float32)
    buffers = norm_of_gradients = None
    if spec.in_backward and not spec.gradients_on_host:
        trained, opt_state, losses, norm = step_in_backward(
            _inputs(spec, state, batch, count),
            state.opt_state,
            rate=rate,
            last_norm=state.last_norm,
            rounding=rounding,
        )
    else:
        if spec.gradients_on_host:
            losses, grads, norm_of_gradients = gradients_in_host_memory(
                _inputs(spec, state, batch, count), state.gradients
            )
            buffers = grads.layers
        else:
            losses, grads, _ = gradients(spec, state, batch)
        with jax.named_scope("optimizer"):
            trained, opt_state, norm = apply_gradients(
                config.optimizer,
                grads,
                state.opt_state,
                # Each device updates the same shard of the parameters and of the optimizer state.
                constrain(spec, trained, sharded=True),
                rate=rate,
                divisor=count if loss_scale is None else count * loss_scale.value,
                key=rounding,
                last_norm=state.last_norm,
                norm=norm_of_gradients,
            )
    if loss_scale is not None:
        loss_scale = loss_scale.update(jnp.isfinite(norm))
    inputs = spec.objective.inputs(batch)
    real = inputs["segments"] != 0
    fields = (inputs[name] for name in ("positions", "segments", "tokens"))
    metrics = {
        "tokens": real.sum(),
        "attended": attended_pairs(spec.model, *fields, order=spec.layout.order(real.shape[-1])),
        "train/loss": (losses.loss - losses.z_loss if config.train.z_loss else losses.loss) / count,
        "train/grad_norm": norm,
        "train/learning_rate": rate,
    }
    if not spec.model.causal:
        metrics["train/loss_tokens"] = count
    own = spec.objective.means(losses.metrics, count)
    metrics |= {f"train/{name}": x for name, x in own.items()}
    if config.train.z_loss:
        metrics["train/z_loss"] = losses.z_loss / count
    feed_forward, totals = FEED_FORWARDS[spec.model.feed_forward], losses.counts
    if feed_forward.has_auxiliary_loss(spec.model):
        metrics["train/auxiliary_loss"] = losses.auxiliary / count
    metrics |= feed_forward.metrics(spec.model, totals.sums, jnp.maximum(totals.tokens, 1.0))
    if loss_scale is not None:
        metrics["train/loss_scale"] = loss_scale.value
    state = replace(
        state,
        model=join(trained, frozen),
        opt_state=opt_state,
        step=state.step + 1,
        loss_scale=loss_scale,
        last_norm=None
        if state.last_norm is None
        else jnp.where(norm < jnp.inf, norm, state.last_norm),
        gradients=buffers,
    )
    return state, metrics


def _inputs(spec: TrainSpec, state: TrainState, batch: Batch, count: Array) -> StepInputs:
    """Returns the inputs of a step whose layers are updated inside the backward pass."""
    trained, frozen = split_trained(spec, state.model)
    in_float8 = _in_float8(spec, state.model)
    return StepInputs(
        spec,
        _losses(spec),
        lambda trained: in_float8(join(trained, frozen)),
        trained,
        batch,
        _step_key(state),
        count,
    )


def _losses(spec: TrainSpec) -> Losses:
    """Returns the functions of a micro-batch for `step_in_backward`."""
    z_loss = spec.config.train.z_loss

    def begin(model, batch, key):
        return model.begin(**_model_inputs(spec, batch), dropout_key=key)

    def hidden_states(model, batch, x):
        return model.end(x, spec.objective.inputs(batch)["tokens"].shape[1])

    def end(model, batch, key, x, aux, totals):
        hidden = hidden_states(model, batch, x)
        losses = loss_sums(spec, model, batch, key, z_loss, totals, (hidden, aux))
        return losses.loss + losses.auxiliary, losses

    def summands(model, batch, x, aux):
        return _totals(spec, model, batch, hidden_states(model, batch, x), aux)

    return Losses(begin, end, summands if _reads_totals(spec) else None)


def compile_step(
    spec: TrainSpec,
    state: TrainState,
    batch: Batch,
    options: Mapping[str, bool | str] = MappingProxyType({}),
) -> jax.stages.Compiled:
    """Compiles `train_step` for a state and a batch `[A, B, T]`, which may be abstract. The
    compiled step donates the state.

    Args:
      options: XLA options.

    Raises:
      RuntimeError: with optimizer.state_memory_kind=pinned_host, the optimizer state is not in host
        memory; with train.linear=float8 on a GPU, a product has other operands.
    """
    key = "optimizer.state_memory_kind=pinned_host"
    offloaded = spec.config.optimizer.state_memory_kind == "pinned_host"
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state.slots)}
    if offloaded and kinds != {HOST} and not is_absent():
        raise RuntimeError(f"{key}, but the state is in {kinds}")
    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(spec))
    step = jax.jit(partial(train_step, spec), donate_argnums=0, out_shardings=(shardings, None))
    options = dict(options)
    float8 = spec.config.train.linear == "float8" and platform() == "gpu"
    if platform() == "gpu" and (float8 or spec.config.adapter.type != "none"):
        # XLA may choose its own kernels over cuBLAS. They take wider operands than 8 bits, and do
        # not add into their result: the products of adapters keep three more arrays [T, D] alive.
        options["xla_gpu_enable_triton_gemm"] = False
    if offloaded and spec.in_backward and platform() == "gpu":
        # With the default of 2, most transfers to and from host memory wait for each other, and
        # the layers for them.
        options["xla_gpu_experimental_parallel_async_compute_limit"] = "64"
    if is_absent() and platform() == "gpu":
        # As in runs with fa4-jax, which set `fa4.XLA_FLAG`.
        options[fa4.XLA_OPTION] = False
        if capability() == HOPPER:
            # As on such a GPU, where XLA times its own kernels too, but takes cuBLAS's.
            options["xla_gpu_enable_triton_gemm"] = False
    with jax.set_mesh(spec.mesh), deterministic(spec.config.train.deterministic):
        compiled = step.lower(state, batch).compile(options | compiler_options())
    if float8 and not is_absent():
        check_float8_products(compiled.as_text() or "")
    # On the CPU backend, host memory is device memory.
    if (offloaded or spec.gradients_on_host) and platform() != "cpu" and not is_absent():
        needs = compiled.memory_analysis()
        if needs is None or not needs.host_argument_size_in_bytes:
            key = key if offloaded else "optimizer.in_backward=true"
            raise RuntimeError(f"{key}, but the step reads no host memory")
    return compiled


def check_kernel(spec: TrainSpec) -> None:
    """Checks that the kernel in execution.attention_implementation can honor the model's attention.
    Traces the loss without compiling it.

    Raises:
      ValueError: an unknown kernel.
      NotImplementedError: the kernel cannot honor the arguments.
    """
    batch = {
        name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in abstract_batch(spec).items()
    }
    with jax.set_mesh(spec.mesh), deterministic(spec.config.train.deterministic):
        jax.eval_shape(
            partial(loss_sums, spec, z_loss=0.0),
            abstract_state(spec).model,
            batch,
            jax.random.key(0),
        )


def abstract_batch(spec: TrainSpec) -> Batch:
    """Returns shapes and shardings of a training batch `[A, B, T]`."""
    train, layout = spec.config.train, spec.layout
    T = train.seq_len + -train.seq_len % layout.multiple
    shape = train.gradient_accumulation_steps, spec.micro_batch_size, T
    x = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout.sharding)
    batch = dict.fromkeys((*spec.encoding.fields, "segments", "positions"), x)
    if WEIGHTS in batch:
        batch[WEIGHTS] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=layout.sharding)
    if width := _patch_width(spec):
        shape = *shape, width
        batch["tokens"] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=layout.sharding)
    return batch


def _patch_width(spec: TrainSpec) -> int:
    """Returns the number of values in a patch; 0 for a model of text."""
    own = spec.model.encoder
    height, width = own.patch_size or (0, 0)
    return own.channels * height * width


def random_batch(spec: TrainSpec) -> Batch:
    """Returns a training batch `[A, B, T]` of random tokens, with one document per sequence."""
    train, B, rng = spec.config.train, spec.global_batch_size, np.random.default_rng(0)
    shape = B, train.seq_len + 1
    tokens = rng.integers(0, spec.model.encoder.classes or spec.model.V, shape, np.int32)
    positions = np.arange(train.seq_len, dtype=np.int32)[None].repeat(B, 0)
    batch = dict(tokens=tokens[:, :-1], labels=tokens[:, 1:], positions=positions)
    if width := _patch_width(spec):
        shape = B, train.seq_len, width
        batch |= dict(tokens=rng.standard_normal(shape, np.float32))
    batch |= dict(segments=np.ones_like(positions))
    batch |= dict(ends=np.full_like(positions, train.seq_len))
    batch |= {WEIGHTS: np.ones(positions.shape, np.float32)}
    own = *spec.encoding.fields, "segments", "positions"
    batch = {name: batch.get(name, np.zeros_like(positions)) for name in own}
    return spec.layout.put(batch, train.gradient_accumulation_steps)


def _jit(spec: TrainSpec, **options: Any) -> Callable[[Callable], Callable]:
    """Returns `jax.jit` for programs other than the step."""
    on = spec.config.train.deterministic

    def jit(f):
        @wraps(f)
        def traced(*arguments, **named):
            with deterministic(on):
                return f(*arguments, **named)

        with deterministic(on):
            return jax.jit(traced, compiler_options=compiler_options(), **options)

    return jit


def answer_scorer(spec: TrainSpec) -> Callable[[Transformer, Batch], Array]:
    """Returns a function from a model and a batch `[1, B, T]` to the log-probabilities of its
    answers, `Answers.logps`, on every device."""

    @_jit(spec, out_shardings=NamedSharding(spec.mesh, PartitionSpec()))
    def score(model, batch):
        model, batch = _in_float8(spec, model)(model), jax.tree.map(lambda x: x[0], batch)
        hidden, _ = _run_model(spec, model, batch, None)
        return score_answers(_forward_pass(spec, model, batch, hidden)).logps

    return score


def evaluator(spec: TrainSpec, by_record: bool = False) -> Callable[..., dict[str, Any]]:
    """Returns a function from a model and each source's batches `[B, T]` to metrics: the mean loss
    over all sources, in nats, and the objective's metrics; with several sources, also the mean loss
    of each source with labels; for pairs, also the `histogram` of their reward margins.

    The function calls its third argument after each batch but the last, with the share of the
    batch's work that is done. At most two batches are in flight, so that batches do not fill the
    device's memory. If the objective reads totals, there are two passes over all batches.

    Args:
      by_record: also return `RECORDS`, float64 `[2, n]`: the sum of the loss and the count of each
        record with a label, in the order of the batches. A record that packing splits over several
        sequences has an entry for each.
    """

    @_jit(spec, out_shardings=NamedSharding(spec.mesh, PartitionSpec()))
    def batch_sums(model, batch, totals):
        batch = jax.tree.map(lambda x: x[0], batch)
        hidden, _ = _run_model(spec, model, batch, None)
        forward = _forward_pass(spec, model, batch, hidden)
        losses = spec.objective.loss(forward._replace(totals=totals and totals.objective))
        margins = jnp.zeros(0) if losses.margins is None else losses.margins
        loss, records = losses.loss, losses.records
        if by_record and records is None:
            records = sum_by_document(forward)
            # The logits of `losses.loss` would be computed too.
            loss = records[0].sum()
        return loss, losses.metrics, spec.objective.count(batch), margins, records

    def to_host(sums):
        *sums, margins, records = jax.device_get(sums)
        losses, counts = np.zeros((2, 0)) if records is None else records
        records = np.stack([losses, counts]).astype(np.float64)[:, counts > 0]
        return *sums, margins[np.isfinite(margins)], records

    @_jit(spec)
    def summands(model, batch):
        batch = jax.tree.map(lambda x: x[0], batch)
        return _totals(spec, model, batch, *_run_model(spec, model, batch, None))

    def results(function, read, model, sources, progress):
        names, found = [], []
        for name, batches in sources.items():
            for batch in batches:
                names.append(name)
                found.append(function(model, spec.layout.put(batch)))
                if len(found) > 1:
                    found[-2] = read(found[-2])
                    progress()
        return names, [*found[:-1], *map(read, found[-1:])]

    def evaluate(model, sources, progress=lambda share: None):
        totals, share = None, partial(progress, 1 / (1 + spec.objective.totals))
        with jax.set_mesh(spec.mesh):
            if spec.objective.totals:
                _, each = results(summands, jax.block_until_ready, model, sources, share)
                totals = jax.tree.map(lambda *x: sum(x), *each)
            function = partial(batch_sums, totals=totals)
            names, sums = results(function, to_host, model, sources, share)
        losses, others, counts, margins, records = zip(*sums, strict=True)
        count = np.maximum(np.sum(counts, dtype=np.float64), 1.0)
        means: dict[str, Any] = {"eval/loss": float(np.sum(losses, dtype=np.float64) / count)}
        totals = {
            name: np.sum([x[name] for x in others], dtype=np.float64)
            for name in spec.objective.sums
        }
        with np.errstate(invalid="ignore"):
            own = spec.objective.means(totals, count)
        means |= {f"eval/{name}": float(x) for name, x in own.items()}
        if len(margins := np.concatenate(margins)):
            means[MARGINS] = histogram(margins)
        if by_record:
            means[RECORDS] = np.concatenate(records, axis=1)
        for source in sources if len(sources) > 1 else ():
            own = np.array(names) == source
            loss, count = (np.sum(np.array(x)[own], dtype=np.float64) for x in (losses, counts))
            if count:
                means[f"eval/loss/{source}"] = float(loss / count)
        return means

    return evaluate
