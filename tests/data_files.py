"""Tiny data sets in the true on-disk forms of every format, from the same arrays."""

from __future__ import annotations

import csv
import gzip
import io
import json
import pickle
import struct
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]

CLASSES = ("ant", "bee", "cat")


def random_images(count: int, shape: tuple[int, ...] = (3, 32, 32), seed: int = 0) -> Pixels:
    """uint8 [N,C,H,W]; every image is different."""
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), np.uint8)


def png(planes: Pixels) -> bytes:
    """The bytes of a PNG of [C,H,W]: what it decodes to is known exactly."""
    file = io.BytesIO()
    Image.fromarray(planes[0] if len(planes) == 1 else planes.transpose(1, 2, 0).copy()).save(file, "PNG")
    return file.getvalue()


def write_files(root: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def write_zip(path: Path, files: Mapping[str, bytes] | Iterable[tuple[str | zipfile.ZipInfo, bytes]]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items() if isinstance(files, Mapping) else files:
            archive.writestr(name, data)
    return path


def class_folders(x: Pixels, y: Iterable[int], prefix: str = "") -> dict[str, bytes]:
    """prefix/class/NNN.png; sorted by class these are `in_class_order(x, y)`."""
    return {
        f"{prefix}{CLASSES[label]}/{i:03}.png": png(image) for i, (image, label) in enumerate(zip(x, y, strict=True))
    }


def in_class_order(x: Pixels, y: NDArray[np.int64]) -> tuple[Pixels, NDArray[np.int64]]:
    order = np.argsort(y, kind="stable")
    return x[order], y[order]


def cifar10_records(x: Pixels, y: Iterable[int]) -> bytes:
    return b"".join(bytes([label]) + image.tobytes() for image, label in zip(x, y, strict=True))


def cifar100_records(x: Pixels, y: Iterable[int]) -> bytes:
    """A coarse label that must not be taken stands before the fine one."""
    return b"".join(bytes([19 - label, label]) + image.tobytes() for image, label in zip(x, y, strict=True))


def python2_pickle(values: Mapping[str, object]) -> bytes:
    """A dict of str, lists of int or str, and byte arrays as Python 2 and numpy 1 pickled them (protocol 2)."""

    def text(value: str | bytes) -> bytes:
        raw = value if isinstance(value, bytes) else value.encode("latin-1")
        return b"U" + bytes([len(raw)]) + raw if len(raw) < 256 else b"T" + struct.pack("<i", len(raw)) + raw

    def array(value: Pixels) -> bytes:
        dtype = b"cnumpy\ndtype\n" + text("u1") + b"K\x00K\x01\x87R(K\x03" + text("|") + b"NNN"
        dtype += b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        shape = b"".join(b"J" + struct.pack("<i", side) for side in value.shape) + b"\x86"
        made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text("b") + b"\x87R"
        return made + b"(K\x01" + shape + dtype + b"\x89" + text(value.tobytes()) + b"tb"

    def one(value: object) -> bytes:
        if isinstance(value, np.ndarray):
            return array(value)
        if isinstance(value, str):
            return text(value)
        if isinstance(value, int):
            return b"K" + bytes([value])
        assert isinstance(value, list)
        return b"](" + b"".join(map(one, value)) + b"e"

    pairs = b"".join(text(key) + one(value) for key, value in values.items())
    return b"\x80\x02}q\x01(" + pairs + b"u."


def python3_pickle(protocol: int, values: Mapping[str, object], as_bytes: bool = False) -> bytes:
    """The same by this Python and numpy; `as_bytes`: keys as CIFAR's files have them when they are saved again."""
    return pickle.dumps({key.encode() if as_bytes else key: value for key, value in values.items()}, protocol)


def idx_images(x: Pixels) -> bytes:
    count, _, height, width = x.shape
    return struct.pack(">IIII", 0x803, count, height, width) + x.tobytes()


def idx_labels(y: Iterable[int]) -> bytes:
    labels = bytes(map(int, y))
    return struct.pack(">II", 0x801, len(labels)) + labels


def write_idx(
    root: Path, train: tuple[Pixels, Iterable[int]], test: tuple[Pixels, Iterable[int]] | None = None
) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for stem, part in (("train", train), ("t10k", test)):
        if part is not None:
            (root / f"{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_images(part[0]), 1))
            (root / f"{stem}-labels-idx1-ubyte").write_bytes(idx_labels(part[1]))
    return root


def write_csv(path: Path, rows: Iterable[Iterable[object]], delimiter: str = ",") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


def write_parquet(path: Path, x: Pixels, y: Iterable[int], names: Iterable[str]) -> Path:
    """As the `datasets` library pushes images to the hub."""
    import pyarrow
    import pyarrow.parquet

    images = [{"bytes": png(image), "path": f"{i}.png"} for i, image in enumerate(x)]
    features = {"image": {"_type": "Image"}, "label": {"names": list(names), "_type": "ClassLabel"}}
    table = pyarrow.table({"image": images, "label": pyarrow.array(list(y), pyarrow.int64())})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(table, path, row_group_size=5)
    return path
