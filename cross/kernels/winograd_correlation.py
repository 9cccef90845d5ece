"""Winograd's forward convolution and input gradient: both are a correlation of a padded image with a 3x3 kernel.

For each chunk of tiles: first every (block of input channels, group of tiles) is transformed; then a task takes a pair of blocks of
output channels and a group of tiles, forms their 16 matrix products, one register tile after another, and transforms them to
outputs. Each output is written by one task, which sums over input channels in their order.

The transformed weight is made once a step by a kernel of its own. One that would not stay in a cache until it is read is made by
the convolution itself instead, a part of the output channels at a time (`is_in_parts`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from cross.graph import Shape
from cross.kernels.arithmetic import keep
from cross.kernels.convolution import ConvSpec
from cross.kernels.convolution_forward import forward_correlation
from cross.kernels.convolution_input_gradient import input_gradient_correlation
from cross.kernels.correlation import Correlation, write_correlation
from cross.kernels.lane_sums import is_few, suits_lane_sums, write_lane_sums
from cross.kernels.loop_nest import (
    Buffer,
    Expr,
    PrimFunc,
    lanes,
    local,
    scratch,
    settle,
    store,
    write_kernel,
    zeros,
)
from cross.kernels.products import Factor, Product, add_products, runs
from cross.kernels.statistics import Moments, Statistics, write_statistics
from cross.kernels.tiles import register_tile
from cross.kernels.winograd import (
    GROUP,
    PAIR,
    PLACES,
    TILE_PIXELS,
    Tiles,
    both_ways,
    chunk_tiles,
    input_line,
    input_tiles,
    output_line,
    output_tiles,
)
from cross.kernels.winograd_weight import is_in_parts, transformed_weight_shape, write_transformed
from cross.storage import Storage, parts_of_pixels
from cross.target import Target

MOST_TILES = 528
"""Of a chunk: two samples of 32 x 32 pixels; beyond, nothing is saved by fewer and longer loops."""

LEAST_TILES = 144
"""Of a chunk, whatever the caches: a weight in parts is transformed for each chunk again."""

FEW_TILES = 16
"""A batch with fewer takes the direct nest where it would transform a weight in parts."""

CACHES = 2
"""Second-level caches that a chunk takes."""


def forward_chunk_shape(spec: ConvSpec, target: Target) -> Shape:
    """Physical shape of the chunk of transformed tiles that `winograd_forward` works with."""
    return _chunk_shape(spec, spec.in_channels, target)


def input_gradient_chunk_shape(spec: ConvSpec, target: Target) -> Shape:
    """The same for `winograd_input_gradient`."""
    return _chunk_shape(spec, spec.out_channels, target)


def _chunk_shape(spec: ConvSpec, channels: int, target: Target) -> Shape:
    """[input blocks, 16, tiles, i]; two more tiles than are used keep the 16 places apart in the cache."""
    block, least = target.channel_block, LEAST_TILES if target.l3_kib or is_in_parts(spec) else GROUP
    return channels // block, PLACES, chunk_tiles(target, channels, CACHES, (least, MOST_TILES)) + 2, block


def winograd_forward(spec: ConvSpec, target: Target, *, statistics: bool = False) -> PrimFunc:
    """PrimFunc(x stored with `spec.x_pads`, [w], transformed w, chunk, y stored without pads, [sum and m2 of y in
    `winograd_forward_parts`]); w, in weight storage, is there where the weight `is_in_parts`."""
    work, chunk = forward_correlation(spec, target), forward_chunk_shape(spec, target)
    parts = winograd_forward_parts(spec, target) if statistics else None
    return _winograd("winograd_forward", spec, target, work, output_tiles(spec), chunk, is_gradient=False, parts=parts)


def winograd_forward_parts(spec: ConvSpec, target: Target) -> Storage:
    """Storage of the statistics of y: a group of tiles is a part."""
    pixels = spec.out_height * spec.out_width
    return parts_of_pixels(spec.out_channels, target.channel_block, pixels, TILE_PIXELS * GROUP)


def winograd_input_gradient(spec: ConvSpec, target: Target) -> PrimFunc:
    """PrimFunc(dy stored with `spec.y_pads`, [w], transformed w, chunk, dx stored without pads)."""
    work, chunk = input_gradient_correlation(spec, target), input_gradient_chunk_shape(spec, target)
    return _winograd("winograd_input_gradient", spec, target, work, input_tiles(spec), chunk, is_gradient=True)


def _winograd(
    name: str,
    spec: ConvSpec,
    target: Target,
    work: Correlation,
    tiles: Tiles,
    chunk: Shape,
    *,
    is_gradient: bool,
    parts: Storage | None = None,
) -> PrimFunc:
    with write_kernel(name) as kernel:
        source = kernel.tensor("source", work.source.shape)
        weight = kernel.tensor("weight", spec.weight_storage(target).shape) if is_in_parts(spec) else None
        transformed = kernel.tensor("transformed", transformed_weight_shape(spec, target, is_gradient))
        tensors = (
            source,
            weight,
            transformed,
            kernel.tensor("chunk", chunk),
            kernel.tensor("out", work.destination.shape),
        )
        statistics = None if parts is None else Statistics.of(kernel, parts)
        nest = _Nest(work, target, tiles, kernel.batch, is_gradient, *tensors, statistics)
        few = _few(spec, target, tiles, kernel.batch, is_gradient) if weight is not None else None
        if few is None:
            nest.write()
        else:
            with T.If(few):
                with T.Then():
                    direct = (source, weight, tensors[-1])
                    if is_gradient:
                        write_lane_sums(spec, target, kernel.batch, direct)
                    else:
                        write_correlation(work, target, kernel.batch, direct)
                        if statistics is not None:
                            write_statistics(statistics, kernel.batch, tensors[-1])
                with T.Else():
                    nest.write()
    return kernel.function


def _few(spec: ConvSpec, target: Target, tiles: Tiles, batch: Expr, is_gradient: bool) -> Expr | None:
    """Whether a batch takes the direct nest; None where none does."""
    if is_gradient:
        return is_few(spec, batch) if suits_lane_sums(spec, target) else None
    return batch * tiles.count < FEW_TILES if tiles.count < FEW_TILES else None


@dataclass(frozen=True)
class _Nest:
    """source [N, C blocks, H, W, i], weight as stored or None, transformed [K blocks of a part, 16, C blocks, i, v], chunk
    [C blocks, 16, tiles, i]."""

    work: Correlation
    target: Target
    tiles: Tiles
    batch: Expr
    is_gradient: bool
    source: Buffer
    weight: Buffer | None
    transformed: Buffer
    chunk: Buffer
    destination: Buffer
    statistics: Statistics | None

    @property
    def in_blocks(self) -> int:
        return int(self.chunk.shape[0])

    @property
    def width(self) -> int:
        return int(self.destination.shape[-1])

    def write(self) -> None:
        """Every chunk of tiles: its transforms, then its products."""
        most = int(self.chunk.shape[2]) - 2
        total = settle(self.batch * self.tiles.count)
        with T.serial((total + (most - 1)) // most) as number:
            first = settle(number * most)
            count = settle(T.min(total - first, most))
            groups = settle((count + (GROUP - 1)) // GROUP)
            with T.parallel(groups * self.in_blocks) as task:
                self._transform(settle(task % self.in_blocks), settle(task // self.in_blocks * GROUP), first, count)
            part = int(self.transformed.shape[0])
            with T.serial(int(self.destination.shape[1]) // part) as number_of_part:
                block = settle(number_of_part * part)
                if self.weight is not None:
                    write_transformed(self.target, self.weight, self.is_gradient, block, self.transformed)
                self._multiply(first, count, groups, block)

    def _transform(self, c: Expr, begin: Expr, first: Expr, count: Expr) -> None:
        """One block of channels of the tiles [begin, begin + GROUP) of the chunk."""
        (phase,), depth = self.work.phases, int(self.chunk.shape[-1])
        lane = lanes(0, depth)
        with T.serial(T.min(count - begin, GROUP)) as inside:
            tile = settle(begin + inside)
            sample, row, column = self.tiles.place(first + tile)
            y, x = settle(row + phase.row_taps.offset), settle(column + phase.column_taps.offset)
            places = both_ways(input_line, lambda i, j: self.source[sample, c, y + i, x + j, lane], 4)
            for place in range(PLACES):
                store(self.chunk, (c, place, tile, lane), places[place // 4][place % 4])

    def _multiply(self, first: Expr, count: Expr, groups: Expr, first_block: Expr) -> None:
        pairs = int(self.transformed.shape[0]) // PAIR
        # What is larger is read once: the weights of a pair, kept over the groups, or a group, kept over the pairs.
        weights_outside = int(self.destination.shape[1]) * self.width > int(self.chunk.shape[2])
        with T.parallel(groups * pairs) as task:
            if weights_outside:
                pair, begin = settle(task // groups * PAIR), settle(task % groups * GROUP)
            else:
                pair, begin = settle(task % pairs * PAIR), settle(task // pairs * GROUP)
            products = scratch(PLACES, PAIR, GROUP, self.width)
            count_here = settle(T.min(count - begin, GROUP))
            scalars, vectors = register_tile(self.target, ((GROUP, 1),), PAIR)
            assert GROUP % scalars == 0, f"{scalars} tiles do not divide a group"
            with T.serial(PLACES) as place, T.serial((count_here + (scalars - 1)) // scalars) as tile:
                for k in range(0, PAIR, vectors):
                    self._product(products, (place, k, tile * scalars), begin, pair, (scalars, vectors))
            self._outputs(products, first + begin, count_here, first_block + pair)

    def _product(
        self, products: Buffer, where: tuple[Expr, int, Expr], begin: Expr, pair: Expr, shape: tuple[int, int]
    ) -> None:
        """One register tile of one of the 16 products, summed over all input channels."""
        (place, block, inside), lane = where, lanes(0, self.width)
        sums = [local(shape[1], self.width) for _ in range(shape[0])]
        every = [(i, k) for i in range(shape[0]) for k in range(shape[1])]
        tile = settle(begin + inside)
        for i, k in every:
            store(sums[i], (k, lane), zeros(self.width))
        with T.serial(self.in_blocks) as c:
            for run in runs(self.target, int(self.chunk.shape[-1])):
                factors = []
                for channel, (i, k) in itertools.product(run, every):
                    value = Factor(i, self.chunk, (c, place, tile + i), 0, channel)
                    row = (pair + (block + k), place, c, channel)
                    weight = Factor((k, channel), self.transformed, row, 0, 0, self.width)
                    factors.append(Product(sums[i], k, value, weight))
                add_products(self.target, factors, len(every))
        for i, k in every:
            store(products, (place, block + k, inside + i, lane), sums[i][k, lane])

    def _outputs(self, products: Buffer, first: Expr, count: Expr, block: Expr) -> None:
        """The outputs of a group from its products, and their statistics."""
        lane = lanes(0, self.width)
        moments = None if self.statistics is None else Moments(PAIR, self.width)
        with T.serial(count) as inside:
            sample, row, column = self.tiles.place(first + inside)
            for k in range(PAIR):

                def read(i: int, j: int, k: int = k) -> Expr:
                    return products[4 * i + j, k, inside, lane]

                outputs = both_ways(output_line, read, 4)
                for i in range(2):
                    for j in range(2):
                        value = outputs[i][j] if moments is None else keep(outputs[i][j])
                        store(self.destination, (sample, block + k, row + i, column + j, lane), value)
                        if moments is not None:
                            moments.add(k, value, inside == 0 if i == j == 0 else False)
        if self.statistics is not None and moments is not None:
            moments.write(self.statistics, first // GROUP, block, count * TILE_PIXELS)
