"""Element types of weights files: how they lie in memory, and floats of any width as float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

STORED: Mapping[str, np.dtype[Any]] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "int16": np.dtype("<i2"),
    "int8": np.dtype("i1"),
    "uint8": np.dtype("u1"),
    "bool": np.dtype("?"),
}
"""How an element lies in a file; bfloat16 is the upper half of a float32."""


def in_memory(array: Array, kind: str) -> Array:
    """A contiguous copy in native byte order: floats as float32, integers as they are. `kind` is a key of `STORED`."""
    if kind == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        return np.array(array, np.float32 if kind.startswith("float") else array.dtype.newbyteorder("="), order="C")
