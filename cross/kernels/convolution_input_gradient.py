"""Input gradient of the direct convolution: dx[n, c, h, w] = sum over o, r, s of dy[n, o, p, q] * w[o, c, r, s], where
p*stride + r*dilation - pad = h. Rows of x are taken by their phase, h modulo stride: all rows of a phase sum over the same
kernel rows (`input_gradient_phases`), so each phase is a correlation of dy with part of the kernel, and nothing is multiplied by zero.

The vector lanes run over input channels here, so the weight is read from a transposed copy, made once a step; a batch with few
pixels does without (`lane_sums.py`).
"""

from __future__ import annotations

from dataclasses import replace

from tvm.script.ir_builder import tirx as T

from cross.graph import Shape
from cross.kernels.arithmetic import keep, transposed
from cross.kernels.convolution import ConvSpec, Taps, input_gradient_phases
from cross.kernels.correlation import Correlation, correlation, write_correlation
from cross.kernels.lane_sums import is_few, suits_lane_sums, write_lane_sums
from cross.kernels.loop_nest import Buffer, Expr, PrimFunc, lanes, settle, store, write_kernel
from cross.storage import NO_PADS
from cross.target import Target


def transposed_weight_shape(spec: ConvSpec, target: Target) -> Shape:
    """Physical shape [C blocks, O blocks a group, R, S, o, c] of the copy that `weight_transpose` writes."""
    out_blocks, in_blocks, rows, columns, depth, width = spec.weight_storage(target).shape
    return in_blocks * spec.groups, out_blocks // spec.groups, rows, columns, width, depth


def weight_transpose(spec: ConvSpec, target: Target) -> PrimFunc:
    """PrimFunc(w in forward storage, copy of `transposed_weight_shape`): input and output channels exchanged,
    kernel rows and columns reversed (so that both operands of the gradient are read in rising order)."""
    with write_kernel("weight_transpose") as kernel:
        weight = kernel.tensor("weight", spec.weight_storage(target).shape)
        copy = kernel.tensor("copy", transposed_weight_shape(spec, target))
        write_transpose(spec, target, weight, copy)
    return kernel.function


def write_transpose(spec: ConvSpec, target: Target, weight: Buffer, copy: Buffer) -> None:
    """The nest of `weight_transpose`, into the kernel that is being written."""
    in_blocks, out_blocks, rows, columns, width, depth = transposed_weight_shape(spec, target)
    in_group = in_blocks // spec.groups
    with T.parallel(in_blocks * out_blocks) as task, T.grid(rows, columns) as (r, s):
        block, k = settle(task // out_blocks), settle(task % out_blocks)
        group, c = settle(block // in_group), settle(block % in_group)
        write_square(target, weight, (group * out_blocks + k, c, r, s), copy, (block, k, rows - 1 - r, columns - 1 - s))


def write_square(
    target: Target, weight: Buffer, source: tuple[Expr, ...], copy: Buffer, destination: tuple[Expr, ...]
) -> None:
    """One tap of one pair of blocks: [i, o] at `source` becomes [o, i] at `destination`."""
    depth, width = int(weight.shape[-2]), int(weight.shape[-1])
    if depth == width == target.vector_floats > 1 and not target.rvv:
        rows = transposed([keep(weight[(*source, i, lanes(0, width))]) for i in range(depth)])
        for o, row in enumerate(rows):
            store(copy, (*destination, o, lanes(0, depth)), row)
        return
    for o in range(width):
        for i in range(depth):
            store(copy, (*destination, o, i), weight[(*source, i, o)])


def convolution_input_gradient(spec: ConvSpec, target: Target) -> PrimFunc:
    """PrimFunc(dy stored with `spec.y_pads`, transposed copy of w, dx stored without pads); where the spec `suits_lane_sums`
    PrimFunc(dy, w in weight storage, copy, dx), which makes the copy itself for a batch that wants it.

    y_pads must be at least `input_gradient_pads(spec)`. Any stride, pad and dilation; rows of x that no output reads get zero."""
    work = input_gradient_correlation(spec, target)
    if not suits_lane_sums(spec, target):
        return correlation(work, target)
    with write_kernel(work.name) as kernel:
        dy = kernel.tensor("dy", work.source.shape)
        weight = kernel.tensor("weight", spec.weight_storage(target).shape)
        copy = kernel.tensor("copy", work.weight_shape)
        dx = kernel.tensor("dx", work.destination.shape)
        with T.If(is_few(spec, kernel.batch)):
            with T.Then():
                write_lane_sums(spec, target, kernel.batch, (dy, weight, dx))
            with T.Else():
                write_transpose(spec, target, weight, copy)
                write_correlation(work, target, kernel.batch, (dy, copy, dx))
    return kernel.function


def input_gradient_correlation(spec: ConvSpec, target: Target) -> Correlation:
    """The input gradient as a correlation of dy with the transposed copy."""
    return Correlation(
        name="convolution_input_gradient",
        source=spec.y_storage(target),
        weight_shape=transposed_weight_shape(spec, target),
        destination=spec.x_storage(target, NO_PADS),
        groups=spec.groups,
        in_strides=(1, 1),
        out_strides=spec.strides,
        phases=tuple(
            replace(phase, row_taps=_in_copy(spec, 0, phase.row_taps), column_taps=_in_copy(spec, 1, phase.column_taps))
            for phase in input_gradient_phases(spec)
        ),
    )


def _in_copy(spec: ConvSpec, axis: int, taps: Taps) -> Taps:
    """The same taps on the copy of the weight, whose rows and columns are reversed."""
    return replace(taps, first=spec.kernel[axis] - 1 - taps.first, step=-taps.step)
