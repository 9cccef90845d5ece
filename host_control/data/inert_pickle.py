"""A reader of the pickles that CIFAR's python version consists of, which executes nothing.

Python's own unpickler calls what a file names. This one is a small stack machine over the opcodes that `pickletools`
splits a file into (it checks every length against the file): values are dicts, lists, tuples, numbers, text and
numpy arrays, and the only names it knows are those of an array's parts, which stand for functions of this module.
Any other name, opcode or shape of data is a DataError (23).
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np

from cross.errors import DataError

_MARK = object()
_VALUES = frozenset(
    "BININT BININT1 BININT2 LONG1 LONG4 INT LONG FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8".split()
)
_IGNORED = frozenset(("PROTO", "FRAME"))


class _Name:
    """A name that the file mentions, and what we do where it calls it."""

    def __init__(self, call: Callable[..., object]) -> None:
        self.call = call


class _DType:
    """numpy.dtype('u1'): bytes are all we need."""

    def __init__(self, code: object, *_: object) -> None:
        if code not in ("u1", b"u1", "|u1"):
            raise ValueError(f"an array of {code!r}, not of bytes")

    def set_state(self, _state: object) -> None:
        """Byte order and fields: nothing that bytes have."""


class _Array:
    """numpy.ndarray under construction: `set_state` fills it."""

    def __init__(self, *_: object) -> None:
        self.value: np.ndarray[Any, np.dtype[np.uint8]] | None = None

    def set_state(self, state: object) -> None:
        """(version, shape, dtype, is_fortran, data)"""
        if not isinstance(state, tuple) or len(state) != 5:
            raise ValueError("an array without its five parts")
        _, shape, kind, fortran, data = state
        if fortran:
            raise ValueError("an array in Fortran order")
        self.fill(data.encode("latin-1") if isinstance(data, str) else data, kind, shape)

    def fill(self, data: object, kind: object, shape: object) -> None:
        """The array's bytes; reshape checks their number."""
        if not isinstance(kind, _DType) or not isinstance(data, bytes | bytearray) or not isinstance(shape, tuple):
            raise ValueError("an array that is not plain bytes")
        if not all(type(side) is int and side >= 0 for side in shape):
            raise ValueError("an array of impossible shape")
        self.value = np.frombuffer(data, np.uint8).reshape(shape)


def _from_buffer(data: object, kind: object, shape: object, order: object) -> _Array:
    """numpy._core.numeric._frombuffer: an array at protocol 5."""
    if order != "C":
        raise ValueError("an array in Fortran order")
    array = _Array()
    array.fill(data, kind, shape)
    return array


def _encode(text: object, encoding: object = "latin1") -> bytes:
    """_codecs.encode: how Python 3 writes bytes at protocol 2."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes in an encoding that pickle does not use")
    return text.encode("latin-1")


_KNOWN = {
    **{f"{module}.multiarray _reconstruct": _Name(_Array) for module in ("numpy.core", "numpy._core")},
    **{f"{module}.numeric _frombuffer": _Name(_from_buffer) for module in ("numpy.core", "numpy._core")},
    "numpy ndarray": _Name(_Array),
    "numpy dtype": _Name(_DType),
    "_codecs encode": _Name(_encode),
}


def load_inert(data: bytes, name: str) -> Any:
    """What a pickle holds; `name` is the file's, for messages. DataError for anything but plain data."""
    try:
        return _Machine().run(data)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, UnicodeError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{name} is not a CIFAR batch: {reason}. Nothing in it was executed; fetch it again.") from None


class _Machine:
    """Stack and memo of one pickle. Every method named like an opcode does it; `arg` is what pickletools read."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for opcode, arg, _ in pickletools.genops(io.BytesIO(data)):
            if opcode.name == "STOP":
                if len(self._stack) != 1:
                    raise ValueError("values are left over at its end")
                return _plain(self._stack[0])
            if opcode.name in _VALUES:
                self._stack.append(arg)
            elif opcode.name not in _IGNORED:
                step = getattr(self, f"_op_{opcode.name.lower()}", None)
                if step is None:
                    raise ValueError(f"it holds the instruction {opcode.name}")
                step(arg)
        raise ValueError("it ends too early")

    def _since_mark(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("a list without its beginning")
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items

    def _fill(self, pairs: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(pairs) % 2:
            raise ValueError("pairs for what is no dict")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            # Nested tuples as keys take exponential time to hash.
            if not isinstance(key, str | bytes | int):
                raise ValueError("a key that is no text")
            target[key.decode("latin-1") if isinstance(key, bytes) else key] = _plain(value)

    def _extend(self, items: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise ValueError("items for what is no list")
        self._stack[-1].extend(map(_plain, items))

    def _name(self, name: str) -> None:
        if name not in _KNOWN:
            raise ValueError(f"it names {name.replace(' ', '.')}, which no CIFAR file needs")
        self._stack.append(_KNOWN[name])

    def _op_mark(self, _: object) -> None:
        self._stack.append(_MARK)

    def _op_none(self, _: object) -> None:
        self._stack.append(None)

    def _op_newtrue(self, _: object) -> None:
        self._stack.append(True)

    def _op_newfalse(self, _: object) -> None:
        self._stack.append(False)

    def _op_pop(self, _: object) -> None:
        self._stack.pop()

    def _op_empty_dict(self, _: object) -> None:
        self._stack.append({})

    def _op_empty_list(self, _: object) -> None:
        self._stack.append([])

    def _op_empty_tuple(self, _: object) -> None:
        self._stack.append(())

    def _op_dict(self, _: object) -> None:
        pairs = self._since_mark()
        self._stack.append({})
        self._fill(pairs)

    def _op_list(self, _: object) -> None:
        self._stack.append(self._since_mark())

    def _op_tuple(self, _: object) -> None:
        self._stack.append(tuple(self._since_mark()))

    def _op_tuple1(self, _: object) -> None:
        self._last(1)

    def _op_tuple2(self, _: object) -> None:
        self._last(2)

    def _op_tuple3(self, _: object) -> None:
        self._last(3)

    def _last(self, count: int) -> None:
        if len(self._stack) < count:
            raise ValueError("a tuple without its items")
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        self._stack.append(items)

    def _op_append(self, _: object) -> None:
        self._extend([self._stack.pop()])

    def _op_appends(self, _: object) -> None:
        self._extend(self._since_mark())

    def _op_setitem(self, _: object) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._fill([key, value])

    def _op_setitems(self, _: object) -> None:
        self._fill(self._since_mark())

    def _op_put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    _op_binput = _op_long_binput = _op_put

    def _op_memoize(self, _: object) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _op_get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    _op_binget = _op_long_binget = _op_get

    def _op_global(self, name: str) -> None:
        self._name(name)

    def _op_stack_global(self, _: object) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._name(f"{module} {name}")

    def _op_reduce(self, _: object) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, _Name) or not isinstance(arguments, tuple):
            raise ValueError("it calls what is no name")
        self._stack.append(function.call(*arguments))

    def _op_build(self, _: object) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if not isinstance(target, _Array | _DType):
            raise ValueError("it changes what is no array")
        target.set_state(state)


def _plain(value: Any) -> Any:
    """Arrays under construction as arrays; names and marks stay no values."""
    if isinstance(value, _Array):
        if value.value is None:
            raise ValueError("an array without data")
        return value.value
    if isinstance(value, _Name | _DType) or value is _MARK:
        raise ValueError("a name where a value belongs")
    return value
