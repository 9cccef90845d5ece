"""Expression trees to TIR, with our own polynomials for exp, log and tanh.

No libm: TVM's exp becomes a scalar `expf` call, slow and different from one C library to the next. These are vectors of
plain arithmetic, the same on every target: Cody-Waite reduction and minimax polynomials in the form of Cephes
(Moshier, single precision), 1-2 ulp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from cross.expression import Expr

PrimExpr = Any


def _f(value: float) -> PrimExpr:
    return tirx.const(value, "float32")


def _polynomial(x: PrimExpr, coefficients: tuple[float, ...]) -> PrimExpr:
    total = _f(coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + _f(coefficient)
    return total


def exp(x: PrimExpr) -> PrimExpr:
    """e^x: x = k ln 2 + r, |r| <= ln 2 / 2; 2^k is put together from bits. Saturates at the float32 range; NaN stays NaN."""
    clamped = maximum(minimum(x, _f(88.0)), _f(-87.0))
    # Truncation of a positive number is the floor: no floor instruction on rv64gc, and floorf would be libm.
    k = tirx.Cast("int32", clamped * _f(1.44269504088896341) + _f(128.5)) - tirx.const(128, "int32")
    kf = tirx.Cast("float32", k)
    r = clamped - kf * _f(0.693359375) - kf * _f(-2.12194440e-4)
    coefficients = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
    series = _polynomial(r, coefficients) * r * r + r + _f(1.0)
    power = tirx.reinterpret("float32", (k + tirx.const(127, "int32")) << tirx.const(23, "int32"))
    return series * power + (x - x)


def log(x: PrimExpr) -> PrimExpr:
    """ln x for normal x > 0: x = m 2^k, sqrt(1/2) <= m < sqrt(2). Zero gives -inf, below zero and NaN give NaN."""
    bits = tirx.reinterpret("int32", x)
    k = (bits >> tirx.const(23, "int32")) - tirx.const(126, "int32")
    mantissa = tirx.reinterpret(
        "float32", (bits & tirx.const(0x007FFFFF, "int32")) | tirx.const(0x3F000000, "int32")
    )
    low = mantissa < _f(0.707106781186547524)
    kf = tirx.Cast("float32", tirx.Select(low, k - 1, k))
    m = tirx.Select(low, mantissa + mantissa, mantissa) - _f(1.0)
    coefficients = (
        7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
        -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
    )  # fmt: skip
    square = m * m
    value = _polynomial(m, coefficients) * m * square + kf * _f(-2.12194440e-4) - _f(0.5) * square
    value = m + value + kf * _f(0.693359375)
    bad = tirx.Select(x == _f(0.0), _f(float("-inf")), _f(float("nan")))
    return tirx.Select(x > _f(0.0), value, bad)


def sigmoid(x: PrimExpr) -> PrimExpr:
    return _f(1.0) / (_f(1.0) + exp(_f(0.0) - x))


def tanh(x: PrimExpr) -> PrimExpr:
    """A polynomial near zero, where 1 - 2 / (e^2x + 1) would cancel."""
    magnitude = tirx.Select(x < _f(0.0), _f(0.0) - x, x)
    coefficients = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
    square = x * x
    near = _polynomial(square, coefficients) * square * x + x
    far = _f(1.0) - _f(2.0) / (exp(magnitude + magnitude) + _f(1.0))
    return tirx.Select(magnitude < _f(0.625), near, tirx.Select(x < _f(0.0), _f(0.0) - far, far))


def maximum(a: PrimExpr, b: PrimExpr) -> PrimExpr:
    """Like numpy's for a NaN in `a`: it stays."""
    return tirx.Select(b > a, b, a)


def minimum(a: PrimExpr, b: PrimExpr) -> PrimExpr:
    return tirx.Select(b < a, b, a)


def uniform(identity: int, counter: Callable[[int], PrimExpr], sample: PrimExpr, element: PrimExpr) -> PrimExpr:
    """A number in [0, 1) from (seed, step, sample, element, identity): the finaliser of MurmurHash3, twice."""

    def u32(value: int | PrimExpr) -> PrimExpr:
        return tirx.const(value, "uint32") if isinstance(value, int) else tirx.Cast("uint32", value)

    def mix(h: PrimExpr) -> PrimExpr:
        h = (h ^ (h >> u32(16))) * u32(0x85EBCA6B)
        h = (h ^ (h >> u32(13))) * u32(0xC2B2AE35)
        return h ^ (h >> u32(16))

    row = mix(counter(0) ^ u32(identity)) + counter(1) * u32(0x9E3779B9)
    row = mix(row ^ ((counter(2) + u32(sample)) * u32(0x85EBCA77)))
    bits = mix(row + u32(element) * u32(0x9E3779B1))
    return tirx.Cast("float32", tirx.Cast("int32", bits >> u32(8))) * _f(2.0**-24)


FUNCTIONS: dict[str, Callable[..., PrimExpr]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: _f(0.0) - a,
    "max": maximum,
    "min": minimum,
    "greater": lambda a, b: a > b,
    "equal": lambda a, b: a == tirx.Cast("float32", b),
    "select": tirx.Select,
    "exp": exp,
    "log": log,
    "sqrt": tirx.sqrt,
    "sigmoid": sigmoid,
    "tanh": tanh,
}


def evaluate(
    expr: Expr,
    read: Callable[[int], PrimExpr],
    index: Callable[[int], PrimExpr],
    random: Callable[[int, int], PrimExpr],
) -> PrimExpr:
    """An expression at one element: read(i) is input i there, index(d) its index, random(identity, counter input) its number."""
    memo: dict[Expr, PrimExpr] = {}

    def visit(e: Expr) -> PrimExpr:
        if e not in memo:
            if e[0] == "input":
                memo[e] = read(e[1])
            elif e[0] == "const":
                memo[e] = _f(e[1])
            elif e[0] == "index":
                memo[e] = tirx.Cast("float32", index(e[1]))
            elif e[0] == "uniform":
                memo[e] = random(e[1], e[2])
            else:
                memo[e] = FUNCTIONS[e[0]](*(visit(part) for part in e[1:]))
        return memo[e]

    return visit(expr)
