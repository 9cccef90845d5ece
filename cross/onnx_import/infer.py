"""Output shape of every operator of `cross.graph`: one table. A ValueError says what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from cross.graph import BATCH, Shape

Attrs = Mapping[str, Any]
Rule = Callable[[Sequence[Shape], Attrs], Shape]


def output_shape(op: str, inputs: Sequence[Shape], attrs: Attrs) -> Shape:
    """Shape of the operator's only output."""
    return RULES[op](inputs, attrs)


def pooled(
    extent: int, kernel: int, stride: int, before: int, after: int, dilation: int = 1, ceil: bool = False
) -> int:
    """Windows along one axis. With `ceil` the last may overhang, but starts inside the input or the pad before it."""
    span = extent + before + after - (dilation * (kernel - 1) + 1)
    if span < 0:
        raise ValueError(f"a window of {dilation * (kernel - 1) + 1} does not fit into {extent + before + after}")
    count = (-(-span // stride) if ceil else span // stride) + 1
    if ceil and (count - 1) * stride >= extent + before:
        count -= 1
    return count


def broadcast(a: Shape, b: Shape) -> Shape:
    """numpy broadcasting in which the batch meets only the batch, 1 or nothing."""
    rank = max(len(a), len(b))
    out = []
    for x, y in zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True):
        if x != y and 1 not in (x, y):
            raise ValueError(f"shapes {a} and {b} do not broadcast")
        out.append(y if x == 1 else x)
    if BATCH in out[1:]:
        raise ValueError(f"shapes {a} and {b} meet with the batch not first")
    return tuple(out)


def _same(inputs: Sequence[Shape], attrs: Attrs) -> Shape:
    return inputs[0]


def _binary(inputs: Sequence[Shape], attrs: Attrs) -> Shape:
    return broadcast(inputs[0], inputs[1])


def _conv2d(inputs: Sequence[Shape], attrs: Attrs) -> Shape:
    (n, channels, height, width), (out, per_group, rows, columns) = inputs
    if channels != per_group * attrs["groups"] or out % attrs["groups"]:
        raise ValueError(f"{channels} input channels, weight {inputs[1]}, {attrs['groups']} groups do not fit")
    top, left, bottom, right = attrs["pads"]
    (sh, sw), (dh, dw) = attrs["strides"], attrs["dilations"]
    return (n, out, pooled(height, rows, sh, top, bottom, dh), pooled(width, columns, sw, left, right, dw))


def _dense(inputs: Sequence[Shape], attrs: Attrs) -> Shape:
    x, w = inputs
    if x[-1] != w[1]:
        raise ValueError(f"input {x} and weight {w} do not fit")
    return (*x[:-1], w[0])


def _matmul(inputs: Sequence[Shape], attrs: Attrs) -> Shape:
    a, b = inputs
    if len(a) != len(b) or len(a) < 3 or a[:-2] != b[:-2] or a[-1] != b[-2]:
        raise ValueError(f"operands {a} and {b} do not fit")
    return (*a[:-1], b[-1])


def _embedding(inputs: Sequence[Shape], attrs: Attrs) -> Shape:
    tokens, table = inputs
    return (*tokens, table[1])


def _layer_norm(inputs: Sequence[Shape], attrs: Attrs) -> Shape:
    x, *vectors = inputs
    if any(vector != x[-1:] for vector in vectors):
        raise ValueError(f"scale and shift {vectors} do not fit {x}")
    return x


def _pool(inputs: Sequence[Shape], attrs: Attrs) -> Shape:
    n, channels, height, width = inputs[0]
    top, left, bottom, right = attrs["pads"]
    (kh, kw), (sh, sw), ceil = attrs["kernel"], attrs["strides"], attrs["ceil_mode"]
    return (n, channels, pooled(height, kh, sh, top, bottom, 1, ceil), pooled(width, kw, sw, left, right, 1, ceil))


def _reduce(inputs: Sequence[Shape], attrs: Attrs) -> Shape:
    axes = set(attrs["axes"])
    if attrs["keepdims"]:
        return tuple(1 if i in axes else d for i, d in enumerate(inputs[0]))
    return tuple(d for i, d in enumerate(inputs[0]) if i not in axes)


def _pad(inputs: Sequence[Shape], attrs: Attrs) -> Shape:
    return tuple(
        d if d == BATCH else d + before + after for d, (before, after) in zip(inputs[0], attrs["pads"], strict=True)
    )


def _reshape(inputs: Sequence[Shape], attrs: Attrs) -> Shape:
    shape = tuple(attrs["shape"])
    if prod(shape[1:]) != prod(inputs[0][1:]):
        raise ValueError(f"{inputs[0]} cannot be reshaped to {shape}")
    return shape


def _transpose(inputs: Sequence[Shape], attrs: Attrs) -> Shape:
    return tuple(inputs[0][i] for i in attrs["perm"])


def _concat(inputs: Sequence[Shape], attrs: Attrs) -> Shape:
    axis, first = attrs["axis"], inputs[0]
    if any(len(s) != len(first) or s[:axis] != first[:axis] or s[axis + 1 :] != first[axis + 1 :] for s in inputs):
        raise ValueError(f"shapes {', '.join(map(str, inputs))} do not concatenate along axis {axis}")
    return (*first[:axis], sum(s[axis] for s in inputs), *first[axis + 1 :])


def _slice(inputs: Sequence[Shape], attrs: Attrs) -> Shape:
    spans = zip(inputs[0], attrs["starts"], attrs["ends"], attrs["steps"], strict=True)
    return tuple(d if d == BATCH else max(0, -(-(end - start) // step)) for d, start, end, step in spans)


UNARY = frozenset(
    "relu sigmoid tanh exp erf gelu neg sqrt clip leaky_relu silu hard_swish hard_sigmoid dropout".split()
)
BINARY = frozenset(("add", "sub", "mul", "div"))
POOLS = frozenset(("max_pool2d", "avg_pool2d"))
REDUCTIONS = frozenset(("reduce_mean", "reduce_sum"))
WEIGHTED = frozenset(("conv2d", "dense", "embedding", "matmul"))

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(UNARY, _same),
    **dict.fromkeys(BINARY, _binary),
    **dict.fromkeys(POOLS, _pool),
    **dict.fromkeys(REDUCTIONS, _reduce),
    "conv2d": _conv2d,
    "dense": _dense,
    "matmul": _matmul,
    "causal_mask": _same,
    "embedding": _embedding,
    "layer_norm": _layer_norm,
    "batch_norm": _same,
    "softmax": _same,
    "log_softmax": _same,
    "lrn": _same,
    "pad": _pad,
    "reshape": _reshape,
    "transpose": _transpose,
    "concat": _concat,
    "slice": _slice,
}
