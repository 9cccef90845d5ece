"""Expression trees to TIR, with our own polynomials for exp, log, tanh and erf.

No libm: TVM's exp becomes a scalar `expf` call, slow and different from one C library to the next. These are vectors of
plain arithmetic, the same on every target: Cody-Waite reduction and minimax polynomials in the form of Cephes
(Moshier, single precision), 1-2 ulp.

Values may be vectors. What is used more than once is kept in a local variable: TIR is a tree, and shared parts would be
written out (and simplified) at each use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from cross.expression import Expr
from cross.kernels.loop_nest import ON_STACK, lanes

PrimExpr = Any


def _type(value: PrimExpr) -> tuple[str, int]:
    """(element type, lanes)."""
    name, _, width = str(tirx.convert(value).ty).partition("x")
    return name, int(width) if width else 1


def width_of(value: PrimExpr) -> int:
    return _type(value)[1]


def _dtype(value: PrimExpr) -> str:
    return _type(value)[0]


def constant(value: float, like: PrimExpr, dtype: str = "float32") -> PrimExpr:
    scalar = tirx.const(value, dtype)
    width = width_of(like)
    return tirx.Broadcast(scalar, width) if width > 1 else scalar


def cast(dtype: str, value: PrimExpr) -> PrimExpr:
    width = width_of(value)
    return tirx.Cast(dtype if width == 1 else f"{dtype}x{width}", value)


def bits(dtype: str, value: PrimExpr) -> PrimExpr:
    width = width_of(value)
    return tirx.reinterpret(dtype if width == 1 else f"{dtype}x{width}", value)


def keep(value: PrimExpr) -> PrimExpr:
    """The value, computed once and held in a register."""
    width = width_of(value)
    variable = T.alloc_buffer((width,), _dtype(value), scope="local", annotations=ON_STACK)
    index = lanes(0, width)
    T.buffer_store(variable, value, [index])
    return variable[index]


def transposed(rows: list[PrimExpr]) -> list[PrimExpr]:
    """The columns of a square of vectors, as many as they have lanes (a power of two): in each step, halves of twice the size
    change places, so that every value moves in registers."""
    step = 1
    while step < len(rows):
        rows = [keep(_exchanged(rows, i, step)) for i in range(len(rows))]
        step *= 2
    return rows


def _exchanged(rows: list[PrimExpr], i: int, step: int) -> PrimExpr:
    """Row i once `step` lanes have changed places with row i ^ step."""
    width = len(rows)
    first, second = rows[i & ~step], rows[i | step]
    shift = step if i & step else 0
    places = [lane + shift if not lane & step else width + lane - step + shift for lane in range(width)]
    return tirx.Shuffle([first, second], places)


def select(condition: PrimExpr, a: PrimExpr, b: PrimExpr) -> PrimExpr:
    """a where the condition holds, else b; scalars are spread over the lanes of the others."""
    width = max(width_of(v) for v in (condition, a, b))

    def spread(v: PrimExpr) -> PrimExpr:
        return tirx.Broadcast(v, width) if width > 1 and width_of(v) == 1 else v

    return tirx.Select(spread(condition), spread(a), spread(b))


def _polynomial(x: PrimExpr, coefficients: tuple[float, ...]) -> PrimExpr:
    total = constant(coefficients[0], x)
    for coefficient in coefficients[1:]:
        total = total * x + constant(coefficient, x)
    return total


def exp(x: PrimExpr) -> PrimExpr:
    """e^x: x = k ln 2 + r, |r| <= ln 2 / 2; 2^k is put together from bits. Saturates at the float32 range; NaN stays NaN."""
    x = keep(x)
    clamped = keep(maximum(minimum(x, constant(88.0, x)), constant(-87.0, x)))
    # Added to 1.5 * 2^23 a number is rounded to a whole one, which its low bits then hold: no conversion instruction (rv64gc
    # has no floor, floorf would be libm, and QEMU 7.2 dies on a vfcvt.rtz that begins a block of its translation).
    shifted = keep(clamped * constant(1.44269504088896341, x) + constant(12582912.0, x))
    k = keep(bits("int32", shifted) - constant(0x4B400000, x, "int32"))
    kf = keep(shifted - constant(12582912.0, x))
    r = keep(clamped - kf * constant(0.693359375, x) - kf * constant(-2.12194440e-4, x))
    coefficients = (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
    series = _polynomial(r, coefficients) * r * r + r + constant(1.0, x)
    power = bits("float32", (k + constant(127, x, "int32")) << constant(23, x, "int32"))
    return select(x == x, series * power, x)


def log(x: PrimExpr) -> PrimExpr:
    """ln x for normal x > 0: x = m 2^k, sqrt(1/2) <= m < sqrt(2). Zero gives -inf, below zero and NaN give NaN."""
    x = keep(x)
    raw = keep(bits("int32", x))
    fraction = (raw & constant(0x007FFFFF, x, "int32")) | constant(0x3F000000, x, "int32")
    mantissa = keep(bits("float32", fraction))
    k = keep((raw >> constant(23, x, "int32")) - constant(126, x, "int32"))
    low = mantissa < constant(0.707106781186547524, x)
    kf = keep(cast("float32", select(low, k - constant(1, x, "int32"), k)))
    m = keep(select(low, mantissa + mantissa, mantissa) - constant(1.0, x))
    coefficients = (
        7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
        -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
    )  # fmt: skip
    square = keep(m * m)
    tail = _polynomial(m, coefficients) * m * square + kf * constant(-2.12194440e-4, x) - constant(0.5, x) * square
    value = m + tail + kf * constant(0.693359375, x)
    bad = select(x == constant(0.0, x), constant(float("-inf"), x), constant(float("nan"), x))
    return select(x > constant(0.0, x), value, bad)


def sigmoid(x: PrimExpr) -> PrimExpr:
    return constant(1.0, x) / (constant(1.0, x) + exp(constant(0.0, x) - x))


def tanh(x: PrimExpr) -> PrimExpr:
    """A polynomial near zero, where 1 - 2 / (e^2x + 1) would cancel."""
    x = keep(x)
    zero, one = constant(0.0, x), constant(1.0, x)
    magnitude = keep(select(x < zero, zero - x, x))
    coefficients = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
    square = keep(x * x)
    near = _polynomial(square, coefficients) * square * x + x
    far = keep(one - constant(2.0, x) / (exp(magnitude + magnitude) + one))
    return select(magnitude < constant(0.625, x), near, select(x < zero, zero - far, far))


def erf(x: PrimExpr) -> PrimExpr:
    """x P(x^2) up to 1, then 1 - exp(-Q(|x|)), with Q fitted to -ln erfc on [1, 4]: 1.3e-7 of the true value (our own
    least-maximum fits, weighted by erfc). NaN stays NaN."""
    x = keep(x)
    zero, one = constant(0.0, x), constant(1.0, x)
    magnitude = keep(select(x < zero, zero - x, x))
    clamped = keep(minimum(magnitude, constant(4.0, x)))
    near_terms = (
        7.889119297033176e-5, -8.020841050893068e-4, 5.189535208046436e-3, -2.6854444295167923e-2,
        1.1283600330352783e-1, -3.761262595653534e-1, 1.1283791065216064,
    )  # fmt: skip
    far_terms = (
        2.1686850232072175e-5, -4.4133636401966214e-4, 4.204561933875084e-3, -2.5208257138729095e-2,
        1.0841857641935349e-1, 6.332198977470398e-1, 1.1295784711837769, -1.880402269307524e-4,
    )  # fmt: skip
    near = _polynomial(keep(x * x), near_terms) * x
    far = keep(one - exp(zero - _polynomial(clamped, far_terms)))
    return select(magnitude < one, near, select(x < zero, zero - far, far))


def maximum(a: PrimExpr, b: PrimExpr) -> PrimExpr:
    """Like numpy's for a NaN in `a`: it stays."""
    return select(b > a, b, a)


def minimum(a: PrimExpr, b: PrimExpr) -> PrimExpr:
    return select(b < a, b, a)


def uniform(identity: int, counter: Callable[[int], PrimExpr], sample: PrimExpr, element: PrimExpr) -> PrimExpr:
    """A number in [0, 1) from (seed, step, sample, element, identity): the finaliser of MurmurHash3, three times."""

    def mix(h: PrimExpr) -> PrimExpr:
        h = keep(h)
        h = keep((h ^ (h >> constant(16, h, "uint32"))) * constant(0x85EBCA6B, h, "uint32"))
        h = keep((h ^ (h >> constant(13, h, "uint32"))) * constant(0xC2B2AE35, h, "uint32"))
        return h ^ (h >> constant(16, h, "uint32"))

    place = cast("uint32", sample)
    start = mix(counter(0) ^ constant(identity, place, "uint32")) + counter(1) * constant(0x9E3779B9, place, "uint32")
    row = mix(start ^ ((counter(2) + place) * constant(0x85EBCA77, place, "uint32")))
    along = cast("uint32", element)
    mixed = mix(row + along * constant(0x9E3779B1, along, "uint32"))
    high = cast("int32", mixed >> constant(8, mixed, "uint32"))
    return cast("float32", high) * constant(2.0**-24, high)


FUNCTIONS: dict[str, Callable[..., PrimExpr]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: constant(0.0, a) - a,
    "max": maximum,
    "min": minimum,
    "greater": lambda a, b: a > b,
    "equal": lambda a, b: a == cast("float32", b),
    "select": select,
    "exp": exp,
    "log": log,
    "sqrt": tirx.sqrt,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "erf": erf,
}


def evaluate(
    expr: Expr,
    read: Callable[[int], PrimExpr],
    index: Callable[[int], PrimExpr],
    random: Callable[[int, int], PrimExpr],
) -> PrimExpr:
    """An expression at one place: read(i) is input i there, index(d) its index, random(identity, counter input) its number."""
    uses: dict[Expr, int] = {}

    def count(e: Expr) -> None:
        uses[e] = uses.get(e, 0) + 1
        if uses[e] == 1:
            for part in e[1:]:
                if isinstance(part, tuple):
                    count(part)

    count(expr)
    memo: dict[Expr, PrimExpr] = {}

    def visit(e: Expr) -> PrimExpr:
        if e not in memo:
            value = _leaf(e, read, index, random)
            if value is None:
                value = FUNCTIONS[e[0]](*(visit(part) for part in e[1:]))
            is_kept = uses[e] > 1 and e[0] not in ("const", "greater", "equal")
            memo[e] = keep(value) if is_kept else value
        return memo[e]

    return visit(expr)


def _leaf(
    e: Expr,
    read: Callable[[int], PrimExpr],
    index: Callable[[int], PrimExpr],
    random: Callable[[int, int], PrimExpr],
) -> PrimExpr | None:
    if e[0] == "input":
        return read(e[1])
    if e[0] == "const":
        return tirx.const(e[1], "float32")
    if e[0] == "index":
        return cast("float32", tirx.convert(index(e[1])))
    return random(e[1], e[2]) if e[0] == "uniform" else None
