"""The small kernels of batch norm, whatever layout the sums of the samples come in."""

from __future__ import annotations

import numpy as np
import pytest

from cross.graph import BATCH, TensorType
from cross.kernels.normalisation import batch_norm_gradient_finish_kernel
from cross.storage import Storage, blocked, plain
from tests.kernel_tensors import HOST, Runner, relative_error, stored

CHANNELS, PIXELS, EPSILON, SAMPLES = 16, 9, 1e-5, 5
PLANE = TensorType((BATCH, CHANNELS, 1, 1))
LAYOUTS = {
    "blocked": blocked(PLANE, HOST.vector_floats),
    "plain planes": plain(PLANE),
    "plain rows": plain(TensorType((BATCH, CHANNELS))),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("other", LAYOUTS)
def test_batch_norm_gradient_sums_any_layout(layout: str, other: str) -> None:
    """c, the last output, is -gamma / sqrt(var + eps) * (sum of dy) / count."""
    rng = np.random.default_rng(0)
    kinds: list[Storage] = [LAYOUTS[layout], LAYOUTS[other]]
    sums = [rng.standard_normal((SAMPLES, CHANNELS, 1, 1)).astype("float32") for _ in kinds]
    gamma, var = (rng.uniform(0.5, 2, CHANNELS).astype("float32") for _ in range(2))
    function = batch_norm_gradient_finish_kernel(kinds, CHANNELS, CHANNELS, PIXELS, EPSILON, HOST.vector_floats)
    partial = [stored(a if len(s.axes) == 4 else a[..., 0, 0], s) for a, s in zip(sums, kinds, strict=True)]
    outputs = [np.full(CHANNELS, np.nan, "float32") for _ in range(6)]
    found = Runner(function)(*partial, gamma, var, *outputs)
    wanted = -gamma / np.sqrt(var.astype("float64") + EPSILON) * sums[0].sum((0, 2, 3)) / (SAMPLES * PIXELS)
    assert relative_error(found, wanted) <= 1e-5
