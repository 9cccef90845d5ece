"""Kernels written down as loop nests: the few words that `convolution*.py`, `depthwise.py`, `grouped.py` and `dense.py` share.

A kernel is a `tvm.tirx.PrimFunc` over tensors in the storage of `cross/storage.py`; a dimension BATCH is the symbolic batch.
The loops are written with TVM's IR builder rather than scheduled from a `te.compute`: register tiles of two sizes side by
side (see `cross/kernels/tiles.py`) need no test inside the inner loop that way, and the unrolled order of loads, which
decides whether the accumulators stay in registers, is the order in which we write them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from cross.graph import BATCH, Shape

Expr = Any
"""A TIR expression, or a Python number."""

Buffer = Any
"""A TIR buffer: a tensor argument, a local array, or a view of one."""

PrimFunc = Any
"""`tvm.tirx.PrimFunc`."""

STACK_BYTES = 1024
"""TVM puts constant arrays below this size on the stack; it asks the runtime for workspace for larger ones, and for any
array whose scope is "local", which is why ours are "global"."""


WORKSPACE_BYTES = 128 << 10
"""Scratch memory that a task may use at most."""


class Kernel:
    """A kernel being written: `batch` is its symbolic batch; `function` is there once the `with write_kernel(...)` ends."""

    def __init__(self) -> None:
        self.batch: Expr = T.int64()
        self.function: PrimFunc = None

    def tensor(self, name: str, shape: Shape, dtype: str = "float32") -> Buffer:
        """The next argument: a tensor of this physical shape."""
        return T.arg(name, T.buffer(tuple(self.batch if extent == BATCH else extent for extent in shape), dtype))


@contextmanager
def write_kernel(name: str) -> Iterator[Kernel]:
    """Write a PrimFunc called `name`; its arguments do not overlap."""
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name(name)
            T.func_attr({"tirx.noalias": True})
            kernel = Kernel()
            yield kernel
    kernel.function = builder.get()


ON_STACK = {"disable_lower_builtin": True}
"""Keeps TVM from turning an allocation of known size into a call for workspace memory."""


def local(*shape: int) -> Buffer:
    """A small float32 array of this task: registers where every index is a constant, stack otherwise."""
    assert prod(shape) * 4 < STACK_BYTES, f"a local array of {shape} would be allocated by the runtime"
    return T.alloc_buffer(shape, "float32")


def scratch(*shape: int) -> Buffer:
    """A float32 array of this task: in the thread's workspace memory (TASTE_WORKSPACE_BYTES of native/src/pool.h), or on the
    stack where it is small."""
    assert prod(shape) * 4 <= WORKSPACE_BYTES, f"{shape} is too much for scratch memory"
    return T.alloc_buffer(shape, "float32")


def view(buffer: Buffer, *shape: Expr, dtype: str = "float32") -> Buffer:
    """The same elements under another shape."""
    return T.decl_buffer(shape, dtype, data=buffer.data)


def settle(value: Expr) -> Expr:
    """An index computed once: kept in a local variable that TVM's simplifier cannot write out again at each of hundreds of
    uses (it does so with a plain binding, and then spends seconds on a kernel)."""
    variable = T.alloc_buffer((1,), "int64")
    T.buffer_store(variable, T.Cast("int64", value), [0])
    return variable[0]


def lanes(first: Expr, width: int, stride: int = 1) -> Expr:
    """Index of `width` elements, one vector."""
    return T.ramp(first, stride, width) if width > 1 else first


def spread(value: Expr, width: int) -> Expr:
    """A scalar in every lane."""
    return T.broadcast(value, width) if width > 1 else value


def zeros(width: int) -> Expr:
    return spread(T.float32(0), width)


def store(buffer: Buffer, index: tuple[Expr, ...], value: Expr) -> None:
    T.buffer_store(buffer, value, list(index))


def add_to(buffer: Buffer, index: tuple[Expr, ...], value: Expr) -> None:
    """buffer[index] += value: one fused multiply-add where `value` is a product."""
    T.buffer_store(buffer, buffer[index] + value, list(index))


CACHE_LINE = 16
"""Floats."""


def prefetch(buffer: Buffer, index: tuple[Expr, ...]) -> None:
    """Ask for the cache line of an element, into the second-level cache. It need not exist: nothing is read."""
    T.evaluate(tirx.call_intrin("void", "tirx.prefetch", address_of(buffer, index), 0, 2, 1))


def address_of(buffer: Buffer, index: tuple[Expr, ...]) -> Expr:
    return tirx.call_intrin("handle", "tirx.address_of", buffer[index])


def keep_order(value: Expr) -> None:
    """LLVM's instruction scheduler moves nothing from one side of this to the other. It is no instruction, but a use of a
    value, which stays in its register at least until here."""
    T.evaluate(tirx.call_llvm_intrin("void", "llvm.fake.use", value))


def opaque_serial(count: int, batch: Expr) -> Any:
    """A loop that LLVM must not unroll: it would share loads between steps and run out of registers. `batch` is at least 1,
    which LLVM does not know, so neither does it know the number of steps."""
    return T.serial(T.min(batch * count, count) if count > 1 else count)


@contextmanager
def when(condition: Expr) -> Iterator[None]:
    """The body runs where `condition` holds; a Python bool decides while the kernel is written."""
    with T.If(condition), T.Then():
        yield
