"""Dense and matrix-product kernels against float64 numpy, at odd sizes and batches 1, 2, 3 and 9."""

from __future__ import annotations

import numpy as np
import pytest

from cross.graph import BATCH
from cross.kernels.dense import (
    DenseSpec,
    MatmulSpec,
    dense_forward,
    dense_input_gradient,
    dense_weight_gradient,
    flops,
    matmul,
    matrix_transpose,
)
from tests.kernel_tensors import HOST, Runner, relative_error

BATCHES = (1, 2, 3, 9)
TOLERANCE = 1e-6
SHAPES = [
    DenseSpec(64, 10),
    DenseSpec(37, 7),
    DenseSpec(1, 1),
    DenseSpec(5, 130),
    DenseSpec(200, 16, (3,)),
    DenseSpec(70, 33, (2, 5)),
    DenseSpec(1030, 12),
]


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _blank(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


@pytest.mark.parametrize("spec", SHAPES, ids=str)
def test_dense_agrees_with_numpy(spec: DenseSpec) -> None:
    forward, input_gradient = Runner(dense_forward(spec, HOST)), Runner(dense_input_gradient(spec, HOST))
    weight_gradient = Runner(dense_weight_gradient(spec, HOST))
    for batch in BATCHES:
        x, w = _random(batch, *spec.leading, spec.inputs), _random(spec.outputs, spec.inputs)
        dy = _random(batch, *spec.leading, spec.outputs)
        wide_x, wide_w, wide_dy = (array.astype(np.float64) for array in (x, w, dy))
        assert relative_error(forward(x, w, _blank(*dy.shape)), wide_x @ wide_w.T) < TOLERANCE
        assert relative_error(input_gradient(dy, w, _blank(*x.shape)), wide_dy @ wide_w) < TOLERANCE
        expected = wide_dy.reshape(-1, spec.outputs).T @ wide_x.reshape(-1, spec.inputs)
        assert relative_error(weight_gradient(x, dy, _blank(*w.shape)), expected) < TOLERANCE


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("size", [(5, 9, 7), (8, 40, 70), (1, 1, 3)], ids=str)
def test_matmul_agrees_with_numpy(size: tuple[int, int, int], transpose_a: bool) -> None:
    spec = MatmulSpec((2,), *size, transpose_a)
    kernel = Runner(matmul(spec, HOST))
    for batch in (1, 3):
        a, b = _random(batch, 2, spec.rows, spec.inner), _random(batch, 2, spec.inner, spec.columns)
        stored_a = np.ascontiguousarray(a.swapaxes(2, 3)) if transpose_a else a
        y = kernel(stored_a, b, _blank(batch, 2, spec.rows, spec.columns))
        assert relative_error(y, a.astype(np.float64) @ b.astype(np.float64)) < TOLERANCE


@pytest.mark.parametrize("shape", [(9, 17), (2, 3, 16, 5)], ids=str)
def test_matrix_transpose_exchanges_the_last_two_axes(shape: tuple[int, ...]) -> None:
    x = _random(*shape)
    kernel = Runner(matrix_transpose((BATCH, *shape[1:]) if len(shape) > 2 else shape, HOST))
    wanted = x.swapaxes(-1, -2)
    assert np.array_equal(kernel(x, _blank(*wanted.shape)), wanted)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    spec = DenseSpec(100, 10)
    kernel = Runner(dense_forward(spec, HOST))
    x, w = _random(9, 100), _random(10, 100)
    together = kernel(x, w, _blank(9, 10))
    alone = [kernel(np.ascontiguousarray(x[row : row + 1]), w, _blank(1, 10)) for row in range(9)]
    assert np.array_equal(together, np.concatenate(alone))


def test_flops_count_multiplies_and_adds() -> None:
    assert flops(DenseSpec(512, 1000, (4,))) == 2 * 4 * 512 * 1000
    assert flops(MatmulSpec((7,), 2, 5, 3)) == 2 * 7 * 2 * 3 * 5
