"""Runs lowered programs in this process through TVM's JIT: kernels, storages and lifetimes without C, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm

from cross.assign_storage import assign_storage
from cross.compile_kernels import compile_kernel
from cross.graph import Model
from cross.lower import Convolutions, Kernels, LoweredProgram, lower
from cross.storage import Storage
from cross.target import find_target
from cross.training_graph import build_training_graph

Array = np.ndarray[Any, Any]
HOST = "x86-64-avx2"


def offsets(storage: Storage, batch: int) -> Array:
    """Element offset of every canonical element."""
    total = np.array(storage.base)
    for axis in storage.axes:
        index = np.arange(batch if axis.extent == -1 else axis.extent)
        total = total[..., None] + index // axis.block * axis.outer_stride + index % axis.block * axis.inner_stride
    return total


def stored(array: Array, storage: Storage, batch: int) -> Array:
    flat = np.zeros(storage.elements * (batch if storage.batched else 1), storage.dtype)
    flat[offsets(storage, batch).ravel()] = np.asarray(array).ravel()
    return flat.reshape([batch if d == -1 else d for d in storage.shape])


def canonical(array: Array, storage: Storage, batch: int) -> Array:
    return array.ravel()[offsets(storage, batch)]


_compiled: dict[str, Any] = {}


def kernel(kernels: Kernels, symbol: str) -> Any:
    if symbol not in _compiled:
        _compiled[symbol] = compile_kernel(symbol, kernels.builders[symbol](), kernels.target)[symbol]
    return _compiled[symbol]


def lower_model(
    model: Model,
    loss: str = "cross_entropy",
    target: str = HOST,
    fusion: bool = True,
    trainable: str = "all",
    winograd: Convolutions | None = None,
    bn_policy: str = "per-micro-batch",
    recomputation: str = "cheap",
) -> Kernels:
    chosen = find_target(target)
    training = build_training_graph(model, loss, fusion, trainable, bn_policy, recomputation)
    return lower(assign_storage(training, chosen), chosen, winograd)


def run_program(
    kernels: Kernels, name: str, values: Mapping[str, Array], batch: int
) -> tuple[dict[str, Array], LoweredProgram]:
    """Run every call in order, every tensor in memory of its own (filled with NaN first, so that an unwritten border shows)."""
    program = next(p for p in kernels.programs if p.stored.graph.name == name)
    memory: dict[str, Any] = {}
    for call in program.calls:
        for tensor in call.arguments:
            if tensor in memory:
                continue
            storage = program.storages[tensor]
            if tensor in values:
                physical = stored(values[tensor], storage, batch)
            else:
                shape = [batch if d == -1 else d for d in storage.shape]
                fill = np.nan if storage.dtype == "float32" else 7
                physical = np.full(shape, fill, storage.dtype)
            memory[tensor] = tvm.runtime.tensor(physical)
        kernel(kernels, call.kernel)(*(memory[tensor] for tensor in call.arguments))
    return {t: canonical(m.numpy(), program.storages[t], batch) for t, m in memory.items()}, program
