"""Sums and maxima of expressions over axes of each sample, and sums over the batch.

A sum over a whole plane keeps several accumulators side by side (shorter dependency chains, and less rounding than one
long sum); every output is reduced by one task in one fixed order, so the bits do not depend on the thread count.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from cross.expression import Expr
from cross.graph import Shape, TensorType
from cross.kernels import access, arithmetic
from cross.kernels.access import Channel, Index, PrimExpr
from cross.kernels.loop_nest import Kernel, add_to, lanes, local, store, when, write_kernel, zeros
from cross.kernels.map import Source, declare, declare_inputs, element, spread_tasks
from cross.kernels.tiles import largest_divisor
from cross.storage import Storage

LOWEST = -3.4028234663852886e38


def accumulators(width: int) -> int:
    """Partial sums side by side: the largest divisor of a row's length up to 8."""
    return largest_divisor(width, 8)


def reduce_kernel(
    exprs: Sequence[Expr],
    kind: str,
    axes: tuple[int, ...],
    domain: Shape,
    inputs: Sequence[Storage],
    types: Sequence[TensorType],
    outputs: Sequence[Storage],
    vector: int,
) -> tirx.PrimFunc:
    """Arguments: the inputs, then one output an expression: `domain` with 1 at the reduced axes. kind: 'sum' or 'max'."""
    with write_kernel("reduce") as kernel:
        sources = declare_inputs(kernel, inputs, types)
        results = [declare(kernel, f"y{i}", storage) for i, storage in enumerate(outputs)]
        gathers = any(access.is_gathered(s, t) for s, t in zip(inputs, types, strict=True))
        if kind == "sum" and axes == (2, 3) and not gathers and outputs[0].kind == "blocked":
            _plane_sums(kernel, exprs, domain, sources, results, outputs)
        elif _keeps_rows(axes, domain, sources, outputs, vector):
            for expr, result in zip(exprs, results, strict=True):
                _along_rows(kernel, expr, kind, axes, domain, sources, result, vector)
        else:
            for expr, result, storage in zip(exprs, results, outputs, strict=True):
                _generic(kernel, expr, kind, axes, domain, sources, result, storage, vector)
    return kernel.function


def _plane_sums(
    kernel: Kernel,
    exprs: Sequence[Expr],
    domain: Shape,
    sources: Sequence[Source],
    results: Sequence[Any],
    outputs: Sequence[Storage],
) -> None:
    """[N, C, H, W] -> [N, C, 1, 1]: task = (sample, channel block)."""
    _, channels, height, width = domain
    block, groups, side = outputs[0].block, outputs[0].shape[1], accumulators(width)
    with T.parallel(0, kernel.batch * groups) as task:
        n, o = task // groups, task % groups
        channel = Channel(o, lanes(0, block), block)
        parts = [local(side * block) for _ in exprs]
        for part in parts:
            for j in range(side):
                store(part, (lanes(j * block, block),), zeros(block))
        with T.serial(0, height) as h, T.serial(0, width // side) as w:
            for j in range(side):
                for expr, part in zip(exprs, parts, strict=True):
                    value = element(expr, sources, domain, (n, channel, h, w * side + j))
                    if channels % block:
                        value = arithmetic.select(channel.flat < channels, value, arithmetic.constant(0.0, value))
                    add_to(part, (lanes(j * block, block),), value)
        for part, result in zip(parts, results, strict=True):
            for j in range(1, side):
                add_to(part, (lanes(0, block),), part[lanes(j * block, block)])
            store(result, (n, o, 0, 0, lanes(0, block)), part[lanes(0, block)])


def _keeps_rows(
    axes: tuple[int, ...], domain: Shape, sources: Sequence[Source], outputs: Sequence[Storage], vector: int
) -> bool:
    """Whether the last axis stays and can be walked in vectors."""
    last = domain[-1]
    is_plain = all(s.kind == "plain" for s in outputs) and all(_row_is_vector(s, last) for s in sources)
    return is_plain and len(domain) - 1 not in axes and last % vector == 0


def _along_rows(
    kernel: Kernel,
    expr: Expr,
    kind: str,
    axes: tuple[int, ...],
    domain: Shape,
    sources: Sequence[Source],
    result: Any,
    vector: int,
) -> None:
    """A few vectors of the last axis a task; the reduced axes are walked inside, whole rows of cache lines at a time."""
    last = domain[-1]
    side = next(d for d in (4, 2, 1) if last % (d * vector) == 0)
    kept = [d for d in range(len(domain) - 1) if d not in axes]
    extents = [*(kernel.batch if domain[d] == -1 else domain[d] for d in kept), last // (side * vector)]
    tasks: PrimExpr = 1
    for extent in extents:
        tasks = tasks * extent
    work = 1
    for extent in domain[1:]:
        work *= extent
    start = 0.0 if kind == "sum" else LOWEST
    with spread_tasks(tasks, work) as task:
        place = _unflatten(task, extents)
        indices: list[Index] = [0] * len(domain)
        for d, index in zip(kept, place[:-1], strict=True):
            indices[d] = index
        first = place[-1] * (side * vector)
        totals = local(side * vector)
        lane = [lanes(j * vector, vector) for j in range(side)]
        for j in range(side):
            store(totals, (lane[j],), arithmetic.constant(start, totals[lane[j]]))
        with ExitStack() as loops:
            for axis in axes:
                indices[axis] = loops.enter_context(T.serial(0, domain[axis]))
            for j in range(side):
                at = [*indices[:-1], lanes(first + j * vector, vector)]
                _combine(kind, totals, lane[j], element(expr, sources, domain, at))
        out = [0 if d in axes else index for d, index in enumerate(indices)]
        for j in range(side):
            store(result, tuple([*out[:-1], lanes(first + j * vector, vector)]), totals[lane[j]])


def _combine(kind: str, total: Any, index: PrimExpr, value: PrimExpr) -> None:
    if kind == "sum":
        add_to(total, (index,), value)
    else:
        store(total, (index,), arithmetic.maximum(arithmetic.keep(value), total[index]))


def _generic(
    kernel: Kernel,
    expr: Expr,
    kind: str,
    axes: tuple[int, ...],
    domain: Shape,
    sources: Sequence[Source],
    result: Any,
    storage: Storage,
    vector: int,
) -> None:
    """One output at a time; a plain last axis alone is reduced in vectors, then over lanes, then the tail."""
    kept = [d for d in range(len(domain)) if d not in axes]
    extents = [kernel.batch if domain[d] == -1 else domain[d] for d in kept]
    rows: PrimExpr = 1
    for extent in extents:
        rows = rows * extent
    work = 1
    for extent in domain[1:]:
        work *= extent
    last = domain[-1]
    in_vectors = axes == (len(domain) - 1,) and all(_row_is_vector(s, last) for s in sources)
    width = vector if in_vectors and last >= vector else 1
    start = 0.0 if kind == "sum" else LOWEST
    _zero_filled_channels(kernel, storage, domain, kept, result)
    with spread_tasks(rows, work) as row:
        indices: list[Index] = [0] * len(domain)
        for d, extent in zip(reversed(kept), reversed(extents), strict=True):
            indices[d] = row % extent
            row = row // extent
        total = local(width)
        store(total, (lanes(0, width),), arithmetic.constant(start, total[lanes(0, width)]))
        if width > 1:
            with T.serial(0, last // width) as i:
                at = [*indices[:-1], lanes(i * width, width)]
                _combine(kind, total, lanes(0, width), element(expr, sources, domain, at))
            for lane in range(1, width):
                _combine(kind, total, 0, total[lane])
            tail = last - last // width * width
            if tail:
                with T.serial(0, tail) as i:
                    at = [*indices[:-1], i + (last - tail)]
                    _combine(kind, total, 0, element(expr, sources, domain, at))
        else:
            with ExitStack() as loops:
                for axis in axes:
                    indices[axis] = loops.enter_context(T.serial(0, domain[axis]))
                _combine(kind, total, 0, element(expr, sources, domain, indices))
        out = [0 if d in axes else index for d, index in enumerate(indices)]
        store(result, access.position(storage, out), total[0])


def _row_is_vector(source: Source, last: int) -> bool:
    along = source.kind.shape[-1] if source.kind.shape else 1
    in_order = source.storage.kind == "plain" or (source.storage.kind == "vector" and len(source.kind.shape) == 1)
    return in_order and along in (1, last)


def _zero_filled_channels(kernel: Kernel, storage: Storage, domain: Shape, kept: Sequence[int], result: Any) -> None:
    """Channels that fill up the last block of a blocked output are zero."""
    if storage.kind != "blocked":
        return
    _, groups, rows, columns, block = storage.shape
    filled = groups * block - (domain[1] if 1 in kept else 1)
    if filled:
        with T.serial(0, kernel.batch) as n, T.serial(0, rows) as h, T.serial(0, columns) as w:
            with T.serial(0, filled) as i:
                store(result, (n, groups - 1, h, w, block - filled + i), tirx.const(0, "float32"))


def sum_batch_kernel(
    expr: Expr, domain: Shape, inputs: Sequence[Storage], types: Sequence[TensorType], output: Storage, vector: int
) -> tirx.PrimFunc:
    """Sum over the samples, in order: `output` holds domain[1:] (or the same elements in a vector)."""
    inner = domain[1:]
    valid = 1
    for extent in inner:
        valid *= extent
    with write_kernel("sum_batch") as kernel:
        sources = declare_inputs(kernel, inputs, types)
        y = declare(kernel, "y", output)
        last = inner[-1] if inner else 1
        width = vector if all(_row_is_vector(s, last) for s in sources) and last % vector == 0 else 1
        with spread_tasks(output.elements // width, output.elements) as group:
            place = group * width
            total = local(width)
            store(total, (lanes(0, width),), zeros(width))
            with when(place < valid if output.elements != valid else True):
                with T.serial(0, kernel.batch) as n:
                    indices = _unflatten(place, inner)
                    if width > 1:
                        indices[-1] = lanes(indices[-1], width)
                    add_to(total, (lanes(0, width),), element(expr, sources, domain, (n, *indices)))
            if len(output.shape) == 1:
                store(y, (lanes(place, width),), total[lanes(0, width)])
            else:
                at = _unflatten(place, output.shape)
                at[-1] = lanes(at[-1], width)
                store(y, tuple(at), total[lanes(0, width)])
    return kernel.function


def _unflatten(place: PrimExpr, shape: Sequence[PrimExpr]) -> list[PrimExpr]:
    found: list[PrimExpr] = []
    for extent in reversed(shape):
        found.insert(0, place % extent)
        place = place // extent
    return found
