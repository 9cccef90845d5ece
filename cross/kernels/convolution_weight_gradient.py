"""Weight gradient of the direct convolution: dw[o, c, r, s] = sum over n, p, q of x[n, c, p*stride + r*dilation - pad, ..] * dy[n, o, p, q].

A task owns a tile of dw: some blocks of output channels, one block of input channels, and where that gives too few tasks one
kernel row, one tap, or part of the input channels. It walks over samples and rows in chunks small enough for the first-level
cache; within a chunk each tap keeps `scalars` x `vectors` accumulators in registers over all pixels, and adds to dw between
chunks. Each element of dw is summed by one task, in the order of samples, rows and columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from cross.kernels.convolution import ConvSpec
from cross.kernels.loop_nest import Buffer, Expr, PrimFunc, add_to, lanes, local, settle, spread, store, when, write_kernel, zeros
from cross.kernels.tiles import chunk, fits, split
from cross.target import Target

CHUNK_PIXELS = 192
"""Pixels of a chunk: two blocks of dy and one of x fill about half of a 32 KiB cache at 8 floats a vector."""

UNROLLED_COLUMNS = 8
"""Rows up to so many pixels are unrolled whole, longer ones by four."""

ENOUGH_TASKS_A_CORE = 4


def convolution_weight_gradient(spec: ConvSpec, target: Target) -> PrimFunc:
    """PrimFunc(x stored with `spec.x_pads`, dy stored with `spec.y_pads`, dw in weight storage).

    x_pads must be at least `forward_pads(spec)`; of dy only the interior is read. Filled-up channels come out zero."""
    out_blocks, in_blocks, kernel_rows, kernel_columns, depth, _ = spec.weight_storage(target).shape
    scalars, vectors = _tile(target, depth, out_blocks // spec.groups)
    cut = split(out_blocks // spec.groups, vectors)
    # Extents of what the tasks share out: tiles of output channels, input channel blocks, then what more is needed.
    shares = [spec.groups * cut.count, in_blocks, 1, 1, 1]
    for place, extent in ((2, kernel_rows), (3, kernel_columns), (4, depth // scalars)):
        if _product(shares) < ENOUGH_TASKS_A_CORE * target.cores:
            shares[place] = extent
    with write_kernel("convolution_weight_gradient") as kernel:
        x = kernel.tensor("x", spec.x_storage(target).shape)
        dy = kernel.tensor("dy", spec.y_storage(target).shape)
        dw = kernel.tensor("dw", spec.weight_storage(target).shape)
        with T.parallel(_product(shares)) as task:
            place = []
            for extent in reversed(shares):
                place.insert(0, task % extent)
                task = task // extent
            tile, c, r, s, i = place
            group, tile_of_group = tile // cut.count, tile % cut.count
            for size, first, count, first_block in cut.parts:
                with when(T.And(tile_of_group >= first, tile_of_group < first + count)):
                    block = settle(group * cut.total + first_block + (tile_of_group - first) * size)
                    nest = _Nest(spec, x, dy, dw, kernel.batch, group * in_blocks + c, c, block, size, scalars)
                    nest.chunks((r, kernel_rows // shares[2]), (s, kernel_columns // shares[3]), (i, depth // scalars // shares[4]))
    return kernel.function


def _tile(target: Target, depth: int, out_blocks: int) -> tuple[int, int]:
    """(input channels, blocks of output channels) of a register tile: the channels divide a block."""
    most = 4 if target.vector_registers <= 16 or target.vector_floats == 1 else 8
    scalars = max(divisor for divisor in range(1, most + 1) if depth % divisor == 0)
    vectors = max((k for k in range(1, min(4, out_blocks) + 1) if fits(target, scalars, k)), default=1)
    return scalars, vectors


def _product(extents: list[int]) -> int:
    total = 1
    for extent in extents:
        total *= extent
    return total


@dataclass(frozen=True)
class _Nest:
    """The body of one task, written once for each size of tile. `x_block` counts from x's first block, `c` from the group's."""

    spec: ConvSpec
    x: Buffer
    dy: Buffer
    dw: Buffer
    batch: Expr
    x_block: Expr
    c: Expr
    block: Expr
    vectors: int
    scalars: int

    @property
    def width(self) -> int:
        return int(self.dw.shape[-1])

    def chunks(self, rows: tuple[Expr, int], columns: tuple[Expr, int], parts: tuple[Expr, int]) -> None:
        """Sum over all chunks. Each range is (first, count) of kernel rows, kernel columns and parts of the input channels."""
        spec = self.spec
        with T.grid(self.vectors, rows[1], columns[1], parts[1], self.scalars) as (k, r, s, part, i):
            index = (self.block + k, self.c, rows[0] + r, columns[0] + s, (parts[0] + part) * self.scalars + i)
            store(self.dw, (*index, lanes(0, self.width)), zeros(self.width))
        samples = max(1, CHUNK_PIXELS // (spec.out_height * spec.out_width))
        height = chunk(spec.out_height, CHUNK_PIXELS // spec.out_width)
        with T.serial((self.batch + (samples - 1)) // samples) as sample_chunk, T.serial(-(-spec.out_height // height)) as row_chunk:
            sample, row = settle(sample_chunk * samples), settle(row_chunk * height)
            sample_count = settle(T.min(self.batch - sample, samples)) if samples > 1 else 1
            row_count = settle(T.min(spec.out_height - row, height)) if spec.out_height % height else height
            with T.grid(rows[1], columns[1], parts[1]) as (r, s, part):
                tap = rows[0] + r, columns[0] + s, (parts[0] + part) * self.scalars
                self._tap(tap, (sample, sample_count), (row, row_count))

    def _tap(self, tap: tuple[Expr, Expr, Expr], samples: tuple[Expr, Expr], rows: tuple[Expr, Expr]) -> None:
        """Add one chunk's part to `scalars` input channels from `tap[2]` on of one kernel position."""
        r, s, first = tap
        sums = [local(self.vectors, self.width) for _ in range(self.scalars)]
        every = [(i, k) for i in range(self.scalars) for k in range(self.vectors)]
        lane = lanes(0, self.width)
        for i, k in every:
            store(sums[i], (k, lane), self.dw[self.block + k, self.c, r, s, first + i, lane])
        with T.serial(samples[1]) as n, T.serial(rows[1]) as h:
            unrolled = self.spec.out_width if self.spec.out_width <= UNROLLED_COLUMNS else 4
            whole = self.spec.out_width // unrolled
            with T.serial(whole) as outer:
                for column in range(unrolled):
                    self._pixel(sums, tap, (samples[0] + n, rows[0] + h, outer * unrolled + column))
            for column in range(whole * unrolled, self.spec.out_width):
                self._pixel(sums, tap, (samples[0] + n, rows[0] + h, column))
        for i, k in every:
            store(self.dw, (self.block + k, self.c, r, s, first + i, lane), sums[i][k, lane])

    def _pixel(self, sums: list[Buffer], tap: tuple[Expr, Expr, Expr], pixel: tuple[Expr, Expr, Expr]) -> None:
        spec, (r, s, first), (n, h, w) = self.spec, tap, pixel
        y = h * spec.strides[0] + r * spec.dilations[0] + spec.x_pads[0] - spec.pads[0]
        x = w * spec.strides[1] + s * spec.dilations[1] + spec.x_pads[1] - spec.pads[1]
        lane = lanes(0, self.width)
        for i in range(self.scalars):
            value = spread(self.x[n, self.x_block, y, x, first + i], self.width)
            for k in range(self.vectors):
                gradient = self.dy[n, self.block + k, h + spec.y_pads[0], w + spec.y_pads[1], lane]
                add_to(sums[i], (k, lane), value * gradient)
