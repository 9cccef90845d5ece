"""Loops of in-order cores: the same bits as without them, and loads that nothing waits for."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cross.kernels.convolution import ConvSpec, with_needed_pads
from cross.kernels.convolution_forward import convolution_forward
from cross.kernels.convolution_input_gradient import convolution_input_gradient
from cross.kernels.convolution_weight_gradient import convolution_weight_gradient
from cross.kernels.winograd_correlation import winograd_forward
from cross.kernels.winograd_weight_gradient import winograd_weight_gradient
from cross.target import find_target
from tests.kernel_assembly import assembly_of_build, heaviest_loop
from tests.kernel_tensors import Runner

SAME = (1, 1, 1, 1)
CASES = [
    (convolution_forward, ConvSpec(16, 16, 5, 9, (3, 3), pads=SAME)),
    (convolution_forward, ConvSpec(16, 16, 5, 19, (3, 3), (2, 2), SAME)),
    (convolution_input_gradient, ConvSpec(16, 16, 4, 4, (3, 3), pads=SAME)),
    (convolution_weight_gradient, ConvSpec(3, 16, 4, 13, (3, 3), pads=SAME)),
    (winograd_forward, ConvSpec(16, 16, 6, 6, (3, 3), pads=SAME)),
    (winograd_weight_gradient, ConvSpec(16, 16, 6, 6, (3, 3), pads=SAME)),
]
BOARDS = ("rpi3", "visionfive2", "bpi-f3")
BATCH = 3


@pytest.mark.parametrize(("build", "spec"), CASES, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("board", BOARDS)
def test_the_bits_are_those_of_the_plain_loops(board: str, build: Any, spec: ConvSpec) -> None:
    """The same kernel with its loads in either place, both compiled for this machine."""
    target = find_target(board)
    assert target.in_order
    results = []
    for variant in (target, replace(target, in_order=False)):
        function = build(with_needed_pads(spec), variant)
        random = np.random.default_rng(7)
        shapes = [_shape(parameter) for parameter in function.params]
        arrays = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
        results.append(Runner(function)(*arrays))
    assert np.isfinite(results[0]).all() and np.ptp(results[0]) > 1
    assert np.array_equal(results[0], results[1])


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(int(n) if hasattr(n, "value") else BATCH for n in parameter.shape)


LOAD = re.compile(r"(?:ldr|ldur|flw|vle32\.v) ([qds]\d+|f[a-z]+\d+|v\d+),|ldp ([qds]\d+), ([qds]\d+),")
PRODUCT = re.compile(r"(?:fmla|fmadd\.s|vfmacc\.vf|vfmadd\.vf)\s+(.*)")


@pytest.mark.parametrize("board", BOARDS)
def test_products_do_not_wait_for_loads(board: str, tmp_path: Path) -> None:
    """Of the loads of the heaviest loop hardly one is used within the next three instructions."""
    target = find_target(board)
    spec = with_needed_pads(ConvSpec(64, 64, 16, 16, (3, 3), pads=SAME))
    loop = heaviest_loop(assembly_of_build(winograd_forward(spec, target), target, tmp_path), PRODUCT)
    loads, hurried = 0, 0
    for number, line in enumerate(loop):
        for register in _loaded(line):
            loads += 1
            hurried += any(register in _sources(other) for other in loop[number + 1 : number + 4])
    # As LLVM places them, every twelfth load or more.
    assert loads >= 32
    assert hurried <= loads // 40, f"{hurried} of {loads} loads are used at once"


def _loaded(line: str) -> set[str]:
    """Registers, as they are called where they are used."""
    found = LOAD.match(line)
    names = {name for name in found.groups() if name} if found else set()
    return {re.sub(r"^[qds](?=\d)", "v", name) for name in names}


def _sources(line: str) -> set[str]:
    found = PRODUCT.match(line)
    return set(re.findall(r"f[a-z]+\d+|v\d+", found[1])) if found else set()
