"""DataSet -> packed folder (docs/data.md): sample by sample, whole or not at all, the same bytes every time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cross.errors import DataError, UsageError
from host_control.data.data_set import BadSampleError, Bytes, DataSet, PackOptions, Split
from host_control.data.images import prepare, require_same_shape
from host_control.data.packed import (
    FORMAT,
    MAX_HEADER_BYTES,
    TEST,
    TRAIN,
    PackedDataSet,
    data_sha256,
    metadata_sha256,
    open_packed,
)

Report = Callable[[str, int, int], None]
"""(stage, done, total), as `Console.progress` gives it."""

_ALIGNMENT = 64
_BUFFER_BYTES = 2**22
_NO_HASH = "0" * 64
_LONGEST_NUMBER = "-1.2345678901234567e-308"


@dataclass(frozen=True)
class Packed:
    """What `pack` made, and the samples that `--skip-bad` left out: why, a line each."""

    data: PackedDataSet
    skipped: tuple[str, ...]


def pack(data_set: DataSet, out: Path, options: PackOptions, report: Report = lambda *_: None) -> Packed:
    """Write `out`, which must not exist or be empty; nothing is left where it fails.

    Raises UsageError where `out` holds something, DataError for what is wrong with the data, OSError of the disk.
    """
    out = Path(os.path.abspath(out))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {out} is there already and not an empty folder. Name another, or remove it.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with _folder_for(out) as folder:
        train = _Written(data_set, options, "train", data_set.train, report)
        train.write(folder / TRAIN)
        _require_two_classes(train, data_set)
        if data_set.test is not None:
            test = _Written(data_set, options, "test", data_set.test, report, train)
            test.write(folder / TEST)
        skipped = train.skipped + (test.skipped if data_set.test is not None else [])
        _sync(folder)
        os.rename(folder, out)
        _sync(out.parent)
    return Packed(open_packed(out, verify=False), tuple(skipped))


@contextmanager
def _folder_for(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out`; those that killed runs left are removed first: nobody holds their lock."""
    for left in out.parent.glob(f".{out.name}.*.part"):
        with _held(left) as free:
            if free:
                shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".part", dir=out.parent))
    folder.chmod(0o777 & ~_umask())
    with _held(folder):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Whether this process got the folder's lock, which dies with it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _require_two_classes(train: _Written, data_set: DataSet) -> None:
    if data_set.kind == "images" and len(np.unique(train.labels[train.kept])) < 2:
        raise DataError(
            f"{data_set.source} has {len(train.kept)} usable samples, not of two classes: {len(train.skipped)} are bad. "
            "Repair the images."
        )


class _Written:
    """One split on its way into a file.

    y comes first, so that its int32 are aligned, and x is written before y is known (bad samples drop out): room for
    header and y is kept free in front, and what is left of it becomes spaces at the header's end.
    """

    def __init__(
        self,
        data: DataSet,
        options: PackOptions,
        name: str,
        split: Split,
        report: Report,
        train: _Written | None = None,
    ) -> None:
        self._data, self._options, self._name, self._split, self._report = data, options, name, split, report
        self._train = train
        self.labels = split.labels.astype(np.int32 if data.kind == "images" else np.uint8)
        self._domains, self._domain_names = _domains(data, split)
        self.kept: list[int] = []
        self.skipped: list[str] = []
        self.shape: tuple[int, ...] = train.shape if train else ()
        self._histogram = np.zeros((0, 256), np.int64)

    def write(self, path: Path) -> None:
        """The file, synced."""
        rows = self._prepared()
        first = next(rows, None)
        if first is None:
            raise DataError(f"{self._data.source} has no usable sample in its {self._name} split. Repair the images.")
        count = len(self._split)
        self.shape = first.shape
        self._histogram = np.zeros((len(first) if self._data.kind == "images" else 0, 256), np.int64)
        self._require_fitting_normalisation()
        room = len(self._header(self._metadata(None, _NO_HASH), count)) + self.labels.nbytes + self._domains.nbytes
        x_start = -(-room // _ALIGNMENT) * _ALIGNMENT
        with path.open("w+b") as file:
            file.seek(x_start)
            for block in _blocks(first, rows):
                self._count(block)
                file.write(block.data)
            y = self.labels[self.kept].tobytes()
            if self._domain_names:
                y += self._domains[self.kept].tobytes()
            for sha256 in (_NO_HASH, None):
                # The hash covers y too, so it is known only once everything else is in the file.
                file.flush()
                metadata = self._metadata(self.normalisation(), sha256 or data_sha256(path))
                header = self._header(metadata, len(self.kept))
                file.seek(0)
                file.write(_padded(header, x_start - len(y)) + y)
            file.flush()
            os.fsync(file.fileno())

    def _prepared(self) -> Iterator[Bytes]:
        """The samples as they are stored, all of one shape; bad ones are left out or raised."""
        total = len(self._split)
        step = max(total // 100, 1)
        for i in range(total):
            if i % step == 0:
                self._report(self._name, i, total)
            try:
                planes = prepare(self._split.sample(i), self._options, self._split.name(i))
            except BadSampleError as error:
                if not self._options.skip_bad:
                    raise
                self.skipped.append(str(error))
                continue
            if self.shape and planes.shape != self.shape:
                require_same_shape(planes, self.shape, self._split.name(i))
            self.kept.append(i)
            yield planes
        self._report(self._name, total, total)

    def _count(self, block: Bytes) -> None:
        for plane in range(len(self._histogram)):
            self._histogram[plane] += np.bincount(block[:, plane].reshape(-1), minlength=256)

    def _require_fitting_normalisation(self) -> None:
        mean, std, planes = self._options.mean, self._options.std, len(self._histogram)
        if mean is not None and std is not None and planes and not len(mean) == len(std) == planes:
            raise UsageError(
                f"mean has {len(mean)} and std {len(std)} values (of --mean and --std, or of the model's metadata), the "
                f"images have {planes} planes. Give a value for each plane."
            )

    def normalisation(self) -> tuple[list[float], list[float]]:
        """mean and std of each plane: given, or of the training split, from exact counts of every value."""
        if self._train is not None:
            return self._train.normalisation()
        if self._options.mean is not None and self._options.std is not None:
            return list(self._options.mean), list(self._options.std)
        return mean_and_std(self._histogram)

    def _metadata(self, normalisation: tuple[list[float], list[float]] | None, sha256: str) -> dict[str, str]:
        """Of the header; without a normalisation, one with as many characters as any can have."""
        facts = {
            "format": FORMAT,
            "split": self._name,
            "classes": json.dumps(self._data.classes),
            "source": self._data.source.encode("utf-8", "replace").decode(),
            "skipped": str(len(self.skipped) if normalisation else len(self._split)),
            "sha256": sha256,
        }
        if self._domain_names:
            facts["domains"] = json.dumps(self._domain_names)
        if self._data.kind == "images":
            longest = "[" + ", ".join([_LONGEST_NUMBER] * self.shape[0]) + "]"
            mean, std = (json.dumps(part) for part in normalisation) if normalisation else (longest, longest)
            planes = "gray" if self.shape[0] == 1 else "BGR" if self._options.bgr else "RGB"
            facts |= {"mean": mean, "std": std, "planes": planes, "resize": self._options.resize}
        return facts | {"metadata_sha256": metadata_sha256(facts)}

    def _header(self, metadata: dict[str, str], count: int) -> bytes:
        """Length and JSON, without the spaces at its end."""
        y_shape = [count, *self.labels.shape[1:]]
        y_bytes = count * int(np.prod(self.labels.shape[1:], dtype=np.int64)) * self.labels.itemsize
        x_bytes = count * int(np.prod(self.shape, dtype=np.int64))
        domain_bytes = count * 4 if self._domain_names else 0
        y_type = "I32" if self.labels.dtype == np.int32 else "U8"
        header: dict[str, Any] = {
            "__metadata__": metadata,
            "y": {"dtype": y_type, "shape": y_shape, "data_offsets": [0, y_bytes]},
        }
        first = y_bytes + domain_bytes
        if domain_bytes:
            header["domain"] = {"dtype": "I32", "shape": [count], "data_offsets": [y_bytes, first]}
        header["x"] = {"dtype": "U8", "shape": [count, *self.shape], "data_offsets": [first, first + x_bytes]}
        text = json.dumps(header, separators=(",", ":")).encode()
        return len(text).to_bytes(8, "little") + text


def _domains(data: DataSet, split: Split) -> tuple[NDArray[np.int32], list[str]]:
    """The domain of each sample, int32 [N], and the names of all; both empty where the source knows of none."""
    both = [part for part in (data.train, data.test) if part is not None]
    if not any(part.domain for part in both):
        return np.zeros(0, np.int32), []
    found = {name for part in both if part.domain for name in map(part.domain, range(len(part)))}
    number = {name: index for index, name in enumerate(sorted(found))}
    assert split.domain is not None
    return np.array([number[split.domain(i)] for i in range(len(split))], np.int32), list(number)


def _padded(header: bytes, size: int) -> bytes:
    """The header with spaces up to `size` bytes."""
    if size - 8 > MAX_HEADER_BYTES:
        raise DataError(f"the header takes {size - 8} bytes, {MAX_HEADER_BYTES} can be read. Remove bad samples first.")
    return (size - 8).to_bytes(8, "little") + header[8:].ljust(size - 8)


def _blocks(first: Bytes, rows: Iterator[Bytes]) -> Iterator[Bytes]:
    """The rows in blocks [n, ...] of a few MiB."""
    limit = max(_BUFFER_BYTES // first.nbytes, 1)
    block = [first]
    for row in rows:
        if len(block) == limit:
            yield np.stack(block)
            block = []
        block.append(row)
    yield np.stack(block)


def mean_and_std(histogram: NDArray[np.int64]) -> tuple[list[float], list[float]]:
    """Of x/255, from how often each plane [P] has each of the values [256]; a plane of one value gets std 1."""
    means, stds = [], []
    values = range(256)
    for counts in histogram.tolist():
        total = sum(counts)
        first = sum(count * value for count, value in zip(counts, values, strict=True))
        second = sum(count * value * value for count, value in zip(counts, values, strict=True))
        # In whole numbers up to the last division: the same doubles everywhere.
        variance = (second * total - first * first) / (total * total)
        means.append(first / (total * 255))
        stds.append(variance**0.5 / 255 if variance > 0 else 1.0)
    return means, stds


def content_key(parts: Any) -> str:
    """A name that stands for `parts`, any JSON value."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
