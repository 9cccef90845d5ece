"""`data fetch`: public data sets, downloaded with known checksums and unpacked without trusting the archive's paths.

A download that was cut goes on where it stopped (`NAME.part`); an archive that lies in the folder already, brought
there by hand, is used. Every wait is bounded. What is unpacked appears under its final name once it is whole.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from cross.errors import CorruptInputError, LinkLostError
from host_control.data.packing import Report

_ANSWER_S = 20.0
"""Longest silence of a server."""
_DEADLINE_S = 3600.0
"""Longest download as a whole."""
_CHUNK = 2**18
_MAX_UNPACKED_BYTES = 2**31


@dataclass(frozen=True)
class Archive:
    """One file to download: its `bytes` and SHA-256 are known beforehand. `folder` is what it unpacks to, or None."""

    url: str
    bytes: int
    sha256: str
    folder: str | None = None

    @property
    def name(self) -> str:
        """The file's name."""
        return self.url.rpartition("/")[2]


_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"

ARCHIVES: dict[str, tuple[Archive, ...]] = {
    "cifar10": (
        Archive(
            _CIFAR + "cifar-10-binary.tar.gz",
            170052171,
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            "cifar-10-batches-bin",
        ),
    ),
    "cifar100": (
        Archive(
            _CIFAR + "cifar-100-binary.tar.gz",
            168513733,
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            "cifar-100-binary",
        ),
    ),
    "tiny-imagenet": (
        Archive(
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            248100043,
            "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
            "tiny-imagenet-200",
        ),
    ),
    "fashion-mnist": (
        Archive(
            _FASHION + "train-images-idx3-ubyte.gz",
            26421880,
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        ),
        Archive(
            _FASHION + "train-labels-idx1-ubyte.gz",
            29515,
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        ),
        Archive(
            _FASHION + "t10k-images-idx3-ubyte.gz",
            4422102,
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        ),
        Archive(
            _FASHION + "t10k-labels-idx1-ubyte.gz",
            5148,
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
}


def fetch(archives: tuple[Archive, ...], out: Path, report: Report = lambda *_: None) -> int:
    """Download and unpack into `out`; returns the bytes that came over the network.

    Raises LinkLostError (17) where a server does not answer or stops, CorruptInputError (14) where the checksum is not
    the known one or an archive has a path that leads out of it.
    """
    out.mkdir(parents=True, exist_ok=True)
    received = 0
    for archive in archives:
        if archive.folder is not None and (out / archive.folder).is_dir():
            continue
        file = out / archive.name
        if not file.exists():
            received += _download(archive, file, report)
        _require_hash(archive, file)
        if archive.folder is not None:
            _unpack(archive, file, out, report)
            file.unlink()
    return received


def _require_hash(archive: Archive, file: Path) -> None:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(2**22):
            digest.update(chunk)
    if digest.hexdigest() != archive.sha256:
        raise CorruptInputError(
            f"{file} has SHA-256 {digest.hexdigest()[:16]}..., {archive.sha256[:16]}... is right. Remove it and fetch again."
        )


def _download(archive: Archive, file: Path, report: Report) -> int:
    """The file, whole under its name; a cut download stays as `.part` and goes on next time."""
    part = file.with_name(file.name + ".part")
    have = part.stat().st_size if part.exists() else 0
    if have > archive.bytes:
        part.unlink()
        have = 0
    received = 0
    if have < archive.bytes:
        try:
            received = _receive(archive, part, have, report)
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            reason = getattr(error, "reason", None) or error
            raise LinkLostError(
                f"{archive.url} cannot be fetched: {' '.join(str(reason).split()) or type(reason).__name__}. Run it again "
                f"where there is a network (what came is kept), or put the file into {file.parent} by hand."
            ) from error
    try:
        _require_hash(archive, part)
    except CorruptInputError:
        # Going on from damaged bytes would never end.
        part.unlink()
        raise
    os.replace(part, file)
    return received


def _receive(archive: Archive, part: Path, have: int, report: Report) -> int:
    request = urllib.request.Request(archive.url, headers={"User-Agent": "taste-edge"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    until = time.monotonic() + _DEADLINE_S
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
        if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
            have = 0
        start = have
        with part.open("ab" if have else "wb") as file:
            while chunk := answer.read1(min(_CHUNK, archive.bytes - have + 1)):
                file.write(chunk)
                have += len(chunk)
                report(archive.name, have, archive.bytes)
                if have > archive.bytes:
                    break
                if time.monotonic() > until:
                    raise TimeoutError(f"only {have} of {archive.bytes} bytes came within {_DEADLINE_S:.0f} s")
            file.flush()
            os.fsync(file.fileno())
    if have < archive.bytes:
        raise TimeoutError(f"the connection ended after {have} of {archive.bytes} bytes")
    return have - start


def _unpack(archive: Archive, file: Path, out: Path, report: Report) -> None:
    """The archive's only folder, moved into `out` once all of it is there."""
    assert archive.folder is not None, "archives that stay as they are, are not unpacked"
    scratch = Path(tempfile.mkdtemp(prefix=f".{archive.folder}.", dir=out))
    done = 0
    try:
        try:
            for name, content in _members(file):
                target = scratch / _safe(name, file)
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as copy:
                    while chunk := content.read(_CHUNK):
                        done += len(chunk)
                        if done > _MAX_UNPACKED_BYTES:
                            raise CorruptInputError(
                                f"{file} unpacks to more than {_MAX_UNPACKED_BYTES} bytes. Remove it."
                            )
                        copy.write(chunk)
                report("unpack", done, max(done, archive.bytes))
        except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
            raise CorruptInputError(f"{file} cannot be unpacked: {error}. Remove it and fetch again.") from error
        if not (scratch / archive.folder).is_dir():
            raise CorruptInputError(f"{file} holds no folder {archive.folder}. Remove it and fetch again.")
        os.rename(scratch / archive.folder, out / archive.folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _members(file: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Names and contents of the regular files; links and devices are left out."""
    if file.suffix == ".zip":
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if not info.is_dir():
                    with archive.open(info) as content:
                        yield info.filename, content
        return
    with tarfile.open(file, "r:gz") as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isreg() else None
            if stream is not None:
                yield member.name, stream


def _safe(name: str, file: Path) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise CorruptInputError(
            f"{file} holds {name!r}, a path that leads out of it. Do not trust this file: remove it."
        )
    return path
