"""CSV (comma, semicolon or tab) of image paths and labels, and optionally the split and the domain of each.

With a heading the columns are found by their names (path, file, image, ...; label, class, ...; split; domain); without one the
first is the path and the second the label. Paths are relative to the CSV and stay inside its folder. Labels that are
all whole numbers are class numbers, others names, whose classes are sorted.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np

from cross.errors import DataError
from host_control.data.data_set import DataSet, Split, chosen_test, numbered_classes
from host_control.data.image_folder import file_split
from host_control.data.images import is_image
from host_control.data.tree import Tree, stamps

SUFFIXES = (".csv", ".tsv")
_PATH_NAMES = (
    "path",
    "file",
    "filename",
    "file_name",
    "filepath",
    "file_path",
    "image",
    "image_path",
    "img",
    "image_id",
)
_LABEL_NAMES = ("label", "class", "class_name", "target", "category", "y", "labels")
_SPLIT_NAMES = ("split", "set", "subset", "partition")
_MAX_BYTES = 2**30

_DOMAIN_NAMES = ("domain",)

_Row = tuple[int, str, str, str, str]
"""Line number, path, label, split ('train' where there is no such column), domain ('' where there is none)."""

_Columns = tuple[int, int, int | None, int | None]


def read(path: Path) -> DataSet:
    """The data set; DataError names the line that is wrong."""
    tree = Tree(path.parent, (), ())
    rows = _rows(path, tree.read(path.name, _MAX_BYTES))
    splits = {row[3] for row in rows}
    test, note = chosen_test(sorted(splits))
    if "train" not in splits:
        raise DataError(f"{path} has no line of split 'train'. Name the training lines so.")
    unknown = sorted(splits - {"train", "val", "valid", "validation", "test", "testing"})
    if unknown:
        raise DataError(f"{path} has lines of split {unknown[0]!r}. Use train, val or test.")
    classes, number = _classes(rows, path)
    parts = [_split(tree, [row for row in rows if row[3] == name], number) for name in ("train", test) if name]
    title = f"CSV {path.name}"
    return DataSet(
        "csv", title, "images", classes, parts[0], parts[1] if len(parts) > 1 else None, (note,) if note else ()
    )


def stamp(path: Path) -> list[tuple[str, int, int, int]]:
    """What `file_stamp` is of a folder: of the CSV and all the images it names."""
    names = [row[1] for row in _rows(path, Tree(path.parent, (), ()).read(path.name, _MAX_BYTES))]
    return stamps(path.parent, [path.name, *names])


def _rows(path: Path, data: bytes) -> list[_Row]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}. Save it as UTF-8.") from None
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    try:
        lines = [
            (number, [cell.strip() for cell in line])
            for number, line in enumerate(csv.reader(io.StringIO(text), delimiter=delimiter), 1)
            if any(cell.strip() for cell in line)
        ]
    except csv.Error as error:
        raise DataError(f"{path} is not a readable CSV: {error}. Save it again.") from None
    if not lines:
        raise DataError(f"{path} is empty. Give it a line an image: path, label.")
    columns = _columns(lines[0][1])
    if not is_image(lines[0][1][columns[0]]):
        lines = lines[1:]
    rows = [_row(path, number, cells, columns) for number, cells in lines]
    if not rows:
        raise DataError(f"{path} has a heading and no lines. Give it a line an image: path, label.")
    return rows


def _columns(heading: list[str]) -> _Columns:
    """Where path, label, split and domain stand."""
    names = [name.lower() for name in heading]
    path = next((names.index(name) for name in _PATH_NAMES if name in names), None)
    label = next((names.index(name) for name in _LABEL_NAMES if name in names), None)
    split = next((names.index(name) for name in _SPLIT_NAMES if name in names), None)
    domain = next((names.index(name) for name in _DOMAIN_NAMES if name in names), None)
    return (0, 1, None, None) if path is None or label is None else (path, label, split, domain)


def _row(path: Path, number: int, cells: list[str], columns: _Columns) -> _Row:
    at_path, at_label, at_split, at_domain = columns
    if len(cells) <= max(column for column in columns if column is not None) or not cells[at_path]:
        raise DataError(f"line {number} of {path} has {len(cells)} columns. Give it a path and a label.")
    if not cells[at_label]:
        raise DataError(f"line {number} of {path} has no label. Give it one, or remove the line.")
    name = PurePosixPath(cells[at_path].replace("\\", "/"))
    if name.is_absolute() or ".." in name.parts:
        raise DataError(
            f"line {number} of {path} leads out of its folder: {cells[at_path]}. Put the CSV above the images."
        )
    domain = cells[at_domain] if at_domain is not None else ""
    if at_domain is not None and not domain:
        raise DataError(f"line {number} of {path} has no domain. Give it one, or remove the line.")
    return number, str(name), cells[at_label], cells[at_split].lower() if at_split is not None else "train", domain


def _classes(rows: Sequence[_Row], path: Path) -> tuple[tuple[str, ...], dict[str, int]]:
    """Class names, and the number of every label as it is written."""
    written = {row[2] for row in rows}
    if all(label.lstrip("-").isdecimal() and len(label) < 10 for label in written):
        number = {label: int(label) for label in written}
        return numbered_classes([np.array(list(number.values()))], str(path)), number
    classes = tuple(sorted(written))
    return classes, {label: index for index, label in enumerate(classes)}


def _split(tree: Tree, rows: Sequence[_Row], number: dict[str, int]) -> Split:
    split = file_split(tree, [row[1] for row in rows], np.array([number[row[2]] for row in rows], np.int64))
    domains = [row[4] for row in rows]
    return replace(split, domain=domains.__getitem__) if any(domains) else split
