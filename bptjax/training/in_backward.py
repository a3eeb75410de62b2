"""Optimizer steps inside the backward pass: each layer is updated as soon as its gradient is known,
so that the gradients of all layers never exist at once."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from bptjax.models.layer_backward import Use
from bptjax.models.params import is_variable, param_path
from bptjax.models.stack import run_with_backward
from bptjax.ops.quantize import fold_in, rounding_key
from bptjax.ops.stacked import get_entry, put_entry
from bptjax.optim.optimizer import OptState, Update, clip_factor, sum_of_squares
from bptjax.parallel.sliced_update import update_in_slices
from bptjax.training.spec import TrainSpec
from bptjax.training.state import constrain

Batch = dict[str, Any]


class Losses(NamedTuple):
    """Functions of a micro-batch, given by the train step.

    Attributes:
      begin: maps (model, micro-batch, dropout key) to `LayerInputs`.
      end: maps (model, micro-batch, dropout key, residual stream after the layers, auxiliary sums
        of the layers, totals) to (loss to differentiate, sums of the losses).
      summands: maps (model, micro-batch, residual stream, auxiliary sums) to the summands of
        `totals`; None if the loss does not depend on totals of the batch.
    """

    begin: Callable[..., Any]
    end: Callable[..., tuple[Array, Any]]
    summands: Callable[..., Any] | None


class StepInputs(NamedTuple):
    """Inputs of a step whose layers run backward one at a time.

    Attributes:
      model_of: returns the model with these trained parameters.
      batch: micro-batches `[A, B, T]`.
      key: dropout key of the step.
      divisor: as for `apply_gradients`.
    """

    spec: TrainSpec
    losses: Losses
    model_of: Callable[[Any], Any]
    trained: Any
    batch: Batch
    key: Array
    divisor: Array


class _Loop(NamedTuple):
    """State of the reversed loop.

    Attributes:
      parameters: the trained arrays of the layers.
      slots: optimizer state of each, by slot; or the array that collects the gradients of each.
      squares: sum of the squares of the gradients so far.
    """

    parameters: list[Array]
    slots: list[Any]
    squares: Array


class _Parameters:
    """The trained parameters, by their position among the leaves of the model.

    Attributes:
      variables, values: the parameters and their arrays.
      of_layers: positions of the parameters of layers.
      of_top: positions of all other parameters.
    """

    def __init__(self, trained: Any, model_of: Callable[[Any], Any]):
        leaves, self.structure = jax.tree.flatten_with_path(trained, is_leaf=is_variable)
        self.variables = [v for _, v in leaves]
        self.values = [v.get_value() for v in self.variables]
        self.model, self._model_of = model_of(trained), model_of
        in_layers = {id(x) for x in jax.tree.leaves(self.model.layers)}
        self.of_layers = [i for i, x in enumerate(self.values) if id(x) in in_layers]
        self.of_top = [i for i in range(len(self.values)) if i not in self.of_layers]
        names = (param_path(at).partition(".")[0] for at, _ in leaves)
        self.after_layers = [i for i, x in enumerate(names) if x in self.model.AFTER_LAYERS]

    def with_top(self, top: list[Array]) -> Any:
        """Returns the model with these values of `of_top`."""
        new = dict(zip(self.of_top, top, strict=True))
        each = (v.replace(new.get(i, self.values[i])) for i, v in enumerate(self.variables))
        return self._model_of(self.structure.unflatten(each))

    def as_variables(self, values: dict[int, Array]) -> dict[int, nnx.Variable]:
        """Returns arrays by position as variables with the axes of the parameters."""
        return {i: self.variables[i].replace(x) for i, x in values.items()}


class _Passes(NamedTuple):
    """The forward pass of all micro-batches, and the gradients of the end of the model.

    Attributes:
      sums: sums of the losses.
      of_end: gradients of `_Parameters.of_top`, by position, from the computation after the layers.
      d_x: gradient of the residual streams after the layers.
      backward: maps (d_x, state of the reversed loop, use of the gradients of layers) to
        (gradients of `_Parameters.of_top`, new state).
    """

    sums: Any
    of_end: dict[int, Array]
    d_x: Array
    backward: Callable[[Array, _Loop, Use], tuple[dict[int, Array], _Loop]]


def _run_forward(given: StepInputs, parameters: _Parameters) -> _Passes:
    """Runs the micro-batches forward. A layer processes all of them before the next layer runs."""
    spec, losses, batch, key = given.spec, given.losses, given.batch, given.key
    A, model, of_top = batch["labels"].shape[0], parameters.model, parameters.of_top
    top = [parameters.values[i] for i in of_top]

    def begin(top, batch, number):
        micro_key = jax.random.fold_in(key, number)
        return losses.begin(parameters.with_top(top), batch, micro_key)

    def inputs(batch, number):
        given = begin(top, batch, number)
        return given.x, given.context, given.mask.segments

    def end(top, x, aux, batch, number, totals):
        micro_key = jax.random.fold_in(key, number)
        return losses.end(parameters.with_top(top), batch, micro_key, x, aux, totals)

    numbers = jnp.arange(A)
    x, context, segments = _map(inputs, batch, numbers)
    dropout_keys = jax.vmap(lambda n: jax.random.key_data(jax.random.fold_in(key, n)))(numbers)
    in_layers = {id(parameters.values[i]) for i in parameters.of_layers}
    x, aux, backward = run_with_backward(
        model.layers,
        lambda leaf: id(leaf) in in_layers,
        spec.model,
        x,
        context,
        segments=segments,
        order=spec.layout.order(x.shape[2]),
        dropout_keys=dropout_keys,
        execution=spec.execution,
        sequence_strategy=spec.config.parallel.sequence_strategy,
        embedding_norm=model.layer_embedding_norm,
    )
    aux = jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), aux)
    totals = None
    if losses.summands is not None and A > 1:
        summands = _map(partial(losses.summands, parameters.with_top(top)), batch, x, aux)
        totals = jax.tree.map(lambda y: y.sum(0), summands)

    def loss_gradients(x, aux, batch, number):
        found = jax.grad(end, (0, 1, 2), has_aux=True)(top, x, aux, batch, number, totals)
        (d_top, d_x, d_aux), sums = found
        return (sums, d_top), (d_x, d_aux)

    (sums, d_top), (d_x, d_aux) = _sum_and_map(loss_gradients, x, aux, batch, numbers)
    of_end = dict(zip(of_top, d_top, strict=True))

    def run_backward(d_x, loop, use):
        gradients, of_layers = dict(of_end), jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1), d_aux)
        d_x, d_norm, loop = backward(d_x, of_layers, loop, use)

        def begin_gradients(d_x, batch, number):
            _, pull = jax.vjp(lambda top: begin(top, batch, number).x, top)
            return pull(d_x)[0], ()

        d_begin, _ = _sum_and_map(begin_gradients, d_x, batch, numbers)
        positions = {id(x): i for i, x in zip(of_top, top, strict=True)}
        of_norm = [positions.get(id(x)) for x in jax.tree.leaves(model.layer_embedding_norm)]
        for i, d in zip(of_norm, jax.tree.leaves(d_norm), strict=True):
            if i is not None:
                gradients[i] = gradients[i] + d
        return {i: gradients[i] + d for i, d in zip(of_top, d_begin, strict=True)}, loop

    return _Passes(sums, of_end, d_x, run_backward)


def step_in_backward(
    given: StepInputs, opt_state: OptState, *, rate: Array, last_norm: Array | None, rounding: Array
) -> tuple[Any, OptState, Any, Array]:
    """Takes an optimizer step. Returns the trained parameters, the optimizer state, the sums of the
    losses, and the norm of the gradients.

    If the loss is not finite, nothing changes. If the gradient of a parameter is not finite, this
    parameter does not change, and the norm is not finite.

    Args:
      rate: as for `apply_gradients`.
      last_norm: norm of the previous step, with optimizer.clip=delayed.
      rounding: key of the rounding.
    """
    spec, parameters = given.spec, _Parameters(given.trained, given.model_of)
    config = spec.config.optimizer
    structure, variables, values = parameters.structure, parameters.variables, parameters.values
    of_layers = parameters.of_layers
    slots = zip(*(structure.flatten_up_to(tree) for tree in opt_state.slots.values()), strict=True)
    slots = [dict(zip(opt_state.slots, each, strict=True)) for each in slots]
    passes = _run_forward(given, parameters)
    sums, finite = passes.sums, jnp.isfinite(passes.sums.loss)
    scale = 1 / jnp.asarray(given.divisor, jnp.float32)
    factor = 1.0 if last_norm is None else clip_factor(config, last_norm)
    update = Update(config, rate, scale * factor, opt_state.count + 1, rounding_key(rounding))
    sharded = spec.config.parallel.zero_stage > 1
    in_place = spec.config.parallel.zero_stage == 3 and config.state_memory_kind == "device"

    def updated(gradients, current, slots, indices):
        """Updates parameters by their position. Returns their new values and slots, and the sum of
        the squares of the gradients."""
        gradients = constrain(spec, parameters.as_variables(gradients), sharded)
        squares = {i: sum_of_squares(g, scale) for i, g in gradients.items()}
        total, step = sum(squares.values(), jnp.zeros(())), update
        if config.clip == "per_layer":
            step = replace(update, scale=scale * clip_factor(config, jnp.sqrt(total)))
        new = {}
        for i, g in gradients.items():
            # Not of the total, so that no update waits for other gradients.
            when = finite & jnp.isfinite(squares[i])
            p, index = variables[i].replace(current[i]), indices.get(i)
            if index is None or in_place:
                p = p if index is not None else constrain(spec, p, sharded=True)
                p, own = step(i, p, g, slots[i], when=when, index=index)
            else:
                # Each device updates its shard of the entry; then all get the entry. Slots in host
                # memory move here. Reading them a layer ahead was slower on an H200.
                stacked = p, slots[i]
                entry = constrain(spec, get_entry(stacked, index), sharded=True)
                key = fold_in(step.key, index)
                p, own = replace(step, key=key)(i, entry[0], g, entry[1], when=when)
                p, own = put_entry(stacked, (p, entry[1] | own), index)
            new[i] = p.get_value(), slots[i] | own
        return new, total

    def use(loop, gradients, indices):
        each = _existing(of_layers, gradients, indices)
        current = dict(zip(of_layers, loop.parameters, strict=True))
        own_slots = dict(zip(of_layers, loop.slots, strict=True))
        new, squares = updated(
            {i: g for i, g, _ in each}, current, own_slots, {i: index for i, _, index in each}
        )
        for i, (value, slot) in new.items():
            current[i], own_slots[i] = value, slot
        return _Loop([*current.values()], [*own_slots.values()], loop.squares + squares)

    after = parameters.after_layers
    new, squares = updated({i: passes.of_end[i] for i in after}, dict(enumerate(values)), slots, {})
    # Otherwise XLA may keep the gradient of the head until after the layers.
    d_x, new, squares = jax.lax.optimization_barrier((passes.d_x, new, squares))
    loop = _Loop([values[i] for i in of_layers], [slots[i] for i in of_layers], squares)
    of_top, loop = passes.backward(d_x, loop, Use(lambda loop: loop.parameters, use))
    rest = {i: g for i, g in of_top.items() if i not in after}
    more, squares = updated(rest, dict(enumerate(values)), slots, {})
    new |= more | dict(zip(of_layers, zip(loop.parameters, loop.slots, strict=True), strict=True))
    trained = structure.unflatten([v.replace(new[i][0]) for i, v in enumerate(variables)])
    slots = {
        name: structure.unflatten([new[i][1][name] for i in range(len(variables))])
        for name in opt_state.slots
    }
    norm = jnp.where(finite, jnp.sqrt(loop.squares + squares), jnp.nan)
    opt_state = OptState(opt_state.count + finite.astype(jnp.int32), slots)
    return trained, opt_state, sums, norm


def gradients_in_host_memory(given: StepInputs, buffers: Any) -> tuple[Any, Any, Array]:
    """Computes the gradients of a step, and moves the gradient of each layer to host memory as soon
    as it is known. Returns the sums of the losses; the gradients, those of layers in host memory;
    and the norm of the gradients after the division.

    Args:
      buffers: arrays in host memory that the gradients of layers overwrite; see
        `TrainState.gradients`.
    """
    spec, parameters = given.spec, _Parameters(given.trained, given.model_of)
    of_layers, scale = parameters.of_layers, 1 / jnp.asarray(given.divisor, jnp.float32)
    passes = _run_forward(given, parameters)

    def use(loop, gradients, indices):
        each = _existing(of_layers, gradients, indices)
        kept = dict(zip(of_layers, loop.slots, strict=True))
        found = parameters.as_variables({i: g for i, g, _ in each})
        found = constrain(spec, found, sharded=True)
        for i, _, index in each:
            kept[i] = update_in_slices(
                lambda old, new, key: new.astype(old.dtype),
                kept[i],
                found[i].get_value(),
                jnp.zeros(2, jnp.uint32),
                axes=found[i].axes,
                when=jnp.array(True),
                index=index,
            )
        squares = loop.squares + sum_of_squares(found, scale)
        return _Loop(loop.parameters, [*kept.values()], squares)

    values = [parameters.values[i] for i in of_layers]
    loop = _Loop(values, jax.tree.leaves(buffers), jnp.zeros(()))
    of_top, loop = passes.backward(passes.d_x, loop, Use(lambda loop: loop.parameters, use))
    of_top = constrain(spec, parameters.as_variables(of_top), sharded=True)
    norm = jnp.sqrt(loop.squares + sum_of_squares(of_top, scale))
    gradients = of_top | parameters.as_variables(dict(zip(of_layers, loop.slots, strict=True)))
    gradients = [gradients[i] for i in range(len(parameters.variables))]
    return passes.sums, parameters.structure.unflatten(gradients), norm


def _existing(positions: list[int], gradients: list, indices: list) -> list[tuple]:
    """Returns (position, gradient, index of the layer) of the parameters that a layer has."""
    given = zip(positions, gradients, indices, strict=True)
    return [(i, g, index) for i, g, index in given if g is not None]


def _map(f: Callable, *args: Any) -> Any:
    """Applies `f` to each micro-batch of the arguments, and stacks the results."""
    if len(jax.tree.leaves(args)[0]) == 1:
        return jax.tree.map(lambda x: x[None], f(*jax.tree.map(lambda x: x[0], args)))
    return jax.lax.map(lambda args: f(*args), args)


def _sum_and_map(f: Callable, *args: Any) -> tuple[Any, Any]:
    """Applies `f`, which returns two trees, to each micro-batch of the arguments. Returns the first
    tree summed, in float32 over several micro-batches, and the second tree stacked."""
    first = jax.tree.map(lambda x: x[0], args)
    if len(jax.tree.leaves(args)[0]) == 1:
        total, each = f(*first)
        return total, jax.tree.map(lambda x: x[None], each)

    def add(sums, args):
        new, each = f(*args)
        return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, new), each

    shapes = jax.eval_shape(lambda args: f(*args)[0], first)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), shapes
    )
    return jax.lax.scan(add, zeros, args)
