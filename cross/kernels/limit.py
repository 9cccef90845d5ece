"""The multiply-add limit of a CPU, as a kernel: sums in registers, no memory, nothing to wait for.

Compiled like every other kernel of a build, so what it reaches is what the best of them could."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from cross.graph import BATCH
from cross.kernels.loop_nest import PrimFunc, lanes, local, store, write_kernel
from cross.target import Target

SYMBOL = "taste_multiply_add_limit"

STEPS = 20000
"""Of a task: some 50 microseconds on a fast core, so that starting it costs nothing."""


@dataclass(frozen=True)
class Limit:
    """What the tables say of the kernel."""

    sums: int
    width: int

    @property
    def row_elements(self) -> int:
        """Its sums, a factor and a term."""
        return (self.sums + 2) * self.width

    @property
    def row_flops(self) -> int:
        return 2 * STEPS * self.sums * self.width


def limit_of(target: Target) -> Limit:
    """As many sums as registers hold beside a factor and a term, and no more than hide any latency."""
    return Limit(min(24, target.vector_registers - 4), target.vector_floats)


def multiply_add_limit(target: Target) -> PrimFunc:
    """PrimFunc(rows float32 [n, row_elements]): every sum of a row becomes sum * factor + term, many times."""
    limit = limit_of(target)
    lane = lanes(0, limit.width)
    with write_kernel(SYMBOL) as kernel:
        rows = kernel.tensor("rows", (BATCH, limit.row_elements))
        with T.parallel(kernel.batch) as row:
            places = [lanes(i * limit.width, limit.width) for i in range(limit.sums + 2)]
            registers = [local(limit.width) for _ in places]
            for register, place in zip(registers, places, strict=True):
                store(register, (lane,), rows[row, place])
            *sums, factor, term = registers
            with T.serial(STEPS):
                for total in sums:
                    store(total, (lane,), total[lane] * factor[lane] + term[lane])
            for total, place in zip(sums, places, strict=False):
                store(rows, (row, place), total[lane])
    return kernel.function
