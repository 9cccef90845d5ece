"""Dense layers and batched matrix products, on plain (row-major) storage.

    dense_forward           y[row, m]  = sum over k of x[row, k] * w[m, k]        lanes run over k: both rows are contiguous
    dense_input_gradient    dx[row, k] = sum over m of dy[row, m] * w[m, k]       lanes run over the result's columns
    dense_weight_gradient   dw[m, k]   = sum over rows of dy[row, m] * x[row, k]  lanes run over the result's columns
    matmul                  y[i, j]    = sum over k of a[i, k] * b[k, j]          the same, for each pair of matrices of a batch

Two nests do all of it: `_Dot` (lanes over the summed axis, added up at the end in a fixed order) and `_Outer` (a column of
`a` times a row of `b`, accumulated). Both sum each element in one task in one order, whatever the batch and the threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from tvm.script.ir_builder import tirx as T

from cross.graph import BATCH, Shape
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
from cross.kernels.tiles import FEW_REGISTERS, split
from cross.target import Target

ROWS = 4
"""Rows of a register tile; what is left over is done row by row."""

SUM_CHUNK = 64
"""Summed rows that `_Outer` takes at a time, so that a chunk of `b` stays in the cache while a group of tiles uses it."""

MANY_ROWS = 16
"""Rows a sample from which transposing the weight pays: `_Outer` then does dense_forward's work, without sums over lanes."""

BAND = 8
"""Rows that a task of `matrix_transpose` fills: no more lines than a set of a first-level cache holds."""

GROUP = 8
"""Tiles of rows that share a chunk of `b`."""


@dataclass(frozen=True)
class DenseSpec:
    """x [N, *leading, inputs], w [outputs, inputs], y [N, *leading, outputs]."""

    inputs: int
    outputs: int
    leading: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of x a sample."""
        return prod(self.leading)


@dataclass(frozen=True)
class MatmulSpec:
    """y [N, *leading, rows, columns] = a [N, *leading, rows, inner] times b [N, *leading, inner, columns]; a transposed
    `a` is stored with its last two axes exchanged. `b` never is: rows of it are what vectors are loaded from."""

    leading: tuple[int, ...]
    rows: int
    columns: int
    inner: int
    transpose_a: bool = False


def flops(spec: DenseSpec | MatmulSpec) -> int:
    """Floating-point operations a sample, the same for each of the three dense kernels."""
    if isinstance(spec, DenseSpec):
        return 2 * spec.rows * spec.inputs * spec.outputs
    return 2 * prod(spec.leading) * spec.rows * spec.inner * spec.columns


def dense_forward(spec: DenseSpec, target: Target) -> PrimFunc:
    """PrimFunc(x, w, y)."""
    with write_kernel("dense_forward") as kernel:
        rows = kernel.batch * spec.rows
        x = kernel.tensor("x", (BATCH, *spec.leading, spec.inputs))
        w = kernel.tensor("w", (spec.outputs, spec.inputs))
        y = kernel.tensor("y", (BATCH, *spec.leading, spec.outputs))
        x, y = view(x, rows, spec.inputs), view(y, rows, spec.outputs)
        nest = _Dot(
            target,
            lambda row, k: x[row, k],
            lambda m, k: w[m, k],
            lambda row, m, value: store(y, (row, m), value),
            spec.inputs,
        )
        tiles, row_tiles = split(spec.outputs, ROWS), (rows + (nest.height - 1)) // nest.height
        with T.parallel(row_tiles * tiles.count) as task:
            nest.tiles(settle(task % row_tiles), rows, settle(task // row_tiles), spec.outputs)
    return kernel.function


def dense_input_gradient(spec: DenseSpec, target: Target) -> PrimFunc:
    """PrimFunc(dy, w, dx)."""
    with write_kernel("dense_input_gradient") as kernel:
        rows = kernel.batch * spec.rows
        dy = kernel.tensor("dy", (BATCH, *spec.leading, spec.outputs))
        w = kernel.tensor("w", (spec.outputs, spec.inputs))
        dx = kernel.tensor("dx", (BATCH, *spec.leading, spec.inputs))
        dy, dx = view(dy, rows, spec.outputs), view(dx, rows, spec.inputs)
        nest = _Outer(target, lambda row, m: dy[row, m], lambda m, k: w[m, k], lambda row, k: (dx, (row, k)))
        nest.parallel(rows, spec.inputs, spec.outputs)
    return kernel.function


def dense_weight_gradient(spec: DenseSpec, target: Target) -> PrimFunc:
    """PrimFunc(x, dy, dw)."""
    with write_kernel("dense_weight_gradient") as kernel:
        rows = kernel.batch * spec.rows
        x = kernel.tensor("x", (BATCH, *spec.leading, spec.inputs))
        dy = kernel.tensor("dy", (BATCH, *spec.leading, spec.outputs))
        dw = kernel.tensor("dw", (spec.outputs, spec.inputs))
        x, dy = view(x, rows, spec.inputs), view(dy, rows, spec.outputs)
        nest = _Outer(target, lambda m, row: dy[row, m], lambda row, k: x[row, k], lambda m, k: (dw, (m, k)))
        nest.parallel(spec.outputs, spec.inputs, rows)
    return kernel.function


def matmul(spec: MatmulSpec, target: Target) -> PrimFunc:
    """PrimFunc(a, b, y)."""
    a_shape = (spec.inner, spec.rows) if spec.transpose_a else (spec.rows, spec.inner)
    with write_kernel("matmul") as kernel:
        pairs = kernel.batch * prod(spec.leading)
        a = kernel.tensor("a", (BATCH, *spec.leading, *a_shape))
        b = kernel.tensor("b", (BATCH, *spec.leading, spec.inner, spec.columns))
        y = kernel.tensor("y", (BATCH, *spec.leading, spec.rows, spec.columns))
        a, b = view(a, pairs, *a_shape), view(b, pairs, spec.inner, spec.columns)
        y = view(y, pairs, spec.rows, spec.columns)
        with T.parallel(pairs) as pair:
            nest = _Outer(
                target,
                lambda i, k: a[pair, k, i] if spec.transpose_a else a[pair, i, k],
                lambda k, j: b[pair, k, j],
                lambda i, j: (y, (pair, i, j)),
            )
            nest.serial(spec.rows, spec.columns, spec.inner)
    return kernel.function


def matrix_transpose(shape: Shape, target: Target) -> PrimFunc:
    """PrimFunc(x of `shape`, y with the last two axes exchanged). A task fills a few rows of y from their start, so that
    each cache line stays in the first level until it is full."""
    *leading, rows, columns = shape
    with write_kernel("matrix_transpose") as kernel:
        count: Expr = 1
        for extent in leading:
            count = count * (kernel.batch if extent == BATCH else extent)
        x, y = kernel.tensor("x", shape), kernel.tensor("y", (*leading, columns, rows))
        x, y = view(x, count, rows, columns), view(y, count, columns, rows)
        bands = -(-columns // BAND)
        with T.parallel(count * bands) as task:
            matrix, first = settle(task // bands), settle(task % bands * BAND)
            with when(first + BAND <= columns), T.serial(rows) as i, T.unroll(BAND) as j:
                store(y, (matrix, first + j, i), x[matrix, i, first + j])
            with when(first + BAND > columns), T.serial(rows) as i, T.serial(columns - first) as j:
                store(y, (matrix, first + j, i), x[matrix, i, first + j])
    return kernel.function


@dataclass(frozen=True)
class _Dot:
    """Sums of a(row, k) * b(column, k) over k < `inner`, both contiguous in k: a vector of partial sums for each result."""

    target: Target
    a: Callable[[Expr, Expr], Expr]
    b: Callable[[Expr, Expr], Expr]
    put: Callable[[Expr, Expr, Expr], None]
    inner: int

    @property
    def height(self) -> int:
        return _dot_rows(self.target)

    def tiles(self, row_tile: Expr, rows: Expr, column_tile: Expr, columns: int) -> None:
        """One tile of the result: `height` rows and up to ROWS columns."""
        for size, first, count, first_column in split(columns, ROWS).parts:
            with when(T.And(column_tile >= first, column_tile < first + count)):
                column = settle(first_column + (column_tile - first) * size)
                row = settle(row_tile * self.height)
                with when(row + self.height <= rows):
                    self._tile(row, self.height, column, size)
                with when(row + self.height > rows), T.serial(rows - row) as left:
                    self._tile(row + left, 1, column, size)

    def _tile(self, row: Expr, rows: int, column: Expr, columns: int) -> None:
        width = self.target.vector_floats
        vectors = self.inner // width
        sums, totals = [local(columns, width) for _ in range(rows)], local(rows, columns)
        every = [(i, j) for i in range(rows) for j in range(columns)]
        for i, j in every:
            store(sums[i], (j, lanes(0, width)), zeros(width))
        with T.serial(vectors) as vector:
            for i, j in every:
                lane = lanes(vector * width, width)
                add_to(sums[i], (j, lanes(0, width)), self.a(row + i, lane) * self.b(column + j, lane))
        for i, j in every:
            store(totals, (i, j), _lane_sum(sums[i], (j,), 0, width))
        with T.serial(self.inner - vectors * width) as rest:
            for i, j in every:
                k = vectors * width + rest
                add_to(totals, (i, j), self.a(row + i, k) * self.b(column + j, k))
        for i, j in every:
            self.put(row + i, column + j, totals[i, j])


def _dot_rows(target: Target) -> int:
    """Rows of a tile of `_Dot`: three of four sums each, and their operands, are what 16 registers hold."""
    return 3 if target.vector_registers <= FEW_REGISTERS else ROWS


def _lane_sum(sums: Buffer, index: tuple[int, ...], first: int, width: int) -> Expr:
    """Sum of `width` lanes, pairwise: halves of halves."""
    if width == 1:
        return sums[(*index, first)]
    half = width // 2
    return _lane_sum(sums, index, first, half) + _lane_sum(sums, index, first + half, width - half)


@dataclass(frozen=True)
class _Outer:
    """out(row, column) = sums of a(row, k) * b(k, column) over k, b and out contiguous in columns."""

    target: Target
    a: Callable[[Expr, Expr], Expr]
    b: Callable[[Expr, Expr], Expr]
    out: Callable[[Expr, Expr], tuple[Buffer, tuple[Expr, ...]]]

    @property
    def width(self) -> int:
        return self.target.channel_block

    @property
    def vectors(self) -> int:
        if self.target.vector_floats == 1:
            return 1
        return 3 if self.target.vector_registers <= FEW_REGISTERS else 4

    def parallel(self, rows: Expr, columns: int, inner: Expr) -> None:
        """The whole product, in tasks of GROUP tiles of rows and a chunk of columns."""
        tiles = -(-columns // (self.vectors * self.width))
        chunk = min(max(tiles // (8 * self.target.cores), 4), 32) * self.vectors * self.width
        chunks, groups = -(-columns // chunk), (rows + (GROUP * ROWS - 1)) // (GROUP * ROWS)
        with T.parallel(groups * chunks) as task:
            # The chunk of b that a task reads is the next task's too: rows run fastest.
            first = settle(task % groups * (GROUP * ROWS))
            self._task(
                (first, T.min(rows - first, GROUP * ROWS)), (settle(task // groups * chunk), chunk), columns, inner
            )

    def serial(self, rows: int, columns: int, inner: int) -> None:
        """The whole product in this task."""
        self._task((0, rows), (0, columns), columns, inner)

    def _task(self, rows: tuple[Expr, Expr], chunk: tuple[Expr, int], columns: int, inner: Expr) -> None:
        first_row, row_count = rows[0], settle(rows[1])
        with T.serial((inner + (SUM_CHUNK - 1)) // SUM_CHUNK) as part:
            first = settle(part * SUM_CHUNK)
            count = settle(T.min(inner - first, SUM_CHUNK))
            with T.serial(row_count // ROWS) as tile:
                self._columns(settle(first_row + tile * ROWS), ROWS, chunk, columns, (first, count))
            with T.serial(row_count % ROWS) as left:
                row = settle(first_row + row_count // ROWS * ROWS + left)
                self._columns(row, 1, chunk, columns, (first, count))

    def _columns(self, row: Expr, rows: int, chunk: tuple[Expr, int], columns: int, inner: tuple[Expr, Expr]) -> None:
        """All columns of a chunk: whole tiles, then single vectors, then what does not fill a vector."""
        tile, column = self.vectors * self.width, chunk[0]
        end = settle(T.min(column + chunk[1], columns))
        tiles = settle((end - column) // tile)
        with T.serial(tiles) as index:
            self._tile(row, rows, column + index * tile, self.vectors, self.width, inner)
        if columns % tile:
            rest = settle(column + tiles * tile)
            singles = settle((end - rest) // self.width)
            with T.serial(singles) as index:
                self._tile(row, rows, rest + index * self.width, 1, self.width, inner)
            if columns % self.width:
                last = settle(rest + singles * self.width)
                with when(last < end):
                    self._tile(row, rows, last, 1, columns % self.width, inner)

    def _tile(self, row: Expr, rows: int, column: Expr, vectors: int, width: int, inner: tuple[Expr, Expr]) -> None:
        first, count = inner
        sums, lane = [local(vectors, width) for _ in range(rows)], lanes(0, width)
        every = [(i, j) for i in range(rows) for j in range(vectors)]
        for i, j in every:
            buffer, index = self.out(row + i, lanes(column + j * width, width))
            with T.If(first == 0):
                with T.Then():
                    store(sums[i], (j, lane), zeros(width))
                with T.Else():
                    store(sums[i], (j, lane), buffer[index])
        with T.serial(count) as k:
            for i in range(rows):
                value = spread(self.a(row + i, first + k), width)
                for j in range(vectors):
                    add_to(sums[i], (j, lane), value * self.b(first + k, lanes(column + j * width, width)))
        for i, j in every:
            buffer, index = self.out(row + i, lanes(column + j * width, width))
            store(buffer, index, sums[i][j, lane])
