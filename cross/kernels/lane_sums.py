"""Input gradient of the direct convolution for few pixels, on the weight as it is.

The lanes of a stored weight run over output channels, which the input gradient sums over. So a task keeps a vector of partial sums for
every pixel and input channel, adds products of two vectors to it, and adds up its lanes at the end. A transposed copy of the
weight, which lets the lanes run over input channels, costs more than it saves where a batch has few pixels: the weight is
then the most of what is read.

Tasks are blocks of input channels. Each sums over blocks of output channels in their order, so the result does not depend on
the number of threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from cross.kernels.arithmetic import keep, transposed
from cross.kernels.convolution import ConvSpec, Phase, input_gradient_phases
from cross.kernels.loop_nest import Buffer, Expr, lanes, local, prefetch, scratch, settle, store, zeros
from cross.kernels.products import Factor, Product, add_products
from cross.target import Target

MOST_PIXELS = 64
"""Of a batch that takes this nest: with more, a copy of the weight is worth its while."""


def suits_lane_sums(spec: ConvSpec, target: Target) -> bool:
    """Whether a batch of one has few pixels, and channels fill whole vectors."""
    depth, width = spec.weight_storage(target).shape[-2:]
    return spec.groups == 1 and spec.height * spec.width <= MOST_PIXELS and depth == width == target.vector_floats > 1


def is_few(spec: ConvSpec, batch: Expr) -> Expr:
    """Whether a batch takes this nest."""
    return batch <= MOST_PIXELS // (spec.height * spec.width)


def write_lane_sums(spec: ConvSpec, target: Target, batch: Expr, tensors: tuple[Buffer, Buffer, Buffer]) -> None:
    """The nest over (dy stored with `spec.y_pads`, w in weight storage, dx stored without pads), into the kernel that is being
    written."""
    depth = int(tensors[1].shape[-2])
    pixels, channels = _tile(target, depth)
    most = MOST_PIXELS // (spec.height * spec.width)
    parts, places = [], 0
    for phase in input_gradient_phases(spec):
        parts.append(_Part(phase, places))
        places += -(-most * phase.height * phase.width // pixels) * pixels
    with T.parallel(int(tensors[1].shape[1])) as task:
        nest = _Nest(target, spec, batch, *tensors, settle(task), scratch(depth, places, depth), pixels, channels)
        nest.sum(parts, _blocks(spec, target, depth))
        for part in parts:
            nest.add_lanes(part, not target.rvv)


def _tile(target: Target, depth: int) -> tuple[int, int]:
    """(pixels, input channels) whose sums fit into registers with the pixels and one vector of the weight beside them."""
    fitting = (
        (pixels, channels)
        for pixels in range(1, 5)
        for channels in (1, 2, 4)
        if depth % channels == 0 and pixels * channels + pixels + 1 <= target.vector_registers
    )
    return max(fitting, key=lambda tile: tile[0] * tile[1] / (tile[0] + tile[1]))


def _blocks(spec: ConvSpec, target: Target, depth: int) -> int:
    """Output blocks at a time: their weights of a block of input channels and a sample of dy fill most of a first-level cache.
    (A tile reads a part of the weights only, but the parts of large weights come to lie in the same few lines of it.)"""
    rows, columns = spec.y_storage(target).shape[2:4]
    bytes_of_block = 4 * depth * (spec.kernel[0] * spec.kernel[1] * depth + rows * columns)
    return max(1, target.l1_kib * 1024 * 3 // 4 // bytes_of_block)


@dataclass(frozen=True)
class _Part:
    """A phase, and its first place among the partial sums."""

    phase: Phase
    first: int

    @property
    def has_taps(self) -> bool:
        return bool(self.phase.row_taps.count and self.phase.column_taps.count)


@dataclass(frozen=True)
class _Nest:
    """The body of a task: `block` of input channels; `sums` [i, pixel, lane]."""

    target: Target
    spec: ConvSpec
    batch: Expr
    dy: Buffer
    weight: Buffer
    dx: Buffer
    block: Expr
    sums: Buffer
    pixels: int
    channels: int

    @property
    def depth(self) -> int:
        return int(self.sums.shape[0])

    def _place(self, phase: Phase, number: Expr) -> tuple[Expr, Expr, Expr]:
        """(sample, row, column) in a phase of a pixel of the batch."""
        inside = settle(number % (phase.height * phase.width))
        sample = settle(number // (phase.height * phase.width))
        return sample, settle(inside // phase.width), settle(inside % phase.width)

    def sum(self, parts: Sequence[_Part], most: int) -> None:
        """All output channels, `most` blocks at a time."""
        out_blocks = int(self.weight.shape[0])
        with T.serial(-(-out_blocks // most)) as number, T.serial(self.depth // self.channels) as line:
            first = settle(number * most)
            count = settle(T.min(out_blocks - first, most))
            for part in parts:
                if part.has_taps:
                    total = self.batch * (part.phase.height * part.phase.width)
                    with T.serial((total + (self.pixels - 1)) // self.pixels) as tile:
                        self._tile(part, (first, count, most), settle(line * self.channels), tile)

    def _tile(self, part: _Part, blocks: tuple[Expr, Expr, int], line: Expr, tile: Expr) -> None:
        """`pixels` pixels by `channels` channels from `line` on, over blocks (first, count); the last pixel of a batch may stand
        in for some that there are not. Every tile asks for another channel's weights of the blocks that come next."""
        phase, lane, pixel = part.phase, lanes(0, self.depth), settle(tile * self.pixels)
        other = settle(line + tile % self.channels)
        last = self.batch * (phase.height * phase.width) - 1
        places = [self._place(phase, T.min(pixel + p, last)) for p in range(self.pixels)]
        totals = [local(self.channels, self.depth) for _ in places]
        every = [(p, i) for p in range(self.pixels) for i in range(self.channels)]
        with T.If(blocks[0] > 0):
            with T.Then():
                for p, i in every:
                    store(totals[p], (i, lane), self.sums[line + i, part.first + pixel + p, lane])
            with T.Else():
                for p, i in every:
                    store(totals[p], (i, lane), zeros(self.depth))
        rows, columns = phase.row_taps, phase.column_taps
        taps = columns.count if self.target.in_order else 1
        with T.serial(blocks[1]) as k, T.grid(rows.count, columns.count // taps) as (j, outer):
            products = []
            for tap in range(taps):
                m = outer * taps + tap
                out, r, s = blocks[0] + k, rows.first + j * rows.step, columns.first + m * columns.step
                y, x = rows.offset + j * rows.offset_step, columns.offset + m * columns.offset_step
                prefetch(self.weight, (out + blocks[2], self.block, r, s, other, 0))
                for i, (p, (n, row, column)) in itertools.product(range(self.channels), enumerate(places)):
                    gradient = Factor((tap, p), self.dy, (n, out, row + y, column + x), 0, 0, self.depth)
                    weight = Factor((tap, i), self.weight, (out, self.block, r, s, line + i), 0, 0, self.depth)
                    products.append(Product(totals[p], i, gradient, weight))
            add_products(self.target, products, len(every))
        for p, i in every:
            store(self.sums, (line + i, part.first + pixel + p, lane), totals[p][i, lane])

    def add_lanes(self, part: _Part, in_registers: bool) -> None:
        """dx of a phase; pixels that nothing reads get zero."""
        phase, depth = part.phase, self.depth
        row_stride, column_stride = self.spec.strides
        with T.serial(self.batch * (phase.height * phase.width)) as pixel:
            n, row, column = self._place(phase, pixel)
            at = (n, self.block, row * row_stride + phase.row, column * column_stride + phase.column)
            if not part.has_taps:
                store(self.dx, (*at, lanes(0, depth)), zeros(depth))
            elif in_registers:
                rows = [keep(self.sums[i, part.first + pixel, lanes(0, depth)]) for i in range(depth)]
                store(self.dx, (*at, lanes(0, depth)), _sum(transposed(rows)))
            else:
                with T.serial(depth) as i:
                    values = [self.sums[i, part.first + pixel, lane] for lane in range(depth)]
                    store(self.dx, (*at, i), _sum(values))


def _sum(values: Sequence[Expr]) -> Expr:
    """Pairs first: as little rounding as can be."""
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]
