"""Every operator of `cross.graph` in numpy, written from its definition alone: the oracle for values.

Independent of `cross`: windows are gathered into columns here, never summed tap by tap. Works in the dtype of what it
is given, float64 included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cross.graph import BATCH, MASKED, Model

Array = np.ndarray[Any, np.dtype[Any]]


def numpy_forward(model: Model, x: Array, *, training: bool = False, dtype: Any = np.float32) -> dict[str, Array]:
    """Every tensor of the model for the batch `x`. `training`: batch norms use the batch's statistics; no dropout."""
    stored = {**model.parameters, **model.states, **model.constants}
    values = {name: array.astype(dtype) for name, array in stored.items()}
    values[model.input] = x.astype(dtype)
    for node in model.nodes:
        attrs = {**node.attrs, "training": training}
        values[node.outputs[0]] = OPERATORS[node.op](attrs, *(values[name] for name in node.inputs))
    return values


def windows(x: Array, kernel: Sequence[int], attrs: Mapping[str, Any], fill: float) -> Array:
    """[N, C, H', W', R, S]: what each window sees of the padded input."""
    (sh, sw), (dh, dw) = attrs["strides"], attrs.get("dilations", (1, 1))
    top, left, bottom, right = attrs["pads"]
    height, width = x.shape[2:]
    counts, overhang = [], []
    for extent, before, after, k, s, d in (
        (height, top, bottom, kernel[0], sh, dh),
        (width, left, right, kernel[1], sw, dw),
    ):
        span = (k - 1) * d + 1
        starts = [i for i in range(0, extent + before + after, s) if _fits(i, extent, before, after, span, attrs)]
        counts.append(len(starts))
        overhang.append(max(0, starts[-1] + (k - 1) * d + 1 - (extent + before + after)))
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom + overhang[0]), (left, right + overhang[1])), constant_values=fill)
    rows = np.arange(counts[0])[:, None] * sh + np.arange(kernel[0]) * dh
    columns = np.arange(counts[1])[:, None] * sw + np.arange(kernel[1]) * dw
    return padded[:, :, rows[:, None, :, None], columns[None, :, None, :]]


def _fits(start: int, extent: int, before: int, after: int, span: int, attrs: Mapping[str, Any]) -> bool:
    """A window lies inside; with ceil_mode it may overhang if it starts inside the input or the padding before it."""
    if start + span <= extent + before + after:
        return True
    return bool(attrs.get("ceil_mode", False)) and start < extent + before


def conv2d(attrs: Mapping[str, Any], x: Array, w: Array) -> Array:
    groups = attrs["groups"]
    seen = windows(x, w.shape[2:], attrs, 0.0)
    if groups == len(w) == x.shape[1]:
        return np.asarray(np.einsum("nchwrs,crs->nchw", seen, w[:, 0]))
    parts = [
        np.tensordot(part, kernel, ((1, 4, 5), (1, 2, 3)))
        for part, kernel in zip(np.split(seen, groups, 1), np.split(w, groups, 0), strict=True)
    ]
    return np.concatenate(parts, -1).transpose(0, 3, 1, 2)


def batch_norm(attrs: Mapping[str, Any], x: Array, gamma: Array, beta: Array, mean: Array, variance: Array) -> Array:
    axes = (0, *range(2, x.ndim))
    if attrs["training"]:
        mean, variance = x.mean(axes), x.var(axes)
    per_channel = (slice(None),) + (None,) * (x.ndim - 2)
    normal = (x - mean[per_channel]) / np.sqrt(variance + attrs["eps"])[per_channel]
    return np.asarray(normal * gamma[per_channel] + beta[per_channel], x.dtype)


def layer_norm(attrs: Mapping[str, Any], x: Array, gamma: Array, *beta: Array) -> Array:
    normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + attrs["eps"])
    return np.asarray(sum(beta, normal * gamma))


def erf(x: Array) -> Array:
    return np.array([math.erf(v) for v in np.asarray(x).ravel()], x.dtype).reshape(x.shape)


def gelu(attrs: Mapping[str, Any], x: Array) -> Array:
    if attrs["approximate"] == "tanh":
        return np.asarray(x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)), x.dtype)
    return np.asarray(x * (1 + erf(x / math.sqrt(2))) / 2, x.dtype)


def max_pool2d(attrs: Mapping[str, Any], x: Array) -> Array:
    return np.asarray(windows(x, attrs["kernel"], attrs, -np.inf).max((4, 5)))


def avg_pool2d(attrs: Mapping[str, Any], x: Array) -> Array:
    """A padded element counts with count_include_pad; one beyond the padding (ceil_mode) never does."""
    counted = np.ones(x.shape[2:], x.dtype)
    if attrs["count_include_pad"]:
        top, left, bottom, right = attrs["pads"]
        padded = np.pad(counted, ((top, bottom), (left, right)), constant_values=1.0)
        shifted = {**attrs, "pads": (0, 0, 0, 0)}
        counts = windows(padded[None, None], attrs["kernel"], shifted, 0.0)
    else:
        counts = windows(counted[None, None], attrs["kernel"], attrs, 0.0)
    sums = windows(x, attrs["kernel"], attrs, 0.0).sum((4, 5))
    return np.asarray(sums / counts.sum((4, 5))[:, :, : sums.shape[2], : sums.shape[3]])


def softmax(attrs: Mapping[str, Any], x: Array) -> Array:
    powers = np.exp(x - x.max(attrs["axis"], keepdims=True))
    return np.asarray(powers / powers.sum(attrs["axis"], keepdims=True))


def log_softmax(attrs: Mapping[str, Any], x: Array) -> Array:
    shifted = x - x.max(attrs["axis"], keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(attrs["axis"], keepdims=True)))


def lrn(attrs: Mapping[str, Any], x: Array) -> Array:
    size, channels = attrs["size"], x.shape[1]
    out = np.empty_like(x)
    for c in range(channels):
        first, last = max(0, c - (size - 1) // 2), min(channels - 1, c + size // 2)
        squares = (x[:, first : last + 1] ** 2).sum(1)
        out[:, c] = x[:, c] / (attrs["bias"] + attrs["alpha"] / size * squares) ** attrs["beta"]
    return out


def slice_(attrs: Mapping[str, Any], x: Array) -> Array:
    spans = zip(attrs["starts"], attrs["ends"], attrs["steps"], strict=True)
    return x[tuple(slice(a, None if b == BATCH else b, step) for a, b, step in spans)]


def sigmoid(x: Array) -> Array:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))


def element(function: Callable[..., Any]) -> Callable[..., Array]:
    """An operator without attributes."""
    return lambda attrs, *inputs: np.asarray(function(*inputs))


OPERATORS: Mapping[str, Callable[..., Array]] = {
    "conv2d": conv2d,
    "dense": element(lambda x, w: np.einsum("...k,mk->...m", x, w, optimize=True)),
    "matmul": element(np.matmul),
    "embedding": element(lambda tokens, w: w[tokens.astype(np.int64)]),
    "layer_norm": layer_norm,
    "erf": element(erf),
    "gelu": gelu,
    "causal_mask": element(lambda x: np.where(np.triu(np.ones(x.shape[-2:]), 1) == 1, MASKED, x).astype(x.dtype)),
    "batch_norm": batch_norm,
    "relu": element(lambda x: np.where(x > 0, x, 0).astype(x.dtype)),
    "sigmoid": element(sigmoid),
    "tanh": element(np.tanh),
    "exp": element(np.exp),
    "neg": element(np.negative),
    "sqrt": element(np.sqrt),
    "clip": lambda attrs, x: np.minimum(np.maximum(x, attrs["min"]), attrs["max"]).astype(x.dtype),
    "leaky_relu": lambda attrs, x: np.where(x > 0, x, attrs["alpha"] * x).astype(x.dtype),
    "silu": element(lambda x: x * sigmoid(x)),
    "hard_swish": element(lambda x: x * np.minimum(np.maximum(x + 3, 0), 6) / 6),
    "hard_sigmoid": lambda attrs, x: np.minimum(np.maximum(attrs["alpha"] * x + attrs["beta"], 0), 1).astype(x.dtype),
    "add": element(np.add),
    "sub": element(np.subtract),
    "mul": element(np.multiply),
    "div": element(np.divide),
    "max_pool2d": max_pool2d,
    "avg_pool2d": avg_pool2d,
    "reduce_mean": lambda attrs, x: np.asarray(x.mean(tuple(attrs["axes"]), keepdims=attrs["keepdims"])),
    "reduce_sum": lambda attrs, x: np.asarray(x.sum(tuple(attrs["axes"]), keepdims=attrs["keepdims"])),
    "softmax": softmax,
    "log_softmax": log_softmax,
    "lrn": lrn,
    "dropout": lambda attrs, x: x,
    "pad": lambda attrs, x: np.pad(x, attrs["pads"], constant_values=attrs["value"]),
    "reshape": lambda attrs, x: x.reshape([len(x) if d == BATCH else d for d in attrs["shape"]]),
    "transpose": lambda attrs, x: x.transpose(attrs["perm"]),
    "concat": lambda attrs, *inputs: np.concatenate(inputs, attrs["axis"]),
    "slice": slice_,
}


def operators() -> set[str]:
    """Names of everything that is covered."""
    return set(OPERATORS)
