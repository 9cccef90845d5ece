"""A kill loop over packing, run by tests/test_data_pack.py: `python -m tests.killed_packing SOURCE OUT [--in-place]`.

`--in-place` plants the bug that it must find: a writer that works under the final name.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cross.errors import CorruptInputError, UsageError
from host_control.data import PackOptions, open_packed, packing, read_data_set


def _killed_at(point: int, source: Path, out: Path, in_place: bool) -> bool:
    """Packs in a child that dies, as by kill -9, at the n-th sample, fsync or rename; whether it came that far."""
    if (child := os.fork()) != 0:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    passed = itertools.count(1)

    def die(*_: object) -> None:
        if next(passed) == point:
            os._exit(9)

    @contextmanager
    def written_in_place(folder: Path) -> Iterator[Path]:
        folder.mkdir()
        yield folder

    try:
        sync, rename = os.fsync, os.rename
        os.fsync = lambda file: (die(), sync(file))[1]  # type: ignore[func-returns-value]
        os.rename = lambda old, new: (die(), rename(old, new))[1]  # type: ignore[func-returns-value]
        if in_place:
            packing._folder_for = written_in_place
        packing.pack(read_data_set(source, PackOptions()), out, PackOptions(), die)
    finally:
        os._exit(0)


def _first_mixture(source: Path, out: Path, in_place: bool) -> str:
    """`point N`, after which neither nothing nor all of the packed data is there, or `none of` all the points."""
    for point in itertools.count(1):
        died = _killed_at(point, source, out, in_place)
        try:
            whole = not out.exists() or open_packed(out).test is not None
        except (CorruptInputError, UsageError):
            whole = False
        if not whole:
            return f"point {point}"
        shutil.rmtree(out, ignore_errors=True)
        if not died:
            return f"none of {point - 1}"
    raise AssertionError("unreachable")


if __name__ == "__main__":
    print(_first_mixture(Path(sys.argv[1]), Path(sys.argv[2]), "--in-place" in sys.argv))
