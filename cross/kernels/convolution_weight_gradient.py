"""Weight gradient of the direct convolution:

dw[o, c, r, s] = sum over n, p, q of x[n, c, p*stride + r*dilation - pad, ..] * dy[n, o, p, q].

A task owns a part of dw: a tile of `vectors` blocks of output channels, some blocks of input channels, and where that gives too
few tasks one kernel row, or one tile of it. It walks over samples and rows in chunks small enough for the first-level cache;
within a chunk each tile keeps `scalars` x `vectors` sums in registers over all pixels, and adds them to dw at its end. Each
element of dw is summed by one task, in the order of samples, rows and columns.

A kernel row and its input channels lie side by side both in x and in dw, (s, i) at s * block + i, so tiles are cut from the
whole line of them; only with a dilation is each kernel column a line of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from tvm.script.ir_builder import tirx as T

from cross.kernels.convolution import ConvSpec
from cross.kernels.loop_nest import (
    Buffer,
    Expr,
    PrimFunc,
    add_to,
    lanes,
    local,
    settle,
    spread,
    store,
    view,
    when,
    write_kernel,
    zeros,
)
from cross.kernels.tiles import Split, chunk, register_tile, split
from cross.target import Target

CHUNK_PIXELS = 192
"""Pixels of a chunk: two blocks of dy and one of x fill about half of a 32 KiB cache at 8 floats a vector."""

TASK_BYTES = 12 << 10
"""Of dw that a task goes through for each chunk, at most, where it takes several blocks of input channels."""

UNROLLED_COLUMNS = 8
"""Rows up to so many pixels are unrolled whole, longer ones by four."""

ENOUGH_TASKS_A_CORE = 3


def convolution_weight_gradient(spec: ConvSpec, target: Target) -> PrimFunc:
    """PrimFunc(x stored with `spec.x_pads`, dy stored with `spec.y_pads`, dw in weight storage).

    x_pads must be at least `forward_pads(spec)`; of dy only the interior is read. Filled-up channels come out zero."""
    with write_kernel("convolution_weight_gradient") as kernel:
        x, dy = (
            kernel.tensor(name, s.shape) for name, s in (("x", spec.x_storage(target)), ("dy", spec.y_storage(target)))
        )
        dw = kernel.tensor("dw", spec.weight_storage(target).shape)
        write_weight_gradient(spec, target, kernel.batch, (x, dy, dw))
    return kernel.function


def write_weight_gradient(spec: ConvSpec, target: Target, batch: Expr, tensors: tuple[Buffer, Buffer, Buffer]) -> None:
    """The nest over (x, dy, dw), into the kernel that is being written."""
    x, dy, dw = tensors
    out_blocks, in_blocks, kernel_rows, kernel_columns, depth, width = spec.weight_storage(target).shape
    lines = 1 if spec.dilations[1] == 1 else kernel_columns
    line = kernel_columns * depth // lines
    scalars, vectors = register_tile(target, ((line, lines),), out_blocks // spec.groups)
    blocks, cut = split(out_blocks // spec.groups, vectors), split(line, scalars)
    shares = _shares(
        target, spec.groups * blocks.count, in_blocks, kernel_rows, cut.count, line * lines * vectors * width * 4
    )
    x_shape = spec.x_storage(target).shape
    x = view(x, batch, *x_shape[1:3], x_shape[3] * depth)
    dw = view(dw, out_blocks, in_blocks, kernel_rows, lines, line, width)
    with T.parallel(prod(shares)) as task:
        place = [settle(task // prod(shares[axis + 1 :]) % extent) for axis, extent in enumerate(shares)]
        group, block_tile = settle(place[0] // blocks.count), settle(place[0] % blocks.count)
        for size, first, count, first_block in blocks.parts:
            with when(T.And(block_tile >= first, block_tile < first + count)):
                block = settle(group * blocks.total + first_block + (block_tile - first) * size)
                nest = _Nest(spec, x, dy, dw, batch, settle(group * in_blocks), block, size, cut, depth)
                nest.part(
                    *(
                        _range(place[axis], shares[axis], shape)
                        for axis, shape in ((1, in_blocks), (2, kernel_rows), (3, cut.count))
                    )
                )


Range = tuple[Expr, int]
"""(first, count)."""


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
    """The body of one task, written once for each size of tile. x is [N, C blocks, rows, columns * channels], dw is
    [O blocks, C blocks of a group, R, lines, line, v]."""

    spec: ConvSpec
    x: Buffer
    dy: Buffer
    dw: Buffer
    batch: Expr
    first_x_block: Expr
    block: Expr
    vectors: int
    cut: Split
    depth: int

    @property
    def width(self) -> int:
        return int(self.dw.shape[-1])

    @property
    def lines(self) -> int:
        return int(self.dw.shape[3])

    def part(self, inputs: Range, rows: Range, tiles: Range) -> None:
        """This task's part of dw: ranges of input blocks, kernel rows and tiles of a line."""
        spec = self.spec
        samples = max(1, CHUNK_PIXELS // (spec.out_height * spec.out_width))
        height = chunk(spec.out_height, CHUNK_PIXELS // spec.out_width)
        sample_chunks, row_chunks = (self.batch + (samples - 1)) // samples, -(-spec.out_height // height)
        with T.serial(sample_chunks) as sample_chunk, T.serial(row_chunks) as row_chunk:
            sample, row = settle(sample_chunk * samples), settle(row_chunk * height)
            sample_count = settle(T.min(self.batch - sample, samples)) if samples > 1 else 1
            row_count = settle(T.min(spec.out_height - row, height)) if spec.out_height % height else height

            def add(place: tuple[Expr, ...], scalars: int) -> None:
                self._add(place, scalars, (sample, sample_count), (row, row_count))

            self._tiles(inputs, rows, tiles, add)

    def _tiles(self, inputs: Range, rows: Range, tiles: Range, body: Callable[[tuple[Expr, ...], int], None]) -> None:
        """`body((input block, kernel row, line, first of the line), scalars)` for every tile of the part."""
        with T.grid(inputs[1], rows[1], self.lines) as (c, r, line):
            for size, first, count, first_item in self.cut.parts:
                if tiles[1] == self.cut.count:
                    begin, end = first, first + count
                else:
                    begin, end = T.max(first, tiles[0]), T.min(first + count, tiles[0] + tiles[1])
                with T.serial(begin, end) as tile:
                    body((inputs[0] + c, rows[0] + r, line, first_item + (tile - first) * size), size)

    def _add(self, place: tuple[Expr, ...], scalars: int, samples: Range, rows: Range) -> None:
        """Add one chunk's products to `scalars` items of a line; the first chunk sets them."""
        c, r, line, first = place
        first, lane = settle(first), lanes(0, self.width)
        sums = [local(self.vectors, self.width) for _ in range(scalars)]
        every = [(i, k) for i in range(scalars) for k in range(self.vectors)]
        with T.If(T.Or(samples[0] > 0, rows[0] > 0)):
            with T.Then():
                for i, k in every:
                    store(sums[i], (k, lane), self.dw[self.block + k, c, r, line, first + i, lane])
            with T.Else():
                for i, k in every:
                    store(sums[i], (k, lane), zeros(self.width))
        unrolled = self.spec.out_width if self.spec.out_width <= UNROLLED_COLUMNS else 4
        whole = self.spec.out_width // unrolled
        with T.serial(samples[1]) as n, T.serial(rows[1]) as h:
            pixel = samples[0] + n, rows[0] + h
            with T.serial(whole) as outer:
                for column in range(unrolled):
                    self._pixel(sums, (c, r, line, first), (*pixel, outer * unrolled + column))
            for column in range(whole * unrolled, self.spec.out_width):
                self._pixel(sums, (c, r, line, first), (*pixel, column))
        for i, k in every:
            store(self.dw, (self.block + k, c, r, line, first + i, lane), sums[i][k, lane])

    def _pixel(self, sums: list[Buffer], place: tuple[Expr, ...], pixel: tuple[Expr, Expr, Expr]) -> None:
        spec, (c, r, line, first), (n, h, w) = self.spec, place, pixel
        y = h * spec.strides[0] + r * spec.dilations[0] + spec.x_pads[0] - spec.pads[0]
        x = w * spec.strides[1] + line * spec.dilations[1] + spec.x_pads[1] - spec.pads[1]
        for i in range(len(sums)):
            value = spread(self.x[n, self.first_x_block + c, y, x * self.depth + first + i], self.width)
            for k in range(self.vectors):
                gradient = self.dy[n, self.block + k, h + spec.y_pads[0], w + spec.y_pads[1], lanes(0, self.width)]
                add_to(sums[i], (k, lanes(0, self.width)), value * gradient)
