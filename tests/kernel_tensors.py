"""Compile a kernel for this machine, and move numpy arrays into and out of a storage by its own formula."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import tvm

from cross.graph import BATCH
from cross.storage import Storage
from cross.target import find_target

HOST = find_target("x86-64-avx2")
HOST_LLVM = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3"}


def compile_kernel(function: Any, llvm: dict[str, Any] = HOST_LLVM) -> Any:
    """The module of one kernel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # As cross.compile_kernels does it, and for its reasons.
        config = {"tirx.disable_storage_rewrite": True, "tirx.disable_cse_tir": True}
        with tvm.transform.PassContext(opt_level=3, config=config):
            return tvm.compile(function, target=tvm.target.Target(llvm))


class Runner:
    """A kernel compiled for this machine, called with float32 arrays, which it writes in place; the last one is returned."""

    def __init__(self, function: Any) -> None:
        self._call = compile_kernel(function)[str(function.attrs["global_symbol"])]

    def __call__(self, *arrays: np.ndarray) -> np.ndarray:
        tensors = [tvm.runtime.tensor(array) for array in arrays]
        self._call(*tensors)
        for array, tensor in zip(arrays, tensors, strict=True):
            array[...] = tensor.numpy()
        return arrays[-1]


def _offsets(storage: Storage, batch: int) -> np.ndarray:
    """Element offset of every canonical element."""
    offset: np.ndarray = np.array(storage.base)
    for axis in storage.axes:
        index = np.arange(batch if axis.extent == BATCH else axis.extent)
        line = index // axis.block * axis.outer_stride + index % axis.block * axis.inner_stride
        offset = offset[..., None] + line
    return offset


def empty(storage: Storage, batch: int, value: float = np.nan) -> np.ndarray:
    """A stored tensor full of `value`."""
    shape = tuple(batch if extent == BATCH else extent for extent in storage.shape)
    return np.full(shape, value, dtype=np.float32)


def stored(array: np.ndarray, storage: Storage) -> np.ndarray:
    """The canonical array in `storage`; what lies outside is zero, as the invariant of cross/storage.py says."""
    batch = array.shape[0] if storage.batched else 0
    flat = empty(storage, batch, 0.0).reshape(-1)
    flat[_offsets(storage, batch)] = array
    return flat.reshape(empty(storage, batch).shape)


def canonical(array: np.ndarray, storage: Storage) -> np.ndarray:
    """The canonical array of a stored one, in float64; fails where anything stored outside is not exactly zero."""
    offsets = _offsets(storage, array.shape[0])
    flat = array.reshape(-1)
    outside = np.ones(flat.shape, dtype=bool)
    outside[offsets] = False
    assert not flat[outside].any(), f"{int(np.count_nonzero(flat[outside]))} elements outside the tensor are not zero"
    result: np.ndarray = flat[offsets].astype(np.float64)
    return result


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 error; absolute where nothing is expected."""
    scale = float(np.linalg.norm(expected))
    return float(np.linalg.norm(found - expected)) / (scale if scale else 1.0)
