"""Conversions of operators that move, cut, join or reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cross.graph import BATCH
from cross.onnx_import.operator import NotConvertible, Operator


def reshape(o: Operator) -> str:
    """Reshape, Flatten, Squeeze, Unsqueeze: the shape that propagation found."""
    return o.reshape(o.data(0), o.output_shape())


def expand(o: Operator) -> str:
    """Expand: nothing, or zeros of the larger shape added, where the batch stays as it is."""
    shape, wanted = o.shape(), o.output_shape()
    if wanted == shape:
        return o.data(0)
    if len(wanted) != len(shape):
        raise NotConvertible(f"it repeats {list(shape[1:])} to {list(wanted[1:])}")
    zeros = o.draft.constant(f"{o.node.output[0]}/zeros", np.zeros(wanted[1:], np.float32))
    return o.emit("add", o.data(0), zeros)


def transpose(o: Operator) -> str:
    """Transpose that leaves the batch first."""
    rank = len(o.shape())
    perm = tuple(int(i) for i in o.attrs.get("perm", range(rank - 1, -1, -1)))
    if sorted(perm) != list(range(rank)):
        raise NotConvertible(f"order {perm}")
    if perm[0] != 0:
        raise NotConvertible("it moves the batch from the first place")
    return o.data(0) if perm == tuple(range(rank)) else o.emit("transpose", o.data(0), perm=perm)


def concat(o: Operator) -> str:
    """Concat of computed tensors, not along the batch."""
    axis = o.axis(int(o.attrs.get("axis", 1)), len(o.output_shape()))
    inputs = [o.data(i) for i in range(len(o.node.input))]
    return inputs[0] if len(inputs) == 1 else o.emit("concat", *inputs, axis=axis)


def slice_(o: Operator) -> str:
    """Slice; everything is an attribute before opset 10. Steps must be positive, the batch whole."""
    shape = o.shape()
    starts, ends = o.setting("starts", 1), o.setting("ends", 2)
    axes = o.setting("axes", 3) or list(range(len(starts)))
    steps = o.setting("steps", 4) or [1] * len(starts)
    spans = _whole(o)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        axis = axis + len(shape) if axis < 0 else axis
        if axis == 0 and start == 0 and end >= 2**31 - 1 and step == 1:
            continue
        extent = shape[o.axis(axis)]
        if step < 1:
            raise NotConvertible(f"step {step}")
        first, last, _ = slice(start, end, step).indices(extent)
        spans[axis] = (first, last, step)
    return _cut(o, spans)


def split(o: Operator) -> tuple[str, ...]:
    """Split -> one slice an output; sizes are what propagation found."""
    axis = o.axis(int(o.attrs.get("axis", 0)))
    first, results = 0, []
    for index in range(len(o.node.output)):
        name = o.node.output[index]
        shape = o.graph.shapes.get(name)
        if shape is None:
            raise NotConvertible("an output of unknown size")
        spans = _whole(o)
        spans[axis] = (first, first + shape[axis], 1)
        first += shape[axis]
        results.append(_cut(o, spans))
    return tuple(results)


def gather(o: Operator) -> str:
    """Gather of one index, or of consecutive ones, along an axis -> slice; of a stored table by tokens -> embedding."""
    if not o.is_data(0):
        return _embedding(o)
    axis = o.axis(int(o.attrs.get("axis", 0)))
    indices = o.constant(1, "index")
    extent = o.shape()[axis]
    flat = [int(i) + extent if i < 0 else int(i) for i in indices.flat]
    if not flat or indices.ndim > 1 or flat != list(range(flat[0], flat[0] + len(flat))):
        raise NotConvertible("indices that are not consecutive")
    spans = _whole(o)
    spans[axis] = (flat[0], flat[-1] + 1, 1)
    return o.reshape(_cut(o, spans), o.output_shape())


def _embedding(o: Operator) -> str:
    table = o.constant(0, "table")
    if table.ndim != 2 or int(o.attrs.get("axis", 0)) != 0:
        raise NotConvertible(f"rows of a stored tensor of {table.ndim} dimensions are chosen by data")
    if o.data(1) != o.draft.input:
        raise NotConvertible("its indices are computed, not the model's input")
    weight = o.parameter(0, table, "vc", tie=True)
    return o.emit("embedding", o.data(1), weight)


def _whole(o: Operator) -> list[tuple[int, int, int]]:
    """A (start, end, step) a dimension that takes everything; the batch ends at BATCH."""
    return [(0, d, 1) for d in o.shape()]


def _cut(o: Operator, spans: list[tuple[int, int, int]]) -> str:
    if all(span == (0, d, 1) for span, d in zip(spans, o.shape(), strict=True)):
        return o.data(0)
    starts, ends, steps = zip(*spans, strict=True)
    return o.emit("slice", o.data(0), starts=starts, ends=ends, steps=steps)


def pad(o: Operator) -> str:
    """Pad with a constant; pads and value are attributes before opset 11."""
    if o.attrs.get("mode", "constant") != "constant":
        raise NotConvertible(f"{o.attrs['mode']} padding")
    rank = len(o.shape())
    values = [int(v) for v in o.setting("pads", 1)]
    axes = [int(a) % rank for a in o.setting("axes", 3)] if o.has(3) else list(range(rank))
    pairs = [(0, 0)] * rank
    for axis, before, after in zip(axes, values[: len(axes)], values[len(axes) :], strict=True):
        pairs[axis] = (before, after)
    if min(min(p) for p in pairs) < 0:
        raise NotConvertible("negative padding")
    if pairs[0] != (0, 0):
        raise NotConvertible("padding of the batch")
    value = o.setting("value", 2, 0.0)
    value = value[0] if isinstance(value, list) else value
    if not any(map(any, pairs)):
        return o.data(0)
    return o.emit("pad", o.data(0), pads=tuple(pairs), value=float(value))


def reduce(op: str) -> Callable[[Operator], str]:
    """ReduceMean or ReduceSum; axes became an input in opset 18 (mean) and 13 (sum)."""

    def convert(o: Operator) -> str:
        axes: Any = o.setting("axes", 1)
        if not axes:
            if o.attrs.get("noop_with_empty_axes", 0):
                return o.data(0)
            raise NotConvertible("it reduces over the batch")
        found = tuple(sorted(o.axis(int(a)) for a in np.atleast_1d(axes)))
        return o.emit(op, o.data(0), axes=found, keepdims=bool(o.attrs.get("keepdims", 1)))

    return convert


def depth_to_space(o: Operator) -> str:
    """DepthToSpace -> reshape, transpose, reshape."""
    n, channels, height, width = o.shape()
    b = int(o.attrs["blocksize"])
    if o.attrs.get("mode", "DCR") == "DCR":
        cut, perm = (n, b, b, channels // (b * b), height, width), (0, 3, 4, 1, 5, 2)
    else:
        cut, perm = (n, channels // (b * b), b, b, height, width), (0, 1, 4, 2, 5, 3)
    moved = o.emit("transpose", o.reshape(o.data(0), cut), perm=perm)
    return o.reshape(moved, (n, channels // (b * b), height * b, width * b))


def space_to_depth(o: Operator) -> str:
    """SpaceToDepth -> reshape, transpose, reshape."""
    n, channels, height, width = o.shape()
    b = int(o.attrs["blocksize"])
    parts = o.reshape(o.data(0), (n, channels, height // b, b, width // b, b))
    moved = o.emit("transpose", parts, perm=(0, 3, 5, 1, 2, 4))
    return o.reshape(moved, (BATCH, channels * b * b, height // b, width // b))
