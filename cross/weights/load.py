"""Read a weights file: what it starts with says which format it is, not its name."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

from cross.errors import CorruptInputError, FileError, UsageError, one_line
from cross.weights.element_types import Array
from cross.weights.npz import SUFFIX, read_npz
from cross.weights.safetensors_file import read_safetensors, starts_safetensors
from cross.weights.torch_legacy import START, read_torch_legacy
from cross.weights.torch_zip import PICKLE, read_torch_zip

_LONGEST = 400
"""Characters of a reason: names in a hostile file may be as long as the file."""


def load_weights(path: Path) -> dict[str, Array]:
    """Tensors by name from safetensors, npz or a PyTorch state dict (zip or legacy); floats of any width as float32.

    Nothing in the file is executed, and memory is bounded by its size. Raises UsageError (no such file), FileError
    (cannot be read) and CorruptInputError (damaged, hostile, or another format).
    """
    if not path.is_file():
        raise UsageError(f"no weights file {path}. Name a safetensors, npz or PyTorch file.")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}. Check its permissions.") from error
    try:
        return _read(data)
    except CorruptInputError as error:
        raise CorruptInputError(one_line(f"{path} cannot be used: {str(error)[:_LONGEST]}")) from error
    except Exception as error:  # whatever a broken file provokes in zipfile, numpy or pickletools is the file's fault
        reason = one_line(f"{type(error).__name__}: {error}".splitlines()[0].rstrip("."))
        raise CorruptInputError(
            f"{path} ({len(data)} bytes) is damaged: {reason[:_LONGEST]}. Copy or save it again."
        ) from error


def _read(data: bytes) -> dict[str, Array]:
    if data.startswith(b"PK"):
        with ZipFile(BytesIO(data)) as archive:
            names = archive.namelist()
            if any(name.rpartition("/")[2] == PICKLE for name in names):
                return read_torch_zip(archive, len(data))
            if any(name.endswith(SUFFIX) for name in names):
                return read_npz(archive, len(data))
    if data.startswith(START):
        return read_torch_legacy(data)
    if starts_safetensors(data):
        return read_safetensors(data)
    raise CorruptInputError(
        "it is neither safetensors nor npz nor a PyTorch state dict (or it is cut short). "
        "Save one with torch.save(model.state_dict(), FILE)."
    )
