"""Telling the kernel which emulator runs a foreign program: an entry in binfmt_misc, which the whole machine shares."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

from cross.errors import MissingToolError

_FOLDER = Path("/proc/sys/fs/binfmt_misc")
_OURS = "taste-"


def register(file: Path) -> None:
    """Register the line of a binfmt.d file under a name of ours, unless an entry for that emulator is there already.

    MissingToolError (22) where the kernel has no binfmt_misc, or an entry is there that does not work in a board's root.
    """
    if not (_FOLDER / "register").exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "none", _FOLDER], check=False, capture_output=True)
    present = _FOLDER / file.stem
    with contextlib.suppress(OSError):
        text = present.read_text()
        if "\nflags: " in text and "F" in text.partition("\nflags: ")[2].split("\n")[0] and text.startswith("enabled"):
            return
        raise MissingToolError(
            f"{present} is an entry without flag F, which does not work in a board's root. Remove it: echo -1 >{present}"
        )
    if (_FOLDER / f"{_OURS}{file.stem}").exists():
        return
    line = next(line for line in file.read_text().splitlines() if line.startswith(":"))
    try:
        (_FOLDER / "register").write_text(f":{_OURS}{line[1:]}")
    except OSError as error:
        raise MissingToolError(
            f"this machine does not let binfmt_misc run {file.stem}: {error.strerror}. Start a -vm board."
        ) from error


def unregister(file: Path) -> None:
    """Remove the entry that `register` made; one that somebody else made stays."""
    with contextlib.suppress(OSError):
        (_FOLDER / f"{_OURS}{file.stem}").write_text("-1")
