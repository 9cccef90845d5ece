"""Winograd's weight gradient: dg = G^T [ sum over tiles of (A dY A^T) . (B^T d B) ] G.

For each chunk of tiles: first every (block of channels of x or dy, group of tiles) is transformed; then a task takes a line of
input channels and a line of output channels, sums their 16 products over the tiles of the chunk in registers, transforms the sums
and adds them to its part of dw. Each element of dw is summed by one task, in the order of tiles.

With few channels that hands more from core to core than it computes. There the tiles of the batch are cut into a part a core, each
with chunks and sums of its own, and the sums are added in the order of parts, transformed once. The number of parts is the
target's, whatever the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from cross.graph import Shape
from cross.kernels.convolution import ConvSpec
from cross.kernels.convolution_weight_gradient import write_weight_gradient
from cross.kernels.loop_nest import (
    Buffer,
    Expr,
    PrimFunc,
    add_to,
    lanes,
    local,
    scratch,
    settle,
    store,
    when,
    write_kernel,
    zeros,
)
from cross.kernels.products import Factor, Product, add_steps
from cross.kernels.tiles import parts_of_sums, register_tile, split
from cross.kernels.winograd import (
    GROUP,
    PAIR,
    PLACES,
    Tiles,
    both_ways,
    chunk_tiles,
    gradient_line,
    input_line,
    output_tiles,
    weight_gradient_line,
)
from cross.target import Target

MOST_TILES = 192
"""Of a chunk: a line of x and one of dy take 24 KiB at 8 floats a vector."""

LEAST_TILES = 96
"""Of a chunk, whatever the caches."""

LARGE_BYTES = 8 << 20
"""Sums beyond this are written to memory, not a cache."""

CACHES = 4
"""Both are streamed, so a chunk may be larger than a cache: with few tiles the transforms of the sums weigh too much."""


def few_tiles(spec: ConvSpec) -> int:
    """A batch with fewer tiles takes the direct nest: the sums to be transformed would be as much as what is summed."""
    return 32 if PLACES * spec.in_channels * spec.out_channels * 4 > LARGE_BYTES else 16


def has_work_for_all_cores(spec: ConvSpec, target: Target) -> bool:
    """Whether a chunk's products, a task for each pair of lines, are enough for every core. Where they are not, the direct nest
    is the faster one: Winograd saves less than an idle core costs (32 channels on two cores with AVX-512: 138 GFLOP/s of the
    direct algorithm against some 200)."""
    line = PAIR * target.channel_block
    return spec.in_channels // line * (spec.out_channels // line) >= target.cores


def parts_of(spec: ConvSpec, target: Target) -> int:
    """Into how many parts the tiles of a batch are cut; 1 also where a sample has less than a group of tiles a part."""
    parts = parts_of_sums(target, PLACES * spec.in_channels * spec.out_channels * 4)
    return parts if output_tiles(spec).count >= parts * GROUP else 1


def weight_gradient_chunk_shapes(spec: ConvSpec, target: Target) -> tuple[Shape, ...]:
    """Physical shapes of what the kernel works with: the chunks of transformed tiles of x and of dy, [parts * lines, 16, tiles,
    channels of a line]; where there are several parts, their sums too, [parts, lines of x, lines of dy, 16, 2, line, v]."""
    line, parts = PAIR * target.channel_block, parts_of(spec, target)
    if parts > 1:
        tiles = chunk_tiles(target, spec.in_channels + spec.out_channels, 1, (GROUP, MOST_TILES), parts)
        x_lines, dy_lines = spec.in_channels // line, spec.out_channels // line
        x_chunk, dy_chunk = ((parts * lines, PLACES, tiles + 1, line) for lines in (x_lines, dy_lines))
        return x_chunk, dy_chunk, (parts, x_lines, dy_lines, PLACES, PAIR, line, target.channel_block)
    tiles = chunk_tiles(target, spec.in_channels + spec.out_channels, CACHES, (LEAST_TILES, MOST_TILES))
    return (spec.in_channels // line, PLACES, tiles + 1, line), (spec.out_channels // line, PLACES, tiles + 1, line)


def winograd_weight_gradient(spec: ConvSpec, target: Target) -> PrimFunc:
    """PrimFunc(x stored with `spec.x_pads`, dy stored with `spec.y_pads`, chunk of x, chunk of dy, [sums of the parts], dw in
    weight storage)."""
    x_shape, dy_shape = spec.x_storage(target).shape, spec.y_storage(target).shape
    x_chunk, dy_chunk, *sums_shape = weight_gradient_chunk_shapes(spec, target)
    with write_kernel("winograd_weight_gradient") as kernel:
        x, dy = kernel.tensor("x", x_shape), kernel.tensor("dy", dy_shape)
        chunks = kernel.tensor("x_chunk", x_chunk), kernel.tensor("dy_chunk", dy_chunk)
        sums = [kernel.tensor("sums", shape) for shape in sums_shape]
        dw = kernel.tensor("dw", spec.weight_storage(target).shape)
        tiles = output_tiles(spec)
        nest = _Nest(spec, target, tiles, kernel.batch, x, dy, *chunks, dw)

        if sums:
            nest.write_parts(sums[0])
        elif tiles.count >= few_tiles(spec):
            nest.write()
        else:
            with T.If(kernel.batch * tiles.count < few_tiles(spec)):
                with T.Then():
                    write_weight_gradient(spec, target, kernel.batch, (x, dy, dw))
                with T.Else():
                    nest.write()
    return kernel.function


@dataclass(frozen=True)
class _Nest:
    spec: ConvSpec
    target: Target
    tiles: Tiles
    batch: Expr
    x: Buffer
    dy: Buffer
    x_chunk: Buffer
    dy_chunk: Buffer
    dw: Buffer

    @property
    def width(self) -> int:
        return int(self.dw.shape[-1])

    def write(self) -> None:
        """Every chunk of tiles: its transforms, then its part of dw."""
        most, in_blocks, out_blocks = int(self.x_chunk.shape[2]) - 1, int(self.x.shape[1]), int(self.dy.shape[1])
        total, lines = settle(self.batch * self.tiles.count), int(self.x_chunk.shape[0])
        with T.serial((total + (most - 1)) // most) as number:
            first = settle(number * most)
            count = settle(T.min(total - first, most))
            with T.parallel((count + (GROUP - 1)) // GROUP * (in_blocks + out_blocks)) as task:
                block, begin = settle(task % (in_blocks + out_blocks)), settle(task // (in_blocks + out_blocks) * GROUP)
                with when(block < in_blocks):
                    self._transform_x(block, begin, first, count)
                with when(block >= in_blocks):
                    self._transform_dy(settle(block - in_blocks), begin, first, count)
            with T.parallel(lines * int(self.dy_chunk.shape[0])) as task:
                self._part(settle(task % lines), settle(task // lines), number, count)

    def write_parts(self, sums: Buffer) -> None:
        """Every part: its chunks one after the other, transformed and multiplied by the same task; then the sums of all."""
        parts, most = int(sums.shape[0]), int(self.x_chunk.shape[2]) - 1
        in_blocks, out_blocks = int(self.x.shape[1]), int(self.dy.shape[1])
        total = settle(self.batch * self.tiles.count)
        share = settle((total + (parts * GROUP - 1)) // (parts * GROUP) * GROUP)
        with T.parallel(parts) as part:
            begin = settle(part * share)
            size = settle(T.max(T.min(total - begin, share), 0))
            with T.serial((size + (most - 1)) // most) as number:
                first, count = settle(begin + number * most), settle(T.min(size - number * most, most))
                with T.serial((count + (GROUP - 1)) // GROUP) as group:
                    with T.serial(in_blocks) as block:
                        self._transform_x(block, group * GROUP, first, count, part * in_blocks)
                    with T.serial(out_blocks) as block:
                        self._transform_dy(block, group * GROUP, first, count, part * out_blocks)
                with T.grid(*(int(extent) for extent in sums.shape[1:3])) as (x_line, dy_line):
                    lines = settle(part * int(sums.shape[1]) + x_line), settle(part * int(sums.shape[2]) + dy_line)
                    self._products(sums, (part, x_line, dy_line), lines, count, number > 0)
        with T.parallel(int(sums.shape[1]) * int(sums.shape[2])) as task:
            x_line, dy_line = settle(task % int(sums.shape[1])), settle(task // int(sums.shape[1]))
            self._add_parts(sums, (x_line, dy_line), (total + (share - 1)) // share)
            self._finish(sums, (0, x_line, dy_line), x_line, dy_line, None)

    def _add_parts(self, sums: Buffer, lines: tuple[Expr, Expr], parts: Expr) -> None:
        """The sums of one pair of lines, of all parts that have tiles, into those of the first part."""
        with T.grid(PLACES, PAIR, int(sums.shape[5])) as (place, k, item):
            at = (*lines, place, k, item, lanes(0, self.width))
            with T.serial(parts - 1) as other:
                add_to(sums, (0, *at), sums[(other + 1, *at)])

    def _put(self, chunk: Buffer, block: Expr, tile: Expr, places: list[list[Expr]]) -> None:
        lane = lanes(block % PAIR * self.width, self.width)
        for place in range(PLACES):
            store(chunk, (block // PAIR, place, tile, lane), places[place // 4][place % 4])

    def _transform_x(self, block: Expr, begin: Expr, first: Expr, count: Expr, first_block: Expr = 0) -> None:
        """A group of tiles of one block of x into block `first_block + block` of the chunk."""
        lane = lanes(0, self.width)
        top, left = (self.spec.x_pads[axis] - self.spec.pads[axis] for axis in (0, 1))
        with T.serial(T.min(count - begin, GROUP)) as inside:
            tile = settle(begin + inside)
            n, row, column = self.tiles.place(first + tile)
            places = both_ways(input_line, lambda i, j: self.x[n, block, row + (top + i), column + (left + j), lane], 4)
            self._put(self.x_chunk, first_block + block, tile, places)

    def _transform_dy(self, block: Expr, begin: Expr, first: Expr, count: Expr, first_block: Expr = 0) -> None:
        lane = lanes(0, self.width)
        top, left = self.spec.y_pads[0], self.spec.y_pads[1]
        with T.serial(T.min(count - begin, GROUP)) as inside:
            tile = settle(begin + inside)
            n, row, column = self.tiles.place(first + tile)
            places = both_ways(
                gradient_line, lambda i, j: self.dy[n, block, row + (top + i), column + (left + j), lane], 2
            )
            self._put(self.dy_chunk, first_block + block, tile, places)

    def _part(self, x_line: Expr, dy_line: Expr, number: Expr, count: Expr) -> None:
        """One line of input channels by one of output channels: dw of this chunk's tiles, stored or added."""
        sums = scratch(PLACES, PAIR, int(self.x_chunk.shape[3]), self.width)
        self._products(sums, (), (x_line, dy_line), count, None)
        self._finish(sums, (), x_line, dy_line, number > 0)

    def _products(
        self, sums: Buffer, at: tuple[Expr, ...], lines: tuple[Expr, Expr], count: Expr, adds: Expr | None
    ) -> None:
        """The 16 products of two lines of the chunks, summed over its tiles: into `sums[at]`, or added where `adds` holds."""
        scalars, vectors = register_tile(self.target, ((int(self.x_chunk.shape[3]), 1),), PAIR)
        cut, blocks = split(int(self.x_chunk.shape[3]), scalars), split(PAIR, vectors)
        with T.serial(PLACES) as place:
            for size, _, tiles, first_item in cut.parts:
                with T.serial(tiles) as tile, T.serial(blocks.count) as k:
                    item = settle(first_item + tile * size)
                    target = (*at, place, settle(k * vectors), item)
                    self._product(sums, target, lines, count, (size, vectors), adds)

    def _finish(self, sums: Buffer, at: tuple[Expr, ...], x_line: Expr, dy_line: Expr, adds: Expr | None) -> None:
        """`sums[at]`, transformed: these two lines of dw, or added to them where `adds` holds."""
        width = self.width
        with T.serial(PAIR) as k, T.serial(int(self.x_chunk.shape[3])) as item:
            lane = lanes(0, width)
            taps = both_ways(weight_gradient_line, lambda i, j: sums[(*at, 4 * i + j, k, item, lane)], 4)
            out, c, i = settle(dy_line * PAIR + k), settle(x_line * PAIR + item // width), settle(item % width)
            places = [(out, c, r, s, i, lane) for r in range(3) for s in range(3)]
            if adds is None:
                for place in places:
                    store(self.dw, place, taps[place[2]][place[3]])
                return
            with T.If(adds):
                with T.Then():
                    for place in places:
                        add_to(self.dw, place, taps[place[2]][place[3]])
                with T.Else():
                    for place in places:
                        store(self.dw, place, taps[place[2]][place[3]])

    def _product(
        self,
        sums: Buffer,
        target: tuple[Expr, ...],
        lines: tuple[Expr, Expr],
        count: Expr,
        shape: tuple[int, int],
        adds: Expr | None,
    ) -> None:
        """One register tile of one of the 16 products, summed over the tiles of the chunk. `target`: (..., place, first block,
        first item)."""
        (x_line, dy_line), (scalars, vectors), width = lines, shape, self.width
        *at, place, block, item = target
        registers = [local(vectors, width) for _ in range(scalars)]
        every = [(i, k) for i in range(scalars) for k in range(vectors)]
        lane = lanes(0, width)

        def clear() -> None:
            for i, k in every:
                store(registers[i], (k, lane), zeros(width))

        if adds is None:
            clear()
        else:
            with T.If(adds):
                with T.Then():
                    for i, k in every:
                        store(registers[i], (k, lane), sums[(*at, place, block + k, item + i, lane)])
                with T.Else():
                    clear()

        def at_tile(tile: Expr, number: int) -> list[Product]:
            return [
                Product(
                    registers[i],
                    k,
                    Factor(number, self.x_chunk, (x_line, place, tile), item, i),
                    Factor((number, k), self.dy_chunk, (dy_line, place, tile), (block + k) * width, 0, width),
                )
                for i, k in every
            ]

        add_steps(self.target, count, at_tile, len(every))
        for i, k in every:
            store(sums, (*at, place, block + k, item + i, lane), registers[i][k, lane])
