"""Storage: where each element of a canonical tensor lies in memory.

Every layout used is one formula. Canonical axis d with index i contributes
`(i // block) * outer_stride + (i % block) * inner_stride` elements to the offset, counted from `base`.
The runtime converts between canonical and stored with the same numbers (native/src/program.h).

INVARIANT: whatever is stored outside the canonical elements (channels that fill up the last block, border rows and
columns) is zero, always. Convolutions read borders instead of testing bounds, and weights of filled-up channels stay zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from cross.graph import BATCH, Shape, TensorType

Pads = tuple[int, int, int, int]
"""Top, left, bottom, right."""

NO_PADS: Pads = (0, 0, 0, 0)


@dataclass(frozen=True)
class Axis:
    extent: int
    block: int
    outer_stride: int
    inner_stride: int


@dataclass(frozen=True)
class Storage:
    """Physical shape (BATCH first if batched), and the map from canonical indices. kind: plain, blocked, weight, vector, parts."""

    kind: str
    dtype: str
    shape: Shape
    axes: tuple[Axis, ...]
    base: int = 0
    block: int = 1
    pads: Pads = NO_PADS

    @property
    def batched(self) -> bool:
        return bool(self.shape) and self.shape[0] == BATCH

    @property
    def elements(self) -> int:
        """Stored elements, of one sample where batched."""
        return prod(d for d in self.shape if d != BATCH)

    @property
    def bytes(self) -> int:
        """Bytes rounded up to 64, of one sample where batched."""
        return -(-self.elements * 4 // 64) * 64


def blocks(channels: int, block: int) -> int:
    return -(-channels // block)


def channel_block(channels: int, vector: int) -> int:
    """Channels a block: the vector length, or all of them where there are fewer."""
    return min(channels, vector)


def plain(kind: TensorType) -> Storage:
    """Row-major, canonical."""
    stride, axes = 1, []
    for extent in reversed(kind.shape):
        axes.append(Axis(extent, 1, stride, 0))
        stride *= max(extent, 1)
    return Storage("plain", kind.dtype, kind.shape, tuple(reversed(axes)))


def blocked(kind: TensorType, vector: int, pads: Pads = NO_PADS) -> Storage:
    """Canonical [N, C, H, W] as [N, C/block, top+H+bottom, left+W+right, block]."""
    n, channels, height, width = kind.shape
    block = channel_block(channels, vector)
    top, left, bottom, right = pads
    rows, columns = top + height + bottom, left + width + right
    plane = rows * columns * block
    shape = (n, blocks(channels, block), rows, columns, block)
    axes = (
        Axis(n, 1, blocks(channels, block) * plane, 0),
        Axis(channels, block, plane, 1),
        Axis(height, 1, columns * block, 0),
        Axis(width, 1, block, 0),
    )
    return Storage("blocked", kind.dtype, shape, axes, (top * columns + left) * block, block, pads)


def convolution_weight(shape: Shape, vector: int, groups: int = 1) -> Storage:
    """Canonical [O, I/groups, R, S] as [O/ob, I/ib, R, S, ib, ob]; ob and ib are the channel blocks."""
    out_channels, in_channels, rows, columns = shape
    ob, ib = channel_block(out_channels, vector), channel_block(in_channels, vector)
    tap = ib * ob
    plane = rows * columns * tap
    axes = (
        Axis(out_channels, ob, blocks(in_channels, ib) * plane, 1),
        Axis(in_channels, ib, plane, ob),
        Axis(rows, 1, columns * tap, 0),
        Axis(columns, 1, tap, 0),
    )
    physical = (blocks(out_channels, ob), blocks(in_channels, ib), rows, columns, ib, ob)
    return Storage("weight", "float32", physical, axes, 0, ob)


def depthwise_weight(shape: Shape, vector: int) -> Storage:
    """Canonical [C, 1, R, S] as [C/block, R, S, block]."""
    channels, _, rows, columns = shape
    block = channel_block(channels, vector)
    axes = (
        Axis(channels, block, rows * columns * block, 1),
        Axis(1, 1, 1, 0),
        Axis(rows, 1, columns * block, 0),
        Axis(columns, 1, block, 0),
    )
    return Storage("weight", "float32", (blocks(channels, block), rows, columns, block), axes, 0, block)


def parts_of_pixels(channels: int, vector: int, pixels: int, part: int) -> Storage:
    """Sums a channel over parts of `part` pixels (`block` of the storage) of a tensor [N, channels, pixels]: [N, parts a sample,
    channels filled up]. Parts are numbered over the whole batch, so one may span samples; the last one has what is left, and
    what would lie behind it is not written."""
    block = channel_block(channels, vector)
    shape = BATCH, -(-pixels // part), blocks(channels, block) * block
    return replace(plain(TensorType(shape)), kind="parts", block=part)


def vector_of(shape: Shape, vector: int) -> Storage:
    """Canonical [C] or [C, 1, 1] as [C rounded up to whole blocks]: filled up with zeros."""
    channels = shape[0]
    block = channel_block(channels, vector)
    axes = (Axis(channels, 1, 1, 0), *(Axis(1, 1, 1, 0) for _ in shape[1:]))
    return Storage("vector", "float32", (blocks(channels, block) * block,), axes, 0, block)
