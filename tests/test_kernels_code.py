"""What the compiler makes of the convolution and dense kernels: outside symbols, vector instructions, bits for any thread count."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

from cross.kernels.convolution import ConvSpec, with_needed_pads
from cross.kernels.convolution_forward import convolution_forward
from cross.kernels.convolution_input_gradient import convolution_input_gradient, weight_transpose
from cross.kernels.convolution_weight_gradient import SAMPLES_A_PART, convolution_weight_gradient, sums_shape
from cross.kernels.dense import (
    DenseSpec,
    MatmulSpec,
    dense_forward,
    dense_input_gradient,
    dense_weight_gradient,
    matmul,
    matrix_transpose,
)
from cross.kernels.depthwise import depthwise_forward, depthwise_input_gradient, depthwise_weight_gradient
from cross.kernels.embedding import EmbeddingSpec, embedding, embedding_gradient
from cross.kernels.grouped import grouped_forward, grouped_input_gradient, grouped_weight_gradient
from cross.storage import NO_PADS
from cross.target import Target, find_target
from tests.kernel_assembly import assembly_of_build, heaviest_loop
from tests.kernel_tensors import HOST, Runner, compile_kernel, empty

CONVOLUTION = with_needed_pads(ConvSpec(32, 32, 16, 16, (3, 3), pads=(1, 1, 1, 1)))
STRIDED = with_needed_pads(ConvSpec(16, 24, 9, 9, (3, 3), (2, 2), (1, 1, 1, 1)))
DEPTHWISE = with_needed_pads(ConvSpec(96, 96, 8, 8, (3, 3), (2, 2), (1, 1, 1, 1), groups=96))
GROUPED = ConvSpec(12, 18, 8, 8, (3, 3), pads=(1, 1, 1, 1), groups=3)
DENSE = DenseSpec(65, 10)
TABLE = EmbeddingSpec(7, 40, (3,))
BUILDERS = [
    *((build, CONVOLUTION) for build in (convolution_forward, convolution_input_gradient, convolution_weight_gradient)),
    *((build, STRIDED) for build in (convolution_input_gradient, weight_transpose)),
    *((build, DEPTHWISE) for build in (depthwise_forward, depthwise_input_gradient, depthwise_weight_gradient)),
    *((build, GROUPED) for build in (grouped_forward, grouped_input_gradient, grouped_weight_gradient)),
    *((build, DENSE) for build in (dense_forward, dense_input_gradient, dense_weight_gradient)),
    *((build, TABLE) for build in (embedding, embedding_gradient)),
    (matmul, MatmulSpec((2,), 16, 24, 8)),
    (matrix_transpose, (64, 48)),
]
ALLOWED = {"TVMFFIErrorSetRaisedFromCStrParts", "__TVMBackendParallelLaunch", "memset"}
LLVM: dict[str, dict[str, Any]] = {
    "rpi4": {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"},
    "visionfive2": {
        "kind": "llvm",
        "mtriple": "riscv64-linux-gnu",
        "mcpu": "generic-rv64",
        "mattr": ["+m", "+a", "+f", "+d"],
    },
}


def _assembly(function: Any, target: Target) -> str:
    module = compile_kernel(function, LLVM[target.name]) if target.name in LLVM else compile_kernel(function)
    return str(module.mod.inspect_source("s"))


def _inner_code(assembly: str) -> str:
    """The code of the tasks, without the checks of the arguments."""
    return assembly[assembly.index("__tvm_parallel_lambda:") :]


@pytest.mark.parametrize(("build", "spec"), BUILDERS, ids=lambda value: getattr(value, "__name__", ""))
def test_kernels_need_nothing_but_the_parallel_launch(build: Any, spec: Any) -> None:
    """No libm, no workspace. (memset is what LLVM makes of filling a row with zeros; every C library has it.)"""
    outside = set(re.findall(r"(\w+)@(?:PLT|GOTPCREL)", _assembly(build(spec, HOST), HOST)))
    assert {name for name in outside if not name.startswith("__tvm_ffi_")} <= ALLOWED


@pytest.mark.parametrize("build", [convolution_forward, convolution_input_gradient, convolution_weight_gradient])
def test_arm_kernels_multiply_and_add_vectors(build: Any) -> None:
    target = find_target("rpi4")
    code = _inner_code(_assembly(build(CONVOLUTION, target), target))
    # By element: a loaded scalar times a vector, without an instruction to spread it.
    assert len(re.findall(r"fmla\s+v\d+\.4s, v\d+\.4s, v\d+\.s\[\d\]", code)) >= 48
    assert code.count("fmadd") == 0


def test_large_weights_are_fetched_ahead_once_a_cache_line() -> None:
    target = find_target("rpi4")
    spec = with_needed_pads(ConvSpec(256, 256, 4, 4, (3, 3), pads=(1, 1, 1, 1)))
    code = _inner_code(_assembly(convolution_forward(spec, target), target))
    # A line is four input channels by a block of four output channels: one request for all the products with it.
    assert 0 < len(re.findall(r"prfm\s+pldl2keep", code)) <= len(re.findall(r"fmla\s", code)) // 16
    assert "prfm" not in _assembly(convolution_forward(CONVOLUTION, target), target)


def test_scalar_kernels_keep_their_sums_in_registers() -> None:
    target = find_target("visionfive2")
    code = _inner_code(_assembly(convolution_forward(CONVOLUTION, target), target))
    products = len(re.findall(r"\bfmadd\.s\b", code))
    assert products >= 64
    assert len(re.findall(r"\bfs[wd]\s", code)) < products // 2


@pytest.mark.usefixtures("own_cores")
@pytest.mark.parametrize("build", [convolution_forward, convolution_weight_gradient, depthwise_weight_gradient])
def test_the_bits_do_not_depend_on_the_number_of_threads(build: Any) -> None:
    spec = DEPTHWISE if build is depthwise_weight_gradient else CONVOLUTION
    random = np.random.default_rng(7)
    forward = build is convolution_forward
    second = spec.weight_storage(HOST) if forward else spec.y_storage(HOST)
    third = spec.y_storage(HOST, NO_PADS) if forward else spec.weight_storage(HOST)
    batch = SAMPLES_A_PART * HOST.cores + 1
    x, other = (
        random.standard_normal(empty(storage, batch).shape).astype(np.float32)
        for storage in (spec.x_storage(HOST), second)
    )
    shape = sums_shape(spec, HOST) if build is convolution_weight_gradient else None
    sums = [] if shape is None else [np.empty(shape, np.float32)]
    kernel, results = Runner(build(spec, HOST)), []
    configure = tvm.get_global_func("runtime.config_threadpool")
    for threads in (1, 2):
        configure(1, threads)
        results.append(kernel(x, other, *sums, empty(third, batch)))
    assert np.array_equal(results[0], results[1])


@pytest.mark.parametrize("build", [convolution_forward, convolution_input_gradient, convolution_weight_gradient])
def test_rvv_kernels_keep_their_sums_in_vector_registers(build: Any, tmp_path: Path) -> None:
    target = find_target("bpi-f3")
    loop = heaviest_loop(assembly_of_build(build(CONVOLUTION, target), target, tmp_path), re.compile("vfma"))
    # vfmadd is the same where a weight is used for the last time: the sum takes its register.
    products = [line for line in loop if re.match(r"(vfmacc|vfmadd)\.v[vf] ", line)]
    sums = {line.split()[1] for line in products}
    assert len(products) >= 8 and len(sums) >= 8
    # A sum goes to memory once, at the end of a loop that is unrolled as a whole; nothing is spilled or shuffled.
    stores = [line for line in loop if re.match(r"(vse|vs\d|fsw|fsd|sd) ?", line)]
    assert 4 * len(stores) <= len(products)
    assert [line for line in loop if re.match(r"(fmadd|vslide|vrgather|vs\dr)", line)] == []
