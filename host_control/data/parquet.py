"""Parquet files of images as the Hugging Face hub has them: an image column (bytes, or a struct with bytes) and a label.

Split names are those of the files (`train-00000-of-00001.parquet`) or of their folders. Class names come from the
metadata that the `datasets` library writes into each file. Needs pyarrow: `pip install taste-edge[parquet]`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cross.errors import DataError, MissingToolError
from host_control.data.data_set import BadSampleError, DataSet, Split, check_labels, chosen_test, numbered_classes
from host_control.data.tree import MAX_SAMPLE_BYTES, Tree

_IMAGES = ("image", "img", "images", "picture")
_LABELS = ("label", "labels", "fine_label", "class", "target")
_ROWS = 64
_SPLIT = re.compile(r"(?:^|[/_.-])(train|validation|valid|val|test)(?=[/_.-])")


def read(tree: Tree) -> DataSet | None:
    """The data set, or None where no file is parquet. MissingToolError without pyarrow, DataError for what is no images."""
    files = [name for name in tree.names if name.endswith(".parquet")]
    if not files:
        return None
    groups: dict[str, list[str]] = {}
    for name in files:
        found = _SPLIT.search(name)
        groups.setdefault(found.group(1) if found else "train", []).append(name)
    if "train" not in groups:
        raise DataError(f"{tree.label} holds parquet files of {', '.join(groups)} and none of train. Fetch that too.")
    test, note = chosen_test(sorted(groups))
    train = _Files(tree, groups["train"])
    parts = [train] + ([_Files(tree, groups[test])] if test else [])
    labels = [part.labels() for part in parts]
    classes = train.class_names() or numbered_classes(labels, tree.label)
    splits = [_split(part, found, len(classes)) for part, found in zip(parts, labels, strict=True)]
    title = f"parquet {tree.root.name}"
    return DataSet("parquet", title, "images", classes, splits[0], splits[1] if test else None, (note,) if note else ())


def _split(files: _Files, labels: NDArray[np.int64], classes: int) -> Split:
    return Split(check_labels(labels, classes, files.name), files.sample, files.name)


class _Files:
    """The parquet files of one split, read in small batches of rows, going forward."""

    def __init__(self, tree: Tree, names: list[str]) -> None:
        self._tree, self._names = tree, names
        self._starts: list[int] = []
        self._columns: list[tuple[str, str]] = []
        total = 0
        for name in names:
            with _opened(tree, name) as file:
                self._starts.append(total)
                self._columns.append(_columns(file.schema_arrow, tree.full(name)))
                total += file.metadata.num_rows
        self._total = total
        self._rows: Iterator[tuple[int, Any]] = iter(())
        self._at = -1

    def class_names(self) -> tuple[str, ...]:
        """What the `datasets` library noted, or nothing."""
        with _opened(self._tree, self._names[0]) as file:
            noted = (file.schema_arrow.metadata or {}).get(b"huggingface", b"{}")
        try:
            names = json.loads(noted)["info"]["features"][self._columns[0][1]]["names"]
        except (ValueError, KeyError, TypeError):
            return ()
        right = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
        return tuple(names) if right else ()

    def labels(self) -> NDArray[np.int64]:
        """int64 [N]"""
        found = []
        for name, (_, label) in zip(self._names, self._columns, strict=True):
            with _opened(self._tree, name) as file:
                column = _guarded(partial(file.read, [label]), self._tree.full(name))[label]
            if column.null_count or not str(column.type).startswith(("int", "uint")):
                raise DataError(
                    f"{label} of {self._tree.full(name)} is {column.type} with {column.null_count} missing. "
                    "Give class numbers."
                )
            found.append(np.asarray(column.to_numpy()).astype(np.int64))
        return np.concatenate(found)

    def name(self, i: int) -> str:
        """Row and file."""
        file = int(np.searchsorted(self._starts, i, side="right")) - 1
        return f"row {i - self._starts[file]} of {self._names[file]}"

    def sample(self, i: int) -> bytes:
        """The bytes of the image file in row i."""
        if i <= self._at:
            self._rows, self._at = iter(()), -1
        if self._at < 0:
            self._rows = self._stream()
        for row, value in self._rows:
            if row == i:
                self._at = i
                return self._image(i, value)
        raise DataError(f"{self._tree.label} ends before row {i}. Fetch it again.")

    def _image(self, i: int, value: Any) -> bytes:
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes) or not 0 < len(data) <= MAX_SAMPLE_BYTES:
            raise BadSampleError(f"{self.name(i)} holds no image bytes. Embed the images, or use --skip-bad.")
        return data

    def _stream(self) -> Iterator[tuple[int, Any]]:
        for start, name, (image, _) in zip(self._starts, self._names, self._columns, strict=True):
            row = start
            with _opened(self._tree, name) as file:
                batches = file.iter_batches(batch_size=_ROWS, columns=[image])
                while (batch := _guarded(partial(next, batches, None), self._tree.full(name))) is not None:
                    for value in batch.column(0):
                        yield row, value.as_py()
                        row += 1


def _opened(tree: Tree, name: str) -> Any:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise MissingToolError(
            f"{tree.full(name)} needs pyarrow to be read. Install it: pip install pyarrow (or taste-edge[parquet])."
        ) from None
    if tree.archive is not None:
        raise DataError(f"{tree.full(name)} lies in a zip. Unpack it, and name the folder.")
    with tree.open(name):
        path = tree.root / tree.prefix / name
    return _guarded(partial(ParquetFile, path), str(path))


def _guarded(read: Callable[[], Any], name: str) -> Any:
    """What pyarrow raises for a broken file, as one line."""
    from pyarrow import ArrowException

    try:
        return read()
    except (ArrowException, OSError, ValueError) as error:
        raise DataError(f"{name} cannot be read: {' '.join(str(error).split())[:200]}. Fetch it again.") from error


def _columns(schema: Any, name: str) -> tuple[str, str]:
    image = next((column for column in _IMAGES if column in schema.names), None)
    label = next((column for column in _LABELS if column in schema.names), None)
    if image is None or label is None:
        raise DataError(
            f"{name} has columns {', '.join(schema.names[:8])}; `image` and `label` are needed. Rename them."
        )
    return image, label
