"""PyTorch's format before 1.6: five pickles (magic number, version, machine, object, keys), then a count and bytes a storage."""

from __future__ import annotations

from io import BytesIO

from cross.errors import CorruptInputError
from cross.weights.element_types import STORED, Array
from cross.weights.pickle_machine import read_pickle
from cross.weights.torch_tensors import KNOWN, Storage, storage_of, tensors_of, values_of

MAGIC = 0x1950A86A20F9469CFC6C
VERSION = 1001
START = b"\x80\x02\x8a\x0a" + MAGIC.to_bytes(10, "little") + b"."


def read_torch_legacy(data: bytes) -> dict[str, Array]:
    """Tensors by name. CorruptInputError, or whatever a damaged file provokes in Python's pickletools."""
    stream, seen = BytesIO(data), {}

    def persistent(identity: object) -> Storage:
        storage = storage_of(identity)
        seen[storage.key] = storage
        return storage

    magic, version, machine = (read_pickle(stream, {}, storage_of) for _ in range(3))
    if magic != MAGIC or version != VERSION or not isinstance(machine, dict):
        raise CorruptInputError(
            f"it has version {version!r} of PyTorch's old format; {VERSION} is known. Save it again."
        )
    if machine.get("little_endian") is not True:
        raise CorruptInputError("its numbers are big-endian. Save it on a little-endian machine.")
    tensors = tensors_of(read_pickle(stream, KNOWN, persistent))
    keys = read_pickle(stream, {}, storage_of)
    parts, position, view = {}, stream.tell(), memoryview(data)
    for key in keys if isinstance(keys, list) else ():
        size = seen[key].whole * STORED[seen[key].kind].itemsize
        count, first = int.from_bytes(view[position : position + 8], "little"), position + 8
        if count != seen[key].whole or first + size > len(data):
            raise CorruptInputError(
                f"storage {key!r} of {seen[key].whole} elements is kept as {count} and needs {size} bytes; "
                f"{max(len(data) - first, 0)} are left. Copy it again."
            )
        parts[key] = view[first : first + size]
        position = first + size
    return values_of(tensors, lambda storage: parts[storage.key], len(data))
