"""Direct convolution kernels against float64 numpy: every shape class, batches 1 to 3, storage invariants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from cross.kernels.convolution import ConvSpec, convolution_class, flops, with_needed_pads
from cross.kernels.convolution_forward import convolution_forward
from cross.kernels.convolution_input_gradient import (
    convolution_input_gradient,
    transposed_weight_shape,
    weight_transpose,
)
from cross.kernels.convolution_weight_gradient import SAMPLES_A_PART, convolution_weight_gradient, sums_shape
from cross.kernels.lane_sums import is_few, suits_lane_sums
from cross.storage import NO_PADS
from cross.target import Target
from tests import convolution_reference as reference
from tests.kernel_tensors import HOST, Runner, canonical, empty, relative_error, stored

SHAPES = {
    "3x3": ConvSpec(16, 32, 8, 8, (3, 3), pads=(1, 1, 1, 1)),
    "3x3 on 4x4": ConvSpec(32, 24, 4, 4, (3, 3), pads=(1, 1, 1, 1)),
    "3x3 long rows": ConvSpec(8, 16, 3, 37, (3, 3), pads=(1, 1, 1, 1)),
    "3x3 stride 2": ConvSpec(16, 16, 8, 8, (3, 3), (2, 2), (1, 1, 1, 1)),
    "3x3 stride 2 odd": ConvSpec(16, 16, 9, 7, (3, 3), (2, 2), (1, 1, 1, 1)),
    "3x3 stride 2 no pad, rows unread": ConvSpec(8, 8, 8, 10, (3, 3), (2, 2)),
    "1x1": ConvSpec(24, 40, 7, 7, (1, 1)),
    "1x1 stride 2": ConvSpec(16, 32, 8, 8, (1, 1), (2, 2)),
    "1x1 stride 2 odd": ConvSpec(16, 8, 7, 9, (1, 1), (2, 2)),
    "1x1 image": ConvSpec(16, 24, 1, 1, (1, 1)),
    "3x3 on 1x1": ConvSpec(8, 8, 1, 1, (3, 3), pads=(1, 1, 1, 1)),
    "stem": ConvSpec(3, 16, 9, 9, (3, 3), pads=(1, 1, 1, 1)),
    "stem 7x7 stride 2": ConvSpec(3, 16, 20, 22, (7, 7), (2, 2), (3, 3, 3, 3)),
    "one channel": ConvSpec(1, 8, 6, 5, (5, 5), pads=(2, 2, 2, 2)),
    "one channel out": ConvSpec(8, 1, 5, 5, (3, 3), pads=(1, 1, 1, 1)),
    "5x5": ConvSpec(8, 16, 6, 6, (5, 5), pads=(2, 2, 2, 2)),
    "channels not filling blocks": ConvSpec(12, 20, 5, 6, (3, 3), pads=(1, 1, 1, 1)),
    "few channels each side": ConvSpec(5, 3, 5, 6, (3, 3), pads=(1, 1, 1, 1)),
    "kernel 1x3, stride 1x2": ConvSpec(8, 8, 5, 6, (1, 3), (1, 2), (0, 1, 0, 1)),
    "kernel 2x2 stride 3": ConvSpec(8, 8, 10, 8, (2, 2), (3, 3)),
    "pads wider than the kernel": ConvSpec(8, 8, 4, 5, (3, 3), (2, 2), (3, 4, 4, 3)),
    "uneven pads": ConvSpec(8, 16, 6, 6, (3, 3), (2, 2), (0, 0, 1, 1)),
    "dilated": ConvSpec(8, 16, 9, 8, (3, 3), pads=(2, 2, 2, 2), dilations=(2, 2)),
    "dilated stride 2": ConvSpec(8, 8, 9, 9, (3, 3), (2, 2), (2, 2, 2, 2), (2, 2)),
    "dilation 3 stride 2": ConvSpec(8, 8, 11, 12, (3, 3), (2, 2), (3, 3, 3, 3), (3, 3)),
    "dilation 2 stride 4": ConvSpec(8, 8, 14, 13, (3, 3), (4, 4), (1, 1, 1, 1), (2, 2)),
    "two groups": ConvSpec(32, 48, 5, 5, (3, 3), pads=(1, 1, 1, 1), groups=2),
    "more weights than half a cache": ConvSpec(192, 192, 2, 2, (3, 3), pads=(1, 1, 1, 1)),
    "stem 6x6 stride 3": ConvSpec(3, 8, 17, 17, (6, 6), (3, 3), (2, 2, 2, 2)),
}
TOLERANCE = 1e-6
BATCH_OF_PARTS = SAMPLES_A_PART * HOST.cores + 1
"""Cut into parts of different sizes."""


def _random(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _tensors(spec: ConvSpec, batch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x = _random((batch, spec.in_channels, spec.height, spec.width), 1)
    w = _random(spec.weight_shape, 2)
    return x, w, _random((batch, spec.out_channels, spec.out_height, spec.out_width), 3)


def weight_gradient_of(spec: ConvSpec, target: Target = HOST) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """(x, dy) -> dw, all canonical."""
    kernel, w_storage = Runner(convolution_weight_gradient(spec, target)), spec.weight_storage(target)
    shape = sums_shape(spec, target)

    def run(x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        sums = [] if shape is None else [np.full(shape, np.nan, np.float32)]
        xs, dys = stored(x, spec.x_storage(target)), stored(dy, spec.y_storage(target))
        return canonical(kernel(xs, dys, *sums, empty(w_storage, x.shape[0])), w_storage)

    return run


def check(spec: ConvSpec) -> None:
    """Forward pass and both gradients at batches 1 to 3, the weight gradient also at one that is cut into parts; whatever is
    stored outside the tensors must come out zero."""
    assert convolution_class(spec, HOST) == "direct"
    forward = Runner(convolution_forward(spec, HOST))
    transpose = None if suits_lane_sums(spec, HOST) else Runner(weight_transpose(spec, HOST))
    input_gradient = Runner(convolution_input_gradient(spec, HOST))
    weight_gradient = weight_gradient_of(spec)
    x_stored, y_stored = spec.x_storage(HOST), spec.y_storage(HOST)
    x_plain, y_plain, w_storage = (
        spec.x_storage(HOST, NO_PADS),
        spec.y_storage(HOST, NO_PADS),
        spec.weight_storage(HOST),
    )
    for batch in (1, 2, 3):
        x, w, dy = _tensors(spec, batch)
        y = canonical(forward(stored(x, x_stored), stored(w, w_storage), empty(y_plain, batch)), y_plain)
        assert relative_error(y, reference.forward(spec, x, w)) < TOLERANCE
        ws, copy = stored(w, w_storage), np.full(transposed_weight_shape(spec, HOST), np.nan, np.float32)
        weights = [ws, copy] if transpose is None else [transpose(ws, copy)]
        dx = canonical(input_gradient(stored(dy, y_stored), *weights, empty(x_plain, batch)), x_plain)
        assert relative_error(dx, reference.input_gradient(spec, dy, w)) < TOLERANCE
        assert relative_error(weight_gradient(x, dy), reference.weight_gradient(spec, x, dy)) < TOLERANCE
    x, _, dy = _tensors(spec, BATCH_OF_PARTS)
    assert relative_error(weight_gradient(x, dy), reference.weight_gradient(spec, x, dy)) < TOLERANCE


@pytest.mark.parametrize("name", SHAPES)
def test_kernels_agree_with_numpy(name: str) -> None:
    check(with_needed_pads(SHAPES[name]))


def test_weight_gradients_above_are_on_both_sides_of_the_choice() -> None:
    assert {sums_shape(with_needed_pads(spec), HOST) is None for spec in SHAPES.values()} == {True, False}


def test_some_of_many_parts_may_have_no_samples() -> None:
    """33 samples are 6 parts of 5 and one of 3."""
    spec, target = with_needed_pads(SHAPES["3x3 stride 2"]), replace(HOST, cores=8)
    assert sums_shape(spec, target) == (8, *spec.weight_storage(target).shape)
    x, _, dy = _tensors(spec, 33)
    assert relative_error(weight_gradient_of(spec, target)(x, dy), reference.weight_gradient(spec, x, dy)) < TOLERANCE


def test_input_gradients_of_few_pixels_take_the_weight_as_it_is() -> None:
    """Shapes above lie on both sides of the choice, by their size and, for those of few pixels, by the batch."""
    specs = [with_needed_pads(spec) for spec in SHAPES.values()]
    few = [spec for spec in specs if suits_lane_sums(spec, HOST)]
    assert 4 <= len(few) < len(specs)
    assert {bool(is_few(spec, batch)) for spec in few for batch in (1, 2, 3)} == {True, False}
    assert any(spec.strides == (2, 2) for spec in few) and any(spec.dilations == (1, 1) for spec in few)


@pytest.mark.parametrize("name", ["3x3", "3x3 stride 2 odd", "stem"])
def test_storages_may_be_padded_wider_than_needed(name: str) -> None:
    spec = with_needed_pads(SHAPES[name])
    top, left, bottom, right = spec.x_pads
    y_top, y_left, y_bottom, y_right = spec.y_pads
    check(
        replace(
            spec,
            x_pads=(top + 1, left + 2, bottom, right + 3),
            y_pads=(y_top + 2, y_left, y_bottom + 1, y_right + 1),
        )
    )


def test_flops_count_multiplies_and_adds() -> None:
    assert flops(ConvSpec(64, 64, 32, 32, (3, 3), pads=(1, 1, 1, 1))) == 2 * 64 * 64 * 9 * 32 * 32
