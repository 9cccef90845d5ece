"""safetensors files through libtaste's own hardened reader and writer, so that the board needs no other package."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from device_runtime.errors import DeviceError
from device_runtime.library import Library, text

Array = np.ndarray[Any, Any]

_DTYPES = {"F32": "<f4", "I32": "<i4", "U32": "<u4"}
_PARAMETERS_AND_STATES = 0b11


def read_weights(library: Library, path: Path) -> dict[str, Array]:
    """Every float32, int32 and uint32 tensor of a file. DeviceError 12: it cannot be read; 14: it is damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DeviceError(f"cannot read {path} ({error.strerror}). Look at the path.", 12) from None
    ffi, functions = library.ffi, library.functions
    file, entry = ffi.new("taste_safetensors *"), ffi.new("taste_safetensors_entry *")
    needed, error_text = ffi.new("uint64_t *"), ffi.new("taste_error *")
    held = ffi.from_buffer(data)
    status = functions.taste_safetensors_open(held, len(data), len(data), file, needed, error_text)
    if status != 0:
        raise DeviceError(f"{path}: {text(ffi, error_text.text)}", int(status))
    read = {}
    while functions.taste_safetensors_next(file, entry):
        dtype = _DTYPES.get(text(ffi, entry.dtype))
        if dtype is None:
            continue
        shape = tuple(entry.shape[d] for d in range(entry.dims))
        flat = np.frombuffer(data[entry.first_byte : entry.end_byte], dtype)
        read[text(ffi, entry.name)] = flat.reshape(shape)
    return read


def write_weights(library: Library, path: Path, values: Mapping[str, Array]) -> None:
    """Writes parameters and states in the order of the tables. The file appears only when it is whole."""
    ffi, functions = library.ffi, library.functions
    arguments = (library.model, _PARAMETERS_AND_STATES, 0, ffi.NULL)
    size = functions.taste_safetensors_header(*arguments, 0, ffi.NULL)
    header = bytearray(size)
    functions.taste_safetensors_header(*arguments, size, ffi.from_buffer("char[]", header))
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "xb") as file:
            file.write(header)
            for tensor in library.tensors:
                if tensor.kind in ("parameter", "state"):
                    file.write(np.ascontiguousarray(values[tensor.name]).tobytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        code = 11 if error.errno == 28 else 12
        raise DeviceError(f"cannot write {path} ({error.strerror}). Look at the path and the disk.", code) from None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
