"""npz, as numpy.savez and savez_compressed write it: x_train, y_train, x_test, y_test and names like these.

Images: [N,H,W], [N,H,W,C] or [N,C,H,W] with 1 or 3 planes; uint8, another integer type with values 0..255, or floats
0..1. Labels: whole numbers [N] or [N,1]. Names of classes, where there are any: `classes`, `class_names`, `label_names`.
Arrays are read sample by sample out of the zip; Python objects in them are refused.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from cross.errors import DataError
from host_control.data.data_set import (
    Bytes,
    DataSet,
    Split,
    check_labels,
    chosen_test,
    numbered_classes,
)
from host_control.data.tree import DAMAGE, ForwardReader

_IMAGES = ("x", "images", "image", "data")
_LABELS = ("y", "labels", "label", "targets")
_CLASSES = ("classes", "class_names", "label_names")
_MAX_BYTES = 2**40


def is_npz(path: Path) -> bool:
    """Whether a zip holds nothing but arrays."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return False
    return bool(names) and all(name.endswith(".npy") for name in names)


def read(path: Path) -> DataSet:
    """The data set; DataError where arrays are missing or are not images and labels."""
    archive = zipfile.ZipFile(path)
    names = [name.removesuffix(".npy") for name in archive.namelist()]
    pairs = _pairs(names)
    if "train" not in pairs:
        raise DataError(
            f"{path} holds {', '.join(sorted(names)[:8])}: no images with labels. Save x_train and y_train (and x_test, y_test)."
        )
    test, note = chosen_test([name for name in pairs if name != "train"])
    chosen = ["train"] + ([test] if test else [])
    arrays = {name: tuple(_Array(archive, path, member) for member in pairs[name]) for name in chosen}
    labels = {name: _labels(y, len(x)) for name, (x, y) in arrays.items()}
    listed = next((name for name in _CLASSES if name in names), None)
    classes = _names(_Array(archive, path, listed)) if listed else numbered_classes(list(labels.values()), str(path))
    splits = [_split(arrays[name][0], labels[name], len(classes)) for name in chosen]
    title = f"npz {path.name}"
    return DataSet("npz", title, "images", classes, splits[0], splits[1] if test else None, (note,) if note else ())


def _pairs(names: list[str]) -> dict[str, tuple[str, str]]:
    """(images, labels) of every split that is there; arrays without a split's name are for training."""
    pairs = {}
    lower = {name.lower(): name for name in names}
    for split in ("train", "val", "valid", "validation", "test"):
        forms: list[tuple[str, str]] = []
        for image, label in zip(_IMAGES, _LABELS, strict=True):
            forms += [(f"{image}_{split}", f"{label}_{split}"), (f"{split}_{image}", f"{split}_{label}")]
        forms += [(f"{split}_images", f"{split}_labels")]
        if split == "train":
            forms += [(image, label) for image in _IMAGES for label in _LABELS]
        found = next((form for form in forms if form[0] in lower and form[1] in lower), None)
        if found is not None:
            pairs[split] = (lower[found[0]], lower[found[1]])
    return pairs


class _Array:
    """One member of the zip: its header read and checked, its rows when they are asked for."""

    def __init__(self, archive: zipfile.ZipFile, path: Path, name: str) -> None:
        self.label = f"{name} of {path}"
        member = f"{name}.npy"

        def open_member() -> AbstractContextManager[IO[bytes]]:
            return archive.open(member)

        try:
            with open_member() as file:
                version = npy.read_magic(file)
                read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                self.shape, fortran, self.dtype = read_header(file)
                self._start = file.tell()
        except (*DAMAGE, SyntaxError, TypeError, RuntimeError, MemoryError) as error:
            # numpy evaluates the header as a literal, which may be anything.
            raise DataError(f"{self.label} cannot be read: {error}. Save it again with numpy.savez.") from error
        if min(self.shape, default=0) < 0 or self.dtype.itemsize == 0:
            raise DataError(f"{self.label} declares {self.dtype} of shape {list(self.shape)}. Save it again.")
        if self.dtype.hasobject:
            raise DataError(f"{self.label} holds Python objects, which are never unpickled. Save plain arrays.")
        if fortran and len(self.shape) > 1:
            raise DataError(f"{self.label} is in Fortran order. Save numpy.ascontiguousarray of it.")
        declared = self._start + self.dtype.itemsize * _product(self.shape)
        stored = archive.getinfo(member).file_size
        if declared != stored or declared > _MAX_BYTES:
            raise DataError(f"{self.label} declares {declared} bytes and has {stored}. Save it again.")
        self._reader = ForwardReader(open_member, self.label)

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0

    def rows(self, first: int, count: int) -> NDArray[Any]:
        """[count, ...] from row `first`."""
        row = self.dtype.itemsize * _product(self.shape[1:])
        data = self._reader.read(self._start + first * row, count * row)
        return np.frombuffer(data, self.dtype).reshape(count, *self.shape[1:])


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for side in shape:
        product *= side
    return product


def _labels(array: _Array, count: int) -> NDArray[np.int64]:
    whole = array.dtype.kind in "iu" and _product(array.shape) == len(array)
    if not whole or len(array) != count:
        raise DataError(
            f"{array.label} is {array.dtype} of shape {list(array.shape)}; {count} images need as many whole numbers. "
            "Save labels as class numbers."
        )
    labels = array.rows(0, count).reshape(count)
    if labels.dtype == np.uint64 and count and labels.max() >= 2**63:
        raise DataError(f"{array.label} holds {labels.max()}. Save labels as class numbers.")
    return labels.astype(np.int64)


def _names(array: _Array) -> tuple[str, ...]:
    if array.dtype.kind != "U" or len(array.shape) != 1:
        raise DataError(f"{array.label} is {array.dtype}, not text. Save a list of names.")
    return tuple(map(str, array.rows(0, len(array))))


def _split(images: _Array, labels: NDArray[np.int64], classes: int) -> Split:
    to_planes = _planes_of(images)
    to_bytes = _bytes_of(images)

    def sample(i: int) -> Bytes:
        return np.ascontiguousarray(to_planes(to_bytes(images.rows(i, 1)[0])))

    def name(i: int) -> str:
        return f"row {i} of {images.label}"

    return Split(check_labels(labels, classes, name), sample, name, str)


def _planes_of(images: _Array) -> Callable[[Bytes], Bytes]:
    """From a row's axes to [C,H,W]."""
    shape = images.shape[1:]
    if len(shape) == 2 and min(shape) > 0:
        return lambda row: row[np.newaxis]
    if len(shape) == 3 and min(shape) > 0 and shape[2] in (1, 3):
        return lambda row: row.transpose(2, 0, 1)
    if len(shape) == 3 and min(shape) > 0 and shape[0] in (1, 3):
        return lambda row: row
    raise DataError(
        f"{images.label} has shape {list(images.shape)}; images are [N,H,W], [N,H,W,C] or [N,C,H,W] with 1 or 3 planes."
        " Reshape it."
    )


def _bytes_of(images: _Array) -> Callable[[NDArray[Any]], Bytes]:
    """From a row's type to bytes; each row's values are checked, never cut off."""
    kind = images.dtype.kind
    if images.dtype == np.uint8:
        return lambda row: row
    if kind not in "iuf":
        raise DataError(f"{images.label} is {images.dtype}, not numbers. Save it as uint8.")
    limit = 1 if kind == "f" else 255

    def convert(row: NDArray[Any]) -> Bytes:
        # The comparison is false for NaN too.
        if not (row.min() >= 0 and row.max() <= limit):
            raise DataError(
                f"{images.label} holds values from {row.min()} to {row.max()} as {images.dtype}; "
                f"that type is taken from 0 to {limit}. Save it as uint8."
            )
        return np.rint(row * 255.0).astype(np.uint8) if kind == "f" else row.astype(np.uint8)

    return convert
