"""Losses: one value a row, and the gradient of the output, scaled by the run-time scalar loss_scale."""

from __future__ import annotations

from cross import expression as ex
from cross.expression import Expr, arg, const
from cross.graph import BATCH, TensorType
from cross.rules.context import LABEL_SMOOTHING, LOSS_SCALE, TARGET, Context, gradient_name


def target_type(output: TensorType, loss: str) -> TensorType:
    """int32 class indices, one a row of logits; or floats like the output."""
    return TensorType((*output.shape[:-1], 1), "int32") if loss == "cross_entropy" else output


def cross_entropy(context: Context, logits: str) -> tuple[str, str]:
    """Softmax cross-entropy of logits [N, ..., classes], the mean over a sample's positions where it has several.

    A position's loss is log sum exp(x - max) + max - x[target] + s * (x[target] - mean x), its gradient
    (softmax - one-hot + s * (one-hot - 1 / classes)) * scale, s being the run-time scalar label_smoothing: PyTorch's
    definition, and at s = 0 the bits of plain cross-entropy.
    """
    build, kind = context.build, context.type(logits)
    axis = len(kind.shape) - 1
    kept = TensorType((*kind.shape[:-1], 1))
    share, even = 1.0 / TensorType(kind.shape[:-1]).elements, const(1.0 / kind.shape[-1])
    build.tensors[LABEL_SMOOTHING] = TensorType((1,))

    top = context.rows(arg(0), (logits,), kind.shape, axis, "max")
    shifted: Expr = ("exp", ex.sub(arg(0), arg(1)))
    total = context.rows(shifted, (logits, top), kind.shape, axis)
    hit: Expr = ("equal", ("index", axis), arg(1))
    chosen = context.rows(ex.select(hit, arg(0), ex.ZERO), (logits, TARGET), kind.shape, axis)
    mean = context.rows(ex.mul(arg(0), even), (logits,), kind.shape, axis)
    value = ex.sub(ex.add(("log", arg(0)), arg(1)), arg(2))
    smoothed = ex.add(value, ex.mul(arg(4), ex.sub(arg(2), arg(3))))
    value_rows = build.map(smoothed, (total, top, chosen, mean, LABEL_SMOOTHING), kept)
    _sample_means(context, value_rows, kept, share)
    one_hot = ex.select(("equal", ("index", axis), arg(3)), ex.ONE, ex.ZERO)
    smoothing = ex.mul(arg(5), ex.sub(one_hot, even))
    slope = ex.add(ex.sub(ex.div(shifted, arg(2)), one_hot), smoothing)
    scale = ex.mul(arg(4), const(share))
    inputs = (logits, top, total, TARGET, LOSS_SCALE, LABEL_SMOOTHING)
    return "loss", build.map(ex.mul(scale, slope), inputs, kind, gradient_name(logits))


def _sample_means(context: Context, rows: str, kind: TensorType, share: float) -> None:
    """The loss [N]: mean over all axes but the batch of `rows`."""
    build, axes = context.build, tuple(range(1, len(kind.shape)))
    if kind.elements > 1:
        attrs = {"exprs": (ex.mul(arg(0), const(share)),), "axes": axes, "kind": "sum", "domain": kind.shape}
        rows = build.emit("reduce", (rows,), [TensorType((BATCH, *(1 for _ in axes)))], attrs)[0]
    build.emit("reshape", [rows], [TensorType((BATCH,))], {}, ["loss"])


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
