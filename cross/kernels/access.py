"""Reading and writing tensors by canonical index, whatever their storage.

Kernels of this folder other than convolutions are written once, over canonical indices; `position` puts the storage in.
An index may be a vector (a ramp). A channel index keeps its block and lane apart (`Channel`), so that a blocked tensor read
at the block of a blocked output costs no division and is one contiguous access.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import te, tirx

from cross.graph import BATCH, Shape, TensorType
from cross.storage import NO_PADS, Storage

PrimExpr = Any
BATCH_VARIABLE = "n"


@dataclass(frozen=True)
class Channel:
    """Channel outer * block + lane."""

    outer: PrimExpr
    lane: PrimExpr
    block: int

    @property
    def flat(self) -> PrimExpr:
        return self.outer * self.block + self.lane


Index = PrimExpr | Channel


def flat(index: Index) -> PrimExpr:
    return index.flat if isinstance(index, Channel) else index


def position(storage: Storage, indices: Sequence[Index]) -> tuple[PrimExpr, ...]:
    """Physical indices of the element at canonical `indices` (inside the tensor: no bounds are tested)."""
    if storage.kind == "blocked":
        sample, channel, row, column = indices[0], indices[1], flat(indices[2]), flat(indices[3])
        top, left, _, _ = storage.pads
        block = storage.block
        if isinstance(channel, Channel) and channel.block == block:
            outer, lane = channel.outer, channel.lane
        else:
            place = flat(channel)
            outer, lane = tirx.floordiv(place, block), tirx.floormod(place, block)
        return sample, outer, row + top, column + left, lane
    if storage.kind == "vector":
        return (flat(indices[0]),)
    return tuple(flat(i) for i in indices)


def broadcast_indices(shape: Shape, domain: Shape, indices: Sequence[Index]) -> list[Index]:
    """The indices of a tensor of `shape` that numpy broadcasting to `domain` reads at `indices` (of the domain)."""
    offset = len(domain) - len(shape)
    return [0 if extent == 1 and domain[d + offset] != 1 else indices[d + offset] for d, extent in enumerate(shape)]


def is_gathered(storage: Storage, kind: TensorType) -> bool:
    """Whether channels of an image-like tensor do not lie side by side: a vector of them cannot be loaded at once."""
    return storage.kind == "plain" and len(kind.shape) >= 3 and kind.shape[-3] != 1


def physical_shape(storage: Storage, batch: PrimExpr) -> tuple[PrimExpr, ...]:
    return tuple(batch if d == BATCH else d for d in storage.shape)


def placeholder(storage: Storage, batch: PrimExpr, name: str) -> te.Tensor:
    return te.placeholder(physical_shape(storage, batch), dtype=storage.dtype, name=name)


def load(tensor: te.Tensor, storage: Storage, indices: Sequence[Index]) -> PrimExpr:
    return tensor[position(storage, indices)]


def store(storage: Storage, kind: TensorType, batch: PrimExpr, value: Callable[..., PrimExpr], name: str) -> te.Tensor:
    """A te.compute over the stored shape: value(*canonical indices) inside, zero in borders and filled-up channels."""
    shape = physical_shape(storage, batch)
    zero = tirx.const(0, storage.dtype)
    if storage.kind == "vector":
        channels = kind.shape[0]

        def vector(i: PrimExpr) -> PrimExpr:
            inner = value(i, *(0 for _ in kind.shape[1:]))
            return inner if shape[0] == channels else tirx.if_then_else(i < channels, inner, zero)

        return te.compute(shape, vector, name=name)
    if storage.kind != "blocked":
        return te.compute(shape, value, name=name)
    top, left, _, _ = storage.pads
    _, channels, height, width = kind.shape

    def blocked(sample: PrimExpr, outer: PrimExpr, row: PrimExpr, column: PrimExpr, lane: PrimExpr) -> PrimExpr:
        channel = Channel(outer, lane, storage.block)
        inner = value(sample, channel, row - top, column - left)
        if channels % storage.block:
            inner = tirx.if_then_else(channel.flat < channels, inner, zero)
        if storage.pads != NO_PADS:
            inside = tirx.all(row >= top, row < top + height, column >= left, column < left + width)
            inner = tirx.if_then_else(inside, inner, zero)
        return inner

    return te.compute(shape, blocked, name=name)


def prim_func(arguments: Sequence[te.Tensor]) -> tirx.PrimFunc:
    return te.create_prim_func(list(arguments))


def parallel_vector_schedule(schedule: Any, block: Any, storage: Storage, vector: int) -> None:
    """Schedule an element-wise block: outer loops parallel, innermost a vector where it divides."""
    loops = schedule.get_loops(block)
    inner_extent = storage.shape[-1]
    if len(loops) == 1 and storage.batched:
        return
    lane = loops[-1]
    if inner_extent % vector == 0 and inner_extent > vector:
        _, lane = schedule.split(lane, [None, vector])
        schedule.vectorize(lane)
    elif inner_extent in (2, 4, 8, 16):
        schedule.vectorize(lane)
    if storage.elements < PARALLEL_ELEMENTS:
        return
    loops = schedule.get_loops(block)
    parallel = schedule.fuse(*loops[:2]) if storage.batched and len(loops) > 2 else loops[0]
    schedule.parallel(parallel)


PARALLEL_ELEMENTS = 512
"""Below so many elements (a sample) a kernel runs in the caller: waking the pool would cost more."""


def batch_variable() -> PrimExpr:
    return te.var(BATCH_VARIABLE)
