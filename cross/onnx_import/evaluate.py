"""Forward pass of a `Model` in numpy, in inference form: what the one data pass of `unfold` runs on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cross.graph import BATCH, MASKED, Model, Node

Array = np.ndarray[Any, np.dtype[Any]]
Attrs = Mapping[str, Any]


def forward(model: Model, samples: Array) -> Iterator[tuple[Node, list[Array], Array]]:
    """Every node in order, with its inputs and output for `samples` [B, ...]. Tensors go after their last use."""
    last_use = {name: i for i, node in enumerate(model.nodes) for name in node.inputs}
    values: dict[str, Array] = {**model.parameters, **model.states, **model.constants, model.input: samples}
    for index, node in enumerate(model.nodes):
        inputs = [values[name] for name in node.inputs]
        output = FORWARD[node.op](inputs, node.attrs)
        values[node.outputs[0]] = output
        yield node, inputs, output
        for name in node.inputs:
            if last_use[name] == index:
                values.pop(name, None)


def _conv2d(inputs: Sequence[Array], attrs: Attrs) -> Array:
    """Tap by tap: memory stays that of the output."""
    x, w = inputs
    top, left, bottom, right = attrs["pads"]
    (sh, sw), (dh, dw), groups = attrs["strides"], attrs["dilations"], attrs["groups"]
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    out_channels, per_group, rows, columns = w.shape
    height = (x.shape[2] - dh * (rows - 1) - 1) // sh + 1
    width = (x.shape[3] - dw * (columns - 1) - 1) // sw + 1
    n = x.shape[0]
    total = np.zeros((n, groups, out_channels // groups, height * width), np.float32)
    grouped = w.reshape(groups, out_channels // groups, per_group, rows, columns)
    for r in range(rows):
        for s in range(columns):
            tap = x[:, :, r * dh :: sh, s * dw :: sw][:, :, :height, :width]
            total += np.matmul(grouped[None, ..., r, s], tap.reshape(n, groups, per_group, height * width))
    return total.reshape(n, out_channels, height, width)


def _batch_norm(inputs: Sequence[Array], attrs: Attrs) -> Array:
    x, gamma, beta, mean, variance = inputs
    shape = (1, -1) + (1,) * (x.ndim - 2)
    scale = gamma / np.sqrt(variance + np.float32(attrs["eps"]))
    return x * scale.reshape(shape) + (beta - mean * scale).reshape(shape)


def _windows(x: Array, attrs: Attrs, fill: float) -> Iterator[Array]:
    """One strided view a tap of the padded input; ceil_mode pads further at the end."""
    top, left, bottom, right = attrs["pads"]
    (kh, kw), (sh, sw) = attrs["kernel"], attrs["strides"]
    extra = max(sh, sw) if attrs["ceil_mode"] else 0
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom + extra), (left, right + extra)), constant_values=fill)
    counts = [
        _count(d + a + b, k, s, a + d, attrs["ceil_mode"])
        for d, a, b, k, s in zip(x.shape[2:], (top, left), (bottom, right), (kh, kw), (sh, sw), strict=True)
    ]
    for r in range(kh):
        for s in range(kw):
            yield padded[:, :, r::sh, s::sw][:, :, : counts[0], : counts[1]]


def _count(extent: int, kernel: int, stride: int, inside: int, ceil: bool) -> int:
    count = (-(-(extent - kernel) // stride) if ceil else (extent - kernel) // stride) + 1
    return count - 1 if ceil and (count - 1) * stride >= inside else count


def _layer_norm(inputs: Sequence[Array], attrs: Attrs) -> Array:
    x, gamma, *beta = inputs
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + np.float32(attrs["eps"])) * gamma
    return np.asarray(scaled + beta[0] if beta else scaled)


def _erf(x: Array) -> Array:
    return np.asarray(np.vectorize(math.erf, otypes=[np.float64])(x), x.dtype)


def _gelu(inputs: Sequence[Array], attrs: Attrs) -> Array:
    x = inputs[0]
    if attrs["approximate"] == "tanh":
        return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
    return np.asarray(0.5 * x * (1 + _erf(x * math.sqrt(0.5))))


def _max_pool2d(inputs: Sequence[Array], attrs: Attrs) -> Array:
    taps = _windows(inputs[0], attrs, -np.inf)
    best = next(taps).copy()
    for tap in taps:
        np.maximum(best, tap, out=best)
    return best


def _avg_pool2d(inputs: Sequence[Array], attrs: Attrs) -> Array:
    x = inputs[0]
    ones = np.ones((1, 1, *x.shape[2:]), np.float32)
    if attrs["count_include_pad"]:
        top, left, bottom, right = attrs["pads"]
        ones = np.pad(ones, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=1.0)
        counted = {**attrs, "pads": (0, 0, 0, 0)}
    else:
        counted = dict(attrs)
    return np.asarray(sum(_windows(x, attrs, 0.0)) / sum(_windows(ones, counted, 0.0)))


def _softmax(inputs: Sequence[Array], attrs: Attrs) -> Array:
    shifted = np.exp(inputs[0] - inputs[0].max(attrs["axis"], keepdims=True))
    return np.asarray(shifted / shifted.sum(attrs["axis"], keepdims=True))


def _lrn(inputs: Sequence[Array], attrs: Attrs) -> Array:
    x, size = inputs[0], attrs["size"]
    before, channels = (size - 1) // 2, x.shape[1]
    squares = np.pad(x * x, ((0, 0), (before, size - 1 - before), *[(0, 0)] * (x.ndim - 2)))
    total = sum(squares[:, i : i + channels] for i in range(size))
    return np.asarray(x / (attrs["bias"] + attrs["alpha"] / size * total) ** attrs["beta"])


def _slice(inputs: Sequence[Array], attrs: Attrs) -> Array:
    spans = zip(attrs["starts"], attrs["ends"], attrs["steps"], strict=True)
    return inputs[0][tuple(slice(a, None if b == BATCH else b, c) for a, b, c in spans)]


def _sigmoid(x: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


FORWARD: Mapping[str, Callable[[Sequence[Array], Attrs], Array]] = {
    "conv2d": _conv2d,
    "dense": lambda v, a: v[0] @ v[1].T,
    "matmul": lambda v, a: v[0] @ v[1],
    "embedding": lambda v, a: v[1][v[0]],
    "layer_norm": _layer_norm,
    "batch_norm": _batch_norm,
    "relu": lambda v, a: np.maximum(v[0], 0),
    "sigmoid": lambda v, a: _sigmoid(v[0]),
    "tanh": lambda v, a: np.tanh(v[0]),
    "exp": lambda v, a: np.exp(v[0]),
    "erf": lambda v, a: _erf(v[0]),
    "gelu": _gelu,
    "causal_mask": lambda v, a: np.where(np.tri(v[0].shape[-1], dtype=bool), v[0], np.float32(MASKED)),
    "neg": lambda v, a: -v[0],
    "sqrt": lambda v, a: np.sqrt(v[0]),
    "clip": lambda v, a: np.clip(v[0], a["min"], a["max"]),
    "leaky_relu": lambda v, a: np.where(v[0] < 0, v[0] * np.float32(a["alpha"]), v[0]),
    "silu": lambda v, a: v[0] * _sigmoid(v[0]),
    "hard_swish": lambda v, a: v[0] * np.clip(v[0] / 6 + 0.5, 0, 1),
    "hard_sigmoid": lambda v, a: np.clip(a["alpha"] * v[0] + a["beta"], 0, 1),
    "add": lambda v, a: v[0] + v[1],
    "sub": lambda v, a: v[0] - v[1],
    "mul": lambda v, a: v[0] * v[1],
    "div": lambda v, a: v[0] / v[1],
    "max_pool2d": _max_pool2d,
    "avg_pool2d": _avg_pool2d,
    "reduce_mean": lambda v, a: v[0].mean(a["axes"], keepdims=a["keepdims"]),
    "reduce_sum": lambda v, a: v[0].sum(a["axes"], keepdims=a["keepdims"]),
    "softmax": _softmax,
    "log_softmax": lambda v, a: np.log(_softmax(v, a)),
    "lrn": _lrn,
    "dropout": lambda v, a: v[0],
    "pad": lambda v, a: np.pad(v[0], a["pads"], constant_values=a["value"]),
    "reshape": lambda v, a: v[0].reshape((v[0].shape[0], *a["shape"][1:])),
    "transpose": lambda v, a: v[0].transpose(a["perm"]),
    "concat": lambda v, a: np.concatenate(v, a["axis"]),
    "slice": _slice,
}
