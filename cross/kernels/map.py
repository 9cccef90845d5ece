"""Element-wise kernels: one expression over any storages. Also conversions between storages and zero-bordered copies.

Two nests. A blocked output is walked a (sample, channel block) a task, a vector of channels at a time, its border zeroed
on the way. A plain output is walked row by row, its last axis in vectors where every input allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from cross.expression import Expr
from cross.graph import Shape, TensorType
from cross.kernels import access, arithmetic
from cross.kernels.access import Channel, Index, PrimExpr
from cross.kernels.loop_nest import Kernel, lanes, store, when, write_kernel, zeros
from cross.storage import Storage


@dataclass(frozen=True)
class Source:
    """An input of a kernel being written."""

    buffer: Any
    storage: Storage
    kind: TensorType


def declare(kernel: Kernel, name: str, storage: Storage) -> Any:
    """The next argument, of any dtype."""
    shape = access.physical_shape(storage, kernel.batch)
    return T.arg(name, T.buffer(shape, storage.dtype))


def declare_inputs(kernel: Kernel, storages: Sequence[Storage], types: Sequence[TensorType]) -> list[Source]:
    return [
        Source(declare(kernel, f"x{i}", storage), storage, kind)
        for i, (storage, kind) in enumerate(zip(storages, types, strict=True))
    ]


def element(expr: Expr, sources: Sequence[Source], domain: Shape, indices: Sequence[Index]) -> PrimExpr:
    """`expr` at one place of `domain` (a vector where an index is one), its inputs broadcast as numpy would."""

    def read(i: int) -> PrimExpr:
        source = sources[i]
        own = access.broadcast_indices(source.kind.shape, domain, indices)
        return source.buffer[access.position(source.storage, own)]

    def random(identity: int, counter: int) -> PrimExpr:
        place: PrimExpr = 0
        for extent, index in zip(domain[1:], indices[1:], strict=True):
            place = place * extent + access.flat(index)
        buffer = sources[counter].buffer
        return arithmetic.uniform(identity, lambda i: buffer[i], access.flat(indices[0]), place)

    return arithmetic.evaluate(expr, read, lambda d: access.flat(indices[d]), random)


def map_kernel(
    expr: Expr,
    inputs: Sequence[Storage],
    types: Sequence[TensorType],
    output: Storage,
    kind: TensorType,
    vector: int,
) -> tirx.PrimFunc:
    """Arguments: the inputs, then the output, in their storages."""
    with write_kernel("map") as kernel:
        sources = declare_inputs(kernel, inputs, types)
        y = declare(kernel, "y", output)

        def value(indices: Sequence[Index]) -> PrimExpr:
            return element(expr, sources, kind.shape, indices)

        if output.kind == "blocked":
            gathers = any(access.is_gathered(s, t) for s, t in zip(inputs, types, strict=True))
            _walk_blocked(kernel, output, kind, y, value, gathers)
        else:
            width = vector if _rows_are_vectors(inputs, types, kind) else 1
            _walk_plain(kernel, output, kind, y, value, width)
    return kernel.function


def _walk_blocked(
    kernel: Kernel,
    output: Storage,
    kind: TensorType,
    y: Any,
    value: Callable[[Sequence[Index]], PrimExpr],
    gathers: bool,
) -> None:
    """`gathers`: an input is not blocked, so lanes of filled-up channels must not be read."""
    _, groups, rows, columns, block = output.shape
    _, channels, height, width = kind.shape
    top, left, _, right = output.pads
    nothing = zeros(block) if output.dtype == "float32" else tirx.const(0, f"{output.dtype}x{block}")

    def blank(n: PrimExpr, o: PrimExpr, row: PrimExpr, first: int, count: int) -> None:
        if count:
            with T.serial(0, count) as c:
                store(y, (n, o, row, first + c, lanes(0, block)), nothing)

    with spread_tasks(kernel.batch * groups, groups * rows * columns * block) as task:
        n, o = task // groups, task % groups
        blank_rows = [(0, top), (top + height, rows - top - height)]
        for first, count in blank_rows:
            if count:
                with T.serial(0, count) as r:
                    blank(n, o, first + r, 0, columns)
        with T.serial(0, height) as h:
            blank(n, o, h + top, 0, left)
            with T.serial(0, width) as w:
                _write_pixel(output, channels, y, value, (n, o, h, w), gathers)
            blank(n, o, h + top, left + width, right)


def _write_pixel(
    output: Storage,
    channels: int,
    y: Any,
    value: Callable[[Sequence[Index]], PrimExpr],
    place: tuple[PrimExpr, PrimExpr, PrimExpr, PrimExpr],
    gathers: bool,
) -> None:
    n, o, h, w = place
    block = output.block
    ragged = channels % block != 0
    if gathers:
        with T.serial(0, block) as lane:
            channel = Channel(o, lane, block)
            at = access.position(output, (n, channel, h, w))
            if ragged:
                store(y, at, tirx.const(0, output.dtype))
            with when(channel.flat < channels if ragged else True):
                store(y, at, value((n, channel, h, w)))
        return
    channel = Channel(o, lanes(0, block), block)
    result = value((n, channel, h, w))
    if ragged:
        result = arithmetic.select(channel.flat < channels, result, arithmetic.constant(0.0, result))
    store(y, access.position(output, (n, channel, h, w)), result)


@contextmanager
def spread_tasks(count: PrimExpr, elements: int) -> Iterator[PrimExpr]:
    """A loop over tasks: parallel where a sample has enough elements to pay for waking the pool."""
    with T.parallel(0, count) if elements >= access.PARALLEL_ELEMENTS else T.serial(0, count) as task:
        yield task


def _rows_are_vectors(inputs: Sequence[Storage], types: Sequence[TensorType], kind: TensorType) -> bool:
    """Whether every input, read along the output's last axis, is contiguous or one value."""
    last = kind.shape[-1] if kind.shape and kind.shape[-1] != -1 else 1
    for storage, own in zip(inputs, types, strict=True):
        along = own.shape[-1] if own.shape else 1
        if storage.kind == "blocked" or (storage.kind == "vector" and len(own.shape) > 1) or along not in (1, last):
            return False
    return last > 1


def _walk_plain(
    kernel: Kernel,
    output: Storage,
    kind: TensorType,
    y: Any,
    value: Callable[[Sequence[Index]], PrimExpr],
    vector: int,
) -> None:
    """Row by row over all axes but the last; a vector [C] or [C, 1, 1] is one row."""
    shape = kind.shape if output.kind == "plain" else kind.shape[:1]
    trailing = len(kind.shape) - len(shape)
    outer, last = shape[:-1], shape[-1]
    if last == -1:
        outer, last = shape, 1
    extents = [kernel.batch if d == -1 else d for d in outer]
    rows: PrimExpr = 1
    for extent in extents:
        rows = rows * extent

    def put(indices: Sequence[Index]) -> None:
        full = (*indices, *(0 for _ in range(trailing)))
        store(y, access.position(output, full), value(full))

    with spread_tasks(rows, output.elements) as row:
        leading: list[PrimExpr] = []
        for extent in reversed(extents):
            leading.insert(0, row % extent)
            row = row // extent
        if len(outer) == len(shape):
            put(leading)
            return
        whole = last // vector if vector > 1 else 0
        if whole:
            with T.serial(0, whole) as i:
                put([*leading, lanes(i * vector, vector)])
        if last - whole * vector > 0:
            with T.serial(0, last - whole * vector) as i:
                put([*leading, i + whole * vector])
        if output.elements > last and output.kind == "vector":
            with T.serial(0, output.elements - last) as i:
                store(y, (i + last,), tirx.const(0, output.dtype))
