"""A pickle read as data: a machine for the opcodes that PyTorch's files consist of, which calls nothing but stubs of ours.

Python's own unpickler calls whatever a file names. Here a name is looked up in a table of stubs; one that is not there
ends the reading. Nothing is allocated but what the file spells out, so memory is bounded by its size.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from cross.errors import CorruptInputError

_PUSHED = frozenset(("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
                     "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"))  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = frozenset(("PROTO", "FRAME", "STOP"))


@dataclass(frozen=True)
class Stub:
    """What stands for a callable of the writer: `make` gets the arguments that the file holds."""

    make: Callable[..., object]


def dictionary(pairs: object = ()) -> dict[object, object]:
    """A dict of pairs whose keys are text or numbers: nothing deep is ever hashed."""
    found: dict[object, object] = {}
    if not isinstance(pairs, (list, tuple)):
        raise CorruptInputError("a dictionary is not made of pairs. Save the file again.")
    for key, value in pairs:
        if type(key) not in (str, int):
            raise CorruptInputError(f"a key is a {type(key).__name__}, not a name. Save a state dict alone.")
        found[key] = value
    return found


def read_pickle(stream: BytesIO, known: Mapping[str, object], persistent: Callable[[object], object]) -> object:
    """The value of the pickle at the stream's position, which is left behind it.

    `known`: what may be named ('module name'), a `Stub` or a plain value. `persistent`: makes a value of a persistent id.
    Raises CorruptInputError at an unknown name or opcode; any exception of Python's where the file is damaged.
    """
    machine = _Machine(known, persistent)
    for opcode, argument, _ in pickletools.genops(stream):
        machine.execute(opcode.name, argument)
    (value,) = machine.stack
    return value


class _Machine:
    def __init__(self, known: Mapping[str, object], persistent: Callable[[object], object]) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, object] = {}
        self._known = known
        self._persistent = persistent
        self._actions: Mapping[str, Callable[[Any], None]] = {
            "EMPTY_LIST": lambda _: self.stack.append([]),
            "EMPTY_DICT": lambda _: self.stack.append({}),
            "MARK": lambda _: self._marks.append(len(self.stack)),
            "TUPLE": lambda _: self.stack.append(tuple(self._to_mark())),
            "APPEND": lambda _: self._extend([self.stack.pop()]),
            "APPENDS": lambda _: self._extend(self._to_mark()),
            "SETITEM": lambda _: self._update(self._top(2)),
            "SETITEMS": lambda _: self._update(self._to_mark()),
            "BINPUT": self._put,
            "LONG_BINPUT": self._put,
            "MEMOIZE": lambda _: self._put(len(self._memo)),
            "BINGET": self._get,
            "LONG_BINGET": self._get,
            "GLOBAL": self._name,
            "STACK_GLOBAL": lambda _: self._name(" ".join(self._top(2))),
            "REDUCE": lambda _: self._call(),
            "NEWOBJ": lambda _: self._call(),
            "BUILD": lambda _: self._build(),
            "BINPERSID": lambda _: self.stack.append(self._persistent(self.stack.pop())),
        }

    def execute(self, name: str, argument: Any) -> None:
        if name in _PUSHED:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            self.stack.append(tuple(self._top(_TUPLES[name])))
        elif name in self._actions:
            self._actions[name](argument)
        elif name not in _IGNORED:
            raise CorruptInputError(f"it uses pickle's {name}, which no state dict needs. Save model.state_dict().")

    def _top(self, count: int) -> list[Any]:
        """Take the last `count` values, none from below the mark."""
        if len(self.stack) - count < (self._marks[-1] if self._marks else 0):
            raise CorruptInputError("its stack runs empty. Save the file again.")
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def _to_mark(self) -> list[Any]:
        start = self._marks.pop()
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def _extend(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise CorruptInputError("it appends to what is no list. Save the file again.")
        self.stack[-1].extend(values)

    def _update(self, flat: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict):
            raise CorruptInputError("it sets an item of what is no dictionary. Save a state dict alone.")
        self.stack[-1].update(dictionary(list(zip(flat[::2], flat[1::2], strict=True))))

    def _put(self, index: int) -> None:
        self._memo[index] = self.stack[-1]

    def _get(self, index: int) -> None:
        self.stack.append(self._memo[index])

    def _name(self, name: str) -> None:
        if name not in self._known:
            dotted = name.replace(" ", ".")
            raise CorruptInputError(
                f"it names {dotted}, which is no part of a state dict. Save model.state_dict() alone."
            )
        self.stack.append(self._known[name])

    def _call(self) -> None:
        stub, arguments = self._top(2)
        if not isinstance(stub, Stub) or not isinstance(arguments, tuple):
            raise CorruptInputError("it calls what cannot be called. Save a state dict alone.")
        self.stack.append(stub.make(*arguments))

    def _build(self) -> None:
        """A dictionary's attributes (PyTorch's `_metadata`) are dropped."""
        self.stack.pop()
        if not isinstance(self.stack[-1], dict):
            raise CorruptInputError("it sets attributes of what is no dictionary. Save a state dict alone.")
