"""Runs layers forward, then backward one layer at a time, so that the gradient of each layer is
used, and its memory reused, before the gradient of the previous layer exists.

Automatic differentiation of a loop over layers returns the gradients of all layers at once. Here
the forward loop takes each layer's `jax.vjp` and stacks its residuals; a reversed loop calls it and
hands the gradient to a function, such as an optimizer's update. That function may overwrite the
layer's parameters, because no later iteration reads them.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bptjax.models.layer_loops import layer_loops, scan_layers
from bptjax.ops.stacked import move

PyTree = Any


class Stack:
    """Stacked layers, some of whose arrays are trained.

    Attributes:
      trained: the trained arrays `[L, ...]`, in the order of the tree's leaves.
    """

    def __init__(
        self,
        layers: PyTree,
        is_trained: Callable[[Array], bool],
        entry_index: Callable[[Any, Array], Callable[[tuple], Array | None]],
    ):
        """
        Args:
          layers: the stacked layers.
          is_trained: whether a leaf is trained.
          entry_index: maps a kind and the index of a layer to the `index` of `read_entry`.
        """
        self._leaves, self._structure = jax.tree.flatten_with_path(layers)
        self._flags = [is_trained(x) for _, x in self._leaves]
        self._entry_index = entry_index
        self.trained = [x for (_, x), flag in zip(self._leaves, self._flags, strict=True) if flag]

    def with_trained(self, trained: Sequence[Array]) -> "Stack":
        """Returns the stack with other trained arrays."""
        other = copy(self)
        other.trained = list(trained)
        return other

    def read(self, kind: Any, index: Array) -> tuple[list, list, list]:
        """Returns the trained and frozen arrays of layer `index`, None where the layer has none,
        and the index of the layer in each trained array."""
        entry = self._entry_index(kind, index)
        indices = [entry(path) for path, _ in self._leaves]
        each = zip(self._arrays(), indices, strict=True)
        values = [None if i is None else _entry(x, i) for x, i in each]
        return *self._split(values), self._split(indices)[0]

    def whole(self, kinds: Sequence[Any]) -> tuple[list, list] | None:
        """Returns the trained and frozen arrays of all layers, None where they have none; None
        instead of both if layers of these kinds are not all layers, or have several kinds."""
        if any(kind != kinds[0] for kind in kinds):
            return None
        entry = self._entry_index(kinds[0], jnp.int32(0))
        each = zip(self._arrays(), self._leaves, strict=True)
        arrays = [None if entry(path) is None else x for x, (path, _) in each]
        if any(x is not None and len(x) != len(kinds) for x in arrays):
            return None
        return self._split(arrays)

    def _arrays(self):
        trained = iter(self.trained)
        each = zip(self._leaves, self._flags, strict=True)
        return [next(trained) if flag else x for (_, x), flag in each]

    def _split(self, values):
        each = [*zip(values, self._flags, strict=True)]
        return [x for x, flag in each if flag], [x for x, flag in each if not flag]

    def join(self, trained: list, frozen: list) -> PyTree:
        """Returns a layer from the arrays that `read` returned."""
        first, second = iter(trained), iter(frozen)
        return self._structure.unflatten([next(first if f else second) for f in self._flags])


class Use(NamedTuple):
    """Use of the gradients of layers.

    Attributes:
      trained: maps the state of the reversed loop to the trained arrays of the stack.
      gradient: maps (state, gradients of a layer, index of the layer in each trained array) to the
        new state. Gradients are None where the layer has no such array.
    """

    trained: Callable[[PyTree], Sequence[Array]]
    gradient: Callable[[PyTree, list, list], PyTree]


class Inputs(NamedTuple):
    """Inputs that all layers read. Cotangents have the same structure.

    Attributes:
      shared: arrays with a leading axis of micro-batches.
      weights: arrays that all micro-batches share.
    """

    shared: PyTree
    weights: PyTree


# Maps (cotangent of the carry, cotangents of the outputs, state, use of the gradients) to the
# (cotangent of the carry, cotangents of the inputs, new state).
Backward = Callable[[PyTree, PyTree, PyTree, Use], tuple[PyTree, Inputs, PyTree]]


@dataclass(frozen=True)
class LayerRunner:
    """Runs layers over micro-batches.

    Attributes:
      step: maps (layer, carry, shared, weights, data, index of the layer, kind=) of a micro-batch
        to (carry, output). The first four have gradients.
      inputs: inputs that all layers read.
      data: inputs without a gradient, with a leading axis of micro-batches.
      micro_batches: number of micro-batches. A layer processes all of them before the next layer
        runs; its gradient is the float32 sum over them, or that of a single one in its dtype.
    """

    step: Callable[..., tuple[PyTree, PyTree]]
    stack: Stack
    inputs: Inputs
    data: PyTree
    micro_batches: int

    def run(
        self,
        carry: PyTree,
        kinds: Sequence[Any],
        *,
        first: Array | int = 0,
        checkpoint: Callable[..., Callable],
    ) -> tuple[PyTree, PyTree, Backward]:
        """Applies layers in order, as `scan_layers`. Returns the last carry, the outputs stacked on
        axis 0, and the backward pass.

        Args:
          carry: pytree whose arrays have a leading axis of micro-batches.
          first: index of the first layer.
          checkpoint: `jax.checkpoint` with a policy, applied to each layer.
        """

        def unit(kind, prevent_cse):
            return _Layer(self, kind, lambda f: checkpoint(f, prevent_cse=prevent_cse))

        return _run(self, unit, carry, kinds, first, 1, self.stack.whole(kinds))

    def run_groups(
        self,
        carry: PyTree,
        kinds: Sequence[Any],
        *,
        first: Array | int = 0,
        size: int,
        save: Callable[[PyTree], PyTree],
        load: Callable[[PyTree], PyTree],
        checkpoint: Callable[..., Callable],
    ) -> tuple[PyTree, PyTree, Backward]:
        """Applies layers as `run`, but saves only the inputs of groups of layers. The backward pass
        runs each group forward again.

        Args:
          size: number of layers in a group.
          save, load: move the input of a group to where it is saved, and back.
          checkpoint: applied to each layer when its group runs again.
        """
        groups = [tuple(kinds[i : i + size]) for i in range(0, len(kinds), size)]

        def unit(kinds, prevent_cse):
            return _Group(self, kinds, save, load, checkpoint)

        carry, outputs, pull = _run(self, unit, carry, groups, first, size)
        outputs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)

        def backward(d_carry, d_outputs, state, use):
            d_outputs = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), d_outputs)
            return pull(d_carry, d_outputs, state, use)

        return carry, outputs, backward

    def layer(self, kind: Any, trained: list, frozen: list, index: Array) -> Callable:
        """Returns a layer's function of (carry, shared, weights, data) of a micro-batch."""

        def function(*args):
            # Join here, because flax modules change only at the trace level that made them.
            return self.step(self.stack.join(trained, frozen), *args, index, kind=kind)

        return function


def _run(runner, unit, carry, kinds, first, size, stack=None):
    """Runs units of `size` layers, each with its entry of `stack`. Returns the same as
    `LayerRunner.run`."""
    outputs, loops = [], []
    for pattern, repeats in layer_loops(kinds):
        # As in `scan_layers`: to XLA, a loop that runs once is not a loop.
        prevent_cse = len(pattern) > 1 or repeats == 1
        each = {pattern.index(kind): unit(kind, prevent_cse) for kind in pattern}
        units = [each[pattern.index(kind)] for kind in pattern]
        # Constants, if possible: XLA must know that the indices are linear in the loop's counter.
        starts = first + size * len(pattern) * np.arange(repeats, dtype=np.int32)

        def body(carry, x, units=units):
            (start, entry), outputs, saved = x, [], []
            for offset, unit in enumerate(units):
                if offset:
                    carry = jax.lax.optimization_barrier(carry)
                carry, output, residuals = unit.forward(carry, start + size * offset, entry)
                outputs.append(output)
                saved.append(residuals)
            return carry, (_stack(outputs), saved)

        carry, (output, saved) = jax.lax.scan(body, carry, (starts, stack))
        outputs.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), output))
        loops.append((units, repeats, first, saved))
        first += size * len(pattern) * repeats
    outputs = jax.tree.map(lambda *each: jnp.concatenate(each), *outputs)

    def backward(d_carry, d_outputs, state, use):
        sums, end = (d_carry, jax.tree.map(jnp.zeros_like, runner.inputs), state), len(kinds)
        for units, repeats, first, saved in reversed(loops):
            start = end - len(units) * repeats

            def body(round, sums, x, units=units, first=first):
                (d_carry, d_inputs, state), (saved, d_output) = sums, x
                start = first + size * len(units) * round
                for offset, unit in reversed(list(enumerate(units))):
                    if offset < len(units) - 1:
                        d_carry = jax.lax.optimization_barrier(d_carry)
                    own = jax.tree.map(lambda y, i=offset: y[i], d_output)
                    d_carry, more, state = unit.backward(
                        d_carry, own, state, use, start + size * offset, saved[offset]
                    )
                    d_inputs = jax.tree.map(jnp.add, d_inputs, more)
                return d_carry, d_inputs, state

            own = jax.tree.map(lambda x, a=start, b=end: x[a:b], d_outputs)
            shape = repeats, len(units)
            d_output = jax.tree.map(lambda x, n=shape: x.reshape(*n, *x.shape[1:]), own)
            sums = _reversed_loop(body, sums, (saved, d_output), repeats)
            end = start
        return sums

    return carry, outputs, backward


class _Layer:
    """A layer with its `jax.vjp`."""

    def __init__(self, runner: LayerRunner, kind: Any, checkpoint: Callable[[Callable], Callable]):
        self.runner, self.kind = runner, kind

        def function(trained, frozen, index, *args):
            return runner.layer(kind, trained, frozen, index)(*args)

        self.function = checkpoint(function)

    def forward(self, carry, index, entry):
        runner = self.runner
        trained, frozen = entry or runner.stack.read(self.kind, index)[:2]

        def one(carry, shared, data):
            def function(trained, carry, shared, weights):
                return self.function(trained, frozen, index, carry, shared, weights, data)

            weights = runner.inputs.weights
            out, pull = jax.vjp(function, trained, carry, shared, weights)
            known = jax.tree.leaves((trained, frozen, index, shared, weights, data))
            return out, self._residuals(pull, known)

        args = carry, runner.inputs.shared, runner.data
        (carry, output), saved = _over_micro_batches(runner, one, *args)
        return carry, output, saved

    def backward(self, d_carry, d_output, state, use, index, saved):
        runner = self.runner
        # Read from the state that the loop overwrites, not from the stack, which would be copied.
        current = runner.stack.with_trained(use.trained(state))
        trained, frozen, indices = current.read(self.kind, index)
        weights = runner.inputs.weights

        def one(sums, saved, cotangent, shared, data):
            known = jax.tree.leaves((trained, frozen, index, shared, weights, data))
            d_trained, d_carry, d_shared, d_weights = self._pull(saved, known)(cotangent)
            return _add(sums, (d_trained, d_weights)), d_carry, d_shared

        args = (d_carry, d_output), runner.inputs.shared, runner.data
        if runner.micro_batches == 1:
            sums, *rest = one(None, saved, *jax.tree.map(lambda x: x[0], args))
            d_carry, d_shared = jax.tree.map(lambda x: x[None], rest)
        else:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (trained, weights))

            def body(sums, args):
                sums, *rest = one(sums, *args)
                return sums, rest

            saved = [move(x, jax.memory.Space.Device) for x in saved]
            sums, (d_carry, d_shared) = jax.lax.scan(body, zeros, (saved, *args))
        gradients, d_weights = sums
        d_weights = jax.tree.map(lambda d, w: d.astype(w.dtype), d_weights, weights)
        return d_carry, Inputs(d_shared, d_weights), use.gradient(state, gradients, indices)

    def _residuals(self, pull, known):
        """Returns the arrays of a `jax.vjp` function that are not known in the backward pass."""
        leaves, self.structure = jax.tree.flatten(pull)
        places = [next((i for i, y in enumerate(known) if y is x), None) for x in leaves]
        self.constants = [
            x if place is None and not isinstance(x, jax.core.Tracer) else None
            for x, place in zip(leaves, places, strict=True)
        ]
        self.places = places
        each = zip(leaves, places, self.constants, strict=True)
        return [x for x, place, constant in each if place is None and constant is None]

    def _pull(self, saved, known):
        """Inverts `_residuals`."""
        rest = iter(saved)
        leaves = [
            constant if constant is not None else next(rest) if place is None else known[place]
            for place, constant in zip(self.places, self.constants, strict=True)
        ]
        return self.structure.unflatten(leaves)


class _Group:
    """A group of layers, of which only the input is saved."""

    def __init__(self, runner, kinds, save, load, checkpoint):
        self.runner, self.kinds = runner, kinds
        self.save, self.load, self.checkpoint = save, load, checkpoint

    def forward(self, carry, first, _):
        runner, saved = self.runner, self.save(carry)

        def step(carry, index, _, kind):
            trained, frozen, _ = runner.stack.read(kind, index)
            function = runner.layer(kind, trained, frozen, index)

            def one(carry, shared, data):
                return function(carry, shared, runner.inputs.weights, data), ()

            return _over_micro_batches(runner, one, carry, runner.inputs.shared, runner.data)[0]

        plain = dict(first=first, checkpoint=lambda f, prevent_cse: f)
        carry, outputs = scan_layers(step, carry, self.kinds, **plain)
        return carry, outputs, saved

    def backward(self, d_carry, d_output, state, use, first, saved):
        # Otherwise XLA might merge this forward pass with the first one.
        d_carry, carry = jax.lax.optimization_barrier((d_carry, self.load(saved)))
        stack = self.runner.stack.with_trained(use.trained(state))
        runner = replace(self.runner, stack=stack)
        *_, backward = runner.run(carry, self.kinds, first=first, checkpoint=self.checkpoint)
        return backward(d_carry, d_output, state, use)


def _over_micro_batches(runner, function, *args):
    """Applies a function that returns (results, residuals) to each micro-batch. Stacks the results
    over micro-batches, and also the residuals if there are several micro-batches."""
    if runner.micro_batches == 1:
        out, saved = function(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], out), saved
    spaces: list[jax.memory.Space] = []

    def one(args):
        out, saved = function(*args)
        spaces[:] = (jax.typeof(x).memory_space for x in saved)
        return out, [move(x, jax.memory.Space.Device) for x in saved]

    # XLA cannot compile slices of slices of host memory: move all micro-batches at once.
    out, saved = jax.lax.map(one, args)
    return out, list(map(move, saved, spaces))


def _reversed_loop(body, sums, xs, count):
    """Applies `body(round, sums, entries of xs)` for the rounds in reverse. XLA knows that the
    indices are linear in the loop's counter, so it copies entries while other kernels run."""

    def step(loop):
        step, sums = loop
        round = count - 1 - step
        return step + 1, body(round, sums, jax.tree.map(lambda x: _entry(x, round), xs))

    start = jnp.int32(0), sums
    return jax.lax.while_loop(lambda loop: loop[0] < count, step, start)[1]


def _entry(x, index):
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False, allow_negative_indices=False)


def _stack(trees):
    return jax.tree.map(lambda *each: jnp.stack(each), *trees)


def _add(sums, new):
    if sums is None:
        return new
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, new)
