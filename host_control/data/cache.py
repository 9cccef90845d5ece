"""Packed once: whatever `--data` names, as a packed folder out of a cache that knows its contents.

The cache is `$TASTE_CACHE/data` or `~/.cache/taste-edge/data`. An entry's name follows from the source's path, the
sizes and times of all its files, and the options: a file that changes makes another entry.
"""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import asdict
from pathlib import Path

from cross.errors import CorruptInputError, NoSpaceError, UsageError
from host_control.data import csv_table
from host_control.data.data_set import PackOptions
from host_control.data.packed import FORMAT, is_packed, open_packed
from host_control.data.packing import Packed, Report, content_key, pack
from host_control.data.read import find_source, read_data_set
from host_control.data.tree import file_stamp


def cache_folder() -> Path:
    """Where packed data sets are kept."""
    named = os.environ.get("TASTE_CACHE")
    return (Path(named) if named else Path.home() / ".cache" / "taste-edge") / "data"


def packed_for(
    data: str | Path, options: PackOptions, cache: Path | None = None, report: Report = lambda *_: None
) -> Packed:
    """The packed form of `data`: itself where it is packed, else from the cache, packed where it is new.

    A damaged entry of the cache is packed again; a damaged folder of the user's is CorruptInputError (14).
    """
    source = find_source(data)
    if source.is_dir() and is_packed(source):
        return Packed(open_packed(source), ())
    is_csv = source.is_file() and source.suffix.lower() in csv_table.SUFFIXES
    stamp = csv_table.stamp(source) if is_csv else file_stamp(source)
    wide = {**asdict(options), "size": list(options.size) if options.size else None}
    key = content_key([FORMAT, str(source.resolve()), stamp, wide])
    entry = (cache or cache_folder()) / key
    if is_packed(entry):
        try:
            return Packed(open_packed(entry), ())
        except CorruptInputError:
            shutil.rmtree(entry)
    try:
        return pack(read_data_set(source, options), entry, options, report)
    except (UsageError, OSError) as error:
        # Another process packed the same in the meantime.
        if not is_packed(entry):
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoSpaceError(
                    f"no space left to pack {source} in {entry.parent}. Free some, or set TASTE_CACHE to another folder."
                ) from error
            raise
        return Packed(open_packed(entry), ())
