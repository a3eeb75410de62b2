"""Optimizer steps inside the backward pass: each layer is updated as soon as its gradient is known,
so that the gradients of all layers never exist at once."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from bptjax.models.layer_backward import Use
from bptjax.models.params import is_variable, param_path
from bptjax.models.stack import run_with_backward
from bptjax.optim.optimizer import OptState, Update, clip_factor, sum_of_squares
from bptjax.training.spec import TrainSpec
from bptjax.training.state import constrain

Batch = dict[str, Any]


class Losses(NamedTuple):
    """Functions of a micro-batch, given by the train step.

    Attributes:
      begin: maps (model, micro-batch, dropout key) to `LayerInputs`.
      end: maps (model, micro-batch, dropout key, residual stream after the layers, auxiliary sums
        of the layers, totals) to (loss to differentiate, sums of the losses).
      counts: maps (auxiliary sums, micro-batch) to the summands of `totals`; None if the loss does
        not depend on totals of the batch.
    """

    begin: Callable[..., Any]
    end: Callable[..., tuple[Array, Any]]
    counts: Callable[..., Any] | None


class _Loop(NamedTuple):
    """State of the reversed loop.

    Attributes:
      parameters: the trained arrays of the layers.
      slots: optimizer state of each, by slot.
      squares: sum of the squares of the gradients so far.
    """

    parameters: list[Array]
    slots: list[dict[str, Any]]
    squares: Array


def step_in_backward(
    spec: TrainSpec,
    losses: Losses,
    model_of: Callable[[Any], Any],
    trained: Any,
    opt_state: OptState,
    batch: Batch,
    key: Array,
    *,
    rate: Array,
    divisor: Array,
    last_norm: Array | None,
    rounding: Array,
) -> tuple[Any, OptState, Any, Array]:
    """Takes an optimizer step over micro-batches `[A, B, T]`. Returns the trained parameters, the
    optimizer state, the sums of the losses, and the norm of the gradients.

    A layer processes all micro-batches before the next layer runs. If the loss is not finite,
    nothing changes. If the gradient of a layer is not finite, this layer and the layers below do
    not change, and the norm is not finite.

    Args:
      model_of: returns the model with these trained parameters.
      key: dropout key of the step.
      rate, divisor: as for `apply_gradients`.
      last_norm: norm of the previous step, with optimizer.clip=delayed.
      rounding: key of the rounding.
    """
    config, A = spec.config.optimizer, batch["labels"].shape[0]
    leaves, structure = jax.tree.flatten_with_path(trained, is_leaf=is_variable)
    variables, names = (
        [v for _, v in leaves],
        [param_path(at).partition(".")[0] for at, _ in leaves],
    )
    values = [v.get_value() for v in variables]
    model = model_of(trained)
    in_layers = {id(x) for x in jax.tree.leaves(model.layers)}
    of_layers = [i for i, x in enumerate(values) if id(x) in in_layers]
    of_top = [i for i in range(len(values)) if i not in of_layers]
    slots = zip(*(structure.flatten_up_to(tree) for tree in opt_state.slots.values()), strict=True)
    slots = [dict(zip(opt_state.slots, each, strict=True)) for each in slots]

    def with_top(top):
        new = dict(zip(of_top, top, strict=True))
        each = (v.replace(new.get(i, values[i])) for i, v in enumerate(variables))
        return model_of(structure.unflatten(each))

    def begin(top, batch, number):
        return losses.begin(with_top(top), batch, jax.random.fold_in(key, number))

    def inputs(batch, number):
        given = begin(top, batch, number)
        return given.x, given.context, given.mask.segments

    def end(top, x, aux, batch, number, totals):
        micro_key = jax.random.fold_in(key, number)
        return losses.end(with_top(top), batch, micro_key, x, aux, totals)

    top, numbers = [values[i] for i in of_top], jnp.arange(A)
    x, context, segments = _map(inputs, batch, numbers)
    dropout_keys = jax.vmap(lambda n: jax.random.key_data(jax.random.fold_in(key, n)))(numbers)
    x, aux, backward = run_with_backward(
        model.layers,
        lambda leaf: id(leaf) in {id(values[i]) for i in of_layers},
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
    if losses.counts is not None and A > 1:
        totals = jax.tree.map(lambda y: y.sum(0), _map(losses.counts, aux, batch))

    def loss_gradients(x, aux, batch, number):
        found = jax.grad(end, (0, 1, 2), has_aux=True)(top, x, aux, batch, number, totals)
        (d_top, d_x, d_aux), sums = found
        return (sums, d_top), (d_x, d_aux)

    (sums, d_top), (d_x, d_aux) = _sum_and_map(loss_gradients, x, aux, batch, numbers)
    finite = jnp.isfinite(sums.loss)
    scale = 1 / jnp.asarray(divisor, jnp.float32)
    factor = 1.0 if last_norm is None else clip_factor(config, last_norm)
    update = Update(config, rate, scale * factor, opt_state.count + 1, rounding)
    sharded = spec.config.parallel.zero_stage > 1

    def updated(gradients, parameters, slots, indices):
        """Updates parameters by their number. Returns their new values and slots, and the sum of
        the squares of the gradients."""
        gradients = {i: variables[i].replace(g) for i, g in gradients.items()}
        gradients = constrain(spec, gradients, sharded)
        squares = sum_of_squares(gradients, scale)
        step, when = update, finite & jnp.isfinite(squares)
        if config.clip == "per_layer":
            step = replace(update, scale=scale * clip_factor(config, jnp.sqrt(squares)))
        new = {}
        for i, g in gradients.items():
            p, index = variables[i].replace(parameters[i]), indices.get(i)
            if index is None or spec.config.parallel.zero_stage == 3:
                p = p if index is not None else constrain(spec, p, sharded=True)
                p, own = step(i, p, g, slots[i], when=when, index=index)
            else:
                # Each device updates its shard of the entry; then all get the entry.
                stacked = p, slots[i]
                at = partial(jax.lax.dynamic_index_in_dim, index=index, keepdims=False)
                entry = constrain(spec, jax.tree.map(at, stacked), sharded=True)
                key = jax.random.fold_in(step.key, index)
                entry = replace(step, key=key)(i, entry[0], g, entry[1], when=when)
                put = partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
                p, own = jax.tree.map(put, stacked, entry)
            new[i] = p.get_value(), slots[i] | own
        return new, squares

    def use(loop, gradients, indices):
        given = zip(of_layers, gradients, indices, strict=True)
        given = [(i, g, index) for i, g, index in given if g is not None]
        parameters = dict(zip(of_layers, loop.parameters, strict=True))
        own_slots = dict(zip(of_layers, loop.slots, strict=True))
        new, squares = updated(
            {i: g for i, g, _ in given}, parameters, own_slots, {i: index for i, _, index in given}
        )
        for i, (value, slot) in new.items():
            parameters[i], own_slots[i] = value, slot
        return _Loop([*parameters.values()], [*own_slots.values()], loop.squares + squares)

    after = {i for i in of_top if names[i] in model.AFTER_LAYERS}
    gradients_of_top = dict(zip(of_top, d_top, strict=True))
    new, squares = updated(
        {i: gradients_of_top[i] for i in after}, dict(enumerate(values)), slots, {}
    )
    # Otherwise XLA may keep the gradient of the head until after the layers.
    d_x, new, squares = jax.lax.optimization_barrier((d_x, new, squares))
    loop = _Loop([values[i] for i in of_layers], [slots[i] for i in of_layers], squares)
    d_aux = jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1), d_aux)
    d_x, d_norm, loop = backward(d_x, d_aux, loop, Use(lambda loop: loop.parameters, use))

    def begin_gradients(d_x, batch, number):
        _, pull = jax.vjp(lambda top: begin(top, batch, number).x, top)
        return pull(d_x)[0], ()

    d_begin, _ = _sum_and_map(begin_gradients, d_x, batch, numbers)
    norm_numbers = {id(values[i]): i for i in of_top}
    of_norm = [norm_numbers.get(id(x)) for x in jax.tree.leaves(model.layer_embedding_norm)]
    for i, d in zip(of_norm, jax.tree.leaves(d_norm), strict=True):
        if i is not None:
            gradients_of_top[i] = gradients_of_top[i] + d
    rest = {
        i: gradients_of_top[i] + d for i, d in zip(of_top, d_begin, strict=True) if i not in after
    }
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
