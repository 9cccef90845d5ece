"""The loop nest of the direct forward convolution and of its input gradient: both are a correlation of blocked tensors.

For each phase (an output row and column modulo the output stride; one phase in the forward pass):

    out[n, k, out_stride*q + phase, .., v] = sum over c, j, l, i of
        in[n, c, in_stride*q + row.offset + j*row.offset_step, .., i] * w[k, c, row.first + j*row.step, .., i, v]

Tasks are (sample, tile of `vectors` channel blocks k, tile of `scalars` pixels of one phase). A task keeps its accumulators
in registers over the whole sum and writes each output once, so the result does not depend on the number of threads.

With statistics of the output (forward pass) a task takes a part of a sample's pixels, whole lines of tiles, one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from tvm.script.ir_builder import tirx as T

from cross.kernels.convolution import Pair, Phase
from cross.kernels.loop_nest import (
    CACHE_LINE,
    Buffer,
    Expr,
    PrimFunc,
    lanes,
    local,
    opaque_serial,
    prefetch,
    settle,
    store,
    when,
    write_kernel,
    zeros,
)
from cross.kernels.products import Factor, Product, add_products, runs
from cross.kernels.statistics import PART_PIXELS, Moments, Statistics
from cross.kernels.tiles import Split, fits_with, largest_divisor, register_tile, split
from cross.storage import Storage
from cross.target import Target

SHORT_ROW = 5
"""Rows with fewer pixels share tiles with the next ones."""


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


def _line(phase: Phase) -> tuple[int, int]:
    """(pixels, number) of the lines that tiles are cut from: rows, so that a tile has one address, or the whole phase where
    rows are short."""
    return (phase.width, phase.height) if phase.width >= SHORT_ROW else (phase.width * phase.height, 1)


def _part_lines(phase: Phase) -> int:
    """Lines of a part: a divisor of their number, so that no part is smaller than the others."""
    pixels, number = _line(phase)
    return largest_divisor(number, PART_PIXELS // pixels)


def part_pixels(phase: Phase) -> int:
    """Pixels of a part that statistics are summed over."""
    return _part_lines(phase) * _line(phase)[0]


def correlation(work: Correlation, target: Target, parts: Storage | None = None) -> PrimFunc:
    """PrimFunc(in, weight, out, [sum, m2]); the statistics of `out` are stored as `parts`."""
    with write_kernel(work.name) as kernel:
        source = kernel.tensor("source", work.source.shape)
        weight = kernel.tensor("weight", work.weight_shape)
        destination = kernel.tensor("destination", work.destination.shape)
        statistics = None if parts is None else Statistics.of(kernel, parts)
        write_correlation(work, target, kernel.batch, (source, weight, destination), statistics)
    return kernel.function


def write_correlation(
    work: Correlation,
    target: Target,
    batch: Expr,
    tensors: tuple[Buffer, Buffer, Buffer],
    statistics: Statistics | None = None,
) -> None:
    """The nest over (in, weight, out), into the kernel that is being written."""
    source, weight, destination = tensors
    group_blocks = work.destination.shape[1] // work.groups
    lines = tuple(_line(phase) for phase in work.phases)
    pixels, vectors = register_tile(target, lines, group_blocks)
    blocks = split(group_blocks, vectors)
    tiles = [(phase, split(length, pixels), count) for phase, (length, count) in zip(work.phases, lines, strict=True)]
    tile_count = sum(cut.count * count for _, cut, count in tiles)
    block_tiles = work.groups * blocks.count
    run = 1 if statistics is None else _part_lines(work.phases[0]) * tiles[0][1].count
    runs = tile_count // run
    # What is larger is read once: the weights of a tile, kept over the samples, or a sample, kept over the tiles.
    weights_outside = prod(work.weight_shape) // block_tiles > work.source.elements
    with T.parallel(batch * (block_tiles * runs)) as task:
        outer, number = settle(task // runs), settle(task % runs)
        inside = batch if weights_outside else block_tiles
        sample, block_tile = (outer % inside, outer // inside) if weights_outside else (outer // inside, outer % inside)
        group = settle(block_tile // blocks.count)
        nest = _Nest(
            work,
            source,
            weight,
            destination,
            settle(sample),
            group,
            settle(block_tile % blocks.count),
            target,
            batch,
        )
        if statistics is not None:
            ((phase, cut, _),) = tiles
            nest.part(phase, cut, blocks, statistics, (sample * runs + number, number * run, run))
            return
        first = 0
        for phase, cut, count in tiles:
            end = first + cut.count * count
            with when(T.And(number >= first, number < end)):
                nest.phase(phase, cut, blocks, number - first)
            first = end


@dataclass(frozen=True)
class _Nest:
    """The body of one task, written once for each size of tile."""

    work: Correlation
    source: Buffer
    weight: Buffer
    destination: Buffer
    sample: Expr
    group: Expr
    block_tile: Expr
    target: Target
    batch: Expr

    @property
    def ahead(self) -> bool:
        """Whether the weights come from beyond the second-level cache."""
        return prod(self.work.weight_shape) * 4 > self.target.l2_kib * 1024

    def phase(self, phase: Phase, cut: Split, blocks: Split, tile: Expr) -> None:
        """Tile number `tile` of a phase."""
        for block, vectors in self._blocks(blocks):
            self._tile_of_line(phase, cut, tile, block, vectors)

    def part(
        self, phase: Phase, cut: Split, blocks: Split, statistics: Statistics, place: tuple[Expr, Expr, int]
    ) -> None:
        """A part: (its number in the batch, its first tile, tiles), and its statistics."""
        number, first, count = place
        width = self.work.weight_shape[-1]
        for block, vectors in self._blocks(blocks):
            moments = Moments(vectors, width)
            with T.serial(count) as tile:
                self._tile_of_line(phase, cut, first + tile, block, vectors, (moments, tile == 0))
            moments.write(statistics, number, block, part_pixels(phase))

    def _blocks(self, blocks: Split) -> Iterator[tuple[Expr, int]]:
        """(first channel block, number of them) of this task's tile; the code for each number is written in its turn."""
        for vectors, first_tile, count, first in blocks.parts:
            with when(T.And(self.block_tile >= first_tile, self.block_tile < first_tile + count)):
                yield settle(self.group * blocks.total + first + (self.block_tile - first_tile) * vectors), vectors

    def _tile_of_line(
        self,
        phase: Phase,
        cut: Split,
        tile: Expr,
        block: Expr,
        vectors: int,
        gathered: tuple[Moments, Expr] | None = None,
    ) -> None:
        line, item = settle(tile // cut.count), settle(tile % cut.count)
        for size, first, count, first_pixel in cut.parts:
            with when(T.And(item >= first, item < first + count)):
                pixel = settle(line * cut.total + first_pixel + (item - first) * size)
                self.tile(phase, pixel, size, block, vectors, gathered)

    def tile(
        self,
        phase: Phase,
        pixel: Expr,
        pixels: int,
        block: Expr,
        vectors: int,
        gathered: tuple[Moments, Expr] | None = None,
    ) -> None:
        """`pixels` outputs from `pixel` on (row-major in the phase) of `vectors` channel blocks from `block` on. `gathered`: the
        moments they belong to, and whether they are the first ones."""
        if phase.width >= SHORT_ROW:
            row, column = settle(pixel // phase.width), settle(pixel % phase.width)
            places = [(row, column + p) for p in range(pixels)]
        else:
            places = [(settle((pixel + p) // phase.width), settle((pixel + p) % phase.width)) for p in range(pixels)]
        width = self.work.weight_shape[-1]
        lane = lanes(0, width)
        sums = [local(vectors, width) for _ in range(pixels)]
        every = [(p, k) for p in range(pixels) for k in range(vectors)]
        for p, k in every:
            store(sums[p], (k, lane), zeros(width))
        if phase.row_taps.count and phase.column_taps.count:
            self._sum(phase, sums, places, block, vectors)
        row_stride, column_stride = self.work.out_strides
        for p, k in every:
            y, x = places[p][0] * row_stride + phase.row, places[p][1] * column_stride + phase.column
            store(self.destination, (self.sample, block + k, y, x, lane), sums[p][k, lane])
            if gathered is not None:
                moments, is_first = gathered
                moments.add(k, sums[p][k, lane], is_first if p == 0 else False)

    def _sum(
        self, phase: Phase, sums: list[Buffer], places: list[tuple[Expr, Expr]], block: Expr, vectors: int
    ) -> None:
        """Add up all input channels and taps. Where the weights of a whole kernel row fit into registers beside the sums, each
        input column is broadcast once for all pixels and taps that read it."""
        _, group_blocks, _, _, depth, width = self.work.weight_shape
        rows, columns = phase.row_taps, phase.column_taps
        unrolled = columns.count if fits_with(self.target, len(places) * vectors, columns.count * vectors) else 1
        reads = self._reads(phase, places, range(unrolled))
        first_source, rows_of_line = settle(self.group * group_blocks), CACHE_LINE // width
        with (
            T.serial(group_blocks) as c,
            T.serial(rows.count) as j,
            opaque_serial(columns.count // unrolled, self.batch) as outer,
        ):
            r = rows.first + j * rows.step
            for run in runs(self.target, depth):
                if self.ahead:
                    taps = [columns.first + (outer + tap) * columns.step for tap in range(unrolled)]
                    lines = [i for i in run if i % rows_of_line == 0] if rows_of_line > 1 else run
                    self._fetch([(block + k, c + 1, r, s, i) for i in lines for s in taps for k in range(vectors)])
                products = []
                for i, (number, (row, column, users)) in itertools.product(run, enumerate(reads)):
                    y = row * self.work.in_strides[0] + rows.offset + j * rows.offset_step
                    x = column + outer * columns.offset_step
                    pixel = Factor(number, self.source, (self.sample, first_source + c, y, x), 0, i)
                    # Used up at once: only the sums, the weights and one broadcast take registers.
                    for p, tap in users:
                        s = columns.first + (outer + tap) * columns.step
                        for k in range(vectors):
                            weight = Factor((k, tap, i), self.weight, (block + k, c, r, s, i), 0, 0, width)
                            products.append(Product(sums[p], k, pixel, weight))
                add_products(self.target, products, len(places) * vectors)

    def _fetch(self, places: list[tuple[Expr, ...]]) -> None:
        """Weights of the next input block, which come from memory while this one's are multiplied."""
        for place in places:
            prefetch(self.weight, (*place, 0))

    def _reads(
        self, phase: Phase, places: list[tuple[Expr, Expr]], taps: range
    ) -> list[tuple[Expr, Expr, list[tuple[int, int]]]]:
        """Input columns that a tile reads in one kernel row: (output row, input column, [(pixel, tap) that use it])."""
        stride, step = self.work.in_strides[1], phase.column_taps.offset_step
        users: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for p in range(len(places)):
            for tap in taps:
                one_row = phase.width >= SHORT_ROW
                key = (0, p * stride + tap * step) if one_row else (p, tap * step)
                users.setdefault(key, []).append((p, tap))
        return [
            (places[p][0], places[p][1] * stride + phase.column_taps.offset + shift, users[p, shift])
            for p, shift in sorted(users)
        ]
