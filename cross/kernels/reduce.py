"""Sums and maxima of expressions over axes of each sample, and sums over the batch.

A sum over a whole plane keeps several accumulators side by side (shorter dependency chains, and less rounding than one
long sum); every output is reduced by one task in one fixed order, so the bits do not depend on the thread count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import s_tir, te, tirx

from cross.expression import Expr
from cross.graph import Shape, TensorType
from cross.kernels import access
from cross.kernels.access import Channel, Index, PrimExpr
from cross.kernels.map import element
from cross.storage import Storage


def _sum_of(count: int) -> Any:
    """A reducer of `count` values at once."""
    return te.comm_reducer(
        lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)) if count > 1 else a + b,
        lambda *types: tuple(tirx.const(0, t) for t in types) if count > 1 else tirx.const(0, types[0]),
        name=f"sum{count}",
    )


def _maximum(value: PrimExpr, axis: Any) -> PrimExpr:
    return te.max(value, axis=axis)


def accumulators(width: int) -> int:
    """Partial sums side by side: the largest divisor of a row's length up to 8."""
    return next(d for d in range(min(width, 8), 0, -1) if width % d == 0)


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
    """Arguments: the inputs, then one output an expression: `domain` with 1 at the reduced axes."""
    batch = access.batch_variable()
    tensors = [access.placeholder(s, batch, f"x{i}") for i, s in enumerate(inputs)]

    def values(indices: Sequence[Index]) -> list[PrimExpr]:
        return [element(e, tensors, inputs, types, domain, indices) for e in exprs]

    if kind == "sum" and axes == (2, 3) and all(o.kind == "blocked" for o in outputs):
        return _plane_sums(values, domain, batch, tensors, outputs, vector)
    return _generic(values, kind, axes, domain, batch, tensors, outputs, vector)


def _generic(
    values: Callable[[Sequence[Index]], list[PrimExpr]],
    kind: str,
    axes: tuple[int, ...],
    domain: Shape,
    batch: PrimExpr,
    tensors: list[te.Tensor],
    outputs: Sequence[Storage],
    vector: int,
) -> tirx.PrimFunc:
    results = []
    for number, storage in enumerate(outputs):
        reduced = {d: te.reduce_axis((0, domain[d]), f"r{d}") for d in axes}

        def value(*indices: Index, number: int = number, reduced: dict[int, Any] = reduced) -> PrimExpr:
            full = [reduced[d] if d in reduced else index for d, index in enumerate(indices)]
            inner = values(full)[number]
            if isinstance(indices[1], Channel) and domain[1] % indices[1].block:
                inner = tirx.if_then_else(indices[1].flat < domain[1], inner, tirx.const(0, "float32"))
            combine = te.sum if kind == "sum" else _maximum
            return combine(inner, axis=list(reduced.values()))

        results.append(_unframed_store(storage, batch, value, f"y{number}"))
    schedule = s_tir.Schedule(access.prim_func([*tensors, *results]))
    for number, storage in enumerate(outputs):
        block = schedule.get_sblock(f"y{number}")
        if storage.elements >= 512 and storage.batched:
            loops = schedule.get_loops(block)
            schedule.parallel(schedule.fuse(*loops[:2]) if len(storage.shape) > 2 else loops[0])
        elif storage.batched:
            schedule.parallel(schedule.get_loops(block)[0])
    return schedule.mod["main"]


def _unframed_store(storage: Storage, batch: PrimExpr, value: Callable[..., PrimExpr], name: str) -> te.Tensor:
    """Like `access.store`, without its tests: a reduction cannot sit inside one (the caller masks the summands)."""
    shape = access.physical_shape(storage, batch)
    if storage.kind != "blocked":
        return te.compute(shape, value, name=name)

    def blocked(sample: PrimExpr, outer: PrimExpr, row: PrimExpr, column: PrimExpr, lane: PrimExpr) -> PrimExpr:
        return value(sample, Channel(outer, lane, storage.block), row, column)

    return te.compute(shape, blocked, name=name)


def _plane_sums(
    values: Callable[[Sequence[Index]], list[PrimExpr]],
    domain: Shape,
    batch: PrimExpr,
    tensors: list[te.Tensor],
    outputs: Sequence[Storage],
    vector: int,
) -> tirx.PrimFunc:
    """[N, C, H, W] -> [N, C, 1, 1]: task = (sample, channel block)."""
    _, channels, height, width = domain
    block, outer_extent = outputs[0].block, outputs[0].shape[1]
    side, count = accumulators(width), len(outputs)
    reducer = _sum_of(count)
    rh, rw = te.reduce_axis((0, height), "rh"), te.reduce_axis((0, width // side), "rw")
    rs = te.reduce_axis((0, side), "rs")

    def partial(n: PrimExpr, outer: PrimExpr, j: PrimExpr, lane: PrimExpr) -> PrimExpr:
        channel = Channel(outer, lane, block)
        inner = values((n, channel, rh, rw * side + j))
        if channels % block:
            inner = [tirx.Select(channel.flat < channels, v, tirx.const(0, "float32")) for v in inner]
        return reducer(tuple(inner) if count > 1 else inner[0], axis=[rh, rw])

    parts = te.compute((batch, outer_extent, side, block), partial, name="part")
    parts = [parts] if count == 1 else list(parts)
    results = te.compute(
        (batch, outer_extent, 1, 1, block),
        lambda n, outer, row, column, lane: reducer(
            tuple(p[n, outer, rs, lane] for p in parts) if count > 1 else parts[0][n, outer, rs, lane], axis=[rs]
        ),
        name="y",
    )
    results = [results] if count == 1 else list(results)
    schedule = s_tir.Schedule(access.prim_func([*tensors, *results]))
    schedule_plane_sums(schedule, "part", "y", count, vector)
    return schedule.mod["main"]


def schedule_plane_sums(schedule: Any, part: str, total: str, count: int, vector: int) -> None:
    """Both stages in one task a (sample, channel block); accumulators in registers."""
    y = schedule.get_sblock(total)
    task = schedule.fuse(*schedule.get_loops(y)[:2])
    schedule.parallel(task)
    p = schedule.get_sblock(part)
    schedule.compute_at(p, task)
    for i in range(count):
        schedule.set_scope(p, i, "local")
    tail = schedule.get_loops(p)[-4:]
    j, lane, rh, rw = tail
    schedule.reorder(rh, rw, j, lane)
    schedule.unroll(j)
    schedule.vectorize(lane)
    initial = schedule.decompose_reduction(p, rh)
    loops = schedule.get_loops(initial)
    schedule.unroll(loops[-2])
    schedule.vectorize(loops[-1])
    loops = schedule.get_loops(y)
    schedule.reorder(loops[-1], loops[-2])
    loops = schedule.get_loops(y)
    schedule.vectorize(loops[-1])
    initial = schedule.decompose_reduction(y, loops[-2])
    schedule.vectorize(schedule.get_loops(initial)[-1])


def sum_batch_kernel(
    expr: Expr, domain: Shape, inputs: Sequence[Storage], types: Sequence[TensorType], output: Storage, vector: int
) -> tirx.PrimFunc:
    """Sum over the samples, in order: `output` holds domain[1:] (or the same elements in a vector)."""
    batch = access.batch_variable()
    tensors = [access.placeholder(s, batch, f"x{i}") for i, s in enumerate(inputs)]
    rn = te.reduce_axis((0, batch), "rn")
    inner_shape = domain[1:]
    valid = 1
    for extent in inner_shape:
        valid *= extent

    def split(position: PrimExpr) -> list[PrimExpr]:
        found: list[PrimExpr] = []
        for extent in reversed(inner_shape):
            found.append(tirx.floormod(position, extent))
            position = tirx.floordiv(position, extent)
        return list(reversed(found))

    def value(position: PrimExpr) -> PrimExpr:
        indices = split(position)
        inner = element(expr, tensors, inputs, types, domain, (rn, *indices))
        if output.elements != valid:
            inner = tirx.if_then_else(position < valid, inner, tirx.const(0, "float32"))
        return te.sum(inner, axis=[rn])

    if output.kind == "vector" or len(output.shape) == 1:
        y = te.compute((output.elements,), value, name="y")
    else:
        y = te.compute(
            output.shape, lambda *i: te.sum(element(expr, tensors, inputs, types, domain, (rn, *i)), axis=[rn]), name="y"
        )
    schedule = s_tir.Schedule(access.prim_func([*tensors, y]))
    _schedule_batch_sum(schedule, output, vector)
    return schedule.mod["main"]


def _schedule_batch_sum(schedule: Any, output: Storage, vector: int) -> None:
    block = schedule.get_sblock("y")
    loops = schedule.get_loops(block)
    lane, rn = loops[-2], loops[-1]
    extent = output.shape[-1]
    if extent % vector == 0 and extent >= vector:
        outer, lane = schedule.split(lane, [None, vector])
        schedule.reorder(outer, rn, lane)
        schedule.vectorize(lane)
        initial = schedule.decompose_reduction(block, rn)
        schedule.vectorize(schedule.get_loops(initial)[-1])
