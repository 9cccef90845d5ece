"""Element-wise arithmetic as small expression trees: built by gradient rules, merged by fusion, compiled by `kernels.map`.

An expression is a nested tuple. Leaves: ("input", i) is the i-th tensor of the node; ("const", c) a float;
("uniform", id, i) a pseudo-random number in [0, 1) that depends on the element, on `id` and on the counter tensor i;
("index", d) the element's canonical index along dimension d, as a float.
Inner nodes: (function, argument, ...) with the functions of `DERIVATIVES`; ("select", c, a, b) takes a where c, a
comparison, holds.

Everything element-wise (activations, batch norm's affine map, dropout, gradients of them) is one of these, so one kernel
class, one derivative table and one fusion rule serve all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Expr = tuple[Any, ...]

ZERO: Expr = ("const", 0.0)
ONE: Expr = ("const", 1.0)


def arg(index: int) -> Expr:
    return ("input", index)


def const(value: float) -> Expr:
    return ("const", float(value))


def add(a: Expr, b: Expr) -> Expr:
    if a == ZERO:
        return b
    return a if b == ZERO else ("add", a, b)


def sub(a: Expr, b: Expr) -> Expr:
    return a if b == ZERO else ("sub", a, b)


def mul(a: Expr, b: Expr) -> Expr:
    if a == ZERO or b == ZERO:
        return ZERO
    if a == ONE:
        return b
    if b == ONE:
        return a
    # A 0/1 factor selects: no multiplication, and no NaN from 0 * inf.
    for mask, other in ((a, b), (b, a)):
        if mask[0] == "select" and _is_mask(mask):
            return ("select", mask[1], mul(mask[2], other), mul(mask[3], other))
    return ("mul", a, b)


def _is_mask(expr: Expr) -> bool:
    """Whether a tree of selects ends in zeros and ones only."""
    return expr in (ZERO, ONE) or (expr[0] == "select" and _is_mask(expr[2]) and _is_mask(expr[3]))


def div(a: Expr, b: Expr) -> Expr:
    return ZERO if a == ZERO else ("div", a, b)


def neg(a: Expr) -> Expr:
    return ZERO if a == ZERO else ("neg", a)


def select(condition: Expr, a: Expr, b: Expr) -> Expr:
    return ("select", condition, a, b)


def greater(a: Expr, b: Expr) -> Expr:
    return ("greater", a, b)


def maximum(a: Expr, b: Expr) -> Expr:
    return ("max", a, b)


def minimum(a: Expr, b: Expr) -> Expr:
    return ("min", a, b)


def sigmoid(x: Expr) -> Expr:
    return ("sigmoid", x)


# Partial derivatives, one function an argument, each of (arguments..., the whole expression).
DERIVATIVES: dict[str, tuple[Callable[..., Expr], ...]] = {
    "add": (lambda a, b, y: ONE, lambda a, b, y: ONE),
    "sub": (lambda a, b, y: ONE, lambda a, b, y: const(-1.0)),
    "mul": (lambda a, b, y: b, lambda a, b, y: a),
    "div": (lambda a, b, y: div(ONE, b), lambda a, b, y: neg(div(y, b))),
    "neg": (lambda a, y: const(-1.0),),
    "max": (
        lambda a, b, y: select(greater(a, b), ONE, ZERO),
        lambda a, b, y: select(greater(a, b), ZERO, ONE),
    ),
    "min": (
        lambda a, b, y: select(greater(b, a), ONE, ZERO),
        lambda a, b, y: select(greater(b, a), ZERO, ONE),
    ),
    "exp": (lambda a, y: y,),
    "log": (lambda a, y: div(ONE, a),),
    "sqrt": (lambda a, y: div(const(0.5), y),),
    "sigmoid": (lambda a, y: mul(y, sub(ONE, y)),),
    "tanh": (lambda a, y: sub(ONE, mul(y, y)),),
    "erf": (lambda a, y: mul(const(2.0 / math.sqrt(math.pi)), ("exp", neg(mul(a, a)))),),
}


def derivative(expr: Expr, index: int) -> Expr:
    """d expr / d input `index`, as an expression over the same inputs."""
    kind = expr[0]
    if kind == "input":
        return ONE if expr[1] == index else ZERO
    if kind in ("const", "uniform", "index", "greater", "equal"):
        return ZERO
    if kind == "select":
        when, otherwise = derivative(expr[2], index), derivative(expr[3], index)
        return ZERO if when == otherwise == ZERO else select(expr[1], when, otherwise)
    total = ZERO
    for partial, argument in zip(DERIVATIVES[kind], expr[1:], strict=True):
        inner = derivative(argument, index)
        if inner != ZERO:
            total = add(total, mul(partial(*expr[1:], expr), inner))
    return total


def inputs_of(expr: Expr) -> set[int]:
    """Indices of the inputs that an expression reads."""
    if expr[0] == "input":
        return {expr[1]}
    if expr[0] == "uniform":
        return {expr[2]}
    found: set[int] = set()
    for part in expr[1:]:
        if isinstance(part, tuple):
            found |= inputs_of(part)
    return found


def substitute(expr: Expr, replacement: Callable[[int], Expr]) -> Expr:
    """The expression with every ("input", i) replaced by replacement(i); counters of `uniform` follow."""
    if expr[0] == "input":
        return replacement(expr[1])
    if expr[0] == "uniform":
        return ("uniform", expr[1], replacement(expr[2])[1])
    return (expr[0], *(substitute(p, replacement) if isinstance(p, tuple) else p for p in expr[1:]))


def size(expr: Expr) -> int:
    """Number of arithmetic operations, the cost of computing it again."""
    return (expr[0] not in ("input", "const")) + sum(size(p) for p in expr[1:] if isinstance(p, tuple))
