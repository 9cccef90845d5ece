"""Batch norm's statistics of a convolution's output, gathered by the task that writes it: the output is not read again.

The pixels of a batch are cut into parts (`cross.storage.parts_of_pixels`). Of each the sum and the squared deviations from the
part's own mean are stored, and `batch_norm_finish` combines them in the order of parts (Chan, Golub and LeVeque 1983), so the
result does not depend on the number of threads.

Within a part of n pixels d = x - (the part's first pixel) is summed, and its square: m2 = sum of d^2 - (sum of d)^2 / n. As the
shift is one of the values, sum of d^2 <= (n + 1) m2: what cancels is at most log2(n + 1) bits, whatever the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from cross.kernels.arithmetic import keep
from cross.kernels.loop_nest import Buffer, Expr, Kernel, add_to, lanes, local, spread, store, view, when, zeros
from cross.storage import Storage

PART_PIXELS = 128
"""Of a part at most, where a line is not longer: statistics are then 1/64 of what they are of, and a sample is still work for
some cores."""


@dataclass(frozen=True)
class Statistics:
    """Where statistics go: sum and m2, [parts of the batch, channels]."""

    sums: Buffer
    m2: Buffer

    @classmethod
    def of(cls, kernel: Kernel, parts: Storage) -> Statistics:
        """The next two arguments of a kernel."""
        _, number, channels = parts.shape
        flat = (kernel.batch * number, channels)
        tensors = [kernel.tensor(name, parts.shape) for name in ("sum", "m2")]
        return cls(*(view(tensor, *flat) for tensor in tensors))


class Moments:
    """The moments of a part of `vectors` channel blocks, while its outputs are written."""

    def __init__(self, vectors: int, width: int) -> None:
        self._shift, self._sums, self._squares = (local(vectors, width) for _ in range(3))
        self._vectors, self._lane, self._width = vectors, lanes(0, width), width
        for k in range(vectors):
            for buffer in (self._shift, self._sums, self._squares):
                store(buffer, (k, self._lane), zeros(width))

    def add(self, k: int, value: Expr, is_first: Expr) -> None:
        """One output of channel block k; of a part's first `is_first` holds."""
        place = k, self._lane
        if is_first is not False:
            with when(is_first):
                store(self._shift, place, value)
        deviation = keep(value - self._shift[place])
        add_to(self._sums, place, deviation)
        add_to(self._squares, place, deviation * deviation)

    def write(self, statistics: Statistics, part: Expr, block: Expr, pixels: Expr) -> None:
        """The statistics of part number `part` of the batch, which has so many pixels, from channel block `block` on."""
        count = keep(T.Cast("float32", pixels))
        for k in range(self._vectors):
            total, size = self._sums[k, self._lane], spread(count, self._width)
            at = part, lanes((block + k) * self._width, self._width)
            store(statistics.sums, at, self._shift[k, self._lane] * size + total)
            m2 = self._squares[k, self._lane] - total * (total / size)
            store(statistics.m2, at, tirx.max(m2, zeros(self._width)))


def write_statistics(statistics: Statistics, batch: Expr, x: Buffer) -> None:
    """Statistics of x [N, C blocks, H, W, v], a batch of one part, into the kernel that is being written."""
    _, blocks, height, width, block = (int(extent) if i else extent for i, extent in enumerate(x.shape))
    with T.parallel(blocks) as o:
        moments = Moments(1, block)
        with T.serial(batch) as n, T.serial(height) as row, T.serial(width) as column:
            is_first = T.And(n == 0, T.And(row == 0, column == 0))
            moments.add(0, x[n, o, row, column, lanes(0, block)], is_first)
        moments.write(statistics, 0, o, batch * (height * width))
