"""Conversions of element-wise operators, and what a stored operand of them is: a constant or a trainable tensor."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, prod
from typing import Any

import numpy as np

from cross.graph import Shape
from cross.onnx_import.operator import NotConvertible, Operator
from cross.onnx_import.source import INTEGERS

Array = np.ndarray[Any, np.dtype[Any]]

TRAINABLE = frozenset(("add", "sub", "mul"))
"""Operators whose stored operand, one number a channel or more, is trained where it follows a weight."""


MASKING = 1e4
"""A stored summand that reaches this hides what it is added to, as attention masks do: it is not trained."""

LARGEST = 1e30
"""What stands for infinity in a mask that is no causal one: sums stay finite, and a softmax gives the same."""


def unary(op: str, **defaults: float) -> Callable[[Operator], str]:
    """Conversion of an operator that has its own name here; float attributes with their ONNX defaults."""

    def convert(o: Operator) -> str:
        return o.emit(op, o.data(0), **{k: float(o.attrs.get(k, v)) for k, v in defaults.items()})

    return convert


def binary(op: str) -> Callable[[Operator], str]:
    """Conversion of an operator with two operands, one of which may be stored."""

    def convert(o: Operator) -> str:
        for data, stored in ((0, 1), (1, 0)):
            if op == "add" and o.is_data(data) and not o.is_data(stored):
                mask = o.constant(stored, "operand")
                if _hides_what_follows(mask == 0, mask, o.shape(data)):
                    return o.emit("causal_mask", o.data(data))
        left, right = (operand(o, i, op) for i in (0, 1))
        return o.emit(op, left, right)

    return convert


def _hides_what_follows(kept: Array, fill: Array, shape: Shape) -> bool:
    """Whether a mask keeps, of square matrices [N, ..., T, T], what is on and below the diagonal, and hides the rest."""
    if len(shape) < 3 or shape[-1] != shape[-2] or kept.shape[-2:] != shape[-2:] or kept.size != shape[-1] ** 2:
        return False
    square, below = kept.reshape(shape[-2:]), np.tri(shape[-1], dtype=bool)
    hidden = np.broadcast_to(fill, kept.shape).reshape(shape[-2:])[~below]
    return np.array_equal(square, below) and bool((hidden <= -MASKING).all())


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
    value = _row(value, len(o.shape(others[0])))
    if value.size == 1:
        return o.draft.constant(o.origin(index), value.reshape(1))
    if op == "add" and np.abs(value).max(initial=0.0) >= MASKING:
        return o.draft.constant(o.origin(index), np.clip(value, -LARGEST, LARGEST))
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
    if exponent == 3.0:
        return o.emit("mul", o.emit("mul", x, x), x)
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


def gelu(o: Operator) -> str:
    """Gelu, exact or with tanh."""
    return o.emit("gelu", o.data(0), approximate=str(o.attrs.get("approximate", "none")))


def where(o: Operator) -> str:
    """Where with a stored condition -> each side times its 0/1 mask, added up; a stored side is masked here."""
    condition = o.constant(0, "condition").astype(bool)
    for data, stored, kept in ((1, 2, condition), (2, 1, ~condition)):
        if o.is_data(data) and not o.is_data(stored):
            fill = np.broadcast_to(o.constant(stored, "side"), np.broadcast_shapes(condition.shape, (1,)))
            if _hides_what_follows(kept, fill, o.shape(data)):
                return o.emit("causal_mask", o.data(data))
    rank, parts = len(o.output_shape()), []
    for index, mask in ((1, condition), (2, ~condition)):
        if o.is_data(index):
            chosen = o.draft.constant(f"{o.node.output[0]}/mask", _row(mask.astype(np.float32), rank))
            parts.append(o.emit("mul", o.data(index), chosen))
        else:
            value = np.clip(o.constant(index, "side").astype(np.float32), -LARGEST, LARGEST)
            masked = np.where(mask, value, np.float32(0))
            parts.append(o.draft.constant(f"{o.node.output[0]}/side", _row(masked, rank)))
    return o.emit("add", *parts)


def _row(value: Array, rank: int) -> Array:
    """Without the batch dimension of a tensor of `rank` dimensions; a scalar as [1]."""
    while value.ndim >= rank:
        if value.shape[0] != 1:
            raise NotConvertible("a stored operand differs from row to row of the batch")
        value = value[0]
    return value.reshape(1) if value.ndim == 0 else value


def cast(o: Operator) -> str:
    """Cast between floats, all of which are float32 here, or of tokens to another integer type."""
    to = int(o.attrs.get("to", 1))
    is_input = o.data(0) == o.draft.input
    if to != 1 and not (is_input and to in INTEGERS):
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
