"""Losses: one value a row, and the gradient of the output, scaled by the run-time scalar loss_scale."""

from __future__ import annotations

from cross import expression as ex
from cross.expression import Expr, arg, const
from cross.graph import BATCH, TensorType
from cross.rules.context import LOSS_SCALE, TARGET, Context, gradient_name


def target_type(output: TensorType, loss: str) -> TensorType:
    """int32 class indices, one a row of logits; or floats like the output."""
    return TensorType((*output.shape[:-1], 1), "int32") if loss == "cross_entropy" else output


def cross_entropy(context: Context, logits: str) -> tuple[str, str]:
    """Softmax cross-entropy: loss = log sum exp(x - max) + max - x[target]; gradient = (softmax - one-hot) * scale."""
    build, kind = context.build, context.type(logits)
    axis = len(kind.shape) - 1
    kept = TensorType((*kind.shape[:-1], 1))

    def rows(expr: Expr, inputs: tuple[str, ...], how: str) -> str:
        attrs = {"exprs": (expr,), "axes": (axis,), "kind": how, "domain": kind.shape}
        return build.emit("reduce", inputs, [kept], attrs)[0]

    top = rows(arg(0), (logits,), "max")
    shifted: Expr = ("exp", ex.sub(arg(0), arg(1)))
    total = rows(shifted, (logits, top), "sum")
    hit: Expr = ("equal", ("index", axis), arg(1))
    chosen = rows(ex.select(hit, arg(0), ex.ZERO), (logits, TARGET), "sum")
    value = ex.sub(ex.add(("log", arg(0)), arg(1)), arg(2))
    value_rows = build.map(value, (total, top, chosen), kept)
    build.emit("reshape", [value_rows], [TensorType((BATCH, *kind.shape[1:-1]))], {}, ["loss"])
    one_hot = ex.select(("equal", ("index", axis), arg(3)), ex.ONE, ex.ZERO)
    slope = ex.mul(arg(4), ex.sub(ex.div(shifted, arg(2)), one_hot))
    inputs = (logits, top, total, TARGET, LOSS_SCALE)
    return "loss", build.map(slope, inputs, kind, gradient_name(logits))


def mean_squared_error(context: Context, output: str) -> tuple[str, str]:
    """loss = mean of (y - target)^2 over a row's elements; gradient = 2 (y - target) / elements * scale."""
    build, kind = context.build, context.type(output)
    share, difference = 1.0 / kind.elements, ex.sub(arg(0), arg(1))
    axes = tuple(range(1, len(kind.shape)))
    square = ex.mul(const(share), ex.mul(difference, difference))
    attrs = {"exprs": (square,), "axes": axes, "kind": "sum", "domain": kind.shape}
    kept = TensorType((BATCH, *(1 for _ in axes)))
    total = build.emit("reduce", (output, TARGET), [kept], attrs)[0]
    build.emit("reshape", [total], [TensorType((BATCH,))], {}, ["loss"])
    slope = ex.mul(ex.mul(const(2.0 * share), arg(2)), difference)
    return "loss", build.map(slope, (output, TARGET, LOSS_SCALE), kind, gradient_name(output))
