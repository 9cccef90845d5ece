"""Depthwise convolution (as many groups as channels): every channel is convolved alone, so vectors of channels never mix.

    forward          y[n, c, p, q]  = sum over r, s    of x[n, c, p*stride + r*dilation - pad, ..] * w[c, r, s]
    input gradient   dx[n, c, h, w] = sum over r, s    of dy[n, c, p, q] * w[c, r, s], by phases as in convolution_input_gradient.py
    weight gradient  dw[c, r, s]    = sum over n, p, q of x[n, c, p*stride + r*dilation - pad, ..] * dy[n, c, p, q]

Activations are blocked, weights [C blocks, R, S, v]. A step is one vector load and one multiply-add, so all three are bound by
loads: neighbouring pixels are unrolled, and the compiler loads what they share once. Each output is summed by one task in one
order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


from tvm.script.ir_builder import tirx as T

from cross.kernels.convolution import ConvSpec, Pair, Taps, phase_extent, taps_of_phase
from cross.kernels.loop_nest import (
    Buffer,
    Expr,
    PrimFunc,
    add_to,
    lanes,
    local,
    settle,
    store,
    when,
    write_kernel,
    zeros,
)
from cross.kernels.tiles import chunk, registers_a_vector, split
from cross.storage import NO_PADS, Storage
from cross.target import Target

TILE_COLUMNS = 4
"""Neighbouring outputs that are computed together."""

CHUNK_PIXELS = 256
"""Pixels of x and of dy that the weight gradient goes over once for each kernel row: they stay in the first-level cache."""


def depthwise_forward(spec: ConvSpec, target: Target) -> PrimFunc:
    """PrimFunc(x stored with `spec.x_pads`, w, y stored without pads); x_pads at least `forward_pads(spec)`."""
    row_taps, column_taps = (
        Taps(spec.kernel[axis], 0, 1, spec.x_pads[axis] - spec.pads[axis], spec.dilations[axis]) for axis in (0, 1)
    )
    phase = _Phase(0, 0, spec.out_height, spec.out_width, row_taps, column_taps)
    storages = spec.x_storage(target), spec.weight_storage(target), spec.y_storage(target, NO_PADS)
    return _correlation("depthwise_forward", storages, spec.strides, (1, 1), [phase])


def depthwise_input_gradient(spec: ConvSpec, target: Target) -> PrimFunc:
    """PrimFunc(dy stored with `spec.y_pads`, w, dx stored without pads); y_pads at least `input_gradient_pads(spec)`."""
    phases = []
    for row in range(min(spec.strides[0], spec.height)):
        for column in range(min(spec.strides[1], spec.width)):
            taps = [taps_of_phase(spec, axis, phase) for axis, phase in enumerate((row, column))]
            stored = [replace(tap, offset=tap.offset + spec.y_pads[axis]) for axis, tap in enumerate(taps)]
            extents = phase_extent(spec.height, row, spec.strides[0]), phase_extent(spec.width, column, spec.strides[1])
            phases.append(_Phase(row, column, *extents, *stored))
    storages = spec.y_storage(target), spec.weight_storage(target), spec.x_storage(target, NO_PADS)
    return _correlation("depthwise_input_gradient", storages, (1, 1), spec.strides, phases)


@dataclass(frozen=True)
class _Phase:
    """As in correlation.py: output rows `row + out_stride * q`, q < height, and the taps that they sum over."""

    row: int
    column: int
    height: int
    width: int
    row_taps: Taps
    column_taps: Taps


def _correlation(
    name: str,
    storages: tuple[Storage, Storage, Storage],
    in_strides: Pair,
    out_strides: Pair,
    phases: list[_Phase],
) -> PrimFunc:
    """A task is one row of one phase, of one sample and channel block."""
    width = storages[0].block
    lane, blocks = lanes(0, width), storages[0].shape[1]
    rows = sum(phase.height for phase in phases)
    with write_kernel(name) as kernel:
        source, weight, destination = (
            kernel.tensor(part, storage.shape) for part, storage in zip(("source", "weight", "destination"), storages)
        )
        with T.parallel(kernel.batch * (blocks * rows)) as task:
            sample, block, line = settle(task // (blocks * rows)), settle(task // rows % blocks), settle(task % rows)

            def tile(phase: _Phase, row: Expr, column: Expr, pixels: int) -> None:
                sums = local(pixels, width)
                for p in range(pixels):
                    store(sums, (p, lane), zeros(width))
                if phase.row_taps.count and phase.column_taps.count:
                    with T.serial(phase.row_taps.count) as j, T.unroll(phase.column_taps.count) as tap:
                        y = row * in_strides[0] + phase.row_taps.offset + j * phase.row_taps.offset_step
                        r = phase.row_taps.first + j * phase.row_taps.step
                        s = phase.column_taps.first + tap * phase.column_taps.step
                        for p in range(pixels):
                            x = (column + p) * in_strides[1] + phase.column_taps.offset
                            x += tap * phase.column_taps.offset_step
                            add_to(sums, (p, lane), source[sample, block, y, x, lane] * weight[block, r, s, lane])
                for p in range(pixels):
                    y, x = row * out_strides[0] + phase.row, (column + p) * out_strides[1] + phase.column
                    store(destination, (sample, block, y, x, lane), sums[p, lane])

            first = 0
            for phase in phases:
                with when(T.And(line >= first, line < first + phase.height)):
                    row = settle(line - first)
                    _columns(phase.width, lambda column, pixels: tile(phase, row, column, pixels))
                first += phase.height
    return kernel.function


def _columns(total: int, tile: Callable[[Expr, int], None]) -> None:
    """A row of `total` pixels as tiles: `tile(first column, pixels)`."""
    for size, _, count, first in split(total, TILE_COLUMNS).parts:
        with T.serial(count) as index:
            tile(settle(first + index * size), size)


def depthwise_weight_gradient(spec: ConvSpec, target: Target) -> PrimFunc:
    """PrimFunc(x stored with `spec.x_pads`, dy stored with `spec.y_pads`, dw); x_pads at least `forward_pads(spec)`.

    A task has one channel block, or one kernel row of it where there are few blocks."""
    storage = spec.weight_storage(target)
    blocks, kernel_rows, kernel_columns, width = storage.shape
    spare = (target.vector_registers - 4) // registers_a_vector(target)
    # All kernel rows at once share the loads of dy, where their sums fit into registers and the tasks are enough.
    rows_at_once = kernel_rows if kernel_rows * kernel_columns <= spare and blocks >= 2 * target.cores else 1
    shared_rows = 1 if blocks >= 2 * target.cores else kernel_rows
    with write_kernel("depthwise_weight_gradient") as kernel:
        x = kernel.tensor("x", spec.x_storage(target).shape)
        dy = kernel.tensor("dy", spec.y_storage(target).shape)
        dw = kernel.tensor("dw", storage.shape)
        with T.parallel(blocks * shared_rows) as task:
            block, first_row = settle(task // shared_rows), settle(task % shared_rows)
            row_count = kernel_rows // shared_rows
            with T.grid(row_count, kernel_columns) as (r, s):
                store(dw, (block, first_row + r, s, lanes(0, width)), zeros(width))
            samples = max(1, CHUNK_PIXELS // (spec.out_height * spec.out_width))
            height = chunk(spec.out_height, CHUNK_PIXELS // spec.out_width)
            with (
                T.serial((kernel.batch + (samples - 1)) // samples) as sample_chunk,
                T.serial(-(-spec.out_height // height)) as row_chunk,
                T.serial(row_count // rows_at_once) as r,
            ):
                sample, row = settle(sample_chunk * samples), settle(row_chunk * height)
                counts = T.min(kernel.batch - sample, samples), T.min(spec.out_height - row, height)
                nest = _WeightNest(spec, x, dy, dw, block, width, rows_at_once, max(1, spare // 2 // kernel_columns))
                nest.add(first_row + r * rows_at_once, (sample, settle(counts[0])), (row, settle(counts[1])))
    return kernel.function


@dataclass(frozen=True)
class _WeightNest:
    """Adds one chunk of pixels to `rows_at_once` kernel rows of one channel block.

    Even and odd columns (`ways` of them) have sums of their own where one kernel row alone would wait for its own last add."""

    spec: ConvSpec
    x: Buffer
    dy: Buffer
    dw: Buffer
    block: Expr
    width: int
    rows_at_once: int
    most_ways: int

    def add(self, first_row: Expr, samples: tuple[Expr, Expr], rows: tuple[Expr, Expr]) -> None:
        spec, lane = self.spec, lanes(0, self.width)
        ways = 1 if self.rows_at_once > 1 else min(self.most_ways, TILE_COLUMNS, spec.out_width)
        places = [(r, s) for r in range(self.rows_at_once) for s in range(spec.kernel[1])]
        sums = [local(ways, spec.kernel[1], self.width) for _ in range(self.rows_at_once)]
        for r, s in places:
            store(sums[r], (0, s, lane), self.dw[self.block, first_row + r, s, lane])
            for way in range(1, ways):
                store(sums[r], (way, s, lane), zeros(self.width))
        unrolled = ways if ways > 1 else min(TILE_COLUMNS, spec.out_width)
        whole = spec.out_width // unrolled
        with T.serial(samples[1]) as n, T.serial(rows[1]) as h:
            pixel = samples[0] + n, rows[0] + h
            with T.serial(whole) as outer:
                for column in range(unrolled):
                    self._pixel(sums, column % ways, first_row, (*pixel, outer * unrolled + column))
            for column in range(whole * unrolled, spec.out_width):
                self._pixel(sums, column % ways, first_row, (*pixel, column))
        for r, s in places:
            total = sums[r][0, s, lane]
            for way in range(1, ways):
                total = total + sums[r][way, s, lane]
            store(self.dw, (self.block, first_row + r, s, lane), total)

    def _pixel(self, sums: list[Buffer], way: int, first_row: Expr, pixel: tuple[Expr, Expr, Expr]) -> None:
        spec, (n, h, w), lane = self.spec, pixel, lanes(0, self.width)
        gradient = self.dy[n, self.block, h + spec.y_pads[0], w + spec.y_pads[1], lane]
        for r in range(self.rows_at_once):
            y = h * spec.strides[0] + (first_row + r) * spec.dilations[0] + spec.x_pads[0] - spec.pads[0]
            for s in range(spec.kernel[1]):
                x = w * spec.strides[1] + s * spec.dilations[1] + spec.x_pads[1] - spec.pads[1]
                add_to(sums[r], (way, s, lane), self.x[n, self.block, y, x, lane] * gradient)
