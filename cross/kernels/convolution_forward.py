"""Forward pass of the direct convolution:

y[n, o, p, q] = sum over c, r, s of x[n, c, p*stride + r*dilation - pad, ..] * w[o, c, r, s].
"""

from __future__ import annotations

from cross.kernels.convolution import ConvSpec, forward_phase
from cross.kernels.correlation import Correlation, correlation
from cross.kernels.loop_nest import PrimFunc
from cross.storage import NO_PADS
from cross.target import Target


def convolution_forward(spec: ConvSpec, target: Target) -> PrimFunc:
    """PrimFunc(x stored with `spec.x_pads`, w in forward storage, y stored without pads).

    x_pads must be at least `forward_pads(spec)`. Output channels that fill up the last block come out zero."""
    return correlation(forward_correlation(spec, target), target)


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
