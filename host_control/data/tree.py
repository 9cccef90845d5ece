"""The files of a source, in a folder or a zip, read without trusting their names.

Nothing outside the folder is ever read: a link that leads out, `..`, an absolute name, a device are refused (23).
"""

from __future__ import annotations

import errno
import lzma
import os
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO

from cross.errors import DataError
from host_control.data.data_set import BadSampleError

MAX_FILES = 4_000_000
MAX_SAMPLE_BYTES = 2**28
"""Largest single image file: no camera writes more, and a zip may claim anything."""

DAMAGE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, KeyError, ValueError, NotImplementedError, OSError)
"""What reading a damaged gz or zip raises; an OSError of the disk itself has an errno and is no damage."""

_LITTER = {"Thumbs.db", "desktop.ini", "__MACOSX"}


@dataclass(frozen=True)
class Tree:
    """A folder, or a zip read in place. `names` are the relative paths of its files, sorted, with `/`; `folders` likewise.

    `root` is the folder or the zip file; `prefix` the part of it that this tree shows ("" or "top/").
    """

    root: Path
    names: tuple[str, ...]
    folders: tuple[str, ...]
    archive: zipfile.ZipFile | None = None
    prefix: str = ""

    @property
    def label(self) -> str:
        """For messages."""
        return str(self.root / self.prefix) if self.prefix else str(self.root)

    def inside(self, folder: str) -> Tree:
        """The tree of one folder in it."""
        start = folder + "/"
        return replace(
            self,
            prefix=self.prefix + start,
            names=tuple(name[len(start) :] for name in self.names if name.startswith(start)),
            folders=tuple(name[len(start) :] for name in self.folders if name.startswith(start)),
        )

    def full(self, name: str) -> str:
        """A file as a message names it."""
        return f"{self.root}/{self.prefix}{name}"

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """A file for reading; what goes wrong in it is a BadSampleError with its name."""
        try:
            if self.archive is not None:
                with self.archive.open(self.prefix + name) as member:
                    yield member
                return
            path = self.root / self.prefix / name
            _require_inside(path, self.root)
            with path.open("rb") as file:
                yield file
        except DAMAGE as error:
            if is_of_the_disk(error) and not isinstance(error, FileNotFoundError):
                raise
            reason = "is not there" if isinstance(error, FileNotFoundError | KeyError) else f"cannot be read: {error}"
            raise BadSampleError(
                f"{self.full(name)} {reason}. Repair or remove it, or use --skip-bad to leave such images out."
            ) from error

    def read(self, name: str, limit: int = MAX_SAMPLE_BYTES) -> bytes:
        """All of a file; DataError where it has more than `limit` bytes."""
        with self.open(name) as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise BadSampleError(f"{self.full(name)} has more than {limit} bytes. Remove it, or use --skip-bad.")
        return data

    def size(self, name: str) -> int:
        """Bytes of a file, as it claims."""
        if self.archive is not None:
            return self.archive.getinfo(self.prefix + name).file_size
        return (self.root / self.prefix / name).stat().st_size


class ForwardReader:
    """Bytes of a stream that unpacks as it is read: going forward reads on, going back begins anew.

    `open_stream` opens it at its beginning; `label` is its name for messages.
    """

    def __init__(self, open_stream: Callable[[], AbstractContextManager[IO[bytes]]], label: str) -> None:
        self._open, self._label = open_stream, label
        self._scope = ExitStack()
        self._stream: IO[bytes] | None = None

    def read(self, first: int, count: int) -> bytes:
        """`count` bytes from position `first`; DataError where the stream is damaged or ends before."""
        try:
            if self._stream is None:
                self._stream = self._scope.enter_context(self._open())
            self._stream.seek(first)
            data = self._stream.read(count)
        except DAMAGE as error:
            if is_of_the_disk(error):
                raise
            raise DataError(f"{self._label} is damaged: {error}. Fetch it again.") from error
        if len(data) != count:
            raise DataError(f"{self._label} ends at byte {first + len(data)} of {first + count}. Fetch it again.")
        return data


def is_of_the_disk(error: BaseException) -> bool:
    """Whether the operating system failed, not what is in the file."""
    # EINVAL: a zip whose directory points before its beginning.
    return isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)


def open_tree(path: Path) -> Tree:
    """The tree of a folder or of a zip file; where all of it is one folder, the tree of that folder. DataError."""
    tree = _zip_tree(path) if path.is_file() else _folder_tree(path)
    while tree.names and all("/" in name for name in tree.names):
        tops = {name.partition("/")[0] for name in (*tree.names, *tree.folders)}
        if len(tops) != 1:
            break
        tree = tree.inside(tops.pop())
    return tree


def file_stamp(path: Path) -> list[tuple[str, int, int, int]]:
    """(name, bytes, mtime, ctime in ns) of a file, or of every file of a folder: equal stamps, equal contents."""
    names = [""] if path.is_file() else list(_folder_tree(path).names)
    return stamps(path, names)


def stamps(root: Path, names: Sequence[str]) -> list[tuple[str, int, int, int]]:
    """The same of some files of a folder; those that are missing have zeros."""
    found = []
    for name in names:
        path = root / name
        status = path.stat() if path.exists() else None
        found.append((name, status.st_size, status.st_mtime_ns, status.st_ctime_ns) if status else (name, 0, 0, 0))
    return found


def _shown(name: str) -> bool:
    return not name.startswith(".") and name not in _LITTER


def _require_text(name: str, where: Path) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where} holds a file whose name is not UTF-8: {name!r}. Rename it.") from None


def _folder_tree(root: Path) -> Tree:
    names: list[str] = []
    folders: list[str] = []
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(root / prefix) as entries:
            for entry in entries:
                if not _shown(entry.name):
                    continue
                _require_text(entry.name, root)
                name = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                    pending.append(name + "/")
                else:
                    _require_regular(entry, root, name)
                    names.append(name)
        if len(names) > MAX_FILES:
            raise DataError(f"{root} holds more than {MAX_FILES} files. Name the folder of the data set alone.")
    return Tree(root, tuple(sorted(names)), tuple(sorted(folders)))


def _require_regular(entry: os.DirEntry[str], root: Path, name: str) -> None:
    if entry.is_file(follow_symlinks=False):
        return
    if entry.is_symlink():
        _require_inside(root / name, root)
        if not Path(entry.path).is_dir():
            return
        raise DataError(f"{root / name} is a link to a folder, which is not followed. Put the folder itself there.")
    raise DataError(f"{root / name} is neither a file nor a folder. Remove it from the data set.")


def _require_inside(path: Path, root: Path) -> None:
    """A file that stays under `root` when links are followed, and is a regular one."""
    try:
        real = path.resolve(strict=True)
    except (OSError, ValueError) as error:
        raise BadSampleError(f"{path} is not there. Correct the path, or use --skip-bad to leave it out.") from error
    if not real.is_relative_to(root.resolve()):
        raise DataError(f"{path} leads out of {root}. Only files inside the data set are read: copy it there.")
    if not stat.S_ISREG(real.stat().st_mode) and not real.is_dir():
        raise DataError(f"{path} is neither a file nor a folder. Remove it from the data set.")


def _zip_tree(path: Path) -> Tree:
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise DataError(f"{path} is not a readable zip: {error}. Fetch it again.") from error
    names: set[str] = set()
    folders: set[str] = set()
    for info in archive.infolist():
        parts = _safe_parts(info, path)
        if not all(map(_shown, parts)):
            continue
        name = "/".join(parts)
        if not info.is_dir() and name in names:
            raise DataError(f"{path} holds {name} twice. Make the zip anew.")
        (folders if info.is_dir() else names).add(name)
        folders.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
    return Tree(path, tuple(sorted(names)), tuple(sorted(folders)), archive)


def _safe_parts(info: zipfile.ZipInfo, path: Path) -> tuple[str, ...]:
    name = info.filename
    pure = PurePosixPath(name)
    mode = info.external_attr >> 16
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or name.removesuffix("/") != str(pure):
        raise DataError(f"{path} holds {name!r}, a path that may lead out of it. Do not trust this file.")
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise DataError(f"{path} holds {name!r}, which is a link or a device. Make the zip of files only.")
    if info.flag_bits & 1:
        raise DataError(f"{path} is encrypted. Unpack it, and name the folder.")
    _require_text(name, path)
    return pure.parts
