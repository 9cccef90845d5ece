"""The record of a run: every event as it comes (metrics.jsonl), a table (metrics.csv), and what it adds up to.

A run that goes on from a checkpoint does some steps again: their first record is taken out, so that there is one of each;
`seconds` of training, which the board counts from where it goes on, are those of the whole run.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from host_control.console import finite
from host_control.run_folder import write_whole

RECORD, TABLE = "metrics.jsonl", "metrics.csv"
COLUMNS = (
    "event", "step", "epoch", "loss", "accuracy", "lr", "effective_batch", "samples_per_s", "seconds", "samples",
    "temperature_c", "rss_bytes",
)  # fmt: skip
_KEPT = ("step", "eval", "checkpoint")


class Metrics:
    """The events of one run in `folder`; opened again, those before the place where the run goes on are kept."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / RECORD
        self.records: list[dict[str, Any]] = read_records(self._path)
        self._file = self._path.open("a", encoding="utf-8")
        self._begins = True
        self._seconds_before = 0.0

    def add(self, event: Mapping[str, Any]) -> None:
        """Record one event of the board; what is no measurement is left out."""
        if event.get("event") == "resume":
            self._drop_after(int(event["step"]), float(event.get("epoch") or math.inf))
            self._seconds_before = max((float(record.get("seconds") or 0) for record in self.records), default=0.0)
            self._begins = False
        elif event.get("event") == "step" and self._begins:
            # No checkpoint was there to go on from: what an earlier attempt recorded is done again from the start.
            self._drop_after(0, 0.0)
            self._begins = False
        elif event.get("event") == "step" and self.records and int(event["step"]) <= self._last_step():
            # The board's events are heard from their start again.
            self._drop_after(int(event["step"]) - 1, math.inf)
            self._seconds_before = 0.0
        if event.get("event") not in _KEPT:
            return
        record = finite(dict(event))
        if record.get("seconds") is not None:
            record["seconds"] += self._seconds_before
        self.records.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def _last_step(self) -> int:
        return next((int(record["step"]) for record in reversed(self.records) if "step" in record), 0)

    def _drop_after(self, step: int, epoch: float) -> None:
        """Forget what comes after the checkpoint of `step`, and a test at its very `epoch`, which is done again: records carry
        their step, evals the step before them."""
        kept, last = [], 0
        for record in self.records:
            last = int(record.get("step", last))
            if last <= step and not (record["event"] == "eval" and float(record["epoch"]) >= epoch):
                kept.append(record)
        if len(kept) == len(self.records):
            return
        self.records = kept
        self._file.close()
        write_whole(self._path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Write the table."""
        self._file.close()
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(record for record in self.records if record["event"] in ("step", "eval"))
        write_whole(self._path.with_name(TABLE), text.getvalue().encode())


def read_records(path: Path) -> list[dict[str, Any]]:
    """What a run has recorded; a last line that a crash tore is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("event") in _KEPT:
            records.append(record)
    return records
