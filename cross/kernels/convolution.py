"""Convolution: its shape, its class of kernels, and what its tensors' storage must leave room for.

    class      storage of x, y (and gradients)   storage of w                     kernels
    direct     blocked                           convolution_weight               convolution_forward.py, ..._input_gradient.py,
                                                                                  ..._weight_gradient.py
    depthwise  blocked                           depthwise_weight                 depthwise.py
    grouped    plain                             plain                            grouped.py

Letters: N batch, C in and O out channels, H x W input, P x Q output (`out_height`, `out_width`), R x S kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cross.graph import BATCH, Shape, TensorType
from cross.storage import NO_PADS, Pads, Storage, blocked, convolution_weight, depthwise_weight
from cross.target import Target

Pair = tuple[int, int]


@dataclass(frozen=True)
class ConvSpec:
    """A convolution of one input size. `pads` are the operator's own; `x_pads` and `y_pads` are those of the storages as
    stored, of x and of the gradient of y; y itself and the gradient of x are stored without."""

    in_channels: int
    out_channels: int
    height: int
    width: int
    kernel: Pair
    strides: Pair = (1, 1)
    pads: Pads = NO_PADS
    dilations: Pair = (1, 1)
    groups: int = 1
    x_pads: Pads = NO_PADS
    y_pads: Pads = NO_PADS

    @property
    def out_height(self) -> int:
        return (self.height + self.pads[0] + self.pads[2] - self.span[0]) // self.strides[0] + 1

    @property
    def out_width(self) -> int:
        return (self.width + self.pads[1] + self.pads[3] - self.span[1]) // self.strides[1] + 1

    @property
    def span(self) -> Pair:
        """Rows and columns that one output reads across."""
        return (self.kernel[0] - 1) * self.dilations[0] + 1, (self.kernel[1] - 1) * self.dilations[1] + 1

    @property
    def weight_shape(self) -> Shape:
        """Canonical [O, C/groups, R, S]."""
        return self.out_channels, self.in_channels // self.groups, *self.kernel

    def x_storage(self, target: Target, pads: Pads | None = None) -> Storage:
        """Blocked storage of x: as stored, or with other `pads`."""
        kind = TensorType((BATCH, self.in_channels, self.height, self.width))
        return blocked(kind, target.channel_block, self.x_pads if pads is None else pads)

    def y_storage(self, target: Target, pads: Pads | None = None) -> Storage:
        """Blocked storage of the gradient of y as stored, or with other `pads` (y's own are NO_PADS)."""
        kind = TensorType((BATCH, self.out_channels, self.out_height, self.out_width))
        return blocked(kind, target.channel_block, self.y_pads if pads is None else pads)

    def weight_storage(self, target: Target) -> Storage:
        """Storage of the weight for the class of this convolution (`direct` or `depthwise`)."""
        if convolution_class(self, target) == "depthwise":
            return depthwise_weight(self.weight_shape, target.channel_block)
        return convolution_weight(self.weight_shape, target.channel_block, self.groups)


def convolution_class(spec: ConvSpec, target: Target) -> str:
    """'direct', 'depthwise' or 'grouped': which kernels run it, so which storages its tensors have."""
    if spec.groups == 1:
        return "direct"
    if spec.groups == spec.in_channels == spec.out_channels:
        return "depthwise"
    whole = spec.in_channels // spec.groups % target.channel_block == 0
    return "direct" if whole and spec.out_channels // spec.groups % target.channel_block == 0 else "grouped"


def flops(spec: ConvSpec) -> int:
    """Floating-point operations a sample, the same for the forward pass and for either gradient."""
    return (
        2
        * spec.out_channels
        * spec.out_height
        * spec.out_width
        * (spec.in_channels // spec.groups)
        * (spec.kernel[0] * spec.kernel[1])
    )


def forward_pads(spec: ConvSpec) -> Pads:
    """Least pads of the storage of x for the forward pass and the weight gradient."""
    bottom = (spec.out_height - 1) * spec.strides[0] + spec.span[0] - spec.pads[0] - spec.height
    right = (spec.out_width - 1) * spec.strides[1] + spec.span[1] - spec.pads[1] - spec.width
    return spec.pads[0], spec.pads[1], max(0, bottom), max(0, right)


def input_gradient_pads(spec: ConvSpec) -> Pads:
    """Least pads of the storage of the gradient of y for the input gradient."""
    top, bottom = _needed(spec, 0, spec.height, spec.out_height)
    left, right = _needed(spec, 1, spec.width, spec.out_width)
    return top, left, bottom, right


def with_needed_pads(spec: ConvSpec) -> ConvSpec:
    """The same convolution with storages that have just the pads its kernels need."""
    return replace(spec, x_pads=forward_pads(spec), y_pads=input_gradient_pads(spec))


@dataclass(frozen=True)
class Taps:
    """Kernel rows (or columns) that one line of outputs sums over: tap j multiplies kernel row `first + j * step` with
    input row `in_stride * q + offset + j * offset_step` for output row q."""

    count: int
    first: int
    step: int
    offset: int
    offset_step: int


@dataclass(frozen=True)
class Phase:
    """Output pixels `row + stride * q`, q < `height`, and the same across: all sum over the same taps. The offsets of taps
    count from the stored (padded) input's first row and column."""

    row: int
    column: int
    height: int
    width: int
    row_taps: Taps
    column_taps: Taps


def forward_phase(spec: ConvSpec) -> Phase:
    """The forward pass, on x as stored: one phase, whose rows step by the stride in x."""
    row_taps, column_taps = (
        Taps(spec.kernel[axis], 0, 1, spec.x_pads[axis] - spec.pads[axis], spec.dilations[axis]) for axis in (0, 1)
    )
    return Phase(0, 0, spec.out_height, spec.out_width, row_taps, column_taps)


def input_gradient_phases(spec: ConvSpec) -> tuple[Phase, ...]:
    """The input gradient, on the gradient of y as stored: a phase for every input row and column modulo the strides."""
    return tuple(
        Phase(
            row,
            column,
            _phase_extent(spec.height, row, spec.strides[0]),
            _phase_extent(spec.width, column, spec.strides[1]),
            *(
                replace(taps, offset=taps.offset + spec.y_pads[axis])
                for axis, taps in enumerate((_phase_taps(spec, 0, row), _phase_taps(spec, 1, column)))
            ),
        )
        for row in range(min(spec.strides[0], spec.height))
        for column in range(min(spec.strides[1], spec.width))
    )


def _phase_taps(spec: ConvSpec, axis: int, phase: int) -> Taps:
    """Taps of the input gradient at input rows `phase, phase + stride, ...`: row stride * q + phase of x reaches output row
    (stride * q + phase + pad - r * dilation) / stride through kernel row r, where that division is exact. Taps run from the
    last kernel row to the first, so that rows of the output gradient are read in rising order."""
    stride, dilation, pad = spec.strides[axis], spec.dilations[axis], spec.pads[axis]
    rows = [r for r in reversed(range(spec.kernel[axis])) if (phase + pad - r * dilation) % stride == 0]
    if not rows:
        return Taps(0, 0, 0, 0, 0)
    step = rows[1] - rows[0] if len(rows) > 1 else 0
    offset = (phase + pad - rows[0] * dilation) // stride
    return Taps(len(rows), rows[0], step, offset, -(step * dilation) // stride)


def _phase_extent(extent: int, phase: int, stride: int) -> int:
    """Rows of a line of `extent` that are `phase` modulo `stride`."""
    return -(-(extent - phase) // stride)


def _needed(spec: ConvSpec, axis: int, extent: int, out_extent: int) -> tuple[int, int]:
    """Rows before and after the gradient of y that the input gradient reads."""
    before = after = 0
    for phase in range(min(spec.strides[axis], extent)):
        taps = _phase_taps(spec, axis, phase)
        if taps.count:
            last = taps.offset + (taps.count - 1) * taps.offset_step
            before = max(before, -taps.offset)
            after = max(after, last + _phase_extent(extent, phase, spec.strides[axis]) - out_extent)
    return before, after
