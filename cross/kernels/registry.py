"""Operator -> kernels: the one table that `cross.lower` walks.

A builder gets the `Site` (the node with its types, storages, convolution spec and target) and returns its calls in order.
Nothing is built until the kernel turns out to be a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from cross.expression import arg
from cross.fuse import domain_of, expressions
from cross.graph import Node, TensorType
from cross.kernels import convolution as conv
from cross.kernels import dense, depthwise, embedding, grouped, map, movement, normalisation, pooling, reduce
from cross.kernels.convolution_forward import convolution_forward, forward_parts
from cross.kernels.convolution_input_gradient import (
    convolution_input_gradient,
    transposed_weight_shape,
    weight_transpose,
)
from cross.kernels.convolution_weight_gradient import convolution_weight_gradient, sums_shape
from cross.kernels.lane_sums import suits_lane_sums
from cross.kernels.winograd import suits_winograd
from cross.kernels.winograd_correlation import (
    forward_chunk_shape,
    input_gradient_chunk_shape,
    winograd_forward,
    winograd_forward_parts,
    winograd_input_gradient,
)
from cross.kernels.winograd_weight import is_in_parts, transformed_weight_shape, winograd_weight
from cross.kernels.winograd_weight_gradient import (
    has_work_for_all_cores,
    weight_gradient_chunk_shapes,
    winograd_weight_gradient,
)
from cross.storage import Storage, plain, row_major
from cross.target import Target


@dataclass(frozen=True)
class Site:
    """Where a kernel is wanted."""

    node: Node
    types: Mapping[str, TensorType]
    storages: Mapping[str, Storage]
    spec: conv.ConvSpec | None
    target: Target
    lean: bool = False
    """Kernels that take the least memory, not the least time."""

    @property
    def vector(self) -> int:
        return self.target.channel_block

    def inputs(self) -> tuple[Storage, ...]:
        return tuple(self.storages[name] for name in self.node.inputs)

    def outputs(self) -> tuple[Storage, ...]:
        return tuple(self.storages[name] for name in self.node.outputs)

    def input_types(self) -> tuple[TensorType, ...]:
        return tuple(self.types[name] for name in self.node.inputs)

    def output_types(self) -> tuple[TensorType, ...]:
        return tuple(self.types[name] for name in self.node.outputs)

    def domain(self) -> tuple[int, ...]:
        return domain_of(self.types, self.node)

    def everything(self) -> tuple[Any, ...]:
        """All that a kernel without extras depends on."""
        attrs = tuple(sorted((k, v) for k, v in self.node.attrs.items() if k not in ("updates", "batch_norm")))
        return attrs, self.inputs(), self.input_types(), self.outputs(), self.output_types()


@dataclass(frozen=True)
class SiteCall:
    """One call: symbol stem, what the kernel depends on, its builder, its argument tensors, and temporaries it needs.

    `flops` is (fixed, a sample); None: counted from the node's expressions.
    """

    name: str
    key: Any
    build: Callable[[], Any]
    arguments: tuple[str, ...]
    flops: tuple[int, int] | None = None
    temporaries: Mapping[str, Storage] = field(default_factory=dict)


def _single(site: Site, build: Callable[[], Any], flops: tuple[int, int] | None = None) -> list[SiteCall]:
    node = site.node
    return [SiteCall(node.op, site.everything(), build, (*node.inputs, *node.outputs), flops)]


def _map(site: Site) -> list[SiteCall]:
    expr, (output,), (kind,) = site.node.attrs["expr"], site.outputs(), site.output_types()
    flops = (0, 0) if expr == arg(0) else None
    return _single(
        site, lambda: map.map_kernel(expr, site.inputs(), site.input_types(), output, kind, site.vector), flops
    )


def _reduce(site: Site) -> list[SiteCall]:
    attrs = site.node.attrs
    return _single(
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
    return _single(
        site,
        lambda: reduce.sum_batch_kernel(expr, site.domain(), site.inputs(), site.input_types(), output, site.vector),
    )


def _batch_statistics(site: Site) -> list[SiteCall]:
    (x,), (kind,) = site.inputs(), site.input_types()
    work = (0, 5 * kind.elements)
    return _single(site, lambda: normalisation.batch_statistics_kernel(kind.shape, x, site.outputs()), work)


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
    return _single(
        site,
        lambda: normalisation.batch_norm_gradient_finish_kernel(
            partial, channels, gamma.elements, attrs["pixels"], attrs["eps"], site.vector
        ),
        (0, 2 * channels),
    )


def _batch_norm_running(site: Site) -> list[SiteCall]:
    gamma, channels, eps = site.inputs()[0], site.input_types()[0].shape[0], site.node.attrs["eps"]
    return _single(
        site,
        lambda: normalisation.batch_norm_running_kernel(channels, gamma.elements, eps, site.vector),
        (4 * channels, 0),
    )


def _conv2d(site: Site) -> list[SiteCall]:
    spec, target = _spec(site), site.target
    if _takes_winograd(site):
        return _winograd_forward(site, spec)
    if _gathers_statistics(site):
        call = _convolution_call(site, spec, partial(convolution_forward, spec, target, statistics=True))
        return [_with_statistics(site, call, forward_parts(spec, target))]
    builders = {
        "direct": convolution_forward,
        "depthwise": depthwise.depthwise_forward,
        "grouped": grouped.grouped_forward,
    }
    build = builders[conv.convolution_class(spec, target)]
    return [_convolution_call(site, spec, lambda: build(spec, target))]


def _conv2d_weight_gradient(site: Site) -> list[SiteCall]:
    spec, target = _spec(site), site.target
    if _takes_winograd(site) and has_work_for_all_cores(spec, target):
        return _winograd_weight_gradient(site, spec)
    kind = conv.convolution_class(spec, target)
    if kind != "direct":
        build = depthwise.depthwise_weight_gradient if kind == "depthwise" else grouped.grouped_weight_gradient
        return [_convolution_call(site, spec, lambda: build(spec, target))]
    shape = sums_shape(spec, target)
    sums = {} if shape is None else {f"{site.node.outputs[0]}:sums": shape}
    return [_convolution_call(site, spec, lambda: convolution_weight_gradient(spec, target), sums)]


def _conv2d_input_gradient(site: Site) -> list[SiteCall]:
    """The direct kernel reads a copy of the weight with input and output channels exchanged, unless a batch has few pixels."""
    spec, target, node = _spec(site), site.target, site.node
    kind = conv.convolution_class(spec, target)
    if kind != "direct":
        build = depthwise.depthwise_input_gradient if kind == "depthwise" else grouped.grouped_input_gradient
        return [_convolution_call(site, spec, lambda: build(spec, target))]
    if _takes_winograd(site):
        return _winograd_input_gradient(site, spec)
    dy, weight = node.inputs
    copy = f"{weight}:transposed~{node.outputs[0]}"
    shape, few = transposed_weight_shape(spec, target), suits_lane_sums(spec, target)
    product = SiteCall(
        node.op,
        (spec, target.name),
        lambda: convolution_input_gradient(spec, target),
        (dy, weight, copy, node.outputs[0]) if few else (dy, copy, node.outputs[0]),
        (0, conv.flops(spec)),
        {copy: row_major("plain", shape)},
    )
    if few:
        return [product]
    build = partial(weight_transpose, spec, target)
    return [SiteCall("weight_transpose", (spec, target.name), build, (weight, copy), (0, 0)), product]


def _takes_winograd(site: Site) -> bool:
    return not site.lean and suits_winograd(_spec(site), site.target)


def _winograd_forward(site: Site, spec: conv.ConvSpec) -> list[SiteCall]:
    target, statistics = site.target, _gathers_statistics(site)
    build = partial(winograd_forward, spec, target, statistics=statistics)
    *before, product = _winograd_correlation(
        site, spec, "winograd_forward", build, forward_chunk_shape(spec, target), False
    )
    return [*before, _with_statistics(site, product, winograd_forward_parts(spec, target)) if statistics else product]


def _gathers_statistics(site: Site) -> bool:
    """Whether `cross.fuse_statistics` put a batch norm's statistics into this convolution."""
    return len(site.node.outputs) > 1


def _with_statistics(site: Site, call: SiteCall, parts: Storage) -> SiteCall:
    """The call of a kernel that gathers statistics too, which are stored as `parts`."""
    temporaries = {**call.temporaries, **dict.fromkeys(site.node.outputs[1:], parts)}
    return replace(call, key=(*call.key, "statistics"), temporaries=temporaries)


def _winograd_input_gradient(site: Site, spec: conv.ConvSpec) -> list[SiteCall]:
    chunk, build = input_gradient_chunk_shape(spec, site.target), partial(winograd_input_gradient, spec, site.target)
    return _winograd_correlation(site, spec, "winograd_input_gradient", build, chunk, True)


def _winograd_correlation(
    site: Site,
    spec: conv.ConvSpec,
    name: str,
    build: Callable[[], Any],
    chunk_shape: tuple[int, ...],
    is_gradient: bool,
) -> list[SiteCall]:
    """The convolution, and the transform of its weight before it where that is whole."""
    target, (x, weight), (y, *statistics) = site.target, site.node.inputs, site.node.outputs
    transformed, chunk = f"{weight}:transformed~{y}", f"{y}:chunk"
    shape = transformed_weight_shape(spec, target, is_gradient)
    temporaries = {transformed: row_major("plain", shape), chunk: row_major("plain", chunk_shape)}
    sources = (x, weight) if is_in_parts(spec) else (x,)
    arguments = (*sources, transformed, chunk, y, *statistics)
    product = SiteCall(name, (spec, target.name), build, arguments, (0, conv.flops(spec)), temporaries)
    if is_in_parts(spec):
        return [product]
    key, build_weight = (spec.weight_shape, is_gradient), partial(winograd_weight, spec, target, is_gradient)
    return [SiteCall("winograd_weight", key, build_weight, (weight, transformed), (0, 0)), product]


def _winograd_weight_gradient(site: Site, spec: conv.ConvSpec) -> list[SiteCall]:
    shapes, (dw,) = weight_gradient_chunk_shapes(spec, site.target), site.node.outputs
    # The sums are there where there are several parts.
    chunks = dict(zip((f"{dw}:x_chunk", f"{dw}:dy_chunk", f"{dw}:sums"), shapes, strict=False))
    build = partial(winograd_weight_gradient, spec, site.target)
    return [_convolution_call(site, spec, build, chunks, "winograd_weight_gradient")]


def _spec(site: Site) -> conv.ConvSpec:
    assert site.spec is not None, "assign_storage attaches a spec to every convolution"
    return site.spec


def _convolution_call(
    site: Site,
    spec: conv.ConvSpec,
    build: Callable[[], Any],
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    op: str = "",
) -> SiteCall:
    """A kernel over the node's inputs, temporaries of these physical `shapes`, by name, and the node's outputs. `op`: where the
    kernel is called otherwise than the node."""
    node, temporaries = site.node, {name: row_major("plain", shape) for name, shape in shapes.items()}
    arguments = (*node.inputs, *temporaries, *node.outputs)
    return SiteCall(op or node.op, (spec, site.target.name), build, arguments, (0, conv.flops(spec)), temporaries)


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
    return _single(site, lambda: build(spec, site.target), (0, 2 * rows * depth * width))


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
    return _single(site, lambda: embedding.embedding(spec, site.target), (0, 0))


def _embedding_gradient(site: Site) -> list[SiteCall]:
    (tokens, _), (table,) = site.input_types(), site.output_types()
    spec = embedding.EmbeddingSpec(table.shape[0], table.shape[1], tokens.shape[1:])
    work = (0, tokens.elements * table.shape[1])
    return _single(site, lambda: embedding.embedding_gradient(spec, site.target), work)


def _max_pool2d(site: Site) -> list[SiteCall]:
    (x,), (x_type,), (y, winner) = site.inputs(), site.input_types(), site.outputs()
    kind, attrs = site.output_types()[0], site.node.attrs
    return _single(site, lambda: pooling.max_pool2d_kernel(x, x_type, (y, winner), kind, attrs), (0, 0))


def _max_pool2d_gradient(site: Site) -> list[SiteCall]:
    (dy, winner), (dx,), (kind,) = site.inputs(), site.outputs(), site.output_types()
    dy_type, attrs = site.input_types()[0], site.node.attrs
    return _single(site, lambda: pooling.max_pool2d_gradient_kernel(dy, dy_type, winner, dx, kind, attrs), (0, 0))


def _avg_pool2d(site: Site) -> list[SiteCall]:
    (x,), (x_type,), (y,) = site.inputs(), site.input_types(), site.outputs()
    return _single(site, lambda: pooling.avg_pool2d_kernel(x, x_type, y, site.node.attrs), (0, 0))


def _avg_pool2d_gradient(site: Site) -> list[SiteCall]:
    (dy,), (dy_type,), (dx,), (kind,) = site.inputs(), site.input_types(), site.outputs(), site.output_types()
    return _single(site, lambda: pooling.avg_pool2d_gradient_kernel(dy, dy_type, dx, kind, site.node.attrs), (0, 0))


def _channel_window_sum(site: Site) -> list[SiteCall]:
    attrs, (output,), (kind,) = site.node.attrs, site.outputs(), site.output_types()
    return _single(
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
    return _single(site, lambda: movement.reshape_kernel(x, x_type, output, kind, site.vector), (0, 0))


def _transpose(site: Site) -> list[SiteCall]:
    (x,), (output,), (kind,), perm = site.inputs(), site.outputs(), site.output_types(), site.node.attrs["perm"]
    return _single(site, lambda: movement.transpose_kernel(x, perm, output, kind, site.vector), (0, 0))


def _concat(site: Site) -> list[SiteCall]:
    (output,), (kind,), axis = site.outputs(), site.output_types(), site.node.attrs["axis"]
    return _single(
        site,
        lambda: movement.concat_kernel(site.inputs(), site.input_types(), axis, output, kind, site.vector),
        (0, 0),
    )


def _slice(site: Site) -> list[SiteCall]:
    (x,), (output,), (kind,), attrs = site.inputs(), site.outputs(), site.output_types(), site.node.attrs
    return _single(
        site,
        lambda: movement.slice_kernel(x, attrs["starts"], attrs["steps"], output, kind, site.vector),
        (0, 0),
    )


def _unslice(site: Site) -> list[SiteCall]:
    (x,), (x_type,), (output,), (kind,) = site.inputs(), site.input_types(), site.outputs(), site.output_types()
    attrs = site.node.attrs
    return _single(
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
    "conv2d": _conv2d,
    "conv2d_input_gradient": _conv2d_input_gradient,
    "conv2d_weight_gradient": _conv2d_weight_gradient,
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
