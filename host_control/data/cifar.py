"""CIFAR-10 and CIFAR-100, in the binary and in the python version (https://www.cs.toronto.edu/~kriz/cifar.html).

Binary: records of one label byte (CIFAR-100: coarse, fine) and 3,072 bytes of planes R,G,B. Python: pickles of a dict
with `data` [N,3072] and `labels` or `fine_labels`. Fine labels are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from cross.errors import DataError
from host_control.data.data_set import Bytes, DataSet, Split, check_labels
from host_control.data.inert_pickle import load_inert
from host_control.data.tree import Tree

_PIXELS = 3 * 32 * 32
_MAX_FILE_BYTES = 2**30
_NAMES_10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_Batch = tuple[np.ndarray[Any, np.dtype[Any]], Bytes]
"""Labels [N] and pixels [N,3072] of one file."""


def read(tree: Tree) -> DataSet | None:
    """The data set, or None where the files are not CIFAR's."""
    names = set(tree.names)
    for read_version in (_binary_10, _binary_100, _python_10, _python_100):
        found = read_version(tree, names)
        if found is not None:
            return found
    return None


def _binary_10(tree: Tree, names: set[str]) -> DataSet | None:
    train = sorted(name for name in names if name.startswith("data_batch_") and name.endswith(".bin"))
    if not train:
        return None
    classes = _listed(tree, "batches.meta.txt") or _NAMES_10
    return _data_set(tree, "CIFAR-10", classes, train, "test_batch.bin", lambda name: _records(tree, name, 1))


def _binary_100(tree: Tree, names: set[str]) -> DataSet | None:
    if "train.bin" not in names or "fine_label_names.txt" not in names:
        return None
    classes = _listed(tree, "fine_label_names.txt")
    return _data_set(tree, "CIFAR-100", classes, ["train.bin"], "test.bin", lambda name: _records(tree, name, 2))


def _python_10(tree: Tree, names: set[str]) -> DataSet | None:
    train = sorted(name for name in names if name.startswith("data_batch_") and "." not in name)
    if not train:
        return None
    classes = _pickled_names(tree, "batches.meta", "label_names") if "batches.meta" in names else _NAMES_10
    return _data_set(tree, "CIFAR-10", classes, train, "test_batch", lambda name: _pickled(tree, name, "labels"))


def _python_100(tree: Tree, names: set[str]) -> DataSet | None:
    if not {"train", "meta"} <= names:
        return None
    classes = _pickled_names(tree, "meta", "fine_label_names")
    return _data_set(tree, "CIFAR-100", classes, ["train"], "test", lambda name: _pickled(tree, name, "fine_labels"))


def _data_set(
    tree: Tree, title: str, classes: tuple[str, ...], train: Sequence[str], test: str, load: Callable[[str], _Batch]
) -> DataSet:
    # Packing walks through the files in order: the one at hand is all that has to be in memory.
    cached = lru_cache(maxsize=1)(load)
    splits = [_split(tree, cached, files, len(classes)) for files in (train, [test] if test in tree.names else [])]
    return DataSet("cifar", title, "images", classes, splits[0], splits[1] if len(splits[1]) else None)


def _split(tree: Tree, load: Callable[[str], _Batch], files: Sequence[str], classes: int) -> Split:
    labels, where = [], []
    for file in files:
        found = load(file)[0]
        labels.append(check_labels(found, classes, lambda i, file=file: f"record {i} of {tree.full(file)}"))  # type: ignore[misc]
        where += [(file, row) for row in range(len(found))]

    def sample(i: int) -> Bytes:
        file, row = where[i]
        pixels: Bytes = load(file)[1][row].reshape(3, 32, 32)
        return pixels

    joined = np.concatenate(labels) if labels else np.empty(0, np.int64)
    return Split(joined, sample, lambda i: f"record {where[i][1]} of {where[i][0]}")


def _listed(tree: Tree, name: str) -> tuple[str, ...]:
    """The lines of a file of names; none where it is missing."""
    if name not in tree.names:
        return ()
    return tuple(filter(None, map(str.strip, tree.read(name, 2**20).decode("utf-8", "replace").splitlines())))


def _records(tree: Tree, name: str, label_bytes: int) -> _Batch:
    data = tree.read(name, _MAX_FILE_BYTES)
    record = label_bytes + _PIXELS
    if not data or len(data) % record:
        raise DataError(
            f"{tree.full(name)} has {len(data)} bytes, which are not whole records of {record}. Fetch it again."
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, record)
    return rows[:, label_bytes - 1], rows[:, label_bytes:]


def _pickled(tree: Tree, name: str, key: str) -> _Batch:
    batch = load_inert(tree.read(name, _MAX_FILE_BYTES), tree.full(name))
    found: tuple[Any, Any] = (batch.get("data"), batch.get(key)) if isinstance(batch, dict) else (None, None)
    pixels, labels = found
    arrays = isinstance(pixels, np.ndarray) and pixels.shape[1:] == (_PIXELS,) and isinstance(labels, list)
    if not arrays or not 0 < len(pixels) == len(labels):
        raise DataError(f"{tree.full(name)} has no `data` [N,3072] of bytes with as many `{key}`. Fetch it again.")
    if not all(type(label) is int and abs(label) < 2**31 for label in labels):
        raise DataError(f"{tree.full(name)} has {key} that are not whole numbers. Fetch it again.")
    return np.array(labels, np.int64), pixels


def _pickled_names(tree: Tree, name: str, key: str) -> tuple[str, ...]:
    meta = load_inert(tree.read(name, 2**20), tree.full(name))
    names = meta.get(key) if isinstance(meta, dict) else None
    if not isinstance(names, list) or not names or not all(isinstance(item, str) for item in names):
        raise DataError(f"{tree.full(name)} has no list `{key}` of names. Fetch it again.")
    return tuple(names)
