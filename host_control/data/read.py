"""Whatever `--data` names -> DataSet: the format is recognised by looking at the files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cross.errors import DataError, MissingToolError, UsageError
from host_control.data import cifar, csv_table, idx, image_folder, npz, parquet, text, tiny_imagenet
from host_control.data.data_set import DEFAULT_VAL_SPLIT, DataSet, PackOptions, Split, with_domains
from host_control.data.images import is_image
from host_control.data.tree import Tree, open_tree

_T = TypeVar("_T")

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's dataset-fashion-mnist puts its files; `--data fashion-mnist` means it."""

_FOLDER_FORMATS = (cifar.read, idx.read, tiny_imagenet.read, parquet.read)
"""Each looks at the names of the files and answers None where they are not its own."""


def find_source(name: str | Path) -> Path:
    """The path that `--data` means. DataError where nothing is there, MissingToolError where a package is missing."""
    path = Path(name)
    if path.exists():
        return path
    if str(name) != "fashion-mnist":
        raise DataError(f"{name} is not there. Give --data a folder, a file, or fashion-mnist.")
    if not FASHION_MNIST.is_dir():
        raise MissingToolError(
            f"fashion-mnist is not in {FASHION_MNIST}. Install Debian's dataset-fashion-mnist, or use "
            "`data fetch fashion-mnist --out DIR` and --data DIR."
        )
    return FASHION_MNIST


def read_data_set(source: str | Path, options: PackOptions) -> DataSet:
    """The data set that lies in a folder, zip or file, with a test split held out where it has none.

    Raises DataError (23) where it is of no known format, has a label out of range, an empty class or one class only.
    """
    path = find_source(source)
    found = _read(path, options)
    strange = [name for name in found.classes if name != name.encode("utf-8", "replace").decode()]
    if strange and found.kind == "images":
        raise DataError(f"{path} has a class whose name is not UTF-8: {strange[0]!r}. Rename it.")
    if not len(found.train):
        raise DataError(f"{path} has no training samples. Put some in.")
    if found.kind == "text":
        if options.domain is not None:
            raise UsageError(f"--domain is of images, {path} is text. Leave it out.")
        return found
    present = np.unique(found.train.labels)
    if len(present) < 2:
        raise DataError(
            f"{path} has one class only to train on: {found.classes[int(present[0])]}. Give at least two classes."
        )
    found = _with_test_split(found, options)
    if options.domain is None:
        return found
    test = None if found.test is None else with_domains(found.test, options.domain)
    return replace(found, train=with_domains(found.train, options.domain), test=test)


def _read(path: Path, options: PackOptions) -> DataSet:
    if path.is_dir():
        return _read_tree(open_tree(path), options)
    if not path.is_file():
        raise DataError(f"{path} is neither a file nor a folder. Name the data set's folder.")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic[:2] == b"PK":
        return npz.read(path) if npz.is_npz(path) else _read_tree(open_tree(path), options)
    if magic == b"PAR1":
        found = parquet.read(Tree(path.parent, (path.name,), ()))
        if found is None:
            raise DataError(f"{path} is a parquet file by its contents. Name it {path.stem}.parquet.")
        return found
    if path.suffix.lower() in csv_table.SUFFIXES:
        return csv_table.read(path)
    if text.looks_like_text(path):
        return text.read(path, options)
    raise DataError(
        f"{path} is no zip, npz, parquet, CSV or UTF-8 text. Unpack it, and give --data the folder that results."
    )


def _read_tree(tree: Tree, options: PackOptions) -> DataSet:
    if not tree.names:
        raise DataError(f"{tree.label} is empty. Give --data a folder with one folder of images a class.")
    if "train.safetensors" in tree.names:
        raise UsageError(f"{tree.label} is packed already. Use it as it is.")
    if "test.safetensors" in tree.names:
        raise DataError(f"{tree.label} has test.safetensors, but no train.safetensors beside it. Pack the data again.")
    for read in _FOLDER_FORMATS:
        found = read(tree)
        if found is not None:
            return found
    file = _file_meant(tree)
    return image_folder.read(tree) if file is None else _read(file, options)


def _file_meant(tree: Tree) -> Path | None:
    """The one CSV beside a folder of images, or the only file there is: naming its folder is as good as naming it."""
    tables = [name for name in tree.names if "/" not in name and Path(name).suffix.lower() in csv_table.SUFFIXES]
    if len(tables) == 1 and sum("/" not in name for name in tree.folders) < 2:
        name = tables[0]
    elif len(tree.names) == 1 and not is_image(tree.names[0]):
        name = tree.names[0]
    else:
        return None
    return tree.root / tree.prefix / name if tree.archive is None else None


def _with_test_split(found: DataSet, options: PackOptions) -> DataSet:
    """Holds a share of every class out of the training split, where there is no other to test on."""
    if found.test is not None:
        if options.val_split is not None:
            raise UsageError(f"{found.source} has a test split of its own. Leave --val-split out.")
        return found
    share = DEFAULT_VAL_SPLIT if options.val_split is None else options.val_split
    if not share:
        return found
    held = held_out(found.train, share, options.seed)
    kept = np.setdiff1d(np.arange(len(found.train)), held)
    if not len(held):
        return found
    note = f"no test split: {len(held)} of {len(found.train)} samples are held out as one, of every class alike"
    return DataSet(
        found.format,
        found.source,
        found.kind,
        found.classes,
        _part(found.train, kept),
        _part(found.train, held),
        (*found.notes, note),
    )


def held_out(split: Split, share: float, seed: int) -> NDArray[np.int64]:
    """Indices [K], rising, of `share` of every class, at least one of it and never all.

    Which ones follows from a hash of seed and key alone: the same on every machine, and samples that are added later
    move none of the others to the other side.
    """
    chosen: list[int] = []
    key = split.key or split.name
    for label in np.unique(split.labels):
        members = np.flatnonzero(split.labels == label).tolist()
        count = min(max(round(len(members) * share), 1), len(members) - 1)
        members.sort(key=lambda i: hashlib.sha256(f"{seed}\n{key(i)}".encode()).digest())
        chosen += members[:count]
    return np.array(sorted(chosen), np.int64)


def _part(split: Split, indices: NDArray[np.int64]) -> Split:
    """Those samples of a split."""

    def at(function: Callable[[int], _T]) -> Callable[[int], _T]:
        return lambda i: function(int(indices[i]))

    return Split(
        split.labels[indices],
        at(split.sample),
        at(split.name),
        None if split.key is None else at(split.key),
        None if split.domain is None else at(split.domain),
    )
