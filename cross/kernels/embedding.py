"""Rows of a table chosen by tokens, and the gradient of the table.

    embedding            y[row]   = w[token of the row]
    embedding_gradient   dw[v]    = sum of dy[row] over the rows whose token is v, in the order of the rows

A task of the gradient owns a slice of columns of the whole table and walks over all rows, so each sum is made in one order
by one task, whatever the number of threads. A token out of range is taken for the nearest that the table has.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tvm.script.ir_builder import tirx as T

from cross.graph import BATCH
from cross.kernels.loop_nest import Buffer, Expr, PrimFunc, add_to, lanes, settle, store, view, write_kernel, zeros
from cross.target import Target

SLICE = 64
"""Columns of a task of the gradient: whole cache lines, so that no two tasks write into one."""


@dataclass(frozen=True)
class EmbeddingSpec:
    """tokens int32 [N, *leading], w [vocabulary, width], y [N, *leading, width]."""

    vocabulary: int
    width: int
    leading: tuple[int, ...]


def _row_of(tokens: Buffer, row: Expr, spec: EmbeddingSpec) -> Expr:
    return settle(T.max(T.min(tokens[row], spec.vocabulary - 1), 0))


def embedding(spec: EmbeddingSpec, target: Target) -> PrimFunc:
    """PrimFunc(tokens, w, y)."""
    vector = target.channel_block
    with write_kernel("embedding") as kernel:
        rows = kernel.batch * prod(spec.leading)
        tokens = kernel.tensor("tokens", (BATCH, *spec.leading), "int32")
        w = kernel.tensor("w", (spec.vocabulary, spec.width))
        y = kernel.tensor("y", (BATCH, *spec.leading, spec.width))
        tokens, y = view(tokens, rows, dtype="int32"), view(y, rows, spec.width)
        with T.parallel(rows) as row:
            chosen = _row_of(tokens, row, spec)
            with T.serial(spec.width // vector) as part:
                lane = lanes(part * vector, vector)
                store(y, (row, lane), w[chosen, lane])
            with T.serial(spec.width % vector) as left:
                column = spec.width // vector * vector + left
                store(y, (row, column), w[chosen, column])
    return kernel.function


def embedding_gradient(spec: EmbeddingSpec, target: Target) -> PrimFunc:
    """PrimFunc(tokens, dy, dw)."""
    vector = target.channel_block
    with write_kernel("embedding_gradient") as kernel:
        rows = kernel.batch * prod(spec.leading)
        tokens = kernel.tensor("tokens", (BATCH, *spec.leading), "int32")
        dy = kernel.tensor("dy", (BATCH, *spec.leading, spec.width))
        dw = kernel.tensor("dw", (spec.vocabulary, spec.width))
        tokens, dy = view(tokens, rows, dtype="int32"), view(dy, rows, spec.width)
        with T.parallel(-(-spec.width // SLICE)) as task:
            first = settle(task * SLICE)
            count = settle(T.min(spec.width - first, SLICE))

            def columns(width: int, start: Expr, steps: Expr) -> None:
                """`steps` times `width` columns from `start` on: zero, then what each row adds."""
                with T.serial(spec.vocabulary) as v, T.serial(steps) as part:
                    store(dw, (v, lanes(start + part * width, width)), zeros(width))
                with T.serial(rows) as row:
                    chosen = _row_of(tokens, row, spec)
                    with T.serial(steps) as part:
                        lane = lanes(start + part * width, width)
                        add_to(dw, (chosen, lane), dy[row, lane])

            columns(vector, first, settle(count // vector))
            if spec.width % vector:
                columns(1, settle(first + count // vector * vector), settle(count % vector))
    return kernel.function
