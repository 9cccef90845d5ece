"""Winograd kernels against float64 numpy: ragged batches, several chunks of tiles, small batches that take the direct nest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cross.kernels import winograd_weight as winograd_weight_module
from cross.kernels import winograd_weight_gradient as winograd_weight_gradient_module
from cross.kernels.convolution import ConvSpec, with_needed_pads
from cross.kernels.winograd import output_tiles, suits_winograd
from cross.kernels.winograd_correlation import (
    forward_chunk_shape,
    input_gradient_chunk_shape,
    winograd_forward,
    winograd_input_gradient,
)
from cross.kernels.winograd_weight import is_in_parts, transformed_weight_shape, winograd_weight
from cross.kernels.winograd_weight_gradient import (
    few_tiles,
    has_work_for_all_cores,
    parts_of,
    weight_gradient_chunk_shapes,
    winograd_weight_gradient,
)
from cross.storage import NO_PADS
from cross.target import load_targets
from tests import convolution_reference as reference
from tests.kernel_tensors import HOST, Runner, canonical, empty, relative_error, stored

SAME = (1, 1, 1, 1)
SHAPES = {
    "tiles of a sample": (ConvSpec(16, 32, 8, 8, (3, 3), pads=SAME), (1, 2, 3)),
    "few tiles a sample": (ConvSpec(32, 16, 4, 4, (3, 3), pads=SAME), (1, 3, 4, 5, 13)),
    "six tiles a sample": (ConvSpec(16, 16, 4, 6, (3, 3), pads=SAME), (1, 2, 3, 17)),
    "several chunks": (ConvSpec(16, 16, 8, 8, (3, 3), pads=SAME), (34,)),
    "rows and columns differ": (ConvSpec(16, 16, 6, 10, (3, 3), pads=SAME), (1, 3)),
    "no pads": (ConvSpec(16, 16, 10, 8, (3, 3)), (1, 2)),
    "full pads": (ConvSpec(16, 16, 6, 8, (3, 3), pads=(2, 2, 2, 2)), (2,)),
    "uneven pads": (ConvSpec(16, 16, 8, 10, (3, 3), pads=(2, 0, 0, 2)), (2,)),
}
TOLERANCE = 1e-6


def _random(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _unset(shape: tuple[int, ...]) -> np.ndarray:
    """Not NaN: a last register tile computes with what nobody has written, and nobody reads what comes out."""
    return np.full(shape, 1e30, np.float32)


class _Kernels:
    """The kernels of one convolution, compiled once, on canonical arrays of any batch."""

    def __init__(self, spec: ConvSpec) -> None:
        assert suits_winograd(spec, HOST)
        self.spec = spec
        self._forward = Runner(winograd_forward(spec, HOST))
        self._input = Runner(winograd_input_gradient(spec, HOST))
        self._weight = Runner(winograd_weight_gradient(spec, HOST))
        self._transforms = [] if is_in_parts(spec) else [Runner(winograd_weight(spec, HOST, g)) for g in (False, True)]

    def _weights(self, w: np.ndarray, is_gradient: bool) -> list[np.ndarray]:
        """What the kernels read of the weight: transformed, or as it is and memory for a part."""
        ws = stored(w, self.spec.weight_storage(HOST))
        transformed = _unset(transformed_weight_shape(self.spec, HOST, is_gradient))
        return [self._transforms[is_gradient](ws, transformed)] if self._transforms else [ws, transformed]

    def forward(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        spec, y = self.spec, self.spec.y_storage(HOST, NO_PADS)
        chunk = _unset(forward_chunk_shape(spec, HOST))
        xs = stored(x, spec.x_storage(HOST))
        return canonical(self._forward(xs, *self._weights(w, False), chunk, empty(y, x.shape[0])), y)

    def input_gradient(self, dy: np.ndarray, w: np.ndarray) -> np.ndarray:
        spec, dx = self.spec, self.spec.x_storage(HOST, NO_PADS)
        chunk = _unset(input_gradient_chunk_shape(spec, HOST))
        ds = stored(dy, spec.y_storage(HOST))
        return canonical(self._input(ds, *self._weights(w, True), chunk, empty(dx, dy.shape[0])), dx)

    def weight_gradient(self, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        spec, w = self.spec, self.spec.weight_storage(HOST)
        chunks = [_unset(shape) for shape in weight_gradient_chunk_shapes(spec, HOST)]
        xs, ds = stored(x, spec.x_storage(HOST)), stored(dy, spec.y_storage(HOST))
        return canonical(self._weight(xs, ds, *chunks, empty(w, x.shape[0])), w)


def _check(kernels: _Kernels, batch: int) -> None:
    spec = kernels.spec
    x = _random((batch, spec.in_channels, spec.height, spec.width), 1)
    dy = _random((batch, spec.out_channels, spec.out_height, spec.out_width), 2)
    w = _random(spec.weight_shape, 3)
    assert relative_error(kernels.forward(x, w), reference.forward(spec, x, w)) < TOLERANCE
    assert relative_error(kernels.input_gradient(dy, w), reference.input_gradient(spec, dy, w)) < TOLERANCE
    assert relative_error(kernels.weight_gradient(x, dy), reference.weight_gradient(spec, x, dy)) < TOLERANCE


@pytest.mark.parametrize("name", SHAPES)
def test_kernels_agree_with_numpy(name: str) -> None:
    spec, batches = SHAPES[name]
    kernels = _Kernels(with_needed_pads(spec))
    for batch in batches:
        _check(kernels, batch)


def test_storages_may_be_padded_wider_than_needed() -> None:
    spec = ConvSpec(16, 16, 4, 6, (3, 3), pads=SAME)
    _check(_Kernels(replace(spec, x_pads=(2, 3, 1, 1), y_pads=(1, 2, 3, 1))), 3)


def test_large_weights_are_transformed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winograd_weight_module, "LARGE_BYTES", 0)
    monkeypatch.setattr(winograd_weight_module, "PART_BLOCKS", 2)
    for spec, batches in ((ConvSpec(32, 48, 4, 6, (3, 3), pads=SAME), (1, 3, 27)), SHAPES["tiles of a sample"]):
        assert is_in_parts(spec)
        kernels = _Kernels(with_needed_pads(spec))
        for batch in batches:
            _check(kernels, batch)


@pytest.mark.parametrize("cores", [2, 3])
def test_a_weight_gradient_is_summed_in_parts(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that are not whole, parts of different size, and with three cores and one sample a part without tiles."""
    target = replace(HOST, cores=cores, l2_kib=1024)
    monkeypatch.setattr(winograd_weight_gradient_module, "MOST_TILES", 96)
    spec = with_needed_pads(ConvSpec(32, 16, 24, 26, (3, 3), pads=SAME))
    assert parts_of(spec, target) == cores
    run, w = Runner(winograd_weight_gradient(spec, target)), spec.weight_storage(HOST)
    for batch in (1, 2, 5):
        x = _random((batch, spec.in_channels, spec.height, spec.width), 1)
        dy = _random((batch, spec.out_channels, spec.out_height, spec.out_width), 2)
        work = [_unset(shape) for shape in weight_gradient_chunk_shapes(spec, target)]
        xs, ds = stored(x, spec.x_storage(HOST)), stored(dy, spec.y_storage(HOST))
        found = canonical(run(xs, ds, *work, empty(w, batch)), w)
        assert relative_error(found, reference.weight_gradient(spec, x, dy)) < TOLERANCE


@pytest.mark.parametrize("name", ["few tiles a sample", "six tiles a sample"])
def test_small_batches_are_on_both_sides_of_the_choice(name: str) -> None:
    spec, batches = SHAPES[name]
    tiles = [batch * output_tiles(spec).count for batch in batches]
    assert min(tiles) < few_tiles(spec) <= max(tiles)


@pytest.mark.parametrize(
    "spec",
    [
        ConvSpec(16, 16, 8, 8, (3, 3), (2, 2), SAME),
        ConvSpec(16, 16, 7, 8, (3, 3), pads=SAME),
        ConvSpec(8, 16, 8, 8, (3, 3), pads=SAME),
        ConvSpec(16, 24, 8, 8, (3, 3), pads=SAME),
        ConvSpec(16, 16, 8, 8, (1, 1)),
        ConvSpec(16, 16, 8, 8, (5, 5), pads=(2, 2, 2, 2)),
        ConvSpec(32, 32, 8, 8, (3, 3), pads=SAME, groups=2),
        ConvSpec(16, 16, 10, 10, (3, 3), pads=(2, 2, 2, 2), dilations=(2, 2)),
        ConvSpec(16, 16, 4, 4, (3, 3), pads=(3, 3, 3, 3)),
        ConvSpec(16, 16, 2, 2, (3, 3), pads=SAME),
    ],
    ids=str,
)
def test_other_convolutions_stay_direct(spec: ConvSpec) -> None:
    assert not suits_winograd(spec, HOST)


@pytest.mark.parametrize(("channels", "cores", "takes"), ((32, 2, False), (32, 1, True), (64, 2, True), (64, 8, False)))
def test_a_weight_gradient_that_would_leave_cores_idle_stays_direct(channels: int, cores: int, takes: bool) -> None:
    target = replace(load_targets()["x86-64-avx512"], cores=cores)
    spec = with_needed_pads(ConvSpec(channels, channels, 16, 16, (3, 3), pads=SAME))
    assert suits_winograd(spec, target) and has_work_for_all_cores(spec, target) is takes


@pytest.mark.parametrize("name", sorted(load_targets()))
def test_nests_can_be_written_for_every_target(name: str) -> None:
    target, spec = load_targets()[name], with_needed_pads(ConvSpec(64, 128, 4, 4, (3, 3), pads=SAME))
    assert suits_winograd(spec, target)
    for write in (winograd_forward, winograd_input_gradient, winograd_weight_gradient):
        assert write(spec, target) is not None


@pytest.mark.parametrize(("name", "tiles"), (("rpi4", 96), ("rpi3", 48), ("rpi5", 240), ("x86-64-avx512", 480)))
def test_a_chunk_stays_in_the_last_cache(name: str, tiles: int) -> None:
    """64 channels: 4 KiB a tile. Half of a second-level cache before memory, in whole groups; two of one before a third."""
    target, spec = load_targets()[name], with_needed_pads(ConvSpec(64, 64, 32, 32, (3, 3), pads=SAME))
    assert forward_chunk_shape(spec, target)[2] - 2 == input_gradient_chunk_shape(spec, target)[2] - 2 == tiles
