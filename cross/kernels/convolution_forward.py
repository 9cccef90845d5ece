"""Forward pass of the direct convolution:

y[n, o, p, q] = sum over c, r, s of x[n, c, p*stride + r*dilation - pad, ..] * w[o, c, r, s].
"""

from __future__ import annotations

from cross.kernels.convolution import ConvSpec, forward_phase
from cross.kernels.correlation import Correlation, correlation, part_pixels
from cross.kernels.loop_nest import PrimFunc
from cross.storage import NO_PADS, Storage, parts_of_pixels
from cross.target import Target


def convolution_forward(spec: ConvSpec, target: Target, *, statistics: bool = False) -> PrimFunc:
    """PrimFunc(x stored with `spec.x_pads`, w in forward storage, y stored without pads, [sum and m2 of y in `forward_parts`]).

    x_pads must be at least `forward_pads(spec)`. Output channels that fill up the last block come out zero."""
    return correlation(forward_correlation(spec, target), target, forward_parts(spec, target) if statistics else None)


def forward_parts(spec: ConvSpec, target: Target) -> Storage:
    """Storage of the statistics of y."""
    pixels = spec.out_height * spec.out_width
    return parts_of_pixels(spec.out_channels, target.channel_block, pixels, part_pixels(forward_phase(spec)))


def forward_correlation(spec: ConvSpec, target: Target) -> Correlation:
    """The forward pass as a correlation of x with the weight."""
    return Correlation(
        name="convolution_forward",
        source=spec.x_storage(target),
        weight_shape=spec.weight_storage(target).shape,
        destination=spec.y_storage(target, NO_PADS),
        groups=spec.groups,
        in_strides=spec.strides,
        out_strides=(1, 1),
        phases=(forward_phase(spec),),
    )
