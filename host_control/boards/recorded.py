"""`recorded:FILE.json`: replays a table measured before. Nothing is run; a strategy never knows the difference."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cross.errors import CorruptInputError, UsageError
from host_control.board import Counters, OperatingPoint, counters_from


class RecordedBoard:
    """The rates of a recorded table, such as a study's `result.json`: `throughput: [{batch_size, samples_per_s, ...}]`.

    `emulated` is the table's. Sizes that are not in it are an error, never interpolated.
    """

    def __init__(self, name: str, table: Mapping[int, Counters]) -> None:
        self.name = name
        self._table = dict(table)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The sizes of the table, ascending."""
        return tuple(sorted(self._table))

    def measure(self, point: OperatingPoint) -> Counters:
        """The recorded counters; UsageError names the sizes there are where `point.batch_size` is not one of them."""
        if point.batch_size not in self._table:
            sizes = ", ".join(map(str, self.batch_sizes))
            raise UsageError(f"batch size {point.batch_size} is not in the table of {self.name}, which has {sizes}.")
        return self._table[point.batch_size]

    def close(self) -> None:
        """Nothing is open."""


def open_recorded(path: Path) -> RecordedBoard:
    """The board that replays `path`; UsageError where there is no such file, CorruptInputError where it is no table."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        emulated = bool(record.get("emulated", False))
        rows = {int(row["batch_size"]): _read_row(row, emulated) for row in record["throughput"]}
        name = str(record.get("board", path.stem))
        if not rows:
            raise ValueError("it has no rows")
    except FileNotFoundError:
        raise UsageError(f"no recorded table {path}. Give --board recorded:FILE.json.") from None
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise CorruptInputError(
            f"{path} is not a recorded table: {reason}. It needs throughput: [{{batch_size, samples_per_s}}]."
        ) from error
    return RecordedBoard(name, rows)


def _read_row(row: Mapping[str, Any], emulated: bool) -> Counters:
    counters = counters_from(row, emulated=bool(row.get("emulated", emulated)))
    if counters.batch_size < 1 or not math.isfinite(counters.samples_per_s) or counters.samples_per_s <= 0:
        raise ValueError(f"batch size {counters.batch_size} at {counters.samples_per_s} samples/s")
    return counters
