"""Moves a training run between operating points: when the limit changes, and when the board is no longer as it was measured.

The effective batch stays, and with it what is learned: after the start only time counts, and every batch size up to the
effective one is a candidate. Points are measured anew by training at them for some seconds, so that no time is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cross.errors import UsageError
from host_control.connection import Files, put_text
from host_control.console import Console, duration
from host_control.power.drift import Visit, order_has_changed, probes, rescaled
from host_control.power.selection import frontier
from host_control.power.table import Point, PowerTable, megahertz

_LOOK_S = 1.0
CONTROL = "operating-point"


def read_limit(file: Path) -> float:
    """Watts: a number, with or without W behind it."""
    try:
        text = file.read_text(encoding="utf-8").strip()
        value = float(text.removesuffix("W"))
    except OSError as error:
        raise UsageError(f"--limit-file {file}: {error.strerror}. Write the limit in watts into it.") from error
    except ValueError:
        raise UsageError(
            f"--limit-file {file} holds {text[:40]!r}, no number of watts. Write one, such as 5."
        ) from None
    if not 0 < value < 1e6:
        raise UsageError(f"--limit-file {file} holds {value:g} W. Write a number above zero.")
    return value


def best_point(table: PowerTable, limit_watts: float, largest: int) -> tuple[Point, bool]:
    """The fastest point below the limit with at most `largest` rows; where there is none, the one that takes least, and False."""
    usable = [p for p in table.points if p.batch_size <= largest]
    below = frontier(usable, limit_watts)
    if below:
        return max(below, key=lambda p: p.samples_per_s), True
    return min(usable, key=lambda p: p.watts), False


@dataclass
class Steering:
    """Told of every event of the board; writes the control file that the board reads between two steps.

    `drift_every_s` None: no point is measured anew. Nothing in here waits.
    """

    table: PowerTable
    limit_watts: float
    files: Files
    console: Console
    largest: int
    limit_file: Path | None = None
    drift_every_s: float | None = None
    drift_s: float = 5.0
    now: Callable[[], float] = time.monotonic
    _at: Point | None = None
    _path: str = ""
    _complaint: str = ""
    _looked: float = 0.0
    _measured: float = 0.0
    _queue: list[Point] = field(default_factory=list)
    _visits: list[Visit] = field(default_factory=list)
    _whole: bool = False
    _since: float | None = None
    _steps: int = 0
    _rates: list[float] = field(default_factory=list)
    _watts: list[float] = field(default_factory=list)

    def arguments(self, folder: str) -> list[str]:
        """Flags of `taste-train train`, behind all others: opened for the largest batch size, begun at the chosen point."""
        self._path = f"{folder}/{CONTROL}"
        self._measured = self._looked = self.now()
        self._move(self._best())
        words = ["--batch-size", str(self.largest), "--control", self._path, "--power-every", "0.5"]
        return words

    def on_event(self, event: Mapping[str, Any]) -> None:
        """One event of the board."""
        kind = event.get("event")
        if kind == "operating_point":
            self._since, self._steps, self._rates, self._watts = self.now(), 0, [], []
        elif kind == "step":
            self._steps += 1
            # The first report after a move has steps of before.
            if self._steps > 1 and event.get("samples_per_s"):
                self._rates.append(float(event["samples_per_s"]))
        elif kind == "power" and event.get("watts") is not None:
            self._watts.append(float(event["watts"]) - (self.table.idle_watts or 0.0))
        if self.now() - self._looked >= _LOOK_S:
            self._looked = self.now()
            self._look_at_limit()
        if self._queue:
            self._end_visit_if_due()
        elif self.drift_every_s is not None and self.now() - self._measured >= self.drift_every_s:
            self._begin(probes(self.table, self.limit_watts, self.largest), whole=False)

    def _best(self) -> Point:
        point, below = best_point(self.table, self.limit_watts, self.largest)
        if not below:
            self.console.line(
                f"warning: no point is below {self.limit_watts:g} W; training goes on at the one that takes least, "
                f"{point.watts:.2f} W{self.table.labels}"
            )
        return point

    def _look_at_limit(self) -> None:
        if self.limit_file is None:
            return
        try:
            limit = read_limit(self.limit_file)
        except UsageError as error:
            # Once: whoever is writing the file may not have come to its end.
            if str(error) != self._complaint:
                self.console.line(f"warning: {error} The limit stays {self.limit_watts:g} W.")
            self._complaint = str(error)
            return
        if limit != self.limit_watts:
            self.limit_watts = limit
            self._queue, self._visits = [], []
            self._say(f"the limit is {limit:g} W now")
            self._move(self._best())

    def _move(self, point: Point) -> None:
        if self._at is not None and point.key == self._at.key:
            return
        self._at = point
        lines = [f"batch_size {point.batch_size}"]
        if point.frequency_khz:
            lines.append(f"frequency_khz {point.frequency_khz}")
        put_text(self.files, "\n".join(lines) + "\n", self._path)
        self._since = None
        self._say(
            f"batch size {point.batch_size}, {megahertz(point.frequency_khz)}: {point.watts:.2f} W{self.table.labels} measured"
        )

    def _say(self, text: str) -> None:
        self.console.line(text)
        self.console.event("steering", message=text, limit_watts=self.limit_watts)

    # Drift

    def _begin(self, points: Sequence[Point], whole: bool) -> None:
        self._queue, self._visits, self._whole = list(points), [], whole
        if not points:
            self._measured = self.now()
            return
        what = "every point below the limit" if whole else f"{len(points)} points"
        self._say(f"measuring {what} anew while training: about {duration(len(points) * self.drift_s)}")
        self._go_to_next()

    def _go_to_next(self) -> None:
        same = self._at is not None and self._at.key == self._queue[0].key
        self._move(self._queue[0])
        if same:  # no event will tell of a move
            self._since, self._steps, self._rates, self._watts = self.now(), 0, [], []

    def _end_visit_if_due(self) -> None:
        if self._since is None or self.now() - self._since < self.drift_s or not self._rates:
            return
        point = self._queue.pop(0)
        rates = sorted(self._rates)
        watts = max(self._watts) if self._watts and self.table.source.startswith("board:") else None
        self._visits.append(Visit(*point.key, rates[len(rates) // 2], watts))
        if self._queue:
            self._go_to_next()
        else:
            self._judge()

    def _judge(self) -> None:
        """Interpolate where the order of the points is as it was; otherwise measure all that may be used."""
        self._measured = self.now()
        changed = not self._whole and order_has_changed(self.table, self._visits)
        self.table = rescaled(self.table, self._visits)
        if changed:
            self._say("the order of the points has changed: the table is measured anew")
            below = [p for p in self.table.points if p.batch_size <= self.largest and p.watts < self.limit_watts]
            self._begin(below, whole=True)
            return
        self._say("the order of the points is as it was" if not self._whole else "the table is measured anew")
        self._move(self._best())


def candidates_for(table: PowerTable, effective_batch: int, minimum: int) -> PowerTable:
    """The part of a table that a run with this effective batch may use."""
    points = tuple(p for p in table.points if minimum <= p.batch_size <= effective_batch)
    if not points:
        raise UsageError(
            f"no batch size of the power table ({', '.join(map(str, table.batch_sizes))}) lies between {minimum} and the "
            f"effective batch {effective_batch}. Raise --effective-batch, or measure smaller ones."
        )
    return replace(table, points=points)
