"""Tiny-ImageNet, in a folder or its zip: wnids.txt, words.txt, train/<wnid>/images, and val as it came or re-sorted.

As it came, val/images holds the files and val/val_annotations.txt their classes; many people re-sort it into
val/<wnid>. Classes are in the order of wnids.txt and are called `<wnid> <words>`. The test folder has no labels.
"""

from __future__ import annotations

import numpy as np

from cross.errors import DataError
from host_control.data.data_set import DataSet, Split
from host_control.data.image_folder import file_split, folder_split
from host_control.data.images import is_image
from host_control.data.tree import Tree

_TEXT_BYTES = 2**26
_ANNOTATIONS = "val_annotations.txt"


def read(tree: Tree) -> DataSet | None:
    """The data set, or None where there is no wnids.txt beside train/."""
    if "wnids.txt" not in tree.names or "train" not in tree.folders:
        return None
    wnids = tuple(word for line in _lines(tree, "wnids.txt") if (word := line.strip()))
    if len(set(wnids)) != len(wnids) or not wnids:
        raise DataError(f"{tree.full('wnids.txt')} lists {len(wnids)} classes, some twice or none. Fetch it again.")
    words = dict(line.split("\t", 1) for line in _lines(tree, "words.txt") if "\t" in line)
    classes = tuple(f"{wnid} {words[wnid].strip()}" if wnid in words else wnid for wnid in wnids)
    train = folder_split(tree.inside("train"), wnids, classes)
    return DataSet("tiny-imagenet", "Tiny-ImageNet", "images", classes, train, _validation(tree.inside("val"), wnids))


def _validation(tree: Tree, wnids: tuple[str, ...]) -> Split | None:
    if not any(map(is_image, tree.names)):
        return None
    there = set(tree.names)
    listed = _annotated(tree, wnids) if _ANNOTATIONS in there else []
    files = [(name, wnid) for name, wnid in listed if name in there]
    if not files:
        # Re-sorted; the annotations often stay behind.
        files = [(name, name.partition("/")[0]) for name in tree.names if is_image(name)]
    number = {wnid: index for index, wnid in enumerate(wnids)}
    strange = [name for name, wnid in files if wnid not in number]
    if strange:
        raise DataError(f"{tree.full(strange[0])} is of no class of wnids.txt. Fetch the data set again.")
    files.sort(key=lambda file: (number[file[1]], file[0]))
    return file_split(tree, [name for name, _ in files], np.array([number[wnid] for _, wnid in files], np.int64))


def _annotated(tree: Tree, wnids: tuple[str, ...]) -> list[tuple[str, str]]:
    """(file, wnid) of every line; DataError names the line that has none."""
    known, found = set(wnids), []
    for number, line in enumerate(_lines(tree, _ANNOTATIONS), 1):
        if not line.strip():
            continue
        fields = line.split("\t")
        if len(fields) < 2 or fields[1] not in known:
            raise DataError(f"line {number} of {tree.full(_ANNOTATIONS)} names no class of wnids.txt. Fetch it again.")
        found.append((f"images/{fields[0]}", fields[1]))
    return found


def _lines(tree: Tree, name: str) -> list[str]:
    return tree.read(name, _TEXT_BYTES).decode("utf-8", "replace").splitlines() if name in tree.names else []
