"""One folder a class, as torchvision's ImageFolder and most people have it, in a folder or a zip.

Either `train/` and one of `val/`, `valid/`, `validation/`, `test/`, `testing/`, each with one folder a class, or the
class folders alone. Classes are the folders' names, sorted; images may lie at any depth below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath

import numpy as np
from numpy.typing import NDArray

from cross.errors import DataError
from host_control.data.data_set import DataSet, Split, chosen_test
from host_control.data.images import is_image
from host_control.data.tree import Tree

_TRAIN_NAMES = ("train", "training")


def read(tree: Tree) -> DataSet:
    """The data set; DataError where there are no class folders with images."""
    tops = sorted({name.partition("/")[0] for name in (*tree.names, *tree.folders) if name not in tree.names})
    train_name = next((name for name in _TRAIN_NAMES if name in tops), None)
    test_name, note = chosen_test(tops) if train_name else (None, None)
    train_tree = tree.inside(train_name) if train_name else tree
    classes = _classes(train_tree)
    train = folder_split(train_tree, classes, classes)
    test = _test_split(tree.inside(test_name), classes) if test_name else None
    notes = [note] if note else []
    ignored = len(train_tree.names) - len(train)
    if ignored:
        notes.append(f"{ignored} files of {train_tree.label} are no images in class folders and are left out")
    return DataSet("image-folder", f"image folder {tree.root.name}", "images", classes, train, test, tuple(notes))


def folder_split(tree: Tree, folders: Sequence[str], classes: Sequence[str]) -> Split:
    """All images of `folders`, which stand for 0, 1, ... and are called `classes`; DataError where one has none."""
    number = {folder: index for index, folder in enumerate(folders)}
    found = [name for name in tree.names if name.partition("/")[0] in number and "/" in name and is_image(name)]
    found.sort(key=lambda name: (number[name.partition("/")[0]], name))
    labels = np.array([number[name.partition("/")[0]] for name in found], np.int64)
    empty = [classes[index] for index in sorted(set(range(len(folders))) - set(labels.tolist()))]
    if empty:
        raise DataError(
            f"{tree.label} has no image of {_some(empty)}. Put images there, or remove {'it' if len(empty) == 1 else 'them'}."
        )
    return file_split(tree, found, labels)


def file_split(tree: Tree, files: Sequence[str], labels: NDArray[np.int64]) -> Split:
    """Image files of a tree with their labels, int64 [N]."""
    return Split(labels, lambda i: tree.read(files[i]), lambda i: tree.full(files[i]), lambda i: files[i])


def _classes(tree: Tree) -> tuple[str, ...]:
    """The class folders, sorted by their names' code points, so the same wherever they are packed."""
    tops = {PurePosixPath(name).parts[0] for name in tree.names if "/" in name}
    tops |= {name for name in tree.folders if "/" not in name}
    if not tops:
        images = sum(map(is_image, tree.names))
        raise DataError(f"{tree.label} holds {images} images and no class folders. Put images into one folder a class.")
    if not any(map(is_image, tree.names)):
        raise DataError(f"{tree.label} holds no images. Put them into one folder a class, as JPEG or PNG.")
    return tuple(sorted(tops))


def _test_split(tree: Tree, classes: tuple[str, ...]) -> Split | None:
    """Images of known classes only; a class may be missing here."""
    tops = {name.partition("/")[0] for name in tree.names if "/" in name}
    unknown = sorted(tops - set(classes))
    if unknown or not tops:
        what = f"has classes that are not trained: {_some(unknown)}" if unknown else "has no class folders"
        raise DataError(f"{tree.label} {what}. Give it the class folders of the training split.")
    there = [name for name in classes if name in tops]
    part = folder_split(tree, there, there)
    number = np.array([classes.index(name) for name in there], np.int64)
    return replace(part, labels=number[part.labels])


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} others" if len(names) > 5 else "")
