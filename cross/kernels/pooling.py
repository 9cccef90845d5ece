"""Pooling windows. Gradients gather: every input pixel sums over the windows that contain it, so no two tasks write one value.

Input and output are both blocked or both plain (`cross.assign_storage`): filled-up channels are zero in one and so in the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import s_tir, te, tirx

from cross.graph import TensorType
from cross.kernels import access
from cross.kernels.access import Channel, Index, PrimExpr
from cross.storage import Storage

LOWEST = -3.4028234663852886e38


def _window(attrs: Mapping[str, Any]) -> tuple[int, int, int, int, int, int]:
    (kh, kw), (sh, sw), pads = attrs["kernel"], attrs["strides"], attrs["pads"]
    return int(kh), int(kw), int(sh), int(sw), int(pads[0]), int(pads[1])


def max_pool2d_kernel(
    x: Storage, x_type: TensorType, outputs: tuple[Storage, Storage], kind: TensorType, attrs: Mapping[str, Any]
) -> tirx.PrimFunc:
    """Arguments: x, y, winner (int32: row * kernel width + column of the first largest value in the window)."""
    kh, kw, sh, sw, top, left = _window(attrs)
    _, _, height, width = x_type.shape
    batch = access.batch_variable()
    source = access.placeholder(x, batch, "x")
    reducer = te.comm_reducer(
        lambda a, b: (tirx.Select(b[0] > a[0], b[0], a[0]), tirx.Select(b[0] > a[0], b[1], a[1])),
        lambda t0, t1: (tirx.const(LOWEST, t0), tirx.const(0, t1)),
        name="first_largest",
    )
    rr, rs = te.reduce_axis((0, kh), "rr"), te.reduce_axis((0, kw), "rs")

    def value(n: PrimExpr, channel: Index, row: PrimExpr, column: PrimExpr) -> Any:
        h, w = row * sh + rr - top, column * sw + rs - left
        inside = tirx.all(h >= 0, h < height, w >= 0, w < width)
        inner = access.load(source, x, (n, channel, h, w))
        candidate = tirx.if_then_else(inside, inner, tirx.const(LOWEST, "float32"))
        return reducer((candidate, rr * kw + rs), axis=[rr, rs])

    y, winner = te.compute(access.physical_shape(outputs[0], batch), _by_storage(outputs[0], value), name="y")
    schedule = s_tir.Schedule(access.prim_func([source, y, winner]))
    _schedule_gather(schedule, outputs[0], 2)
    return schedule.mod["main"]


def _by_storage(storage: Storage, value: Any) -> Any:
    """A compute function over the stored shape (no borders) from one over canonical indices."""
    if storage.kind != "blocked":
        return value
    return lambda n, o, h, w, v: value(n, Channel(o, v, storage.block), h, w)


def _schedule_gather(schedule: Any, storage: Storage, reductions: int) -> None:
    """Tasks over (sample, channel block), a pixel's window summed in registers, channels in lanes."""
    block = schedule.get_sblock("y")
    loops = schedule.get_loops(block)
    schedule.parallel(schedule.fuse(*loops[:2]))
    loops = schedule.get_loops(block)
    if storage.kind == "blocked":
        lane, reduced = loops[-1 - reductions], loops[-reductions:]
        schedule.reorder(*reduced, lane)
        schedule.vectorize(lane)
        loops = schedule.get_loops(block)
        initial = schedule.decompose_reduction(block, loops[-1 - reductions])
        schedule.vectorize(schedule.get_loops(initial)[-1])


def _gather_gradient(
    dy: Storage,
    dy_type: TensorType,
    extra: Storage | None,
    dx: Storage,
    kind: TensorType,
    attrs: Mapping[str, Any],
    weigh: Any,
) -> tirx.PrimFunc:
    """dx[h, w] = sum over windows (row, column) that contain (h, w) of weigh(dy, extra, window indices, tap)."""
    kh, kw, sh, sw, top, left = _window(attrs)
    _, _, rows, columns = dy_type.shape
    batch = access.batch_variable()
    sources = [access.placeholder(s, batch, name) for s, name in ((dy, "dy"), (extra, "winner")) if s is not None]
    ra, rb = te.reduce_axis((0, -(-kh // sh)), "ra"), te.reduce_axis((0, -(-kw // sw)), "rb")

    def value(n: PrimExpr, channel: Index, h: PrimExpr, w: PrimExpr) -> Any:
        # The last window that can hold row h starts at or before it; earlier ones lie `ra` strides above.
        row, column = tirx.floordiv(h + top, sh) - ra, tirx.floordiv(w + left, sw) - rb
        r, s = h + top - row * sh, w + left - column * sw
        inside = tirx.all(row >= 0, row < rows, column >= 0, column < columns, r < kh, s < kw)
        term = weigh(sources, n, channel, row, column, r, s)
        return te.sum(tirx.if_then_else(inside, term, tirx.const(0, "float32")), axis=[ra, rb])

    y = te.compute(access.physical_shape(dx, batch), _by_storage(dx, value), name="y")
    schedule = s_tir.Schedule(access.prim_func([*sources, y]))
    _schedule_gather(schedule, dx, 2)
    return schedule.mod["main"]


def max_pool2d_gradient_kernel(
    dy: Storage, dy_type: TensorType, winner: Storage, dx: Storage, kind: TensorType, attrs: Mapping[str, Any]
) -> tirx.PrimFunc:
    """Arguments: dy, winner, dx."""
    kw = int(attrs["kernel"][1])

    def weigh(sources: Any, n: Any, channel: Index, row: Any, column: Any, r: Any, s: Any) -> PrimExpr:
        won = access.load(sources[1], winner, (n, channel, row, column)) == r * kw + s
        return tirx.Select(won, access.load(sources[0], dy, (n, channel, row, column)), tirx.const(0, "float32"))

    return _gather_gradient(dy, dy_type, winner, dx, kind, attrs, weigh)


def _share(attrs: Mapping[str, Any], kind: TensorType, row: PrimExpr, column: PrimExpr) -> PrimExpr:
    """1 / values averaged in a window: those inside the image, or inside image and padding."""
    kh, kw, sh, sw, top, left = _window(attrs)
    _, _, height, width = kind.shape
    include = bool(attrs.get("count_include_pad", False))
    bottom, right = (int(p) for p in attrs["pads"][2:])
    low_h, high_h = (0, height + top + bottom) if include else (top, top + height)
    low_w, high_w = (0, width + left + right) if include else (left, left + width)
    rows = tirx.min(row * sh + kh, high_h) - tirx.max(row * sh, low_h)
    columns = tirx.min(column * sw + kw, high_w) - tirx.max(column * sw, low_w)
    return tirx.const(1.0, "float32") / tirx.Cast("float32", rows * columns)


def avg_pool2d_kernel(x: Storage, x_type: TensorType, output: Storage, attrs: Mapping[str, Any]) -> tirx.PrimFunc:
    """Arguments: x, y."""
    kh, kw, sh, sw, top, left = _window(attrs)
    _, _, height, width = x_type.shape
    batch = access.batch_variable()
    source = access.placeholder(x, batch, "x")
    rr, rs = te.reduce_axis((0, kh), "rr"), te.reduce_axis((0, kw), "rs")

    def value(n: PrimExpr, channel: Index, row: PrimExpr, column: PrimExpr) -> Any:
        h, w = row * sh + rr - top, column * sw + rs - left
        inside = tirx.all(h >= 0, h < height, w >= 0, w < width)
        inner = access.load(source, x, (n, channel, h, w))
        scaled = inner * _share(attrs, x_type, row, column)
        return te.sum(tirx.if_then_else(inside, scaled, tirx.const(0, "float32")), axis=[rr, rs])

    y = te.compute(access.physical_shape(output, batch), _by_storage(output, value), name="y")
    schedule = s_tir.Schedule(access.prim_func([source, y]))
    _schedule_gather(schedule, output, 2)
    return schedule.mod["main"]


def avg_pool2d_gradient_kernel(
    dy: Storage, dy_type: TensorType, dx: Storage, kind: TensorType, attrs: Mapping[str, Any]
) -> tirx.PrimFunc:
    """Arguments: dy, dx."""

    def weigh(sources: Any, n: Any, channel: Index, row: Any, column: Any, r: Any, s: Any) -> PrimExpr:
        return access.load(sources[0], dy, (n, channel, row, column)) * _share(attrs, kind, row, column)

    return _gather_gradient(dy, dy_type, None, dx, kind, attrs, weigh)
