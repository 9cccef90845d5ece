"""Grouped convolution whose groups do not fill whole channel blocks: plain NCHW and OIHW storage, bounds known or tested.

The columns that a kernel position reads inside the input are known while the kernel is written; rows are tested once a row.
Each output row is one task's, and is summed in the order of input channels and kernel positions.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from cross.graph import BATCH
from cross.kernels.convolution import ConvSpec
from cross.kernels.loop_nest import Expr, PrimFunc, add_to, lanes, local, settle, store, when, write_kernel, zeros
from cross.target import Target


def grouped_forward(spec: ConvSpec, target: Target) -> PrimFunc:
    """PrimFunc(x [N, C, H, W], w [O, C/groups, R, S], y [N, O, P, Q])."""
    group_in, group_out = spec.in_channels // spec.groups, spec.out_channels // spec.groups
    with write_kernel("grouped_forward") as kernel:
        x, w = kernel.tensor("x", _x_shape(spec)), kernel.tensor("w", spec.weight_shape)
        y = kernel.tensor("y", _y_shape(spec))
        with T.parallel(kernel.batch * spec.out_channels) as task, T.serial(spec.out_height) as p:
            n, o = settle(task // spec.out_channels), settle(task % spec.out_channels)
            with T.serial(spec.out_width) as q:
                store(y, (n, o, p, q), zeros(1))
            with T.grid(group_in, spec.kernel[0]) as (c, r):
                channel, row = settle(o // group_out * group_in + c), settle(_row(spec, p, r))
                with when(T.And(row >= 0, row < spec.height)):
                    for s in range(spec.kernel[1]):
                        first, count, column = _columns(spec, s)
                        with T.serial(count) as i:
                            value = x[n, channel, row, i * spec.strides[1] + column]
                            add_to(y, (n, o, p, first + i), value * w[o, c, r, s])
    return kernel.function


def grouped_input_gradient(spec: ConvSpec, target: Target) -> PrimFunc:
    """PrimFunc(dy [N, O, P, Q], w [O, C/groups, R, S], dx [N, C, H, W])."""
    group_in, group_out = spec.in_channels // spec.groups, spec.out_channels // spec.groups
    with write_kernel("grouped_input_gradient") as kernel:
        dy, w = kernel.tensor("dy", _y_shape(spec)), kernel.tensor("w", spec.weight_shape)
        dx = kernel.tensor("dx", _x_shape(spec))
        with T.parallel(kernel.batch * spec.in_channels) as task:
            n, c = settle(task // spec.in_channels), settle(task % spec.in_channels)
            with T.grid(spec.height, spec.width) as (row, column):
                store(dx, (n, c, row, column), zeros(1))
            with T.grid(group_out, spec.out_height, spec.kernel[0]) as (k, p, r):
                o, row = settle(c // group_in * group_out + k), settle(_row(spec, p, r))
                with when(T.And(row >= 0, row < spec.height)):
                    for s in range(spec.kernel[1]):
                        first, count, column = _columns(spec, s)
                        with T.serial(count) as i:
                            value = dy[n, o, p, first + i] * w[o, c % group_in, r, s]
                            add_to(dx, (n, c, row, i * spec.strides[1] + column), value)
    return kernel.function


def grouped_weight_gradient(spec: ConvSpec, target: Target) -> PrimFunc:
    """PrimFunc(x [N, C, H, W], dy [N, O, P, Q], dw [O, C/groups, R, S]).

    A vector of partial sums runs along the columns of a row; its lanes are added pairwise at the end."""
    group_in, group_out = spec.in_channels // spec.groups, spec.out_channels // spec.groups
    width = target.channel_block
    with write_kernel("grouped_weight_gradient") as kernel:
        x, dy = kernel.tensor("x", _x_shape(spec)), kernel.tensor("dy", _y_shape(spec))
        dw = kernel.tensor("dw", spec.weight_shape)
        with T.parallel(spec.out_channels * group_in) as task, T.serial(spec.kernel[0]) as r:
            o, c = settle(task // group_in), settle(task % group_in)
            channel = settle(o // group_out * group_in + c)
            for s in range(spec.kernel[1]):
                first, count, column = _columns(spec, s)
                sums = local(width)
                store(sums, (lanes(0, width),), zeros(width))
                with T.grid(kernel.batch, spec.out_height) as (n, p):
                    row = settle(_row(spec, p, r))
                    with when(T.And(row >= 0, row < spec.height)):
                        with T.serial(count // width) as vector:
                            for lane in range(width):
                                i = vector * width + lane
                                value = x[n, channel, row, i * spec.strides[1] + column]
                                add_to(sums, (lane,), value * dy[n, o, p, first + i])
                        for i in range(count - count % width, count):
                            value = x[n, channel, row, i * spec.strides[1] + column]
                            add_to(sums, (i % width,), value * dy[n, o, p, first + i])
                store(dw, (o, c, r, s), _pairwise([sums[lane] for lane in range(width)]))
    return kernel.function


def _x_shape(spec: ConvSpec) -> tuple[int, ...]:
    return BATCH, spec.in_channels, spec.height, spec.width


def _y_shape(spec: ConvSpec) -> tuple[int, ...]:
    return BATCH, spec.out_channels, spec.out_height, spec.out_width


def _row(spec: ConvSpec, p: Expr, r: Expr) -> Expr:
    """The input row, perhaps outside, that output row p reads through kernel row r."""
    return p * spec.strides[0] + r * spec.dilations[0] - spec.pads[0]


def _columns(spec: ConvSpec, s: int) -> tuple[int, int, int]:
    """(first output column, columns, input column of the first) that read inside the input through kernel column s."""
    offset, stride = s * spec.dilations[1] - spec.pads[1], spec.strides[1]
    first = max(0, -(offset // stride))
    end = min(spec.out_width, (spec.width - 1 - offset) // stride + 1)
    return first, max(0, end - first), first * stride + offset


def _pairwise(terms: list[Expr]) -> Expr:
    """Their sum, halves of halves."""
    half = len(terms) // 2
    return _pairwise(terms[:half]) + _pairwise(terms[half:]) if half else terms[0]
