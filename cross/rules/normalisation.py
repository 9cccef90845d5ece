"""Batch norm, layer norm and local response normalisation.

Batch norm in training is three kernels forward (per-sample statistics, their sum, an element-wise map) and three
backward. The statistics are each sample's sum and squared deviations from its own mean, combined over samples by
Chan, Golub and LeVeque's formula: E[x^2] - mean^2 would cancel.
"""

from __future__ import annotations

from cross import expression as ex
from cross.expression import arg, const
from cross.graph import Node, TensorType
from cross.rules.context import Context


def _spatial(context: Context, x: str) -> tuple[int, ...]:
    return tuple(range(2, len(context.shape(x))))


def _channel_type(context: Context, x: str) -> TensorType:
    """A vector of one value a channel that broadcasts against x."""
    return TensorType((context.shape(x)[1], *(1 for _ in _spatial(context, x))))


def batch_norm(context: Context, node: Node) -> None:
    """y = (x - mean) * scale + offset, with mean and scale from the batch (training) or the running statistics.

    A frozen one uses the running statistics in training too: its coefficients are computed in every run, since a weights
    file may have replaced them, and its map goes into the element-wise work behind the convolution.
    The mean is taken off first: folded into a shift, it would cancel against x and cost digits.
    """
    build = context.build
    x, gamma, beta, mean, var = node.inputs
    vector, epsilon = _channel_type(context, x), float(node.attrs["eps"])
    by_batch = build.training and node.outputs[0] not in context.frozen_norms
    if by_batch:
        mean, batch_var, scale, offset = _batch_statistics(context, node, vector)
        context.saved[node.outputs[0]] = (mean, batch_var)
    else:
        statistics = (gamma, beta, mean, var)
        mean, scale, offset = build.emit("batch_norm_running", statistics, [vector] * 3, {"eps": epsilon})
        context.saved[node.outputs[0]] = (mean, scale)
    expr = ex.add(ex.mul(ex.sub(arg(0), arg(1)), arg(2)), arg(3))
    attrs = {"expr": expr, "batch_norm": by_batch}
    build.emit("map", (x, mean, scale, offset), [context.type(node.outputs[0])], attrs, node.outputs)


def _batch_statistics(context: Context, node: Node, vector: TensorType) -> tuple[str, str, str, str]:
    build = context.build
    x, gamma, beta, mean, var = node.inputs
    shape = context.shape(x)
    pixels = 1
    for extent in shape[2:]:
        pixels *= extent
    if len(shape) == 4:
        rows = TensorType((shape[0], shape[1], 1, 1))
        partial: tuple[str, ...] = build.emit("batch_statistics", [x], [rows, rows])
    else:
        partial = (x,)
    attrs = {"pixels": pixels, "eps": float(node.attrs["eps"]), "momentum": float(node.attrs["momentum"])}
    outputs = build.emit(
        "batch_norm_finish",
        (*partial, gamma, beta, mean, var),
        [vector] * 6,
        {**attrs, "updates": (mean, var)},
    )
    _, _, batch_mean, batch_var, scale, offset = outputs
    return batch_mean, batch_var, scale, offset


def batch_norm_gradient(context: Context, node: Node, dy: str) -> dict[str, str]:
    """dx = a dy + b (x - mean) + c with channel vectors a, b, c; dgamma and dbeta are the two sums they need.

    A frozen one is an affine map: dx = scale dy.
    """
    x, gamma, beta, _, running_var = node.inputs
    frozen = node.outputs[0] in context.frozen_norms
    mean, more = context.saved[node.outputs[0]]
    found: dict[str, str] = {}
    if not frozen or context.wanted.intersection((gamma, beta)):
        outputs = _gradient_sums(context, node, dy, mean, running_var if frozen else more)
        found |= {gamma: outputs[1], beta: outputs[2]}
    if frozen:
        found[x] = context.build.map(ex.mul(arg(0), arg(1)), (dy, more), context.type(x))
    elif x in context.wanted:
        expr = ex.add(ex.add(ex.mul(arg(0), arg(2)), ex.mul(ex.sub(arg(1), arg(5)), arg(3))), arg(4))
        found[x] = context.build.map(expr, (dy, x, *outputs[3:], mean), context.type(x))
    return {name: tensor for name, tensor in found.items() if name in context.wanted}


def _gradient_sums(context: Context, node: Node, dy: str, mean: str, var: str) -> tuple[str, ...]:
    """Sum of dy (x - mean), dgamma, dbeta, a, b, c."""
    build, (x, gamma, beta, _, _) = context.build, node.inputs
    axes, domain, vector = _spatial(context, x), context.shape(x), _channel_type(context, x)
    centred = ex.mul(arg(0), ex.sub(arg(1), arg(2)))
    rows = TensorType(tuple(1 if i in axes else d for i, d in enumerate(domain)))
    if axes:
        attrs = {"exprs": (arg(0), centred), "axes": axes, "kind": "sum", "domain": domain}
        partial = build.emit("reduce", (dy, x, mean), [rows, rows], attrs)
    else:
        partial = (dy, build.map(centred, (dy, x, mean), TensorType(domain)))
    pixels = 1
    for axis in axes:
        pixels *= domain[axis]
    return build.emit(
        "batch_norm_gradient_finish",
        (*partial, gamma, var),
        [vector, context.type(gamma), context.type(beta), vector, vector, vector],
        {"pixels": pixels, "eps": float(node.attrs["eps"])},
    )


def layer_norm(context: Context, node: Node) -> None:
    """y = (x - mean) / sqrt(var + eps) * gamma + beta over the last axis; Ba, Kiros and Hinton 2016, section 3."""
    build, kind, (x, gamma, *beta) = context.build, context.type(node.outputs[0]), node.inputs
    axis, share = len(kind.shape) - 1, const(1.0 / kind.shape[-1])
    deviation = ex.sub(arg(0), arg(1))
    mean = context.rows(ex.mul(arg(0), share), (x,), kind.shape, axis)
    var = context.rows(ex.mul(ex.mul(deviation, deviation), share), (x, mean), kind.shape, axis)
    inverse_expr = ex.div(ex.ONE, ("sqrt", ex.add(arg(0), const(float(node.attrs["eps"])))))
    inverse = build.map(inverse_expr, (var,), context.type(var))
    context.saved[node.outputs[0]] = (mean, inverse)
    expr = ex.mul(ex.mul(deviation, arg(2)), arg(3))
    expr = ex.add(expr, arg(4)) if beta else expr
    build.map(expr, (x, mean, inverse, gamma, *beta), kind, node.outputs[0])


def layer_norm_gradient(context: Context, node: Node, dy: str) -> dict[str, str]:
    """With g = dy gamma and the normalised z: dx = (g - mean of g - z * mean of g z) / sqrt(var + eps)."""
    build, (x, gamma, *beta) = context.build, node.inputs
    kind, (mean, inverse) = context.type(x), context.saved[node.outputs[0]]
    axis, share, found = len(kind.shape) - 1, const(1.0 / kind.shape[-1]), {}
    normal = ex.mul(ex.sub(arg(1), arg(2)), arg(3))
    inputs = (dy, x, mean, inverse)
    if gamma in context.wanted:
        found[gamma] = context.sum_to(ex.mul(arg(0), normal), inputs, kind.shape, context.shape(gamma))
    for name in beta:
        if name in context.wanted:
            found[name] = context.sum_to(arg(0), (dy,), kind.shape, context.shape(name))
    if x in context.wanted:
        scaled = ex.mul(arg(0), arg(4))
        plain = context.rows(ex.mul(ex.mul(arg(0), arg(1)), share), (dy, gamma), kind.shape, axis)
        weighted = context.rows(ex.mul(ex.mul(scaled, normal), share), (*inputs, gamma), kind.shape, axis)
        expr = ex.mul(ex.sub(ex.sub(scaled, arg(5)), ex.mul(normal, arg(6))), arg(3))
        found[x] = build.map(expr, (*inputs, gamma, plain, weighted), kind)
    return found


def lrn(context: Context, node: Node) -> None:
    """y = x * d^-beta, d = bias + alpha / size * (sum of x^2 over a window of channels); Krizhevsky 2012, section 3.3."""
    build, kind, (x,) = context.build, context.type(node.outputs[0]), node.inputs
    attrs = node.attrs
    window = {"size": int(attrs["size"]), "expr": ex.mul(arg(0), arg(0)), "mirrored": False}
    sums = build.emit("channel_window_sum", [x], [kind], window)[0]
    context.saved[node.outputs[0]] = (sums,)
    build.map(ex.mul(arg(0), _power(node, arg(1))), (x, sums), kind, node.outputs[0])


def _denominator(node: Node, sums: ex.Expr) -> ex.Expr:
    scale = float(node.attrs["alpha"]) / int(node.attrs["size"])
    return ex.add(const(float(node.attrs["bias"])), ex.mul(const(scale), sums))


def _power(node: Node, sums: ex.Expr) -> ex.Expr:
    """d^-beta as exp(-beta log d)."""
    return ("exp", ex.mul(const(-float(node.attrs["beta"])), ("log", _denominator(node, sums))))


def lrn_gradient(context: Context, node: Node, dy: str) -> dict[str, str]:
    """dx = dy d^-beta - 2 alpha beta / size * x * (sum over the mirrored window of dy x d^(-beta-1))."""
    build, (x,) = context.build, node.inputs
    (sums,) = context.saved[node.outputs[0]]
    kind, attrs = context.type(x), node.attrs
    inner = ex.div(ex.mul(ex.mul(arg(0), arg(1)), _power(node, arg(2))), _denominator(node, arg(2)))
    window = {"size": int(attrs["size"]), "expr": inner, "mirrored": True}
    spread = build.emit("channel_window_sum", (dy, x, sums), [kind], window)[0]
    factor = 2.0 * float(attrs["alpha"]) * float(attrs["beta"]) / int(attrs["size"])
    direct = ex.mul(arg(0), _power(node, arg(2)))
    expr = ex.sub(direct, ex.mul(ex.mul(const(factor), arg(1)), arg(3)))
    return {x: build.map(expr, (dy, x, sums, spread), kind)}
