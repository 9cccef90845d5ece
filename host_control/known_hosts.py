"""OpenSSH's known_hosts: which keys a host is known by, and recording a new one. Nothing is accepted silently."""

from __future__ import annotations

import base64
import binascii
import contextlib
import fnmatch
import hashlib
import hmac
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cross.errors import FileError

Verdict = Literal["known", "unknown", "changed", "revoked"]


@dataclass(frozen=True)
class KnownKey:
    """One key that a file gives for a host; `place` is FILE:LINE."""

    kind: str
    blob: bytes
    revoked: bool
    place: str


def fingerprint(blob: bytes) -> str:
    """As `ssh-keygen -l` prints it: SHA256:..."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def find_keys(files: Iterable[Path], name: str) -> list[KnownKey]:
    """Every key of `name` (a host, or [host]:port) in `files`; a missing file or a broken line holds none."""
    found = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise FileError(f"cannot read {file}: {error.strerror}. Check its permissions.") from error
        found += [key for number, line in enumerate(lines, 1) if (key := _read_line(line, name, f"{file}:{number}"))]
    return found


def judge(keys: Sequence[KnownKey], blob: bytes) -> tuple[Verdict, str]:
    """What known `keys` say of the key that a host showed, and the place that says so ('' where none does).

    A host that is known by other keys only is `changed`, also where those are of another kind: a host can offer a kind
    that nobody recorded, but so can anyone in between.
    """
    for key in keys:
        if key.revoked and key.blob == blob:
            return "revoked", key.place
    valid = [key for key in keys if not key.revoked]
    for key in valid:
        if key.blob == blob:
            return "known", key.place
    return ("changed", valid[0].place) if valid else ("unknown", "")


def record(file: Path, name: str, kind: str, blob: bytes, *, hashed: bool) -> None:
    """Append one key, atomically: the old file or the new one is there, never a part. Its mode is kept."""
    real = Path(os.path.realpath(file))
    shown = _hash_name(name, os.urandom(20)) if hashed else name
    line = f"{shown} {kind} {base64.b64encode(blob).decode()}\n".encode()
    try:
        real.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        old = real.read_bytes() if real.exists() else b""
        mode = real.stat().st_mode & 0o777 if real.exists() else 0o600
        _replace(real, old + (b"\n" if old and not old.endswith(b"\n") else b"") + line, mode)
    except OSError as error:
        raise FileError(f"cannot record the host key in {file}: {error.strerror}. Check the folder.") from error


def _replace(path: Path, content: bytes, mode: int) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _read_line(line: str, name: str, place: str) -> KnownKey | None:
    fields = line.split()
    marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
    # A certificate authority vouches for certificates, which we do not ask for; it says nothing of a plain key.
    if len(fields) < 3 or fields[0].startswith("#") or marker not in ("", "@revoked"):
        return None
    try:
        blob = base64.b64decode(fields[2], validate=True)
    except (binascii.Error, ValueError):
        return None
    return KnownKey(fields[1], blob, marker == "@revoked", place) if _matches(fields[0], name) else None


def _matches(patterns: str, name: str) -> bool:
    if patterns.startswith("|1|"):
        salt = patterns.split("|")[2]
        with contextlib.suppress(binascii.Error, ValueError):
            return hmac.compare_digest(_hash_name(name, base64.b64decode(salt)), patterns)
        return False
    words = patterns.split(",")
    if any(_fits(word[1:], name) for word in words if word.startswith("!")):
        return False
    return any(_fits(word, name) for word in words if not word.startswith("!"))


def _fits(pattern: str, name: str) -> bool:
    # OpenSSH knows * and ? only; the brackets of [host]:port are plain characters to it, and not to fnmatch.
    return fnmatch.fnmatchcase(name.lower(), pattern.lower().replace("[", "[[]"))


def _hash_name(name: str, salt: bytes) -> str:
    digest = hmac.new(salt, name.lower().encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"
