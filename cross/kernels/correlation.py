"""The loop nest of the direct forward convolution and of its input gradient: both are a correlation of blocked tensors.

For each phase (an output row and column modulo the output stride; one phase in the forward pass):

    out[n, k, out_stride*q + phase, .., v] = sum over c, j, l, i of
        in[n, c, in_stride*q + row.offset + j*row.offset_step, .., i] * w[k, c, row.first + j*row.step, .., i, v]

Tasks are (sample, tile of `vectors` channel blocks k, tile of `scalars` pixels of one phase). A task keeps its accumulators
in registers over the whole sum and writes each output once, so the result does not depend on the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tvm.script.ir_builder import tirx as T

from cross.graph import BATCH
from cross.kernels.convolution import Pair, Taps
from cross.kernels.loop_nest import Buffer, Expr, PrimFunc, add_to, lanes, local, spread, store, when, write_kernel, zeros
from cross.kernels.tiles import Split, register_tile, split
from cross.storage import Storage
from cross.target import Target

UNROLLED_MULTIPLIES = 32
"""A kernel row is unrolled with the channels where both together have at most so many (few input channels)."""


@dataclass(frozen=True)
class Phase:
    """Output pixels `row + out_stride * q`, q < `height`, and the same across; offsets of the taps count from the stored
    (padded) input's first row."""

    row: int
    column: int
    height: int
    width: int
    row_taps: Taps
    column_taps: Taps

    @property
    def pixels(self) -> int:
        return self.height * self.width


@dataclass(frozen=True)
class Correlation:
    """`source` and `destination` are blocked storages; the weight is [K blocks, C blocks a group, R, S, i, v]."""

    name: str
    source: Storage
    weight_shape: tuple[int, ...]
    destination: Storage
    groups: int
    in_strides: Pair
    out_strides: Pair
    phases: tuple[Phase, ...]


def correlation(work: Correlation, target: Target) -> PrimFunc:
    """PrimFunc(in, weight, out)."""
    _, out_blocks, out_height, out_width, _ = work.destination.shape
    group_blocks = out_blocks // work.groups
    pixels, vectors = register_tile(target, tuple(phase.pixels for phase in work.phases), group_blocks)
    block_split = split(group_blocks, vectors)
    tiles = [(phase, split(phase.pixels, pixels)) for phase in work.phases]
    tile_count = sum(cut.count for _, cut in tiles)
    block_tiles = work.groups * block_split.count
    # What is larger is read once: the weights of a tile, kept over the samples, or a sample, kept over the tiles.
    weights_outside = prod(work.weight_shape) // block_tiles > work.source.elements
    with write_kernel(work.name) as kernel:
        source = kernel.tensor("source", work.source.shape)
        weight = kernel.tensor("weight", work.weight_shape)
        destination = kernel.tensor("destination", work.destination.shape)
        with T.parallel(kernel.batch * (block_tiles * tile_count)) as task:
            outer, tile = task // tile_count, task % tile_count
            if weights_outside:
                sample, block_tile = outer % kernel.batch, outer // kernel.batch
            else:
                sample, block_tile = outer // block_tiles, outer % block_tiles
            nest = _Nest(work, source, weight, destination, sample)
            first_tile = 0
            for phase, cut in tiles:
                nest.phase(phase, cut, tile - first_tile, block_split, block_tile)
                first_tile += cut.count
    return kernel.function


@dataclass(frozen=True)
class _Nest:
    """The body of one task, written once for each size of tile."""

    work: Correlation
    source: Buffer
    weight: Buffer
    destination: Buffer
    sample: Expr

    def phase(self, phase: Phase, cut: Split, tile: Expr, block_split: Split, block_tile: Expr) -> None:
        """Tiles of one phase; `tile` counts from the phase's first and may lie outside it."""
        group, tile_of_group = block_tile // block_split.count, block_tile % block_split.count
        for size, first, count, first_pixel in cut.parts:
            for vectors, first_block_tile, block_tiles, first_block in block_split.parts:
                with when(
                    T.And(
                        T.And(tile >= first, tile < first + count),
                        T.And(tile_of_group >= first_block_tile, tile_of_group < first_block_tile + block_tiles),
                    )
                ):
                    pixel = T.bind(first_pixel + (tile - first) * size)
                    block = T.bind(group * block_split.total + first_block + (tile_of_group - first_block_tile) * vectors)
                    self.tile(phase, pixel, size, block, vectors, group)

    def tile(self, phase: Phase, pixel: Expr, pixels: int, block: Expr, vectors: int, group: Expr) -> None:
        """`pixels` outputs from `pixel` on (row-major in the phase) of `vectors` channel blocks from `block` on."""
        width = self.weight.shape[-1]
        width = int(width)
        sums = local(pixels, vectors, width)
        rows = [T.bind((pixel + p) // phase.width) for p in range(pixels)]
        columns = [T.bind((pixel + p) % phase.width) for p in range(pixels)]
        every = [(p, k) for p in range(pixels) for k in range(vectors)]
        for p, k in every:
            store(sums, (p, k, lanes(0, width)), zeros(width))
        if phase.row_taps.count and phase.column_taps.count:
            self._sum(phase, sums, rows, columns, block, vectors, group)
        row_stride, column_stride = self.work.out_strides
        for p, k in every:
            place = (rows[p] * row_stride + phase.row, columns[p] * column_stride + phase.column)
            store(self.destination, (self.sample, block + k, *place, lanes(0, width)), sums[p, k, lanes(0, width)])

    def _sum(
        self,
        phase: Phase,
        sums: Buffer,
        rows: list[Expr],
        columns: list[Expr],
        block: Expr,
        vectors: int,
        group: Expr,
    ) -> None:
        _, blocks_a_group, _, _, depth, width = self.work.weight_shape
        row_taps, column_taps = phase.row_taps, phase.column_taps
        row_stride, column_stride = self.work.in_strides
        unrolled = column_taps.count if column_taps.count * depth <= UNROLLED_MULTIPLIES else 1
        tops = [T.bind(row * row_stride + row_taps.offset) for row in rows]
        lefts = [T.bind(column * column_stride + column_taps.offset) for column in columns]
        with T.grid(blocks_a_group, row_taps.count, column_taps.count // unrolled) as (c, j, outer):
            for inner in range(unrolled):
                tap = outer + inner
                r, s = row_taps.first + j * row_taps.step, column_taps.first + tap * column_taps.step
                for i in range(depth):
                    for p in range(len(rows)):
                        y = tops[p] + j * row_taps.offset_step
                        x = lefts[p] + tap * column_taps.offset_step
                        pixel = spread(self.source[self.sample, group * blocks_a_group + c, y, x, i], width)
                        # Blocks innermost: a broadcast is used up at once, so only `vectors` weights and it take registers.
                        for k in range(vectors):
                            weights = self.weight[block + k, c, r, s, i, lanes(0, width)]
                            add_to(sums, (p, k, lanes(0, width)), pixel * weights)


__all__ = ["BATCH", "Correlation", "Phase", "correlation"]
