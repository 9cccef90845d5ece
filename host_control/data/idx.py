"""IDX, the format of MNIST and its kin: *-images-idx3-ubyte and *-labels-idx1-ubyte, plain or .gz.

Images: magic 0x00000803, count, rows, columns (big-endian u32), then a byte a pixel. Labels: 0x00000801, count, a byte
each. A file with `t10k` or `test` in its name is the test split.
"""

from __future__ import annotations

import gzip
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from cross.errors import DataError
from host_control.data.data_set import Bytes, DataSet, Split, numbered_classes
from host_control.data.tree import ForwardReader, Tree

_IMAGES = re.compile(r"(^|.*[-_.])images[-_.]idx3[-_.]ubyte(\.gz)?$")
_MAX_SIDE = 16384
_MAX_RATIO = 1032
"""Deflate cannot expand further: a header that promises more lies."""
_FASHION_BEGINS = (9, 0, 0, 3, 0, 2, 7, 2, 5, 5, 0, 9, 5, 5, 7, 9)
"""Its first training labels, by which it is told from MNIST."""
_FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


def read(tree: Tree) -> DataSet | None:
    """The data set, or None where no file is named as IDX images are. DataError where a file is not what it says."""
    images = [name for name in tree.names if "/" not in name and _IMAGES.match(name)]
    if not images:
        return None
    test_files = [name for name in images if re.search("t10k|test", name)]
    train_files = [name for name in images if name not in test_files]
    if len(train_files) != 1 or len(test_files) > 1:
        raise DataError(
            f"{tree.label} holds {len(train_files)} training and {len(test_files)} test files of IDX images. "
            "Keep one training file and at most one test file in it."
        )
    train = _split(tree, train_files[0])
    test = _split(tree, test_files[0]) if test_files else None
    classes = numbered_classes([split.labels for split in (train, test) if split], tree.label)
    fashion = len(train) == 60000 and tuple(train.labels[: len(_FASHION_BEGINS)]) == _FASHION_BEGINS
    title = "Fashion-MNIST" if fashion else f"IDX of {tree.root.name}"
    return DataSet("idx", title, "images", _FASHION if fashion else classes, train, test)


def _split(tree: Tree, images: str) -> Split:
    stem = images.replace("images", "labels").replace("idx3", "idx1").removesuffix(".gz")
    partner = next((name for name in (stem + ".gz", stem) if name in tree.names), None)
    if partner is None:
        raise DataError(f"{tree.full(images)} has no {stem} or {stem}.gz beside it. Put its labels there.")
    count, height, width = _dimensions(tree, images, 3)
    (label_count,) = _dimensions(tree, partner, 1)
    if count != label_count:
        raise DataError(f"{tree.full(images)} has {count} images for {label_count} labels. Fetch both again.")
    reader = ForwardReader(lambda: _unpacked(tree, images), tree.full(images))
    labels = np.frombuffer(ForwardReader(lambda: _unpacked(tree, partner), tree.full(partner)).read(8, count), np.uint8)

    def sample(i: int) -> Bytes:
        data = reader.read(16 + i * height * width, height * width)
        return np.frombuffer(data, np.uint8).reshape(1, height, width)

    wide: NDArray[Any] = labels.astype(np.int64)
    return Split(wide, sample, lambda i: f"image {i} of {images}")


def _dimensions(tree: Tree, name: str, axes: int) -> tuple[int, ...]:
    """The sizes that a header gives, checked against the file's own size before anything is read."""
    header = ForwardReader(lambda: _unpacked(tree, name), tree.full(name)).read(0, 4 + 4 * axes)
    if header[:4] != bytes((0, 0, 8, axes)):
        raise DataError(f"{tree.full(name)} does not begin as an IDX file of {axes} axes of bytes. Fetch it again.")
    sizes = struct.unpack(f">{axes}I", header[4:])
    declared, stored = 4 + 4 * axes, tree.size(name)
    product = 1
    for size in sizes:
        product *= size
    declared += product
    packed = name.endswith(".gz")
    if not sizes[0] or any(not 0 < side <= _MAX_SIDE for side in sizes[1:]):
        raise DataError(f"{tree.full(name)} declares {' x '.join(map(str, sizes))}. Fetch it again.")
    if declared > stored * _MAX_RATIO + 1024 if packed else declared != stored:
        raise DataError(f"{tree.full(name)} declares {declared} bytes and has {stored}. Fetch it again.")
    return sizes


@contextmanager
def _unpacked(tree: Tree, name: str) -> Iterator[IO[bytes]]:
    with tree.open(name) as file:
        if name.endswith(".gz"):
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield unpacked  # type: ignore[misc]
        else:
            yield file
