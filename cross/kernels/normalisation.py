"""Batch norm's statistics and the small kernels that turn sums into coefficients.

    batch_statistics            x -> sum[N,C], m2[N,C]: a sample's sum, and squared deviations from the sample's own mean
    batch_norm_finish           sums over samples -> mean, var (biased), scale, shift; running statistics updated in place
    batch_norm_gradient_finish  sums of dy and dy (x - mean) -> dgamma, dbeta and a, b, c of dx = a dy + b x + c
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import s_tir, te, tirx

from cross.graph import Shape
from cross.kernels import access
from cross.kernels.access import Channel, PrimExpr
from cross.kernels.reduce import accumulators
from cross.storage import Storage


def batch_statistics_kernel(domain: Shape, x: Storage, outputs: Sequence[Storage], vector: int) -> tirx.PrimFunc:
    """Arguments: x [N,C,H,W] blocked, sum and m2 [N,C,1,1]. Two passes over a plane that is in cache after the first."""
    _, _, height, width = domain
    batch, block, outer_extent = access.batch_variable(), x.block, x.shape[1]
    side, pixels = accumulators(width), height * width
    source = access.placeholder(x, batch, "x")

    def part(name: str, value: Any) -> te.Tensor:
        rh, rw = te.reduce_axis((0, height), "rh"), te.reduce_axis((0, width // side), "rw")
        shape = (batch, outer_extent, side, block)
        return te.compute(
            shape, lambda n, o, j, v: te.sum(value(n, o, rh, rw * side + j, v), axis=[rh, rw]), name=name
        )

    def total(name: str, parts: te.Tensor) -> te.Tensor:
        rs = te.reduce_axis((0, side), "rs")
        shape = (batch, outer_extent, 1, 1, block)
        return te.compute(shape, lambda n, o, h, w, v: te.sum(parts[n, o, rs, v], axis=[rs]), name=name)

    def read(n: PrimExpr, o: PrimExpr, h: PrimExpr, w: PrimExpr, v: PrimExpr) -> PrimExpr:
        return access.load(source, x, (n, Channel(o, v, block), h, w))

    sum_part = part("sum_part", read)
    sums = total("sum", sum_part)
    share = tirx.const(1.0 / pixels, "float32")

    def squared(n: PrimExpr, o: PrimExpr, h: PrimExpr, w: PrimExpr, v: PrimExpr) -> PrimExpr:
        deviation = read(n, o, h, w, v) - sums[n, o, 0, 0, v] * share
        return deviation * deviation

    m2_part = part("m2_part", squared)
    m2 = total("m2", m2_part)
    schedule = s_tir.Schedule(access.prim_func([source, sums, m2]))
    task = schedule.fuse(*schedule.get_loops(schedule.get_sblock("m2"))[:2])
    schedule.parallel(task)
    for name in ("m2_part", "sum", "sum_part"):
        schedule.compute_at(schedule.get_sblock(name), task)
    for name in ("sum_part", "m2_part"):
        _plane_part(schedule, name)
    for name in ("sum", "m2"):
        _plane_total(schedule, name)
    return schedule.mod["main"]


def _plane_part(schedule: Any, name: str) -> None:
    block = schedule.get_sblock(name)
    schedule.set_scope(block, 0, "local")
    j, lane, rh, rw = schedule.get_loops(block)[-4:]
    schedule.reorder(rh, rw, j, lane)
    schedule.unroll(j)
    schedule.vectorize(lane)
    loops = schedule.get_loops(schedule.decompose_reduction(block, rh))
    schedule.unroll(loops[-2])
    schedule.vectorize(loops[-1])


def _plane_total(schedule: Any, name: str) -> None:
    block = schedule.get_sblock(name)
    lane, rs = schedule.get_loops(block)[-2:]
    schedule.reorder(rs, lane)
    schedule.vectorize(lane)
    initial = schedule.decompose_reduction(block, rs)
    schedule.vectorize(schedule.get_loops(initial)[-1])


class _Channels:
    """Vectors of one value a channel, filled up to whole blocks, and sums over samples into them."""

    def __init__(self, length: int, channels: int, batch: PrimExpr, pixels: int) -> None:
        self.length, self.channels, self.batch, self.pixels = length, channels, batch, pixels

    def placeholder(self, name: str) -> te.Tensor:
        return te.placeholder((self.length,), name=name)

    def sum(self, name: str, tensor: te.Tensor, storage: Storage, value: Any = None) -> te.Tensor:
        """Sum over the samples of value(element, channel)."""
        rn = te.reduce_axis((0, self.batch), f"r_{name}")
        trailing = [0] * (len(storage.axes) - 2)

        def at(i: PrimExpr) -> PrimExpr:
            inner = access.load(tensor, storage, (rn, i, *trailing))
            inner = inner if value is None else value(rn, inner, i)
            if storage.kind == "plain" and self.length != self.channels:
                inner = tirx.if_then_else(i < self.channels, inner, tirx.const(0, "float32"))
            return te.sum(inner, axis=[rn])

        return te.compute((self.length,), at, name=name)

    def each(self, name: str, value: Any) -> te.Tensor:
        return te.compute((self.length,), value, name=name)

    def count(self) -> PrimExpr:
        """Values a channel: samples times pixels."""
        return tirx.Cast("float32", self.batch * self.pixels)


def _schedule_vectors(schedule: Any, names: Sequence[str], length: int, vector: int) -> None:
    if length % vector:
        return
    for name in names:
        block = schedule.get_sblock(name)
        loops = schedule.get_loops(block)
        outer, lane = schedule.split(loops[0], [None, vector])
        if len(loops) == 2:
            schedule.reorder(outer, loops[1], lane)
            initial = schedule.decompose_reduction(block, loops[1])
            schedule.vectorize(schedule.get_loops(initial)[-1])
        schedule.vectorize(lane)


def batch_norm_finish_kernel(
    partial: Sequence[Storage], channels: int, length: int, pixels: int, eps: float, momentum: float, vector: int
) -> tirx.PrimFunc:
    """Arguments: sum, m2 (absent where x has no pixels), gamma, beta, running mean, running var, then mean, var, scale,
    shift, running mean, running var. The running variance is the unbiased one, as in PyTorch."""
    batch = access.batch_variable()
    c = _Channels(length, channels, batch, pixels)
    sources = [access.placeholder(s, batch, f"partial{i}") for i, s in enumerate(partial)]
    gamma, beta, old_mean, old_var = (c.placeholder(name) for name in ("gamma", "beta", "old_mean", "old_var"))
    share = tirx.const(1.0 / pixels, "float32")
    sums = c.sum("total", sources[0], partial[0])
    mean = c.each("mean", lambda i: sums[i] / c.count())

    def deviations(rn: PrimExpr, own: PrimExpr, i: PrimExpr) -> PrimExpr:
        trailing = [0] * (len(partial[0].axes) - 2)
        sample_sum = access.load(sources[0], partial[0], (rn, i, *trailing))
        shift = sample_sum * share - mean[i]
        spread = shift * shift * tirx.const(float(pixels), "float32")
        return spread if len(sources) == 1 else own + spread

    m2 = c.sum("m2", sources[-1], partial[-1], deviations)
    var = c.each("var", lambda i: m2[i] / c.count())
    scale = c.each("scale", lambda i: gamma[i] / tirx.sqrt(var[i] + tirx.const(eps, "float32")))
    shift = c.each("shift", lambda i: beta[i] - mean[i] * scale[i])
    keep, take = tirx.const(1.0 - momentum, "float32"), tirx.const(momentum, "float32")
    new_mean = c.each("new_mean", lambda i: old_mean[i] * keep + mean[i] * take)
    unbiased = tirx.max(c.count() - tirx.const(1.0, "float32"), tirx.const(1.0, "float32"))
    new_var = c.each("new_var", lambda i: old_var[i] * keep + m2[i] / unbiased * take)
    outputs = [sums, m2, mean, var, scale, shift, new_mean, new_var]
    schedule = s_tir.Schedule(access.prim_func([*sources, gamma, beta, old_mean, old_var, *outputs]))
    names = ("total", "mean", "m2", "var", "scale", "shift", "new_mean", "new_var")
    _schedule_vectors(schedule, names, length, vector)
    return schedule.mod["main"]


def batch_norm_gradient_finish_kernel(
    partial: Sequence[Storage], channels: int, length: int, pixels: int, eps: float, vector: int
) -> tirx.PrimFunc:
    """Arguments: sums of dy and of dy (x - mean) a sample, gamma, mean, var, then dgamma, dbeta, a, b, c."""
    batch = access.batch_variable()
    c = _Channels(length, channels, batch, pixels)
    sources = [access.placeholder(s, batch, f"partial{i}") for i, s in enumerate(partial)]
    gamma, mean, var = (c.placeholder(name) for name in ("gamma", "mean", "var"))

    def inverse(i: PrimExpr) -> PrimExpr:
        return tirx.const(1.0, "float32") / tirx.sqrt(var[i] + tirx.const(eps, "float32"))

    dbeta = c.sum("dbeta", sources[0], partial[0])
    weighted = c.sum("weighted", sources[1], partial[1])
    dgamma = c.each("dgamma", lambda i: weighted[i] * inverse(i))
    a = c.each("a", lambda i: gamma[i] * inverse(i))
    b = c.each("b", lambda i: tirx.const(0.0, "float32") - a[i] * inverse(i) * dgamma[i] / c.count())
    shift = c.each("c", lambda i: tirx.const(0.0, "float32") - a[i] * dbeta[i] / c.count() - b[i] * mean[i])
    outputs = [weighted, dgamma, dbeta, a, b, shift]
    schedule = s_tir.Schedule(access.prim_func([*sources, gamma, mean, var, *outputs]))
    _schedule_vectors(schedule, ("weighted", "dbeta", "dgamma", "a", "b", "c"), length, vector)
    return schedule.mod["main"]


