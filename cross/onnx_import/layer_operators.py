"""Conversions of layers with windows, weights or statistics: convolution, Gemm, MatMul, pooling, normalisation."""

from __future__ import annotations

from typing import Any

import numpy as np

from cross.graph import Shape
from cross.onnx_import.infer import pooled
from cross.onnx_import.operator import NotConvertible, Operator

Array = np.ndarray[Any, np.dtype[Any]]


def conv(o: Operator) -> str:
    """Conv -> conv2d (+ add of a [C,1,1] bias). A one-dimensional convolution runs as one row."""
    weight = o.constant(1, "weight")
    x, row = _image(o, "convolution")
    if row:
        weight = weight[:, :, None, :]
    if weight.ndim != 4:
        raise NotConvertible(f"{weight.ndim - 2}-dimensional convolution")
    kernel = weight.shape[2:]
    strides, dilations = _pair(o, "strides", row), _pair(o, "dilations", row)
    pads = _pads(o, kernel, strides, dilations, row)
    layout = "oih" if row else "oihw"
    w = o.parameter(1, weight, layout, tie=True)
    groups = int(o.attrs.get("group", 1))
    y = o.emit("conv2d", x, w, strides=strides, pads=pads, dilations=dilations, groups=groups)
    if o.has(2):
        b = o.parameter(2, o.constant(2, "bias").reshape(-1, 1, 1), "c")
        y = o.emit("add", y, b)
    return o.reshape(y, o.output_shape())


def gemm(o: Operator) -> str:
    """Gemm -> dense (+ add). alpha and beta are almost always 1; otherwise they scale as constants."""
    if o.attrs.get("transA", 0):
        raise NotConvertible("its first operand is transposed, so the batch is not first")
    alpha, beta = float(o.attrs.get("alpha", 1.0)), float(o.attrs.get("beta", 1.0))
    y = _dense(o, o.data(0), stored_transposed=not o.attrs.get("transB", 0))
    if alpha != 1.0:
        y = o.emit("mul", y, o.number(alpha))
    if not o.has(2) or beta == 0.0:
        return y
    if o.is_data(2):
        bias = o.data(2)
    else:
        value = o.constant(2, "bias")
        features = o.draft.shapes[y][-1]
        if value.ndim > 1 and value.shape[0] != 1:
            raise NotConvertible("its bias differs from row to row of the batch")
        bias = o.parameter(2, np.broadcast_to(value.reshape(-1), (features,)), "c")
    return o.emit("add", y, bias if beta == 1.0 else o.emit("mul", bias, o.number(beta)))


def matmul(o: Operator) -> str:
    """MatMul -> dense where the second operand is stored, matmul where both are computed."""
    if not o.is_data(0):
        raise NotConvertible("its first operand is stored, so the batch is not first")
    if not o.is_data(1):
        return _dense(o, o.data(0), stored_transposed=True)
    return o.emit("matmul", o.data(0), o.data(1))


def _dense(o: Operator, x: str, *, stored_transposed: bool) -> str:
    weight = o.constant(1, "second operand")
    if weight.ndim != 2:
        raise NotConvertible(f"product with a stored tensor of {weight.ndim} dimensions")
    layout = "kn" if stored_transposed else "mk"
    if stored_transposed and (table := _table_of(o, weight.T)):
        o.tie(table, 1, weight.T, layout)
        return o.emit("dense", x, table)
    w = o.parameter(1, weight.T if stored_transposed else weight, layout, tie=True)
    return o.emit("dense", x, w)


def _table_of(o: Operator, weight: Array) -> str:
    """The table of tokens that the classifier shares (exporters store it a second time, transposed), or ''. Weights that
    are one number throughout, as a file without values has them, tell nothing."""
    if not weight.size or weight.min() == weight.max():
        return ""
    tables = (n for n, layout in o.draft.layouts.items() if layout == "vc" and n in o.draft.parameters)
    return next((n for n in tables if np.array_equal(o.draft.parameters[n], weight)), "")


def batch_norm(o: Operator) -> str:
    """BatchNormalization, exported for training or not. ONNX's momentum is what stays, PyTorch's what is replaced."""
    if o.attrs.get("spatial", 1) == 0:
        raise NotConvertible("statistics for each pixel (spatial=0)")
    shape = o.shape()
    if len(shape) < 2:
        raise NotConvertible("batch norm of a tensor without channels")
    o.only_output()
    gamma = o.parameter(1, o.constant(1, "scale").reshape(-1), "c")
    beta = o.parameter(2, o.constant(2, "shift").reshape(-1), "c")
    mean = o.state(3, o.constant(3, "running mean").reshape(-1))
    variance = o.state(4, o.constant(4, "running variance").reshape(-1))
    if any(o.draft.shapes[t] != (shape[1],) for t in (gamma, beta, mean, variance)):
        raise NotConvertible(f"statistics that do not fit {shape[1]} channels")
    eps, momentum = float(o.attrs.get("epsilon", 1e-5)), 1.0 - float(o.attrs.get("momentum", 0.9))
    return o.emit("batch_norm", o.data(0), gamma, beta, mean, variance, eps=eps, momentum=round(momentum, 7))


def layer_norm(o: Operator) -> str:
    """LayerNormalization over the last axis."""
    o.only_output()
    rank = len(o.shape())
    if o.axis(int(o.attrs.get("axis", -1))) != rank - 1:
        raise NotConvertible("layer norm over more than the last axis")
    gamma = o.parameter(1, o.constant(1, "scale").reshape(-1), "c")
    inputs = [gamma]
    if o.has(2):
        inputs.append(o.parameter(2, o.constant(2, "shift").reshape(-1), "c"))
    return o.emit("layer_norm", o.data(0), *inputs, eps=float(o.attrs.get("epsilon", 1e-5)))


def max_pool(o: Operator) -> str:
    """MaxPool of images or rows; without indices and dilation."""
    o.only_output()
    if any(d != 1 for d in o.attrs.get("dilations", [1])):
        raise NotConvertible("dilated max pooling")
    return _pool(o, "max_pool2d", {})


def average_pool(o: Operator) -> str:
    """AveragePool of images or rows; without dilation."""
    if any(d != 1 for d in o.attrs.get("dilations", [1])):
        raise NotConvertible("dilated average pooling")
    return _pool(o, "avg_pool2d", {"count_include_pad": bool(o.attrs.get("count_include_pad", 0))})


def _pool(o: Operator, op: str, extra: dict[str, Any]) -> str:
    """A window that overhangs (ceil_mode) is the same as more padding at the end, except where padding is counted."""
    x, row = _image(o, "pooling")
    kernel = _pair(o, "kernel_shape", row)
    strides = _pair(o, "strides", row)
    top, left, bottom, right = _pads(o, kernel, strides, (1, 1), row)
    height, width = o.draft.shapes[x][2:]
    ceil = bool(o.attrs.get("ceil_mode", 0))
    if ceil:
        over_bottom = _overhang(height, kernel[0], strides[0], top, bottom)
        over_right = _overhang(width, kernel[1], strides[1], left, right)
        ceil = bool(extra.get("count_include_pad") and (over_bottom or over_right))
        if not ceil:
            bottom, right = bottom + over_bottom, right + over_right
    y = o.emit(op, x, kernel=kernel, strides=strides, pads=(top, left, bottom, right), ceil_mode=ceil, **extra)
    return o.reshape(y, o.output_shape())


def _overhang(extent: int, kernel: int, stride: int, before: int, after: int) -> int:
    try:
        windows = pooled(extent, kernel, stride, before, after, ceil=True)
    except ValueError as error:
        raise NotConvertible(str(error)) from error
    return max(0, (windows - 1) * stride + kernel - (extent + before + after))


def global_average_pool(o: Operator) -> str:
    """GlobalAveragePool -> mean over everything behind the channels."""
    return o.emit("reduce_mean", o.data(0), axes=tuple(range(2, len(o.shape()))), keepdims=True)


def global_max_pool(o: Operator) -> str:
    """GlobalMaxPool -> a max pool with one window."""
    x, _ = _image(o, "pooling")
    kernel = o.draft.shapes[x][2:]
    y = o.emit("max_pool2d", x, kernel=kernel, strides=kernel, pads=(0, 0, 0, 0), ceil_mode=False)
    return o.reshape(y, o.output_shape())


def lrn(o: Operator) -> str:
    """LRN over channels of images."""
    o.require_rank(4, "local response normalisation")
    attrs = {"alpha": 1e-4, "beta": 0.75, "bias": 1.0} | {k: float(v) for k, v in o.attrs.items() if k != "size"}
    return o.emit("lrn", o.data(0), size=int(o.attrs["size"]), **attrs)


def _image(o: Operator, what: str) -> tuple[str, bool]:
    """The input as [N,C,H,W], and whether it was [N,C,L]."""
    shape = o.shape()
    if len(shape) == 3:
        return o.reshape(o.data(0), (*shape[:2], 1, shape[2])), True
    if len(shape) != 4:
        raise NotConvertible(f"{what} of a tensor of {len(shape)} dimensions")
    return o.data(0), False


def _pair(o: Operator, name: str, row: bool) -> tuple[int, int]:
    values = [int(v) for v in o.attrs.get(name, [1] if row else [1, 1])]
    values = [1, *values] if row else values
    if len(values) != 2 or min(values) < 1:
        raise NotConvertible(f"{name} {values}")
    return values[0], values[1]


def _pads(o: Operator, kernel: Shape, strides: Shape, dilations: Shape, row: bool) -> tuple[int, int, int, int]:
    """Top, left, bottom, right; auto_pad resolved for this input size."""
    auto = o.attrs.get("auto_pad", "NOTSET")
    extents = (1, o.shape()[2]) if row else o.shape()[2:]
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        pairs = []
        for extent, k, s, d in zip(extents, kernel, strides, dilations, strict=True):
            total = max(0, (-(-extent // s) - 1) * s + d * (k - 1) + 1 - extent)
            small, large = total // 2, total - total // 2
            pairs.append((small, large) if auto == "SAME_UPPER" else (large, small))
        return pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]
    if auto == "VALID":
        return 0, 0, 0, 0
    values = [int(v) for v in o.attrs.get("pads", [0, 0] if row else [0, 0, 0, 0])]
    values = [0, values[0], 0, values[1]] if row else values
    if len(values) != 4 or min(values) < 0:
        raise NotConvertible(f"pads {values}")
    return values[0], values[1], values[2], values[3]
