"""Operator -> kernels: the one table that `cross.lower` walks.

A builder gets the `Site` (the node with its types, storages, convolution spec and target) and returns its calls in order.
Nothing is built until the kernel turns out to be a new one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cross.expression import arg
from cross.fuse import expressions
from cross.graph import TensorType
from cross.kernels import convolution_calls, dense, embedding, map, movement, normalisation, pooling, reduce
from cross.kernels.site import Site, SiteCall, single
from cross.storage import plain


def _map(site: Site) -> list[SiteCall]:
    expr, (output,), (kind,) = site.node.attrs["expr"], site.outputs(), site.output_types()
    flops = (0, 0) if expr == arg(0) else None
    return single(
        site, lambda: map.map_kernel(expr, site.inputs(), site.input_types(), output, kind, site.vector), flops
    )


def _reduce(site: Site) -> list[SiteCall]:
    attrs = site.node.attrs
    return single(
        site,
        lambda: reduce.reduce_kernel(
            attrs["exprs"],
            attrs["kind"],
            tuple(attrs["axes"]),
            site.domain(),
            site.inputs(),
            site.input_types(),
            site.outputs(),
            site.vector,
        ),
    )


def _sum_batch(site: Site) -> list[SiteCall]:
    (expr,), (output,) = expressions(site.node), site.outputs()
    return single(
        site,
        lambda: reduce.sum_batch_kernel(expr, site.domain(), site.inputs(), site.input_types(), output, site.vector),
    )


def _batch_statistics(site: Site) -> list[SiteCall]:
    (x,), (kind,) = site.inputs(), site.input_types()
    work = (0, 5 * kind.elements)
    return single(site, lambda: normalisation.batch_statistics_kernel(kind.shape, x, site.outputs()), work)


def _batch_norm_finish(site: Site) -> list[SiteCall]:
    node, inputs = site.node, site.inputs()
    partial, gamma = inputs[:-4], inputs[-4]
    channels, attrs = site.input_types()[-4].shape[0], site.node.attrs
    return [
        SiteCall(
            node.op,
            (partial, channels, gamma.elements, attrs["pixels"], attrs["eps"], attrs["momentum"]),
            lambda: normalisation.batch_norm_finish_kernel(
                partial, channels, gamma.elements, attrs["pixels"], attrs["eps"], attrs["momentum"], site.vector
            ),
            (*node.inputs, *node.outputs, *node.attrs["updates"]),
            (0, 4 * channels),
        )
    ]


def _batch_norm_gradient_finish(site: Site) -> list[SiteCall]:
    partial, gamma, attrs = site.inputs()[:-2], site.inputs()[-2], site.node.attrs
    channels = site.input_types()[-2].shape[0]
    return single(
        site,
        lambda: normalisation.batch_norm_gradient_finish_kernel(
            partial, channels, gamma.elements, attrs["pixels"], attrs["eps"], site.vector
        ),
        (0, 2 * channels),
    )


def _batch_norm_running(site: Site) -> list[SiteCall]:
    gamma, channels, eps = site.inputs()[0], site.input_types()[0].shape[0], site.node.attrs["eps"]
    return single(
        site,
        lambda: normalisation.batch_norm_running_kernel(channels, gamma.elements, eps, site.vector),
        (4 * channels, 0),
    )


def _dense_shape(site: Site, x: TensorType, weight: TensorType) -> tuple[int, int, int]:
    """(rows a sample, K, M)."""
    rows = x.elements // x.shape[-1]
    return rows, weight.shape[1], weight.shape[0]


def _dense(site: Site) -> list[SiteCall]:
    """With many rows a sample, the weight is transposed first and rows of the result are accumulated in vectors."""
    x, weight = site.input_types()
    rows, depth, width = _dense_shape(site, x, weight)
    if rows < dense.MANY_ROWS or site.target.vector_floats == 1:
        return _dense_call(site, dense.dense_forward, x, weight)
    (data, name), (output,) = site.node.inputs, site.node.outputs
    copy = f"{name}:transposed~{output}"
    spec = dense.DenseSpec(inputs=width, outputs=depth, leading=tuple(x.shape[1:-1]))
    build = partial(dense.dense_input_gradient, spec, site.target)
    work = (0, 2 * rows * depth * width)
    product = SiteCall("dense_rows", (spec, site.target.name), build, (data, copy, output), work)
    return [_matrix_transpose(site, name, copy), product]


def _dense_input_gradient(site: Site) -> list[SiteCall]:
    return _dense_call(site, dense.dense_input_gradient, site.output_types()[0], site.input_types()[1])


def _dense_weight_gradient(site: Site) -> list[SiteCall]:
    return _dense_call(site, dense.dense_weight_gradient, site.input_types()[0], site.output_types()[0])


def _dense_call(site: Site, build: Callable[..., Any], x: TensorType, weight: TensorType) -> list[SiteCall]:
    rows, depth, width = _dense_shape(site, x, weight)
    spec = dense.DenseSpec(depth, width, tuple(x.shape[1:-1]))
    return single(site, lambda: build(spec, site.target), (0, 2 * rows * depth * width))


def _matmul(site: Site) -> list[SiteCall]:
    a, b = site.input_types()
    (kind,), attrs = site.output_types(), site.node.attrs
    depth = a.shape[-2] if attrs["transpose_a"] else a.shape[-1]
    spec = dense.MatmulSpec(
        leading=tuple(kind.shape[1:-2]),
        rows=kind.shape[-2],
        columns=kind.shape[-1],
        inner=depth,
        transpose_a=attrs["transpose_a"],
    )
    left, right = site.node.inputs
    calls = []
    if attrs["transpose_b"]:
        copy = f"{right}:transposed~{site.node.outputs[0]}"
        calls.append(_matrix_transpose(site, right, copy))
        right = copy
    output, work = site.node.outputs[0], (0, 2 * kind.elements * depth)
    build = partial(dense.matmul, spec, site.target)
    return [*calls, SiteCall(site.node.op, (spec, site.target.name), build, (left, right, output), work)]


def _matrix_transpose(site: Site, name: str, copy: str) -> SiteCall:
    """A copy of a tensor with its last two axes exchanged."""
    shape = site.types[name].shape
    storage = plain(TensorType((*shape[:-2], shape[-1], shape[-2])))
    build = partial(dense.matrix_transpose, shape, site.target)
    return SiteCall("matrix_transpose", (shape, site.target.name), build, (name, copy), (0, 0), {copy: storage})


def _embedding(site: Site) -> list[SiteCall]:
    tokens, table = site.input_types()
    spec = embedding.EmbeddingSpec(table.shape[0], table.shape[1], tokens.shape[1:])
    return single(site, lambda: embedding.embedding(spec, site.target), (0, 0))


def _embedding_gradient(site: Site) -> list[SiteCall]:
    (tokens, _), (table,) = site.input_types(), site.output_types()
    spec = embedding.EmbeddingSpec(table.shape[0], table.shape[1], tokens.shape[1:])
    work = (0, tokens.elements * table.shape[1])
    return single(site, lambda: embedding.embedding_gradient(spec, site.target), work)


def _max_pool2d(site: Site) -> list[SiteCall]:
    (x,), (x_type,), (y, winner) = site.inputs(), site.input_types(), site.outputs()
    kind, attrs = site.output_types()[0], site.node.attrs
    return single(site, lambda: pooling.max_pool2d_kernel(x, x_type, (y, winner), kind, attrs), (0, 0))


def _max_pool2d_gradient(site: Site) -> list[SiteCall]:
    (dy, winner), (dx,), (kind,) = site.inputs(), site.outputs(), site.output_types()
    dy_type, attrs = site.input_types()[0], site.node.attrs
    return single(site, lambda: pooling.max_pool2d_gradient_kernel(dy, dy_type, winner, dx, kind, attrs), (0, 0))


def _avg_pool2d(site: Site) -> list[SiteCall]:
    (x,), (x_type,), (y,) = site.inputs(), site.input_types(), site.outputs()
    return single(site, lambda: pooling.avg_pool2d_kernel(x, x_type, y, site.node.attrs), (0, 0))


def _avg_pool2d_gradient(site: Site) -> list[SiteCall]:
    (dy,), (dy_type,), (dx,), (kind,) = site.inputs(), site.input_types(), site.outputs(), site.output_types()
    return single(site, lambda: pooling.avg_pool2d_gradient_kernel(dy, dy_type, dx, kind, site.node.attrs), (0, 0))


def _channel_window_sum(site: Site) -> list[SiteCall]:
    attrs, (output,), (kind,) = site.node.attrs, site.outputs(), site.output_types()
    return single(
        site,
        lambda: movement.channel_window_sum_kernel(
            attrs["expr"],
            attrs["size"],
            attrs["mirrored"],
            site.inputs(),
            site.input_types(),
            output,
            kind,
        ),
        (0, attrs["size"] * kind.elements),
    )


def _reshape(site: Site) -> list[SiteCall]:
    (x,), (x_type,), (output,), (kind,) = site.inputs(), site.input_types(), site.outputs(), site.output_types()
    return single(site, lambda: movement.reshape_kernel(x, x_type, output, kind, site.vector), (0, 0))


def _transpose(site: Site) -> list[SiteCall]:
    (x,), (output,), (kind,), perm = site.inputs(), site.outputs(), site.output_types(), site.node.attrs["perm"]
    return single(site, lambda: movement.transpose_kernel(x, perm, output, kind, site.vector), (0, 0))


def _concat(site: Site) -> list[SiteCall]:
    (output,), (kind,), axis = site.outputs(), site.output_types(), site.node.attrs["axis"]
    return single(
        site,
        lambda: movement.concat_kernel(site.inputs(), site.input_types(), axis, output, kind, site.vector),
        (0, 0),
    )


def _slice(site: Site) -> list[SiteCall]:
    (x,), (output,), (kind,), attrs = site.inputs(), site.outputs(), site.output_types(), site.node.attrs
    return single(
        site,
        lambda: movement.slice_kernel(x, attrs["starts"], attrs["steps"], output, kind, site.vector),
        (0, 0),
    )


def _unslice(site: Site) -> list[SiteCall]:
    (x,), (x_type,), (output,), (kind,) = site.inputs(), site.input_types(), site.outputs(), site.output_types()
    attrs = site.node.attrs
    return single(
        site,
        lambda: movement.unslice_kernel(
            x, x_type, attrs["starts"], attrs["steps"], attrs["value"], output, kind, site.vector
        ),
        (0, 0),
    )


BUILDERS: dict[str, Callable[[Site], list[SiteCall]]] = {
    "map": _map,
    "reduce": _reduce,
    "sum_batch": _sum_batch,
    "batch_statistics": _batch_statistics,
    "batch_norm_finish": _batch_norm_finish,
    "batch_norm_running": _batch_norm_running,
    "batch_norm_gradient_finish": _batch_norm_gradient_finish,
    "conv2d": convolution_calls.conv2d,
    "conv2d_input_gradient": convolution_calls.conv2d_input_gradient,
    "conv2d_weight_gradient": convolution_calls.conv2d_weight_gradient,
    "dense": _dense,
    "dense_input_gradient": _dense_input_gradient,
    "dense_weight_gradient": _dense_weight_gradient,
    "matmul": _matmul,
    "embedding": _embedding,
    "embedding_gradient": _embedding_gradient,
    "max_pool2d": _max_pool2d,
    "max_pool2d_gradient": _max_pool2d_gradient,
    "avg_pool2d": _avg_pool2d,
    "avg_pool2d_gradient": _avg_pool2d_gradient,
    "channel_window_sum": _channel_window_sum,
    "reshape": _reshape,
    "transpose": _transpose,
    "concat": _concat,
    "slice": _slice,
    "unslice": _unslice,
}
