"""numpy's npz: a zip of .npy members, compressed or not; object arrays, which are pickles, are refused."""

from __future__ import annotations

from io import BytesIO
from math import prod
from zipfile import ZipFile

import numpy as np
from numpy.lib import format as npy

from cross.errors import CorruptInputError
from cross.weights.element_types import Array, in_memory

SUFFIX = ".npy"
_GROWTH = 32
"""Compressed members may unpack to so many times the file's bytes."""
_SMALL_BYTES = 1 << 20
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_npz(archive: ZipFile, file_bytes: int) -> dict[str, Array]:
    """Arrays by name. CorruptInputError, or whatever a damaged archive provokes in Python's zipfile."""
    members = [info for info in archive.infolist() if info.filename.endswith(SUFFIX)]
    unpacked = sum(info.file_size for info in members)
    if unpacked > _GROWTH * file_bytes + _SMALL_BYTES:
        raise CorruptInputError(f"its {file_bytes} bytes unpack to {unpacked}. Save it with numpy.savez.")
    return {info.filename.removesuffix(SUFFIX): _array(info.filename, archive.read(info)) for info in members}


def _array(name: str, data: bytes) -> Array:
    """One member; its header is held against its size before anything is made of it."""
    stream = BytesIO(data)
    version = npy.read_magic(stream)
    if version not in _HEADERS:
        raise CorruptInputError(f"{name} has npy version {version}. Save arrays of numbers.")
    shape, by_column, dtype = _HEADERS[version](stream)
    if dtype.kind not in "fiub":
        raise CorruptInputError(f"{name} holds {dtype}, not numbers. Save arrays of numbers.")
    body = memoryview(data)[stream.tell() :]
    if prod(shape) * dtype.itemsize != len(body) or min(shape, default=0) < 0:
        raise CorruptInputError(f"{name} has {len(body)} bytes for shape {list(shape)}. Save it again.")
    array = np.frombuffer(body, dtype).reshape(shape, order="F" if by_column else "C")
    return in_memory(array, "float32" if dtype.kind == "f" else dtype.name)
