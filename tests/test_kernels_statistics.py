"""Statistics that convolutions gather of their own output, combined as a batch norm does, against numpy on that very output."""

from __future__ import annotations

import numpy as np
import pytest

from cross.fuse_statistics import fuse_statistics
from cross.graph import Node
from cross.kernels import winograd_weight as winograd_weight_module
from cross.kernels.convolution import ConvSpec, with_needed_pads
from cross.kernels.convolution_forward import convolution_forward, forward_parts
from cross.kernels.normalisation import batch_norm_finish_kernel
from cross.kernels.winograd_correlation import forward_chunk_shape, winograd_forward, winograd_forward_parts
from cross.kernels.winograd_weight import is_in_parts, transformed_weight_shape, winograd_weight
from cross.program_graph import ProgramGraph
from cross.storage import NO_PADS, Storage, blocks
from tests.kernel_tensors import HOST, Runner, canonical, empty, stored

SAME = (1, 1, 1, 1)
DIRECT = {
    "parts of four rows": ConvSpec(3, 16, 32, 32, (3, 3), pads=SAME),
    "tiles of two sizes, all rows": ConvSpec(16, 24, 9, 9, (3, 3), (2, 2), SAME),
    "rows longer than a part": ConvSpec(2, 8, 3, 131, (1, 1)),
    "a prime number of rows": ConvSpec(3, 8, 31, 32, (1, 1)),
    "short rows, channels that fill no block": ConvSpec(16, 10, 4, 4, (1, 1)),
    "fewer channels than a vector": ConvSpec(3, 6, 8, 8, (3, 3), pads=SAME),
    "one pixel": ConvSpec(8, 16, 2, 2, (2, 2)),
}
WINOGRAD = {
    "parts across samples": ConvSpec(16, 16, 32, 32, (3, 3), pads=SAME),
    "samples within a part": ConvSpec(16, 32, 8, 8, (3, 3), pads=SAME),
    "weights in parts": ConvSpec(32, 48, 4, 6, (3, 3), pads=SAME),
}
FAR = 300.0
"""A mean of so many standard deviations: E[x^2] - mean^2 would have no digit left of the variance."""


def _inputs(spec: ConvSpec, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Outputs with a mean far from zero, and an output channel of zeros."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, spec.in_channels, spec.height, spec.width)) + FAR
    w = rng.uniform(0.5, 1, spec.weight_shape)
    w[0] = 0
    return x.astype("float32"), w.astype("float32")


def _check(spec: ConvSpec, storage: Storage, arrays: list[np.ndarray]) -> None:
    """`arrays`: y, sum and m2 as stored."""
    channels, pixels = spec.out_channels, spec.out_height * spec.out_width
    y = canonical(arrays[0], spec.y_storage(HOST, NO_PADS))
    block = min(channels, HOST.channel_block)
    length = blocks(channels, block) * block
    function = batch_norm_finish_kernel([storage] * 2, channels, length, pixels, 1e-5, 0.1, HOST.vector_floats)
    vectors = [np.ones(length, "float32") for _ in range(4)]
    results = [np.full(length, np.nan, "float32") for _ in range(8)]
    Runner(function)(*arrays[1:], *vectors, *results)
    mean, var = results[2][:channels], results[3][:channels]
    assert np.allclose(mean, y.mean((0, 2, 3)), rtol=1e-6, atol=0)
    assert np.allclose(var, y.var((0, 2, 3)), rtol=2e-5, atol=0)
    assert var[0] == 0
    assert not np.concatenate([r[channels:] for r in results]).any()


@pytest.mark.parametrize("name", DIRECT)
def test_direct_kernels_gather_statistics(name: str) -> None:
    spec = with_needed_pads(DIRECT[name])
    run, parts = Runner(convolution_forward(spec, HOST, statistics=True)), forward_parts(spec, HOST)
    for batch in (1, 3):
        x, w = _inputs(spec, batch)
        arrays = [empty(spec.y_storage(HOST, NO_PADS), batch), empty(parts, batch), empty(parts, batch)]
        run(stored(x, spec.x_storage(HOST)), stored(w, spec.weight_storage(HOST)), *arrays)
        _check(spec, parts, arrays)


@pytest.mark.parametrize("name", WINOGRAD)
def test_winograd_gathers_statistics(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of parts that end within a sample or with a short one, and of too few tiles for Winograd."""
    if name == "weights in parts":
        monkeypatch.setattr(winograd_weight_module, "LARGE_BYTES", 0)
    spec = with_needed_pads(WINOGRAD[name])
    run, parts = Runner(winograd_forward(spec, HOST, statistics=True)), winograd_forward_parts(spec, HOST)
    shapes = forward_chunk_shape(spec, HOST), transformed_weight_shape(spec, HOST, False)
    chunk, transformed = (np.full(shape, np.nan, "float32") for shape in shapes)
    for batch in (1, 2, 4, 9):
        x, w = _inputs(spec, batch)
        ws = stored(w, spec.weight_storage(HOST))
        weights = (
            [ws, transformed] if is_in_parts(spec) else [Runner(winograd_weight(spec, HOST, False))(ws, transformed)]
        )
        arrays = [empty(spec.y_storage(HOST, NO_PADS), batch), empty(parts, batch), empty(parts, batch)]
        run(stored(x, spec.x_storage(HOST)), *weights, chunk, *arrays)
        _check(spec, parts, arrays)


def _node(op: str, inputs: str, outputs: str, block: int = 0, **attrs: object) -> Node:
    return Node(op, tuple(inputs.split()), tuple(outputs.split()), attrs, block=block)


def test_statistics_go_into_the_convolution_before_them() -> None:
    """Once, and not where the convolution has groups, stands in another block or is none."""
    nodes = (
        _node("conv2d", "x w", "a", groups=1),
        _node("batch_statistics", "a", "s t"),
        _node("batch_statistics", "a", "s2 t2"),
        _node("conv2d", "a v", "b", groups=2),
        _node("batch_statistics", "b", "s3 t3"),
        _node("conv2d", "a u", "c", groups=1),
        _node("batch_statistics", "c", "s4 t4", block=1),
        _node("batch_statistics", "x", "s5 t5"),
    )
    found = fuse_statistics(ProgramGraph("train", nodes, {}, "x", "c")).nodes
    assert found[0] == _node("conv2d", "x w", "a s t", groups=1)
    assert found[1:] == nodes[2:]
