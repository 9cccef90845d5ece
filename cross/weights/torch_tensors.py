"""What a PyTorch file's pickle stands for: storages, and tensors as views of them; both of its formats share this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cross.errors import CorruptInputError
from cross.weights.element_types import STORED, Array, in_memory
from cross.weights.pickle_machine import Stub, dictionary

NESTS = ("state_dict", "model_state_dict", "model", "net")
"""Keys under which training scripts keep the state dict of a checkpoint."""

_GROWTH = 8
"""Tensors may take so many times the file's bytes: halves double, tied tensors are stored once."""
_SMALL_BYTES = 1 << 20


@dataclass(frozen=True)
class StorageType:
    """`kind` is a key of `STORED`."""

    kind: str


@dataclass(frozen=True)
class Storage:
    """Elements [first, first + count) of the storage that the file keeps under `key`."""

    kind: str
    key: str
    first: int
    count: int
    whole: int
    """Elements of the storage that is kept."""


@dataclass(frozen=True)
class StridedTensor:
    """A view of a storage, in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild_tensor(storage: object, offset: object, shape: object, strides: object, *_: object) -> StridedTensor:
    """What follows the strides (requires_grad, hooks, metadata) says nothing about values."""
    shape, strides = _sizes(shape), _sizes(strides)
    if not isinstance(storage, Storage) or len(shape) != len(strides):
        raise CorruptInputError("a tensor is not a view of a storage. Save the file again.")
    return StridedTensor(storage, _size(offset), shape, strides)


def _rebuild_parameter(data: object, *_: object) -> object:
    return data


def _size(value: object) -> int:
    if type(value) is not int or value < 0:
        raise CorruptInputError("a size, stride or offset is not a whole number from 0 up. Save the file again.")
    return value


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)):
        raise CorruptInputError("a shape is not a list of sizes. Save the file again.")
    return tuple(_size(v) for v in value)


_STORAGES = {"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
             "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"}  # fmt: skip

KNOWN: Mapping[str, object] = {
    "collections OrderedDict": Stub(dictionary),
    "torch._utils _rebuild_tensor": Stub(_rebuild_tensor),
    "torch._utils _rebuild_tensor_v2": Stub(_rebuild_tensor),
    "torch._utils _rebuild_parameter": Stub(_rebuild_parameter),
    **{f"torch {name}Storage": StorageType(kind) for name, kind in _STORAGES.items()},
}
"""All that a state dict's pickle may name."""


def storage_of(identity: object) -> Storage:
    """The storage of a persistent id: ('storage', type, key, location, count), in old files with (key, first, count) of a view."""
    if not isinstance(identity, tuple) or len(identity) not in (5, 6) or identity[0] != "storage":
        raise CorruptInputError("it refers to something that is no storage. Save the file again.")
    _, kind, key, _, count = identity[:5]
    if not isinstance(kind, StorageType) or not isinstance(key, str):
        raise CorruptInputError("a storage has no type or no key. Save the file again.")
    whole, view = _size(count), identity[5] if len(identity) == 6 else None
    if view is None:
        return Storage(kind.kind, key, 0, whole, whole)
    _, first, length = view
    return Storage(kind.kind, key, _size(first), _size(length), whole)


def tensors_of(value: object) -> dict[str, StridedTensor]:
    """The tensors of a state dict, or of the one that a checkpoint holds under one of `NESTS`; other entries are left out."""
    for _ in range(len(NESTS)):
        nest = next((n for n in NESTS if isinstance(value, dict) and isinstance(value.get(n), dict)), None)
        if nest is None:
            break
        assert isinstance(value, dict)
        value = value[nest]
    entries = value.items() if isinstance(value, dict) else ()
    found = {name: entry for name, entry in entries if isinstance(entry, StridedTensor) and isinstance(name, str)}
    if not found:
        raise CorruptInputError(
            f"it holds no tensors by name, neither itself nor under {', '.join(NESTS)}. Save model.state_dict()."
        )
    return found


def values_of(
    tensors: Mapping[str, StridedTensor], stored: Callable[[Storage], memoryview | bytes], file_bytes: int
) -> dict[str, Array]:
    """Every tensor as an array of its own; `stored` gives the bytes of a whole storage."""
    left = _GROWTH * file_bytes + _SMALL_BYTES
    found = {}
    for name, tensor in tensors.items():
        left -= prod(tensor.shape) * max(STORED[tensor.storage.kind].itemsize, 4)
        if left < 0:
            raise CorruptInputError(
                f"its tensors up to {name!r} take more than {_GROWTH} times the file's {file_bytes} bytes. Save clones."
            )
        found[name] = _values(name, tensor, stored(tensor.storage))
    return found


def _values(name: str, tensor: StridedTensor, data: memoryview | bytes) -> Array:
    storage = tensor.storage
    elements = np.frombuffer(data, STORED[storage.kind])
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True)) if 0 not in tensor.shape else -1
    if (
        elements.size != storage.whole
        or storage.first + storage.count > storage.whole
        or tensor.offset + reach + 1 > storage.count
    ):
        raise CorruptInputError(
            f"tensor {name!r} lies outside its storage of {elements.size} elements. Save the file again."
        )
    if reach < 0:
        return np.zeros(tensor.shape, np.float32)
    strides = tuple(s * elements.itemsize for s in tensor.strides)
    view = as_strided(elements[storage.first + tensor.offset :], tensor.shape, strides, writeable=False)
    return in_memory(view, storage.kind)
