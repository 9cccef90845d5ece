"""Means and sums over axes, softmax and log-softmax."""

from __future__ import annotations

from math import prod

from cross import expression as ex
from cross.expression import Expr, arg, const
from cross.graph import Node, Shape, TensorType
from cross.rules.context import Context


def _kept_shape(shape: Shape, axes: tuple[int, ...]) -> Shape:
    return tuple(1 if i in axes else d for i, d in enumerate(shape))


def _reduce(context: Context, node: Node, scale: float) -> None:
    (x,), axes = node.inputs, tuple(node.attrs["axes"])
    shape, output = context.shape(x), node.outputs[0]
    kept, wanted = _kept_shape(shape, axes), context.shape(output)
    expr = ex.mul(arg(0), const(scale))
    attrs = {"exprs": (expr,), "axes": axes, "kind": "sum", "domain": shape}
    if kept == wanted:
        context.build.emit("reduce", [x], [TensorType(kept)], attrs, [output])
        return
    rows = context.build.emit("reduce", [x], [TensorType(kept)], attrs)[0]
    context.build.emit("reshape", [rows], [TensorType(wanted)], {}, [output])


def _spread(context: Context, node: Node, dy: str, scale: float) -> dict[str, str]:
    (x,), axes = node.inputs, tuple(node.attrs["axes"])
    rows = context.reshaped(dy, _kept_shape(context.shape(x), axes))
    return {x: context.build.map(ex.mul(arg(0), const(scale)), [rows], context.type(x))}


def _count(context: Context, node: Node) -> int:
    return prod(context.shape(node.inputs[0])[a] for a in node.attrs["axes"])


def reduce_mean(context: Context, node: Node) -> None:
    _reduce(context, node, 1.0 / _count(context, node))


def reduce_mean_gradient(context: Context, node: Node, dy: str) -> dict[str, str]:
    return _spread(context, node, dy, 1.0 / _count(context, node))


def reduce_sum(context: Context, node: Node) -> None:
    _reduce(context, node, 1.0)


def reduce_sum_gradient(context: Context, node: Node, dy: str) -> dict[str, str]:
    return _spread(context, node, dy, 1.0)


def softmax(context: Context, node: Node) -> None:
    """exp(x - max) / sum, over one axis."""
    (x,), axis, kind = node.inputs, int(node.attrs["axis"]), context.type(node.outputs[0])
    top = context.rows(arg(0), (x,), kind.shape, axis, "max")
    shifted: Expr = ("exp", ex.sub(arg(0), arg(1)))
    total = context.rows(shifted, (x, top), kind.shape, axis)
    context.build.map(ex.div(shifted, arg(2)), (x, top, total), kind, node.outputs[0])


def softmax_gradient(context: Context, node: Node, dy: str) -> dict[str, str]:
    """dx = y (dy - sum of dy y)."""
    y, axis = node.outputs[0], int(node.attrs["axis"])
    kind = context.type(y)
    total = context.rows(ex.mul(arg(0), arg(1)), (dy, y), kind.shape, axis)
    expr = ex.mul(arg(1), ex.sub(arg(0), arg(2)))
    return {node.inputs[0]: context.build.map(expr, (dy, y, total), kind)}


def log_softmax(context: Context, node: Node) -> None:
    (x,), axis, kind = node.inputs, int(node.attrs["axis"]), context.type(node.outputs[0])
    top = context.rows(arg(0), (x,), kind.shape, axis, "max")
    total = context.rows(("exp", ex.sub(arg(0), arg(1))), (x, top), kind.shape, axis)
    expr = ex.sub(ex.sub(arg(0), arg(1)), ("log", arg(2)))
    context.build.map(expr, (x, top, total), kind, node.outputs[0])


def log_softmax_gradient(context: Context, node: Node, dy: str) -> dict[str, str]:
    """dx = dy - exp(y) * sum of dy."""
    y, axis = node.outputs[0], int(node.attrs["axis"])
    kind = context.type(y)
    total = context.rows(arg(0), (dy,), kind.shape, axis)
    expr = ex.sub(arg(0), ex.mul(("exp", arg(1)), arg(2)))
    return {node.inputs[0]: context.build.map(expr, (dy, y, total), kind)}
