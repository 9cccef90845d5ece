"""Grouped convolution kernels (plain storage) against float64 numpy, at batches 1 to 3."""

from __future__ import annotations

import numpy as np
import pytest

from cross.kernels.convolution import ConvSpec, convolution_class
from cross.kernels.grouped import grouped_forward, grouped_input_gradient, grouped_weight_gradient
from tests import convolution_reference as reference
from tests.kernel_tensors import HOST, Runner, relative_error

SHAPES = {
    "3x3": ConvSpec(12, 18, 7, 9, (3, 3), pads=(1, 1, 1, 1), groups=3),
    "multiplier 2": ConvSpec(6, 12, 5, 6, (3, 3), (2, 2), (1, 1, 1, 1), groups=6),
    "stride 2 odd": ConvSpec(8, 4, 9, 11, (3, 3), (2, 2), (1, 1, 1, 1), groups=2),
    "1x1": ConvSpec(12, 12, 4, 17, (1, 1), groups=3),
    "dilated, uneven pads": ConvSpec(4, 6, 9, 20, (3, 2), pads=(2, 0, 1, 3), dilations=(2, 3), groups=2),
    "pads wider than the kernel": ConvSpec(4, 4, 3, 3, (2, 2), (2, 3), (3, 4, 4, 3), groups=2),
    "rows unread": ConvSpec(4, 4, 8, 9, (2, 2), (3, 3), groups=2),
    "1x1 image": ConvSpec(10, 10, 1, 1, (3, 3), pads=(1, 1, 1, 1), groups=5),
}
TOLERANCE = 1e-6


def _random(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", SHAPES)
def test_kernels_agree_with_numpy(name: str) -> None:
    spec = SHAPES[name]
    assert convolution_class(spec, HOST) == "grouped"
    forward, input_gradient = Runner(grouped_forward(spec, HOST)), Runner(grouped_input_gradient(spec, HOST))
    weight_gradient = Runner(grouped_weight_gradient(spec, HOST))
    for batch in (1, 2, 3):
        x = _random((batch, spec.in_channels, spec.height, spec.width), 1)
        w = _random(spec.weight_shape, 2)
        dy = _random((batch, spec.out_channels, spec.out_height, spec.out_width), 3)
        y = forward(x, w, np.full_like(dy, np.nan))
        assert relative_error(y, reference.forward(spec, x, w)) < TOLERANCE
        dx = input_gradient(dy, w, np.full_like(x, np.nan))
        assert relative_error(dx, reference.input_gradient(spec, dy, w)) < TOLERANCE
        dw = weight_gradient(x, dy, np.full_like(w, np.nan))
        assert relative_error(dw, reference.weight_gradient(spec, x, dy)) < TOLERANCE
