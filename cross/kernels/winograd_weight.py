"""Transformed weights for Winograd's correlations: G g G^T as [output blocks, 16, input blocks, i, o]."""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from cross.graph import Shape
from cross.kernels.convolution import ConvSpec
from cross.kernels.convolution_input_gradient import write_square
from cross.kernels.loop_nest import Buffer, Expr, PrimFunc, lanes, scratch, settle, store, write_kernel
from cross.kernels.winograd import PLACES, both_ways, weight_line
from cross.target import Target

LARGE_BYTES = 8 << 20
"""A transformed weight beyond this does not stay in a cache until it is read."""

PART_BLOCKS = 8
"""Output blocks of a part of such a weight, where they divide it: four pairs, as many tasks even where tiles are few."""


def is_in_parts(spec: ConvSpec) -> bool:
    """Whether the convolution transforms its weight itself, a part of the output channels at a time."""
    return PLACES * spec.in_channels * spec.out_channels * 4 > LARGE_BYTES


def transformed_weight_shape(spec: ConvSpec, target: Target, is_gradient: bool) -> Shape:
    """Physical shape of the transformed weight, or of a part, for the forward pass or the input gradient (whose outputs are the
    input channels of the weight); one more input block than there are keeps the 16 places apart in the cache."""
    outputs, inputs, block = spec.out_channels, spec.in_channels, target.channel_block
    if is_gradient:
        outputs, inputs = inputs, outputs
    blocks = outputs // block
    part = PART_BLOCKS if is_in_parts(spec) and blocks % PART_BLOCKS == 0 else blocks
    return part, PLACES, inputs // block + 1, block, block


def winograd_weight(spec: ConvSpec, target: Target, is_gradient: bool) -> PrimFunc:
    """PrimFunc(w in weight storage, transformed w), whole."""
    with write_kernel("winograd_weight") as kernel:
        weight = kernel.tensor("weight", spec.weight_storage(target).shape)
        transformed = kernel.tensor("transformed", transformed_weight_shape(spec, target, is_gradient))
        write_transformed(target, weight, is_gradient, 0, transformed)
    return kernel.function


def write_transformed(target: Target, weight: Buffer, is_gradient: bool, first: Expr, destination: Buffer) -> None:
    """The nest that fills `destination` with the output blocks from `first` on, into the kernel that is being written. For the
    input gradient the weight is transposed and its kernel reversed on the way."""
    part, _, in_blocks, depth, width = (int(extent) for extent in destination.shape)
    in_blocks, lane = in_blocks - 1, lanes(0, width)
    with T.parallel(part * in_blocks) as task:
        # Output blocks outside, as in the products: what a core has transformed is then in its own cache when it reads it.
        block, c = settle(task // in_blocks), settle(task % in_blocks)
        output = settle(first + block)
        taps = weight
        if is_gradient:
            taps = scratch(3, 3, depth, width)
            with T.grid(3, 3) as (r, s):
                write_square(target, weight, (c, output, 2 - r, 2 - s), taps, (r, s))
        with T.serial(depth) as i:

            def tap(r: int, s: int) -> Expr:
                return taps[r, s, i, lane] if is_gradient else weight[output, c, r, s, i, lane]

            places = both_ways(weight_line, tap, 3)
            for place in range(PLACES):
                store(destination, (block, place, c, i, lane), places[place // 4][place % 4])
