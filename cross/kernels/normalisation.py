"""Batch norm's statistics and the small kernels that turn sums into coefficients.

batch_statistics            x -> sum[N,C], m2[N,C]: a sample's sum, and squared deviations from the sample's own mean
                            (a direct convolution or Winograd's gathers them itself, over parts: statistics.py)
batch_norm_finish           sums over samples or parts -> mean, var (biased), scale; running statistics updated in place
batch_norm_gradient_finish  sums of dy and dy (x - mean) -> dgamma, dbeta and a, b, c of dx = a dy + b (x - mean) + c
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from cross.graph import Shape
from cross.kernels import access
from cross.kernels.access import PrimExpr
from cross.kernels.arithmetic import keep, width_of
from cross.kernels.loop_nest import Kernel, add_to, lanes, local, spread, store, view, write_kernel, zeros
from cross.kernels.reduce import accumulators
from cross.storage import Storage


def batch_statistics_kernel(domain: Shape, x: Storage, outputs: Sequence[Storage]) -> Any:
    """Arguments: x [N,C,H,W] blocked, sum and m2 [N,C,1,1]. Two passes over a plane that is in cache after the first."""
    _, _, height, width = domain
    top, left, _, _ = x.pads
    block, groups, side = x.block, x.shape[1], accumulators(width)
    with write_kernel("batch_statistics") as kernel:
        source = kernel.tensor("x", x.shape)
        sums, m2 = kernel.tensor("sum", outputs[0].shape), kernel.tensor("m2", outputs[1].shape)
        with T.parallel(0, kernel.batch * groups) as task:
            n, o = task // groups, task % groups
            parts, centre = local(side * block), local(block)

            def plane(value: Any) -> None:
                """Sum value(pixel) over the plane into the accumulators side by side, then into the first."""
                for j in range(side):
                    store(parts, (lanes(j * block, block),), zeros(block))
                with T.serial(0, height) as h, T.serial(0, width // side) as w:
                    for j in range(side):
                        pixel = source[n, o, h + top, w * side + j + left, lanes(0, block)]
                        add_to(parts, (lanes(j * block, block),), value(pixel))
                for j in range(1, side):
                    add_to(parts, (lanes(0, block),), parts[lanes(j * block, block)])

            plane(lambda pixel: pixel)
            total = parts[lanes(0, block)]
            store(sums, (n, o, 0, 0, lanes(0, block)), total)
            store(centre, (lanes(0, block),), total * spread(T.float32(1.0 / (height * width)), block))
            plane(lambda pixel: (pixel - centre[lanes(0, block)]) * (pixel - centre[lanes(0, block)]))
            store(m2, (n, o, 0, 0, lanes(0, block)), parts[lanes(0, block)])
    return kernel.function


@dataclass(frozen=True)
class _Partial:
    """Sums of each sample and channel, [N, C] or [N, C, 1, 1], or of each part and channel; read a few channels at a time."""

    buffer: Any
    storage: Storage
    batch: PrimExpr

    def at(self, n: PrimExpr, channel: PrimExpr) -> PrimExpr:
        if self.storage.kind == "parts":
            _, parts, channels = self.storage.shape
            return view(self.buffer, self.batch * parts, channels)[n, channel]
        trailing = [0] * (len(self.storage.axes) - 2)
        width, block = width_of(channel), self.storage.block
        if self.storage.kind == "blocked" and width == block > 1:
            channel = access.Channel(channel.base // block, lanes(0, block), block)
        return self.buffer[access.position(self.storage, (n, channel, *trailing))]


def _lanes_of(partial: Sequence[Storage], channels: int, length: int, vector: int) -> int:
    """Channels computed together: a vector where they lie side by side in every partial sum, else one."""
    same = all(s.block == vector if s.kind == "blocked" else s.kind == "parts" or len(s.shape) == 2 for s in partial)
    return vector if same and length % vector == 0 and channels % vector == 0 else 1


def _total(kernel: Kernel, width: int, value: Any) -> PrimExpr:
    """Sum value(sample) over the samples, in order."""
    return _total_of_parts(kernel.batch, width, lambda n, _: value(n), (1.0, None))


def _total_of_parts(parts: PrimExpr, width: int, value: Any, sizes: tuple[float, PrimExpr | None]) -> PrimExpr:
    """Sum value(part, its size) over the parts, in order; `sizes`: of a part, and of the last one where that differs."""
    size, last = sizes
    total, at = local(width), lanes(0, width)
    store(total, (at,), zeros(width))
    with T.serial(0, parts if last is None else parts - 1) as n:
        add_to(total, (at,), value(n, T.float32(size)))
    if last is not None:
        add_to(total, (at,), value(parts - 1, last))
    return total[at]


def _count(kernel: Kernel, pixels: int) -> PrimExpr:
    """Values a channel: samples times pixels."""
    return T.Cast("float32", kernel.batch * pixels)


def _parts(kernel: Kernel, partial: Storage, pixels: int) -> tuple[PrimExpr, tuple[float, PrimExpr | None]]:
    """Number of parts of the batch, and their sizes as `_total_of_parts` takes them. A sample is a part where its statistics
    were summed by themselves."""
    part = partial.block if partial.kind == "parts" else pixels
    if pixels % part == 0:
        return kernel.batch * (pixels // part), (float(part), None)
    parts = (kernel.batch * pixels + (part - 1)) // part
    return parts, (float(part), keep(T.Cast("float32", kernel.batch * pixels - (parts - 1) * part)))


def batch_norm_finish_kernel(
    partial: Sequence[Storage], channels: int, length: int, pixels: int, eps: float, momentum: float, vector: int
) -> Any:
    """Arguments: sum, m2 (absent where x has no pixels) of samples or parts, gamma, beta, running mean, running var, then sum, m2
    over all samples, mean, var (biased), scale, offset (beta), running mean, running var. The running variance is the unbiased
    one, as in PyTorch. Filled-up channels come out zero."""
    width = _lanes_of(partial, channels, length, vector)
    with write_kernel("batch_norm_finish") as kernel:
        sources = [_Partial(kernel.tensor(f"partial{i}", s.shape), s, kernel.batch) for i, s in enumerate(partial)]
        gamma, beta, old_mean, old_var = (kernel.tensor(n, (length,)) for n in ("gamma", "beta", "old_mean", "old_var"))
        names = ("total", "m2", "mean", "var", "scale", "offset", "new_mean", "new_var")
        outputs = {name: kernel.tensor(name, (length,)) for name in names}
        with T.serial(0, channels // width) as group:
            at = lanes(group * width, width)
            count = _count(kernel, pixels)
            parts, sizes = _parts(kernel, partial[0], pixels)
            total = _total_of_parts(parts, width, lambda n, _: sources[0].at(n, at), sizes)
            mean = keep(total / count)

            def deviation(n: PrimExpr, size: PrimExpr) -> PrimExpr:
                shift = keep(sources[0].at(n, at) * (T.float32(1.0) / size) - mean)
                spread_out = shift * shift * size
                return spread_out if len(sources) == 1 else sources[1].at(n, at) + spread_out

            m2 = keep(_total_of_parts(parts, width, deviation, sizes))
            var = keep(m2 / count)
            scale = keep(gamma[at] / tirx.sqrt(var + T.float32(eps)))
            keep_old, take = T.float32(1.0 - momentum), T.float32(momentum)
            unbiased = tirx.max(count - T.float32(1.0), T.float32(1.0))
            values = {
                "total": total,
                "m2": m2,
                "mean": mean,
                "var": var,
                "scale": scale,
                "offset": beta[at],
                "new_mean": old_mean[at] * keep_old + mean * take,
                "new_var": old_var[at] * keep_old + m2 / unbiased * take,
            }
            for name in names:
                store(outputs[name], (at,), values[name])
        _zero_rest(outputs, channels, length)
    return kernel.function


def batch_norm_running_kernel(channels: int, length: int, eps: float, vector: int) -> Any:
    """For eval. Arguments: gamma, beta, running mean, running var, then mean, scale, offset. Filled-up channels: zero."""
    width = vector if channels % vector == 0 else 1
    with write_kernel("batch_norm_running") as kernel:
        gamma, beta, mean, var = (kernel.tensor(n, (length,)) for n in ("gamma", "beta", "mean", "var"))
        outputs = {name: kernel.tensor(name, (length,)) for name in ("out_mean", "scale", "offset")}
        with T.serial(0, channels // width) as group:
            at = lanes(group * width, width)
            store(outputs["out_mean"], (at,), mean[at])
            store(outputs["scale"], (at,), gamma[at] / tirx.sqrt(var[at] + T.float32(eps)))
            store(outputs["offset"], (at,), beta[at])
        _zero_rest(outputs, channels, length)
    return kernel.function


def batch_norm_gradient_finish_kernel(
    partial: Sequence[Storage], channels: int, length: int, pixels: int, eps: float, vector: int
) -> Any:
    """Arguments: sums of dy and of dy (x - mean) a sample, gamma, var, then the second sum over all samples,
    dgamma, dbeta, a, b, c. Filled-up channels come out zero."""
    width = _lanes_of(partial, channels, length, vector)
    with write_kernel("batch_norm_gradient_finish") as kernel:
        sources = [_Partial(kernel.tensor(f"partial{i}", s.shape), s, kernel.batch) for i, s in enumerate(partial)]
        gamma, var = (kernel.tensor(n, (length,)) for n in ("gamma", "var"))
        names = ("weighted", "dgamma", "dbeta", "a", "b", "c")
        outputs = {name: kernel.tensor(name, (length,)) for name in names}
        with T.serial(0, channels // width) as group:
            at = lanes(group * width, width)
            count = _count(kernel, pixels)
            dbeta = keep(_total(kernel, width, lambda n: sources[0].at(n, at)))
            weighted = keep(_total(kernel, width, lambda n: sources[1].at(n, at)))
            inverse = keep(T.float32(1.0) / tirx.sqrt(var[at] + T.float32(eps)))
            dgamma = keep(weighted * inverse)
            a = keep(gamma[at] * inverse)
            b = keep(T.float32(0.0) - a * inverse * dgamma / count)
            c = T.float32(0.0) - a * dbeta / count
            for name, value in zip(names, (weighted, dgamma, dbeta, a, b, c), strict=True):
                store(outputs[name], (at,), value)
        _zero_rest(outputs, channels, length)
    return kernel.function


def _zero_rest(outputs: Mapping[str, Any], channels: int, length: int) -> None:
    if length > channels:
        with T.serial(0, length - channels) as i:
            for output in outputs.values():
                store(output, (channels + i,), T.float32(0))
