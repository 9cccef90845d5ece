"""Weight gradient of the direct convolution:

dw[o, c, r, s] = sum over n, p, q of x[n, c, p*stride + r*dilation - pad, ..] * dy[n, o, p, q].

A task owns a part of dw: a tile of `vectors` blocks of output channels, some blocks of input channels, and where that gives too
few tasks one kernel row, or one tile of it. It walks over samples and rows in chunks small enough for the first-level cache;
within a chunk each tile keeps `scalars` x `vectors` sums in registers over all pixels, and adds them to dw at its end. Each
element of dw is summed by one task, in the order of samples, rows and columns.

A small dw makes that read all of x and dy for each part of it, faster than memory gives them. There the samples are cut into a
part a core, each with a dw of its own, which goes through all of it for each chunk; these are added in the order of parts. The
number of parts is the target's, whatever the number of threads.

A kernel row and its input channels lie side by side both in x and in dw, (s, i) at s * block + i, so tiles are cut from the
whole line of them; only with a dilation is each kernel column a line of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

from tvm.script.ir_builder import tirx as T

from cross.graph import Shape
from cross.kernels.convolution import ConvSpec
from cross.kernels.loop_nest import (
    Buffer,
    Expr,
    PrimFunc,
    add_to,
    lanes,
    local,
    settle,
    store,
    view,
    when,
    write_kernel,
    zeros,
)
from cross.kernels.products import Factor, Product, add_products, runs
from cross.kernels.tiles import Split, chunk, parts_of_sums, register_tile, split
from cross.target import Target

Range = tuple[Expr, int]
"""(first, count)."""

CHUNK_PIXELS = 192
"""Pixels of a chunk: two blocks of dy and one of x fill about half of a 32 KiB cache at 8 floats a vector."""

TASK_BYTES = 12 << 10
"""Of dw that a task goes through for each chunk, at most, where it takes several blocks of input channels."""

UNROLLED_COLUMNS = 8
"""Rows up to so many pixels are unrolled whole, longer ones by four, or by as many where a run of products is to be long."""

ENOUGH_TASKS_A_CORE = 3

SAMPLES_A_PART = 4
"""Smaller batches are not cut into parts: one sample more than in another would be too much of a difference."""


def sums_shape(spec: ConvSpec, target: Target) -> Shape | None:
    """Of the gradients of the parts, [parts, weight storage]; None where there is one."""
    shape = spec.weight_storage(target).shape
    parts = parts_of_sums(target, prod(shape) * 4)
    return (parts, *shape) if parts > 1 else None


def convolution_weight_gradient(spec: ConvSpec, target: Target) -> PrimFunc:
    """PrimFunc(x stored with `spec.x_pads`, dy stored with `spec.y_pads`, [sums of `sums_shape`], dw in weight storage).

    x_pads must be at least `forward_pads(spec)`; of dy only the interior is read. Filled-up channels come out zero."""
    with write_kernel("convolution_weight_gradient") as kernel:
        x, dy = (
            kernel.tensor(name, s.shape) for name, s in (("x", spec.x_storage(target)), ("dy", spec.y_storage(target)))
        )
        shape = sums_shape(spec, target)
        sums = None if shape is None else kernel.tensor("sums", shape)
        dw = kernel.tensor("dw", spec.weight_storage(target).shape)
        if shape is None:
            write_weight_gradient(spec, target, kernel.batch, (x, dy, dw))
        else:
            with T.If(kernel.batch < SAMPLES_A_PART * shape[0]):
                with T.Then():
                    write_weight_gradient(spec, target, kernel.batch, (x, dy, dw))
                with T.Else():
                    _write_parts(spec, target, kernel.batch, (x, dy, sums, dw))
    return kernel.function


@dataclass(frozen=True)
class _Cut:
    """How dw is cut: into tiles of blocks of output channels, and a kernel row of an input block into tiles of its lines."""

    blocks: Split
    line: Split
    dw_shape: tuple[int, ...]
    """[O blocks, C blocks of a group, R, lines, line, v]."""


def _cut(spec: ConvSpec, target: Target) -> _Cut:
    out_blocks, in_blocks, kernel_rows, kernel_columns, depth, width = spec.weight_storage(target).shape
    lines = 1 if spec.dilations[1] == 1 else kernel_columns
    line = kernel_columns * depth // lines
    scalars, vectors = register_tile(target, ((line, lines),), out_blocks // spec.groups)
    shape = (out_blocks, in_blocks, kernel_rows, lines, line, width)
    return _Cut(split(out_blocks // spec.groups, vectors), split(line, scalars), shape)


def _flat_rows(spec: ConvSpec, target: Target, batch: Expr, x: Buffer) -> Buffer:
    """x as [N, C blocks, rows, columns * channels]."""
    shape = spec.x_storage(target).shape
    return view(x, batch, *shape[1:3], shape[3] * shape[4])


def _write_parts(spec: ConvSpec, target: Target, batch: Expr, tensors: tuple[Buffer, Buffer, Buffer, Buffer]) -> None:
    """The nest over (x, dy, sums, dw): a task a part, then the sums of all."""
    x, dy, sums, dw = tensors
    cut, parts = _cut(spec, target), int(sums.shape[0])
    out_blocks, in_blocks, kernel_rows, lines, line, width = cut.dw_shape
    x = _flat_rows(spec, target, batch, x)
    each = view(sums, parts * out_blocks, *cut.dw_shape[1:])
    share = settle((batch + (parts - 1)) // parts)
    with T.parallel(parts) as part:
        begin = settle(part * share)
        end = settle(T.max(begin, T.min(batch, begin + share)))
        with _chunks(spec, begin, end) as (samples, rows), T.serial(spec.groups) as group:
            for size, _, count, first_block in cut.blocks.parts:
                with T.serial(count) as tile:
                    block = settle(group * cut.blocks.total + first_block + tile * size)
                    first_sum = settle(part * out_blocks + block)
                    nest = _Nest(target, spec, x, dy, each, begin, group * in_blocks, block, first_sum, size, cut.line)
                    nest.tiles((0, in_blocks), (0, kernel_rows), (0, cut.line.count), samples, rows)
    vectors = in_blocks * kernel_rows * lines * line
    each, dw = view(sums, parts, out_blocks, vectors, width), view(dw, out_blocks, vectors, width)
    with T.parallel(out_blocks) as task, T.serial(vectors) as item:
        total, lane = local(width), lanes(0, width)
        store(total, (lane,), each[0, task, item, lane])
        with T.serial((batch + (share - 1)) // share - 1) as other:
            add_to(total, (lane,), each[other + 1, task, item, lane])
        store(dw, (task, item, lane), total[lane])


@contextmanager
def _chunks(spec: ConvSpec, begin: Expr, end: Expr) -> Iterator[tuple[Range, Range]]:
    """A loop over chunks of the samples from `begin` to `end`: (samples, rows) of each."""
    most = max(1, CHUNK_PIXELS // (spec.out_height * spec.out_width))
    height = chunk(spec.out_height, CHUNK_PIXELS // spec.out_width)
    sample_chunks, row_chunks = (end - begin + (most - 1)) // most, -(-spec.out_height // height)
    with T.serial(sample_chunks) as sample_chunk, T.serial(row_chunks) as row_chunk:
        sample, row = settle(begin + sample_chunk * most), settle(row_chunk * height)
        samples = settle(T.min(end - sample, most)) if most > 1 else 1
        rows = settle(T.min(spec.out_height - row, height)) if spec.out_height % height else height
        yield (sample, samples), (row, rows)


def write_weight_gradient(spec: ConvSpec, target: Target, batch: Expr, tensors: tuple[Buffer, Buffer, Buffer]) -> None:
    """The nest over (x, dy, dw), into the kernel that is being written."""
    x, dy, dw = tensors
    cut = _cut(spec, target)
    blocks, (_, in_blocks, kernel_rows, lines, line, width) = cut.blocks, cut.dw_shape
    row_bytes = line * lines * blocks.big * width * 4
    shares = _shares(target, spec.groups * blocks.count, in_blocks, kernel_rows, cut.line.count, row_bytes)
    x, dw = _flat_rows(spec, target, batch, x), view(dw, *cut.dw_shape)
    with T.parallel(prod(shares)) as task:
        place = [settle(task // prod(shares[axis + 1 :]) % extent) for axis, extent in enumerate(shares)]
        group, block_tile = settle(place[0] // blocks.count), settle(place[0] % blocks.count)
        for size, first, count, first_block in blocks.parts:
            with when(T.And(block_tile >= first, block_tile < first + count)):
                block = settle(group * blocks.total + first_block + (block_tile - first) * size)
                nest = _Nest(target, spec, x, dy, dw, 0, settle(group * in_blocks), block, block, size, cut.line)
                inputs, kernel_part, tiles = (
                    _range(place[axis], shares[axis], shape)
                    for axis, shape in ((1, in_blocks), (2, kernel_rows), (3, cut.line.count))
                )
                with _chunks(spec, 0, batch) as (samples, rows):
                    nest.tiles(inputs, kernel_part, tiles, samples, rows)


def _shares(
    target: Target, block_tiles: int, in_blocks: int, kernel_rows: int, line_tiles: int, row_bytes: int
) -> tuple[int, int, int, int]:
    """Into how many tasks each axis of dw is cut: tiles of output blocks, input blocks, kernel rows, tiles of a line."""
    enough = ENOUGH_TASKS_A_CORE * target.cores
    inputs = min(
        tasks
        for tasks in range(1, in_blocks + 1)
        if in_blocks % tasks == 0
        and (
            tasks == in_blocks
            or (in_blocks // tasks * kernel_rows * row_bytes <= TASK_BYTES and block_tiles * tasks >= enough)
        )
    )
    rows = kernel_rows if block_tiles * inputs < enough else 1
    tiles = line_tiles if block_tiles * inputs * rows < enough else 1
    return block_tiles, inputs, rows, tiles


def _range(place: Expr, share: int, extent: int) -> Range:
    return place * (extent // share), extent // share


@dataclass(frozen=True)
class _Nest:
    """A tile of output blocks, written once for each size of tile. x is [N, C blocks, rows, columns * channels], dw is
    [O blocks, C blocks of a group, R, lines, line, v]. `begin`: the first sample; its first chunk sets dw, others add to it."""

    target: Target
    spec: ConvSpec
    x: Buffer
    dy: Buffer
    dw: Buffer
    begin: Expr
    first_x_block: Expr
    block: Expr
    dw_block: Expr
    vectors: int
    cut: Split

    @property
    def width(self) -> int:
        return int(self.dw.shape[-1])

    @property
    def depth(self) -> int:
        """Channels of a block of x."""
        return int(self.dw.shape[4]) * int(self.dw.shape[3]) // self.spec.kernel[1]

    def tiles(self, inputs: Range, kernel_rows: Range, tiles: Range, samples: Range, rows: Range) -> None:
        """One chunk's products with every tile of a part of dw: ranges of input blocks, kernel rows and tiles of a line."""
        with T.grid(inputs[1], kernel_rows[1], int(self.dw.shape[3])) as (c, r, line):
            for size, first, count, first_item in self.cut.parts:
                if tiles[1] == self.cut.count:
                    begin, end = first, first + count
                else:
                    begin, end = T.max(first, tiles[0]), T.min(first + count, tiles[0] + tiles[1])
                with T.serial(begin, end) as tile:
                    place = inputs[0] + c, kernel_rows[0] + r, line, first_item + (tile - first) * size
                    self._add(place, size, samples, rows)

    def _add(self, place: tuple[Expr, ...], scalars: int, samples: Range, rows: Range) -> None:
        """Add one chunk's products to `scalars` items of a line; the first chunk sets them."""
        c, r, line, first = place
        first, lane = settle(first), lanes(0, self.width)
        sums = [local(self.vectors, self.width) for _ in range(scalars)]
        every = [(i, k) for i in range(scalars) for k in range(self.vectors)]
        with T.If(T.Or(samples[0] > self.begin, rows[0] > 0)):
            with T.Then():
                for i, k in every:
                    store(sums[i], (k, lane), self.dw[self.dw_block + k, c, r, line, first + i, lane])
            with T.Else():
                for i, k in every:
                    store(sums[i], (k, lane), zeros(self.width))
        most = UNROLLED_COLUMNS if self.target.in_order else 4
        unrolled = self.spec.out_width if self.spec.out_width <= UNROLLED_COLUMNS else most
        whole = self.spec.out_width // unrolled
        with T.serial(samples[1]) as n, T.serial(rows[1]) as h:
            pixel = samples[0] + n, rows[0] + h
            with T.serial(whole) as outer:
                for run in runs(self.target, unrolled):
                    pixels = [(*pixel, outer * unrolled + column) for column in run]
                    self._add_pixels(sums, (c, r, line, first), pixels)
            for run in runs(self.target, self.spec.out_width - whole * unrolled):
                pixels = [(*pixel, whole * unrolled + column) for column in run]
                self._add_pixels(sums, (c, r, line, first), pixels)
        for i, k in every:
            store(self.dw, (self.dw_block + k, c, r, line, first + i, lane), sums[i][k, lane])

    def _add_pixels(
        self, sums: list[Buffer], place: tuple[Expr, ...], pixels: Sequence[tuple[Expr, Expr, Expr]]
    ) -> None:
        spec, (c, r, line, first), products = self.spec, place, []
        for number, (n, h, w) in enumerate(pixels):
            y = h * spec.strides[0] + r * spec.dilations[0] + spec.x_pads[0] - spec.pads[0]
            x = w * spec.strides[1] + line * spec.dilations[1] + spec.x_pads[1] - spec.pads[1]
            for i, k in itertools.product(range(len(sums)), range(self.vectors)):
                value = Factor(number, self.x, (n, self.first_x_block + c, y), x * self.depth + first, i)
                at = n, self.block + k, h + spec.y_pads[0], w + spec.y_pads[1]
                products.append(Product(sums[i], k, value, Factor((number, k), self.dy, at, 0, 0, self.width)))
        add_products(self.target, products, len(sums) * self.vectors)
