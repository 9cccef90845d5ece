"""Activations, arithmetic and dropout: expressions, differentiated symbolically."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from cross import expression as ex
from cross.expression import Expr, arg, const
from cross.graph import MASKED, Node, TensorType
from cross.rules.context import DROPOUT_COUNTER, Context

Attrs = Mapping[str, Any]


def _clip(x: Expr, attrs: Attrs) -> Expr:
    low, high = float(attrs["min"]), float(attrs["max"])
    expr = x if math.isinf(low) else ex.maximum(x, const(low))
    return expr if math.isinf(high) else ex.minimum(expr, const(high))


def _hard_sigmoid(x: Expr, alpha: float, beta: float) -> Expr:
    scaled = ex.add(ex.mul(x, const(alpha)), const(beta))
    return ex.minimum(ex.maximum(scaled, ex.ZERO), ex.ONE)


def _gelu(x: Expr, approximate: str) -> Expr:
    """x times the normal distribution's cumulative function, or its form with tanh (Hendrycks and Gimpel 2016, section 2)."""
    if approximate == "tanh":
        cubed = ex.mul(ex.mul(x, x), x)
        inner = ex.mul(const(math.sqrt(2 / math.pi)), ex.add(x, ex.mul(const(0.044715), cubed)))
        share: Expr = ("tanh", inner)
    else:
        share = ("erf", ex.mul(x, const(math.sqrt(0.5))))
    return ex.mul(ex.mul(const(0.5), x), ex.add(share, ex.ONE))


EXPRESSIONS: dict[str, Callable[[Attrs], Expr]] = {
    "relu": lambda a: ex.maximum(arg(0), ex.ZERO),
    "clip": lambda a: _clip(arg(0), a),
    "leaky_relu": lambda a: ex.select(ex.greater(arg(0), ex.ZERO), arg(0), ex.mul(arg(0), const(a["alpha"]))),
    "sigmoid": lambda a: ex.sigmoid(arg(0)),
    "tanh": lambda a: ("tanh", arg(0)),
    "erf": lambda a: ("erf", arg(0)),
    "exp": lambda a: ("exp", arg(0)),
    "gelu": lambda a: _gelu(arg(0), a["approximate"]),
    "neg": lambda a: ex.neg(arg(0)),
    "sqrt": lambda a: ("sqrt", arg(0)),
    "silu": lambda a: ex.mul(arg(0), ex.sigmoid(arg(0))),
    "hard_swish": lambda a: ex.mul(arg(0), _hard_sigmoid(arg(0), 1 / 6, 0.5)),
    "hard_sigmoid": lambda a: _hard_sigmoid(arg(0), float(a["alpha"]), float(a["beta"])),
    "add": lambda a: ex.add(arg(0), arg(1)),
    "sub": lambda a: ex.sub(arg(0), arg(1)),
    "mul": lambda a: ex.mul(arg(0), arg(1)),
    "div": lambda a: ex.div(arg(0), arg(1)),
}


def _from_output(op: str, attrs: Attrs) -> Expr | None:
    """The derivative in terms of the output (input 0 here), where there is one: the input then need not be saved."""
    y = arg(0)
    if op == "relu" or (op == "leaky_relu" and attrs["alpha"] > 0):
        return ex.select(ex.greater(y, ex.ZERO), ex.ONE, const(attrs.get("alpha", 0.0)))
    if op == "clip" and attrs["min"] < attrs["max"]:
        inside = ex.ONE
        for bound, above in ((float(attrs["min"]), True), (float(attrs["max"]), False)):
            if not math.isinf(bound):
                test = ex.greater(y, const(bound)) if above else ex.greater(const(bound), y)
                inside = ex.select(test, inside, ex.ZERO)
        return inside
    if op == "sigmoid":
        return ex.mul(y, ex.sub(ex.ONE, y))
    if op == "tanh":
        return ex.sub(ex.ONE, ex.mul(y, y))
    return y if op == "exp" else None


def _causal(context: Context, node: Node, hidden: Expr) -> Expr:
    """The input on and below the diagonal of its last two axes, `hidden` above it."""
    last = len(context.shape(node.inputs[0])) - 1
    return ex.select(ex.greater(("index", last), ("index", last - 1)), hidden, arg(0))


def causal_mask(context: Context, node: Node) -> None:
    output = node.outputs[0]
    context.build.map(_causal(context, node, const(MASKED)), node.inputs, context.type(output), output)


def causal_mask_gradient(context: Context, node: Node, dy: str) -> dict[str, str]:
    return {node.inputs[0]: context.build.map(_causal(context, node, ex.ZERO), [dy], context.type(dy))}


def forward(context: Context, node: Node) -> None:
    output = node.outputs[0]
    context.build.map(EXPRESSIONS[node.op](node.attrs), node.inputs, context.type(output), output)


def gradient(context: Context, node: Node, dy: str) -> dict[str, str]:
    """dy * d expr / d input, summed over broadcast dimensions.

    After a batch norm the mask is recomputed from its input, which is saved anyway; elsewhere it is read off the output.
    """
    domain = context.shape(node.outputs[0])
    by_output = None if _is_batch_norm(context, node.inputs[0]) else _from_output(node.op, node.attrs)
    if by_output is not None:
        inputs: tuple[str, ...] = (node.outputs[0], dy)
        return {node.inputs[0]: context.build.map(ex.mul(by_output, arg(1)), inputs, context.type(dy))}
    expr = EXPRESSIONS[node.op](node.attrs)
    inputs, found = (*node.inputs, dy), {}
    for name in node.inputs:
        if name in context.wanted and name not in found:
            parts = [ex.derivative(expr, i) for i, other in enumerate(node.inputs) if other == name]
            total = parts[0]
            for part in parts[1:]:
                total = ex.add(total, part)
            scaled = ex.mul(total, arg(len(node.inputs)))
            if scaled == arg(len(node.inputs)) and context.shape(name) == domain:
                found[name] = dy
            else:
                found[name] = context.sum_to(scaled, inputs, domain, context.shape(name))
    return found


def _is_batch_norm(context: Context, name: str) -> bool:
    producer = context.build.producers.get(name)
    return producer is not None and bool(producer.attrs.get("batch_norm"))


def _kept(node: Node) -> Expr:
    """1 / (1 - ratio) where the element's random number is at least `ratio`, else 0 (inverted dropout)."""
    ratio = float(node.attrs["ratio"])
    identity = zlib.crc32(node.outputs[0].encode())
    return ex.select(ex.greater(const(ratio), ("uniform", identity, 1)), ex.ZERO, const(1.0 / (1.0 - ratio)))


def dropout(context: Context, node: Node) -> None:
    kind, output = context.type(node.outputs[0]), node.outputs[0]
    if not context.build.training or float(node.attrs["ratio"]) == 0.0:
        context.build.map(arg(0), node.inputs, kind, output)
        return
    context.build.tensors[DROPOUT_COUNTER] = TensorType((4,), "uint32")
    context.build.map(("mul", _kept(node), arg(0)), (node.inputs[0], DROPOUT_COUNTER), kind, output)


def dropout_gradient(context: Context, node: Node, dy: str) -> dict[str, str]:
    """The mask is computed again from the same counter."""
    if float(node.attrs["ratio"]) == 0.0:
        return {node.inputs[0]: dy}
    expr = ("mul", _kept(node), arg(0))
    return {node.inputs[0]: context.build.map(expr, (dy, DROPOUT_COUNTER), context.type(dy))}
