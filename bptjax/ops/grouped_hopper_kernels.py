"""The grouped matrix product and its gradient as Pallas kernels for Hopper GPUs. `grouped_hopper`
calls them.

Each multiprocessor computes output tiles in turn. One group of four warps copies tiles of both
operands to shared memory, a few steps ahead and across the ends of output tiles. Two groups
multiply, each for half of the rows, and store their sums while operands of the next tile arrive.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from bptjax.ops.grouped_hopper import DEPTH, ROWS

# Groups of warps that multiply, and their rows; the group that copies comes after them.
GROUPS = 2
HALF = ROWS // GROUPS
# Steps whose operands shared memory holds, by outputs per tile: 208 and 192 of 227 KB, with the
# stored tiles. Each group stores its half of a tile in as many parts.
STAGES = {256: 3, 128: 5}
PARTS = 2
# Registers of a thread that copies, and of one that multiplies.
FEW, MANY = 40, 232


def multiply(
    x: Array, w: Array, experts: Array, shape: Any, *, width: int, cores: int, transposed: bool
) -> Array:
    """As `grouped_hopper.multiply`."""
    inputs, across = x.shape[1], shape.shape[1] // width

    def place(tile: Array) -> tuple[Array, Any, Any]:
        """Returns the block, its rows, and the outputs of a tile."""
        block, column = lax.div(tile, across), lax.rem(tile, across)
        return block, pl.ds(block * ROWS, ROWS), pl.ds(column * width, width)

    def steps(experts: Any, tile: Array) -> Array:
        block, _, _ = place(tile)
        return jnp.where(experts[block] < len(w), inputs // DEPTH, 0)

    def sources(x: Any, w: Any, experts: Any, tile: Array, step: Array) -> tuple[Any, Any]:
        (block, rows, outer), inner = place(tile), pl.ds(step * DEPTH, DEPTH)
        matrix = w.at[experts[block]]
        return x.at[rows, inner], matrix.at[(outer, inner) if transposed else (inner, outer)]

    def product(sums: Any, rows: Any, matrix: Any, half: Any) -> None:
        plgpu.wgmma(sums, rows.at[half], matrix.transpose((1, 0)) if transposed else matrix)

    def target(y: Any, tile: Array) -> Any:
        _, rows, outer = place(tile)
        return y.at[rows, outer]

    tiles = (ROWS, DEPTH), (width, DEPTH) if transposed else (DEPTH, width)
    count = len(experts) * across
    return _run((x, w), experts, shape, tiles, count, width, cores, steps, sources, product, target)


def gradient(x: Array, dy: Array, ranges: Array, shape: Any, *, width: int, cores: int) -> Array:
    """Sums xᵀ · dy over each expert's rows, from DEPTH · ranges[e, 0] to DEPTH · ranges[e, 1]."""
    X, inputs, outputs = shape.shape
    down, across = inputs // ROWS, outputs // width

    def place(tile: Array) -> tuple[Array, Any, Any]:
        """Returns the expert, inputs and outputs of a tile."""
        expert, rest = lax.div(tile, down * across), lax.rem(tile, down * across)
        row, column = lax.div(rest, across), lax.rem(rest, across)
        return expert, pl.ds(row * ROWS, ROWS), pl.ds(column * width, width)

    def steps(ranges: Any, tile: Array) -> Array:
        expert, _, _ = place(tile)
        return ranges[expert, 1] - ranges[expert, 0]

    def sources(x: Any, dy: Any, ranges: Any, tile: Array, step: Array) -> tuple[Any, Any]:
        expert, inner, outer = place(tile)
        rows = pl.ds((ranges[expert, 0] + step) * DEPTH, DEPTH)
        return x.at[rows, inner], dy.at[rows, outer]

    def product(sums: Any, x: Any, dy: Any, half: Any) -> None:
        plgpu.wgmma(sums, x.at[:, half].transpose((1, 0)), dy)

    def target(dw: Any, tile: Array) -> Any:
        return dw.at[place(tile)]

    tiles, count = ((DEPTH, ROWS), (DEPTH, width)), X * down * across
    return _run((x, dy), ranges, shape, tiles, count, width, cores, steps, sources, product, target)


def _run(
    operands: tuple[Array, Array],
    table: Array,
    shape: Any,
    tiles: tuple[tuple[int, int], tuple[int, int]],
    count: int,
    width: int,
    cores: int,
    steps: Callable[..., Array],
    sources: Callable[..., tuple[Any, Any]],
    product: Callable[..., None],
    target: Callable[..., Any],
) -> Array:
    """Computes `count` tiles `[ROWS, width]` of the output, each a sum of products.

    Args:
      tiles: shapes of the tiles of both operands in shared memory.
      steps: number of products of an output tile.
      sources: tiles of both operands for a step of an output tile.
      product: adds the product of two tiles to the sums of one half of the rows.
      target: an output tile.
    """
    stages, part = STAGES[width], width // PARTS

    def slot(step: Array) -> Array:
        return lax.rem(step, stages)

    def kernel(a: Any, b: Any, table: Any, y: Any) -> None:
        def core(buffers: Any, full: Any, free: Any, stored: Any) -> None:
            group = lax.axis_index("group")

            # Both sides count the steps of all tiles, which take the slots in turn.
            @pl.when(group == GROUPS)
            def copy() -> None:
                plgpu.set_max_registers(FEW, action="decrease")

                @plgpu.nd_loop((count,), collective_axes="core", init_carry=jnp.int32(0))
                def done(loop: Any, carry: Array) -> Array:
                    (tile,) = loop.index

                    def copy_step(step: Array, total: Array) -> Array:
                        @pl.when(total >= stages)
                        def wait() -> None:
                            plgpu.barrier_wait(free.at[slot(total)])

                        found = sources(a, b, table, tile, step)
                        for source, buffer in zip(found, buffers, strict=True):
                            to = buffer.at[slot(total)]
                            plgpu.copy_gmem_to_smem(source, to, full.at[slot(total)])
                        return total + 1

                    return lax.fori_loop(0, steps(table, tile), copy_step, carry)

                @pl.loop(jnp.maximum(done - stages, 0), done)
                def wait(step: Array) -> None:
                    plgpu.barrier_wait(free.at[slot(step)])

            @pl.when(group < GROUPS)
            def compute() -> None:
                plgpu.set_max_registers(MANY, action="increase")
                half = pl.ds(group * HALF, HALF)

                @plgpu.nd_loop((count,), collective_axes="core", init_carry=jnp.int32(0))
                def _(loop: Any, carry: Array) -> Array:
                    (tile,) = loop.index
                    number = steps(table, tile)

                    def summed(sums: Any) -> Array:
                        def add(step: Array, total: Array) -> Array:
                            plgpu.barrier_wait(full.at[slot(total)])
                            product(sums, *(buffer.at[slot(total)] for buffer in buffers), half)
                            # The product before this one has ended.
                            plgpu.wgmma_wait(1)

                            @pl.when(step > 0)
                            def release() -> None:
                                plgpu.barrier_arrive(free.at[slot(total - 1)])

                            return total + 1

                        lax.fori_loop(0, number, add, carry)
                        return sums[...]

                    sums = pl.run_scoped(summed, plgpu.ACC((HALF, width), jnp.float32))

                    @pl.when(number > 0)
                    def release() -> None:
                        plgpu.barrier_arrive(free.at[slot(carry + number - 1)])

                    for i in range(PARTS):
                        columns = slice(i * part, (i + 1) * part)
                        # The store of the other part may still read its copy.
                        plgpu.wait_smem_to_gmem(PARTS - 1, wait_read_only=True)
                        stored[group, i] = sums[:, columns].astype(y.dtype)
                        plgpu.commit_smem()
                        to = target(y, tile).at[half, columns]
                        plgpu.copy_smem_to_gmem(stored.at[group, i], to)
                    return carry + number

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.run_scoped(
            core,
            [_shared((stages, *x), o.dtype) for x, o in zip(tiles, operands, strict=True)],
            plgpu.Barrier(num_arrivals=len(operands), num_barriers=stages),
            plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages),
            _shared((GROUPS, PARTS, HALF, part), shape.dtype),
            collective_axes="group",
        )

    return plgpu.kernel(
        kernel,
        out_type=shape,
        grid=(cores,),
        grid_names=("core",),
        num_threads=GROUPS + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(*operands, table)


def _shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns shared memory in the layout that products read, with 128 bytes in a row."""
    transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM(shape, dtype, transforms=transforms)
