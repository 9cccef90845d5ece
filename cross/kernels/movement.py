"""Data movement by canonical index: reshape, transpose, concat, slice, unslice; and the sum over a window of channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from tvm import s_tir, te, tirx
from tvm.script.ir_builder import tirx as T

from cross.expression import Expr
from cross.graph import TensorType
from cross.kernels import access
from cross.kernels.access import Channel, Index, PrimExpr, flat
from cross.kernels.loop_nest import add_to, local, store, when, write_kernel, zeros
from cross.kernels.map import declare, declare_inputs, element
from cross.storage import NO_PADS, Storage


def _moved(
    inputs: Sequence[Storage],
    output: Storage,
    kind: TensorType,
    vector: int,
    value: Callable[[list[te.Tensor], tuple[Index, ...]], PrimExpr],
) -> tirx.PrimFunc:
    batch = access.batch_variable()
    tensors = [access.placeholder(s, batch, f"x{i}") for i, s in enumerate(inputs)]
    y = access.store(output, kind, batch, lambda *indices: value(tensors, indices), "y")
    schedule = s_tir.Schedule(access.prim_func([*tensors, y]))
    access.parallel_vector_schedule(schedule, schedule.get_sblock("y"), output, vector)
    return schedule.mod["main"]


def reshape_kernel(x: Storage, x_type: TensorType, output: Storage, kind: TensorType, vector: int) -> tirx.PrimFunc:
    """The same row-major elements in another shape; the batch stays in front where there is one."""
    skip = 1 if x_type.batched else 0

    def value(tensors: list[te.Tensor], indices: tuple[Index, ...]) -> PrimExpr:
        position: PrimExpr = 0
        for extent, index in zip(kind.shape[skip:], indices[skip:], strict=True):
            position = position * extent + flat(index)
        source: list[PrimExpr] = []
        for extent in reversed(x_type.shape[skip:]):
            source.append(tirx.floormod(position, extent))
            position = tirx.floordiv(position, extent)
        return access.load(tensors[0], x, (*indices[:skip], *reversed(source)))

    return _moved([x], output, kind, vector, value)


def transpose_kernel(
    x: Storage, perm: tuple[int, ...], output: Storage, kind: TensorType, vector: int
) -> tirx.PrimFunc:
    def value(tensors: list[te.Tensor], indices: tuple[Index, ...]) -> PrimExpr:
        source = [flat(indices[perm.index(d)]) for d in range(len(perm))]
        return access.load(tensors[0], x, source)

    return _moved([x], output, kind, vector, value)


def concat_kernel(
    inputs: Sequence[Storage],
    types: Sequence[TensorType],
    axis: int,
    output: Storage,
    kind: TensorType,
    vector: int,
) -> tirx.PrimFunc:
    starts = [sum(t.shape[axis] for t in types[:i]) for i in range(len(types))]

    def value(tensors: list[te.Tensor], indices: tuple[Index, ...]) -> PrimExpr:
        def part(i: int) -> PrimExpr:
            own = list(indices)
            own[axis] = _shifted(indices[axis], -starts[i], inputs[i])
            return access.load(tensors[i], inputs[i], own)

        result = part(len(types) - 1)
        for i in range(len(types) - 2, -1, -1):
            result = tirx.if_then_else(flat(indices[axis]) < starts[i + 1], part(i), result)
        return result

    return _moved(inputs, output, kind, vector, value)


def _shifted(index: Index, offset: int, storage: Storage) -> Index:
    """The index moved along its axis; a channel moved by whole blocks keeps its lane."""
    if isinstance(index, Channel) and offset % index.block == 0:
        return Channel(index.outer + offset // index.block, index.lane, index.block)
    return flat(index) + offset


def slice_kernel(
    x: Storage, starts: tuple[int, ...], steps: tuple[int, ...], output: Storage, kind: TensorType, vector: int
) -> tirx.PrimFunc:
    """y[i] = x[start + i * step]."""

    def value(tensors: list[te.Tensor], indices: tuple[Index, ...]) -> PrimExpr:
        source = [
            _shifted(index, start, x) if step == 1 else flat(index) * step + start
            for index, start, step in zip(indices, starts, steps, strict=True)
        ]
        return access.load(tensors[0], x, source)

    return _moved([x], output, kind, vector, value)


def unslice_kernel(
    x: Storage,
    x_type: TensorType,
    starts: tuple[int, ...],
    steps: tuple[int, ...],
    fill: float,
    output: Storage,
    kind: TensorType,
    vector: int,
) -> tirx.PrimFunc:
    """y[start + i * step] = x[i], `fill` elsewhere: padding, and the gradient of a slice. Negative starts crop."""

    def value(tensors: list[te.Tensor], indices: tuple[Index, ...]) -> PrimExpr:
        tests, source = [], []
        for d, (index, start, step) in enumerate(zip(indices, starts, steps, strict=True)):
            extent = x_type.shape[d]
            if (start == 0 and step == 1 and extent == kind.shape[d]) or d == 0:
                source.append(index)
                continue
            moved = flat(index) - start
            tests += [moved >= 0, moved < extent * step]
            if step != 1:
                tests.append(tirx.floormod(moved, step) == 0)
            source.append(moved if step == 1 else tirx.floordiv(moved, step))
        inner = access.load(tensors[0], x, source)
        return tirx.if_then_else(tirx.all(*tests), inner, tirx.const(fill, "float32")) if tests else inner

    return _moved([x], output, kind, vector, value)


def channel_window_sum_kernel(
    expr: Expr,
    window: int,
    mirrored: bool,
    inputs: Sequence[Storage],
    types: Sequence[TensorType],
    output: Storage,
    kind: TensorType,
) -> tirx.PrimFunc:
    """y[c] = sum of expr over channels c - (size-1)//2 .. c + size//2 (ONNX LRN's window), or the mirrored window."""
    below, above = ((window - 1) // 2, window // 2)[:: -1 if mirrored else 1]
    channels = kind.shape[1]
    with write_kernel("channel_window_sum") as kernel:
        sources = declare_inputs(kernel, inputs, types)
        y = declare(kernel, "y", output)
        extents = [kernel.batch, *kind.shape[1:]]
        rows = kernel.batch * prod(kind.shape[1:])
        if output.kind == "blocked" and (channels % output.block or output.pads != NO_PADS):
            with T.serial(0, kernel.batch) as n:
                _blank(y, n, output)
        with T.parallel(0, rows) as row:
            indices: list[PrimExpr] = []
            for extent in reversed(extents):
                indices.insert(0, row % extent)
                row = row // extent
            total = local(1)
            store(total, (0,), zeros(1))
            with T.serial(0, below + above + 1) as offset:
                c = indices[1] + offset - below
                with when(tirx.all(c >= 0, c < channels)):
                    add_to(total, (0,), element(expr, sources, kind.shape, (indices[0], c, *indices[2:])))
            store(y, access.position(output, indices), total[0])
    return kernel.function


def _blank(y: PrimExpr, n: PrimExpr, output: Storage) -> None:
    """All of one sample to zero, borders and filled-up channels included."""
    _, groups, rows, columns, block = output.shape
    with T.serial(0, groups) as o, T.serial(0, rows) as h, T.serial(0, columns) as w, T.serial(0, block) as lane:
        store(y, (n, o, h, w, lane), zeros(1))
