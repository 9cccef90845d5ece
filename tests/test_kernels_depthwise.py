"""Depthwise convolution kernels against float64 numpy, at batches 1 to 3, with the storage invariants."""

from __future__ import annotations

import numpy as np
import pytest

from cross.kernels.convolution import ConvSpec, convolution_class, with_needed_pads
from cross.kernels.depthwise import depthwise_forward, depthwise_input_gradient, depthwise_weight_gradient
from cross.storage import NO_PADS
from tests import convolution_reference as reference
from tests.kernel_tensors import HOST, Runner, canonical, empty, relative_error, stored

SHAPES = {
    "3x3": ConvSpec(32, 32, 8, 8, (3, 3), pads=(1, 1, 1, 1), groups=32),
    "3x3 many channels": ConvSpec(64, 64, 4, 4, (3, 3), pads=(1, 1, 1, 1), groups=64),
    "3x3 stride 2": ConvSpec(16, 16, 8, 8, (3, 3), (2, 2), (1, 1, 1, 1), groups=16),
    "3x3 stride 2 odd": ConvSpec(16, 16, 9, 7, (3, 3), (2, 2), (1, 1, 1, 1), groups=16),
    "channels not filling blocks": ConvSpec(12, 12, 5, 6, (3, 3), pads=(1, 1, 1, 1), groups=12),
    "few channels": ConvSpec(3, 3, 6, 5, (3, 3), pads=(1, 1, 1, 1), groups=3),
    "5x5 stride 2": ConvSpec(8, 8, 11, 10, (5, 5), (2, 2), (2, 2, 2, 2), groups=8),
    "7x7": ConvSpec(8, 8, 7, 7, (7, 7), pads=(3, 3, 3, 3), groups=8),
    "1x1 image": ConvSpec(40, 40, 1, 1, (3, 3), pads=(1, 1, 1, 1), groups=40),
    "1x1 kernel stride 2": ConvSpec(8, 8, 5, 5, (1, 1), (2, 2), groups=8),
    "dilated, uneven pads": ConvSpec(8, 8, 9, 8, (3, 3), pads=(1, 2, 3, 2), dilations=(2, 2), groups=8),
    "rows unread": ConvSpec(8, 8, 8, 9, (2, 2), (3, 3), groups=8),
    "long rows": ConvSpec(16, 16, 3, 37, (3, 3), pads=(1, 1, 1, 1), groups=16),
}
TOLERANCE = 1e-6


def _random(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", SHAPES)
def test_kernels_agree_with_numpy(name: str) -> None:
    spec = with_needed_pads(SHAPES[name])
    assert convolution_class(spec, HOST) == "depthwise"
    forward, input_gradient = Runner(depthwise_forward(spec, HOST)), Runner(depthwise_input_gradient(spec, HOST))
    weight_gradient = Runner(depthwise_weight_gradient(spec, HOST))
    x_stored, y_stored = spec.x_storage(HOST), spec.y_storage(HOST)
    x_plain, y_plain = spec.x_storage(HOST, NO_PADS), spec.y_storage(HOST, NO_PADS)
    w_storage = spec.weight_storage(HOST)
    for batch in (1, 2, 3):
        x = _random((batch, spec.in_channels, spec.height, spec.width), 1)
        w = _random(spec.weight_shape, 2)
        dy = _random((batch, spec.out_channels, spec.out_height, spec.out_width), 3)
        y = canonical(forward(stored(x, x_stored), stored(w, w_storage), empty(y_plain, batch)), y_plain)
        assert relative_error(y, reference.forward(spec, x, w)) < TOLERANCE
        dx = canonical(input_gradient(stored(dy, y_stored), stored(w, w_storage), empty(x_plain, batch)), x_plain)
        assert relative_error(dx, reference.input_gradient(spec, dy, w)) < TOLERANCE
        dw = canonical(weight_gradient(stored(x, x_stored), stored(dy, y_stored), empty(w_storage, batch)), w_storage)
        assert relative_error(dw, reference.weight_gradient(spec, x, dy)) < TOLERANCE
