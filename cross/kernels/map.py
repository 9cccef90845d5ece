"""Element-wise kernels: one expression over any storages. Also conversions between storages and zero-bordered copies."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tvm import s_tir, te, tirx

from cross.expression import Expr
from cross.graph import Shape, TensorType
from cross.kernels import access, arithmetic
from cross.kernels.access import Index, PrimExpr
from cross.storage import Storage


def element(
    expr: Expr,
    tensors: Sequence[te.Tensor],
    storages: Sequence[Storage],
    types: Sequence[TensorType],
    domain: Shape,
    indices: Sequence[Index],
) -> PrimExpr:
    """`expr` at one element of `domain`, its inputs broadcast as numpy would."""

    def read(i: int) -> PrimExpr:
        return access.broadcast_load(tensors[i], storages[i], types[i].shape, domain, indices)

    def random(identity: int, counter: int) -> PrimExpr:
        position: PrimExpr = 0
        for extent, index in zip(domain[1:], indices[1:], strict=True):
            position = position * extent + access.flat(index)
        return arithmetic.uniform(identity, lambda i: tensors[counter][i], access.flat(indices[0]), position)

    return arithmetic.evaluate(expr, read, lambda d: access.flat(indices[d]), random)


def map_kernel(
    expr: Expr,
    inputs: Sequence[Storage],
    types: Sequence[TensorType],
    output: Storage,
    kind: TensorType,
    vector: int,
) -> tirx.PrimFunc:
    """Arguments: the inputs, then the output, in their storages."""
    batch = access.batch_variable()
    tensors = [access.placeholder(s, batch, f"x{i}") for i, s in enumerate(inputs)]

    def value(*indices: Index) -> PrimExpr:
        return element(expr, tensors, inputs, types, kind.shape, indices)

    y = access.store(output, kind, batch, value, "y")
    schedule = s_tir.Schedule(access.prim_func([*tensors, y]))
    access.parallel_vector_schedule(schedule, schedule.get_sblock("y"), output, vector)
    return schedule.mod["main"]


def flops(kind: TensorType, operations: int) -> int:
    return operations * prod(d for d in kind.shape if d > 0)
