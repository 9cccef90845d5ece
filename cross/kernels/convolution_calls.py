"""Calls of a convolution and of its gradients: which kernels run it, and the temporaries they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from cross.graph import TensorType
from cross.kernels import convolution as conv
from cross.kernels import depthwise, grouped
from cross.kernels.convolution_forward import convolution_forward, forward_parts
from cross.kernels.convolution_input_gradient import (
    convolution_input_gradient,
    transposed_weight_shape,
    weight_transpose,
)
from cross.kernels.convolution_weight_gradient import convolution_weight_gradient, sums_shape
from cross.kernels.lane_sums import suits_lane_sums
from cross.kernels.site import Site, SiteCall
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
from cross.storage import Storage, plain


def conv2d(site: Site) -> list[SiteCall]:
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


def conv2d_weight_gradient(site: Site) -> list[SiteCall]:
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


def conv2d_input_gradient(site: Site) -> list[SiteCall]:
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
        {copy: plain(TensorType(shape))},
    )
    if few:
        return [product]
    build = partial(weight_transpose, spec, target)
    return [SiteCall("weight_transpose", (spec, target.name), build, (weight, copy), (0, 0)), product]


def _takes_winograd(site: Site) -> bool:
    return not site.direct and suits_winograd(_spec(site), site.target)


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
    temporaries = {transformed: plain(TensorType(shape)), chunk: plain(TensorType(chunk_shape))}
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
    node, temporaries = site.node, {name: plain(TensorType(shape)) for name, shape in shapes.items()}
    arguments = (*node.inputs, *temporaries, *node.outputs)
    return SiteCall(op or node.op, (spec, site.target.name), build, arguments, (0, conv.flops(spec)), temporaries)
