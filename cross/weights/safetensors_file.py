"""safetensors, bfloat16 included (the library's numpy reader has no such type)."""

from __future__ import annotations

import numpy as np
from safetensors import deserialize

from cross.errors import CorruptInputError
from cross.weights.element_types import STORED, Array, in_memory

_KINDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "I16": "int16",
          "I8": "int8", "U8": "uint8", "BOOL": "bool"}  # fmt: skip


def starts_safetensors(data: bytes) -> bool:
    """Whether the file starts with the length of a JSON header that fits into it."""
    return data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= len(data) - 8


def read_safetensors(data: bytes) -> dict[str, Array]:
    """Tensors by name. CorruptInputError for a type we have no use for; SafetensorError where the file is damaged."""
    found = {}
    for name, tensor in deserialize(data):  # type: ignore[no-untyped-call]
        if tensor["dtype"] not in _KINDS:
            raise CorruptInputError(f"tensor {name!r} is {tensor['dtype']}. Save float32.")
        kind = _KINDS[tensor["dtype"]]
        found[name] = in_memory(np.frombuffer(tensor["data"], STORED[kind]).reshape(tensor["shape"]), kind)
    return found
