"""Depthwise convolution (as many groups as channels): every channel is convolved alone, so vectors of channels never mix.

    forward          y[n, c, p, q]  = sum over r, s    of x[n, c, p*stride + r*dilation - pad, ..] * w[c, r, s]
    input gradient   dx[n, c, h, w] = sum over r, s    of dy[n, c, p, q] * w[c, r, s], by phases as in convolution_input_gradient.py
    weight gradient  dw[c, r, s]    = sum over n, p, q of x[n, c, p*stride + r*dilation - pad, ..] * dy[n, c, p, q]

Activations are blocked, weights [C blocks, R, S, v]. A step is one vector load and one multiply-add, so all three are bound by
loads: neighbouring pixels are unrolled, and the compiler loads what they share once. Each output is summed by one task in one
order.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from cross.kernels.convolution import ConvSpec, Pair, Phase, forward_phase, input_gradient_phases
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
    storages = spec.x_storage(target), spec.weight_storage(target), spec.y_storage(target, NO_PADS)
    return _correlation("depthwise_forward", storages, spec.strides, (1, 1), (forward_phase(spec),))


def depthwise_input_gradient(spec: ConvSpec, target: Target) -> PrimFunc:
    """PrimFunc(dy stored with `spec.y_pads`, w, dx stored without pads); y_pads at least `input_gradient_pads(spec)`."""
    storages = spec.y_storage(target), spec.weight_storage(target), spec.x_storage(target, NO_PADS)
    return _correlation("depthwise_input_gradient", storages, (1, 1), spec.strides, input_gradient_phases(spec))


def _correlation(
    name: str,
    storages: tuple[Storage, Storage, Storage],
    in_strides: Pair,
    out_strides: Pair,
    phases: tuple[Phase, ...],
) -> PrimFunc:
    """PrimFunc(source, weight, destination), for storages in that order. A task is one row of one phase, of one sample and
    channel block."""
    blocks, rows = storages[0].shape[1], sum(phase.height for phase in phases)
    with write_kernel(name) as kernel:
        source = kernel.tensor("source", storages[0].shape)
        weight = kernel.tensor("weight", storages[1].shape)
        destination = kernel.tensor("destination", storages[2].shape)
        with T.parallel(kernel.batch * (blocks * rows)) as task:
            sample, block, line = settle(task // (blocks * rows)), settle(task // rows % blocks), settle(task % rows)
            nest = _Nest(source, weight, destination, sample, block, storages[0].block, in_strides, out_strides)
            first = 0
            for phase in phases:
                with when(T.And(line >= first, line < first + phase.height)):
                    nest.row(phase, settle(line - first))
                first += phase.height
    return kernel.function


@dataclass(frozen=True)
class _Nest:
    """The body of one task of the forward pass or the input gradient."""

    source: Buffer
    weight: Buffer
    destination: Buffer
    sample: Expr
    block: Expr
    width: int
    in_strides: Pair
    out_strides: Pair

    def row(self, phase: Phase, row: Expr) -> None:
        """One row of a phase, in tiles of neighbouring columns."""
        for size, _, count, first in split(phase.width, TILE_COLUMNS).parts:
            with T.serial(count) as index:
                self._tile(phase, row, settle(first + index * size), size)

    def _tile(self, phase: Phase, row: Expr, column: Expr, pixels: int) -> None:
        sums, lane = local(pixels, self.width), lanes(0, self.width)
        rows, columns = phase.row_taps, phase.column_taps
        for p in range(pixels):
            store(sums, (p, lane), zeros(self.width))
        if rows.count and columns.count:
            with T.serial(rows.count) as j, T.unroll(columns.count) as tap:
                weights = self.weight[self.block, rows.first + j * rows.step, columns.first + tap * columns.step, lane]
                y = row * self.in_strides[0] + rows.offset + j * rows.offset_step
                for p in range(pixels):
                    x = (column + p) * self.in_strides[1] + columns.offset + tap * columns.offset_step
                    add_to(sums, (p, lane), self.source[self.sample, self.block, y, x, lane] * weights)
        for p in range(pixels):
            y, x = row * self.out_strides[0] + phase.row, (column + p) * self.out_strides[1] + phase.column
            store(self.destination, (self.sample, self.block, y, x, lane), sums[p, lane])


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
    """Adds one chunk of pixels to `rows_at_once` kernel rows of one channel block; the first chunk sets them.

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
            for way in range(ways):
                store(sums[r], (way, s, lane), zeros(self.width))
            with when(T.Or(samples[0] > 0, rows[0] > 0)):
                store(sums[r], (0, s, lane), self.dw[self.block, first_row + r, s, lane])
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
