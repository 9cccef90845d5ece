"""Winograd's forward convolution and input gradient: both are a correlation of a padded image with a 3x3 kernel.

For each chunk of tiles: first every (block of input channels, group of tiles) is transformed; then a task takes a tile of blocks
of output channels and a group of tiles, forms their 16 matrix products, one register tile after another, and transforms them to
outputs. Each output is written by one task, which sums over input channels in their order.

A batch with few tiles takes the direct nest instead: the transformed weights would cost more than they save.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from cross.graph import Shape
from cross.kernels.convolution import ConvSpec
from cross.kernels.convolution_forward import forward_correlation
from cross.kernels.convolution_input_gradient import (
    input_gradient_correlation,
    transposed_weight_shape,
    write_square,
    write_transpose,
)
from cross.kernels.correlation import Correlation, write_correlation
from cross.kernels.loop_nest import (
    Buffer,
    Expr,
    PrimFunc,
    add_to,
    lanes,
    local,
    scratch,
    settle,
    spread,
    store,
    view,
    write_kernel,
    zeros,
)
from cross.kernels.tiles import register_tile
from cross.kernels.winograd import (
    GROUP,
    PAIR,
    PLACES,
    Tiles,
    both_ways,
    chunk_tiles,
    input_line,
    input_tiles,
    output_line,
    output_tiles,
    takes_both,
    weight_line,
    write_either,
)
from cross.target import Target

MOST_TILES = 528
"""Of a chunk: two samples of 32 x 32 pixels; beyond, nothing is saved by fewer and longer loops."""

CACHES = 2
"""Second-level caches that a chunk takes."""


def transformed_weight_shape(outputs: int, inputs: int, target: Target) -> Shape:
    """Physical shape [output blocks, 16, input blocks, i, o] of a transformed weight; one more input block than there are keeps
    the 16 places apart in the cache."""
    block = target.channel_block
    return outputs // block, PLACES, inputs // block + 1, block, block


def forward_chunk_shape(spec: ConvSpec, target: Target) -> Shape:
    """Physical shape of the chunk of transformed tiles that `winograd_forward` works with."""
    return _chunk_shape(spec.in_channels, target)


def input_gradient_chunk_shape(spec: ConvSpec, target: Target) -> Shape:
    """The same for `winograd_input_gradient`."""
    return _chunk_shape(spec.out_channels, target)


def _chunk_shape(channels: int, target: Target) -> Shape:
    """[input blocks, 16, tiles, i]; two more tiles than are used keep the 16 places apart in the cache."""
    block = target.channel_block
    return channels // block, PLACES, chunk_tiles(target, channels, CACHES, MOST_TILES) + 2, block


def winograd_forward(spec: ConvSpec, target: Target) -> PrimFunc:
    """PrimFunc(x stored with `spec.x_pads`, [w], transformed w, chunk, y stored without pads); w is there where the
    kernel `takes_both`."""
    work, tiles = forward_correlation(spec, target), output_tiles(spec)
    with write_kernel("winograd_forward") as kernel:
        x = kernel.tensor("x", work.source.shape)
        w = kernel.tensor("w", work.weight_shape) if takes_both(spec, tiles) else None
        shape = transformed_weight_shape(spec.out_channels, spec.in_channels, target)
        transformed = kernel.tensor("transformed", shape)
        chunk = kernel.tensor("chunk", forward_chunk_shape(spec, target))
        y = kernel.tensor("y", work.destination.shape)
        nest = _Nest(work, target, tiles, kernel.batch, x, transformed, chunk, y)

        def direct() -> None:
            write_correlation(work, target, kernel.batch, (x, w, y))

        write_either(spec, tiles, kernel.batch, direct, nest.write)
    return kernel.function


def winograd_input_gradient(spec: ConvSpec, target: Target) -> PrimFunc:
    """PrimFunc(dy stored with `spec.y_pads`, copy of w, chunk, dx stored without pads); the copy is what
    `winograd_input_gradient_weight` made for this batch size."""
    work, tiles = input_gradient_correlation(spec, target), input_tiles(spec)
    with write_kernel("winograd_input_gradient") as kernel:
        dy = kernel.tensor("dy", work.source.shape)
        copy = kernel.tensor("copy", transformed_weight_shape(spec.in_channels, spec.out_channels, target))
        chunk = kernel.tensor("chunk", input_gradient_chunk_shape(spec, target))
        dx = kernel.tensor("dx", work.destination.shape)
        nest = _Nest(work, target, tiles, kernel.batch, dy, copy, chunk, dx)

        def direct() -> None:
            write_correlation(work, target, kernel.batch, (dy, view(copy, *work.weight_shape), dx))

        write_either(spec, tiles, kernel.batch, direct, nest.write)
    return kernel.function


def winograd_forward_weight(spec: ConvSpec, target: Target) -> PrimFunc:
    """PrimFunc([x], w, transformed w): G g G^T; x is there, for the batch, where the kernels `takes_both`."""
    out_blocks, in_blocks, _, _, depth, width = spec.weight_storage(target).shape
    tiles = output_tiles(spec)
    with write_kernel("winograd_forward_weight") as kernel:
        if takes_both(spec, tiles):
            kernel.tensor("x", spec.x_storage(target).shape)
        weight = kernel.tensor("weight", spec.weight_storage(target).shape)
        shape = transformed_weight_shape(spec.out_channels, spec.in_channels, target)
        transformed = kernel.tensor("transformed", shape)

        def write() -> None:
            lane = lanes(0, width)
            with T.parallel(out_blocks * in_blocks) as task, T.serial(depth) as i:
                k, c = settle(task // in_blocks), settle(task % in_blocks)
                places = both_ways(weight_line, lambda r, s: weight[k, c, r, s, i, lane], 3)
                for place in range(PLACES):
                    store(transformed, (k, place, c, i, lane), places[place // 4][place % 4])

        write_either(spec, tiles, kernel.batch, lambda: T.evaluate(0), write)
    return kernel.function


def winograd_input_gradient_weight(spec: ConvSpec, target: Target) -> PrimFunc:
    """PrimFunc([dy], w, copy): the transposed and reversed kernel, transformed; as `weight_transpose` makes it where the batch
    takes the direct nest (dy is there, for the batch, where the kernels `takes_both`)."""
    out_blocks, in_blocks, _, _, depth, width = spec.weight_storage(target).shape
    tiles = input_tiles(spec)
    with write_kernel("winograd_input_gradient_weight") as kernel:
        if takes_both(spec, tiles):
            kernel.tensor("dy", spec.y_storage(target).shape)
        weight = kernel.tensor("weight", spec.weight_storage(target).shape)
        copy = kernel.tensor("copy", transformed_weight_shape(spec.in_channels, spec.out_channels, target))

        def write() -> None:
            with T.parallel(in_blocks * out_blocks) as task:
                c, k = settle(task // out_blocks), settle(task % out_blocks)
                taps = scratch(3, 3, width, depth)
                with T.grid(3, 3) as (r, s):
                    write_square(target, weight, (k, c, 2 - r, 2 - s), taps, (r, s))
                with T.serial(width) as o:
                    places = both_ways(weight_line, lambda r, s: taps[r, s, o, lanes(0, depth)], 3)
                    for place in range(PLACES):
                        store(copy, (c, place, k, o, lanes(0, depth)), places[place // 4][place % 4])

        def transpose() -> None:
            write_transpose(spec, target, weight, view(copy, *transposed_weight_shape(spec, target)))

        write_either(spec, tiles, kernel.batch, transpose, write)
    return kernel.function


@dataclass(frozen=True)
class _Nest:
    """source [N, C blocks, H, W, i], weight [K blocks, 16, C blocks, i, v], chunk [C blocks, 16, tiles, i]."""

    work: Correlation
    target: Target
    tiles: Tiles
    batch: Expr
    source: Buffer
    weight: Buffer
    chunk: Buffer
    destination: Buffer

    @property
    def in_blocks(self) -> int:
        return int(self.chunk.shape[0])

    @property
    def width(self) -> int:
        return int(self.weight.shape[-1])

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
            self._multiply(first, count, groups)

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

    def _multiply(self, first: Expr, count: Expr, groups: Expr) -> None:
        out_blocks = int(self.weight.shape[0])
        scalars, vectors = register_tile(self.target, ((GROUP, 1),), PAIR)
        assert GROUP % scalars == 0, f"{scalars} tiles do not divide a group"
        block_tiles = out_blocks // vectors
        # What is larger is read once: the weights of a tile, kept over the groups, or a group, kept over the blocks.
        weights_outside = out_blocks * self.width > int(self.chunk.shape[2])
        with T.parallel(groups * block_tiles) as task:
            if weights_outside:
                block, begin = settle(task // groups * vectors), settle(task % groups * GROUP)
            else:
                block, begin = settle(task % block_tiles * vectors), settle(task // block_tiles * GROUP)
            products = scratch(PLACES, vectors, GROUP, self.width)
            count_here = settle(T.min(count - begin, GROUP))
            with T.serial(PLACES) as place, T.serial((count_here + (scalars - 1)) // scalars) as tile:
                self._product(products, place, settle(begin + tile * scalars), tile * scalars, block, scalars)
            self._outputs(products, first + begin, count_here, block)

    def _product(self, products: Buffer, place: Expr, tile: Expr, inside: Expr, block: Expr, scalars: int) -> None:
        """One register tile of one of the 16 products, summed over all input channels."""
        vectors, lane, depth = int(products.shape[1]), lanes(0, self.width), int(self.chunk.shape[-1])
        sums = [local(vectors, self.width) for _ in range(scalars)]
        every = [(i, k) for i in range(scalars) for k in range(vectors)]
        for i, k in every:
            store(sums[i], (k, lane), zeros(self.width))
        with T.serial(self.in_blocks) as c, T.unroll(depth) as channel:
            for i in range(scalars):
                value = spread(self.chunk[c, place, tile + i, channel], self.width)
                for k in range(vectors):
                    add_to(sums[i], (k, lane), value * self.weight[block + k, place, c, channel, lane])
        for i, k in every:
            store(products, (place, k, inside + i, lane), sums[i][k, lane])

    def _outputs(self, products: Buffer, first: Expr, count: Expr, block: Expr) -> None:
        lane = lanes(0, self.width)
        with T.serial(count) as inside:
            sample, row, column = self.tiles.place(first + inside)
            for k in range(int(products.shape[1])):

                def read(i: int, j: int, k: int = k) -> Expr:
                    return products[4 * i + j, k, inside, lane]

                outputs = both_ways(output_line, read, 4)
                for i in range(2):
                    for j in range(2):
                        store(self.destination, (sample, block + k, row + i, column + j, lane), outputs[i][j])
