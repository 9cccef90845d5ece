"""Conversions of element-wise operators, and what a stored operand of them is: a constant or a trainable tensor."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, prod
from typing import Any

import numpy as np

from cross.onnx_import.operator import NotConvertible, Operator

Array = np.ndarray[Any, np.dtype[Any]]

TRAINABLE = frozenset(("add", "sub", "mul"))
"""Operators whose stored operand, one number a channel or more, is trained where it follows a weight."""


def unary(op: str, **defaults: float) -> Callable[[Operator], str]:
    """Conversion of an operator that has its own name here; float attributes with their ONNX defaults."""

    def convert(o: Operator) -> str:
        return o.emit(op, o.data(0), **{k: float(o.attrs.get(k, v)) for k, v in defaults.items()})

    return convert


def binary(op: str) -> Callable[[Operator], str]:
    """Conversion of an operator with two operands, one of which may be stored."""

    def convert(o: Operator) -> str:
        left, right = (operand(o, i, op) for i in (0, 1))
        return o.emit(op, left, right)

    return convert


def operand(o: Operator, index: int, op: str) -> str:
    """The draft tensor of an operand: computed, a scalar constant, a constant, or a parameter."""
    if o.is_data(index):
        return o.data(index)
    value = o.constant(index, "operand")
    if value.dtype != np.float32:
        raise NotConvertible(f"operand of type {value.dtype}")
    others = [i for i in range(len(o.node.input)) if o.is_data(i)]
    if not others:
        raise NotConvertible("none of its operands depends on the input")
    rank = len(o.shape(others[0]))
    while value.ndim >= rank:
        if value.shape[0] != 1:
            raise NotConvertible("a stored operand differs from row to row of the batch")
        value = value[0]
    if value.size == 1:
        return o.draft.constant(o.origin(index), value.reshape(1))
    if op in TRAINABLE and any(o.data(i) in o.draft.trained for i in others):
        return o.parameter(index, value, "broadcast")
    return o.draft.constant(o.origin(index), value)


def add_all(o: Operator) -> str:
    """Sum of any number of operands -> additions one after the other."""
    total = operand(o, 0, "add")
    for index in range(1, len(o.node.input)):
        total = o.emit("add", total, operand(o, index, "add"))
    return total


def clip(o: Operator) -> str:
    """Clip; bounds are attributes before opset 11."""
    return _clip(o, _bound(o.setting("min", 1), -inf), _bound(o.setting("max", 2), inf))


def bound_above(o: Operator) -> str:
    """Min with a stored number."""
    return _clip_by_operand(o, lambda value: (-inf, value))


def bound_below(o: Operator) -> str:
    """Max with a stored number."""
    return _clip_by_operand(o, lambda value: (value, inf))


def _clip_by_operand(o: Operator, bounds: Callable[[float], tuple[float, float]]) -> str:
    if len(o.node.input) != 2 or o.is_data(0) == o.is_data(1):
        raise NotConvertible("it compares two computed tensors")
    stored = 1 if o.is_data(0) else 0
    value = o.constant(stored, "bound")
    if value.size != 1:
        raise NotConvertible("its bound is not one number")
    low, high = bounds(float(value.flat[0]))
    return _clip(o, low, high, 1 - stored)


def _clip(o: Operator, low: float, high: float, index: int = 0) -> str:
    if (low, high) == (0.0, inf):
        return o.emit("relu", o.data(index))
    return o.emit("clip", o.data(index), min=low, max=high)


def _bound(value: Any, default: float) -> float:
    if isinstance(value, list):
        value = value[0] if value else None
    if value is None:
        return default
    # Exporters write the largest float where they mean no bound.
    return default if abs(float(value)) >= 3.4e38 else float(value)


def power(o: Operator) -> str:
    """Pow with an exponent that is a product, a root or a quotient."""
    value = o.constant(1, "exponent")
    exponent = float(value.flat[0]) if value.size == 1 else float("nan")
    x = o.data(0)
    if exponent == 1.0:
        return x
    if exponent == 2.0:
        return o.emit("mul", x, x)
    if exponent == 0.5:
        return o.emit("sqrt", x)
    raise NotConvertible(f"exponent {exponent:g}" if value.size == 1 else "exponents that differ")


def reciprocal(o: Operator) -> str:
    """Reciprocal -> 1 / x."""
    return o.emit("div", o.number(1.0), o.data(0))


def prelu(o: Operator) -> str:
    """PRelu(x) = relu(x) - slope * relu(-x), the slope trained."""
    x = o.data(0)
    slope = operand(o, 1, "mul")
    if slope in o.draft.parameters:
        o.draft.layouts[slope] = "slope"
    negative = o.emit("relu", o.emit("neg", x))
    return o.emit("sub", o.emit("relu", x), o.emit("mul", negative, slope))


def swish(o: Operator) -> str:
    """Swish with alpha 1 -> SiLU."""
    if float(o.attrs.get("alpha", 1.0)) != 1.0:
        raise NotConvertible(f"alpha {o.attrs['alpha']}")
    return o.emit("silu", o.data(0))


def same(o: Operator) -> str:
    """Identity."""
    return o.data(0)


def cast(o: Operator) -> str:
    """Cast between floats, all of which are float32 here."""
    to = int(o.attrs.get("to", 1))
    if to != 1:
        raise NotConvertible("a cast of computed values to integers")
    return o.data(0)


def dropout(o: Operator) -> str:
    """Dropout; the ratio is an attribute before opset 12. An inference export trains with it all the same."""
    o.only_output()
    ratio = float(o.setting("ratio", 1, 0.5))
    if not 0.0 <= ratio < 1.0:
        raise NotConvertible(f"ratio {ratio}")
    return o.emit("dropout", o.data(0), ratio=ratio) if ratio else o.data(0)


def softmax(op: str) -> Callable[[Operator], str]:
    """Softmax or LogSoftmax. Before opset 13 every dimension from the axis on is one."""

    def convert(o: Operator) -> str:
        shape = o.shape()
        if o.opset >= 13:
            return o.emit(op, o.data(0), axis=o.axis(int(o.attrs.get("axis", -1))))
        axis = o.axis(int(o.attrs.get("axis", 1)))
        if prod(shape[axis + 1 :]) == 1:
            return o.emit(op, o.data(0), axis=axis)
        flat = o.reshape(o.data(0), (*shape[:axis], prod(shape[axis:])))
        return o.reshape(o.emit(op, flat, axis=axis), shape)

    return convert
