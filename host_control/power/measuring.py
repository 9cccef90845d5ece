"""`power measure`: every point through the board's program, with its sensors beside it, kept as soon as it is known."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cross.errors import CompatibilityError, UsageError
from host_control.board import OperatingPoint
from host_control.boards.bench import check_exit, last_record
from host_control.boards.deployed import DeployedBoard
from host_control.power.energy import integrate
from host_control.power.sources import Load, Source, peak
from host_control.power.table import Point, PowerTable, write_table
from host_control.power.trace import events_of, read_trace

Listener = Callable[[Point], None]
_CLOCK_TRIES = 3
_SAMPLES_MOST = 2000


@dataclass(frozen=True)
class Policy:
    """A group of cores with one clock; `frequencies_khz` ascending."""

    number: int
    governor: str
    frequencies_khz: tuple[int, ...]


def read_policies(info: Any) -> tuple[Policy, ...]:
    """From `taste-train info`; none where the kernel has no cpufreq."""
    return tuple(
        Policy(int(p["policy"]), str(p["governor"]), tuple(int(khz) for khz in p["frequencies_khz"]))
        for p in info.get("policies", ())
    )


def settable_frequencies(policies: tuple[Policy, ...]) -> tuple[int, ...]:
    """Those of the fastest policy: the others follow, each at its highest step not above it."""
    fastest = max(policies, key=lambda p: max(p.frequencies_khz, default=0), default=None)
    return fastest.frequencies_khz if fastest is not None else ()


def board_offset(board: DeployedBoard) -> float:
    """The board's monotonic clock minus this machine's, from the quickest of a few questions; its error is half the answer's time."""
    best = (math.inf, 0.0)
    for _ in range(_CLOCK_TRIES):
        asked = time.monotonic()
        info = board.info()
        answered = time.monotonic()
        if "t_ns" not in info:
            raise CompatibilityError(
                f"taste-train on {board.name} does not tell its clock: not this host's version. Deploy again."
            )
        best = min(best, (answered - asked, float(info["t_ns"]) * 1e-9 - (asked + answered) / 2))
    return best[1]


@dataclass
class Measuring:
    """One `power measure`: measures points into `table`, writes it after each, and takes what is there already."""

    board: DeployedBoard
    source: Source
    folder: Path
    table: PowerTable
    listener: Listener
    threads: int | None = None
    cores: tuple[int, ...] | None = None
    offset_s: float = 0.0
    fresh: set[tuple[int, int, int]] = field(default_factory=set)

    def watts(self, batch_size: int, frequency_khz: int, attempt: int) -> float:
        """Power of a point, measured unless the table has it; a second attempt replaces the first."""
        known = self.table.at(batch_size, frequency_khz)
        if known is None or known.attempts <= attempt:
            wanted = OperatingPoint(batch_size, "train", self.threads, self.cores, frequency_khz or None)
            point = replace(self.measure(wanted), attempts=attempt + 1)
            self.table = self.table.with_point(point)
            write_table(self.folder, self.table)
            self.listener(point)
            known = point
        return known.watts

    def idle(self, seconds: float) -> float:
        """Mean watts of the board while nothing of ours runs."""
        result = self.board.run_program(
            ["monitor", "--seconds", f"{seconds:g}", "--power-every", "0.1"], timeout=60 + seconds
        )
        check_exit(result, f"reading the sensors of {self.board.name}")
        trace = read_trace(events_of(result.stdout))
        readings = self.source.readings(trace, Load(0.0, 1.0), self.offset_s)
        return integrate(readings, trace.start, trace.end).mean_watts

    def measure(self, wanted: OperatingPoint) -> Point:
        """One visit: the rate, the readings while it was measured, and what the board said of itself."""
        frequency_khz = wanted.frequency_khz or 0
        counters, said = self.board.bench(wanted)
        events = events_of(said)
        trace = read_trace(events)
        threads = int((last_record(said, "result") or {}).get("threads", 1))
        readings = self.source.readings(trace, self._load(frequency_khz, threads), self.offset_s)
        idle = self.table.idle_watts or 0.0
        readings = [(t, watts - idle) for t, watts in readings]
        mean = integrate(readings, trace.start, trace.end).mean_watts
        slowed = _slowed(frequency_khz, trace.frequency_khz)
        thinned = readings[:: -(-len(readings) // _SAMPLES_MOST)]
        return Point(
            batch_size=wanted.batch_size,
            frequency_khz=frequency_khz,
            samples_per_s=counters.samples_per_s,
            spread=counters.spread,
            watts=peak(readings),
            mean_watts=mean,
            joules_per_sample=mean / counters.samples_per_s,
            temperature_c=trace.temperature_c,
            throttle_bits=trace.throttle_bits,
            lowest_khz=trace.frequency_khz[0] if trace.frequency_khz else None,
            highest_khz=trace.frequency_khz[1] if trace.frequency_khz else None,
            tainted=counters.tainted or slowed is not None,
            taint=counters.taint or slowed,
            samples=tuple((round(t - trace.start, 4), round(watts, 4)) for t, watts in thinned),
        )

    def _load(self, frequency_khz: int, threads: int) -> Load:
        highest = max(self.table.frequencies_khz)
        return Load(
            min(threads / max(self.board.facts().cores, 1), 1.0), frequency_khz / highest if frequency_khz else 1.0
        )


def _slowed(frequency_khz: int, seen: tuple[int, int] | None) -> str | None:
    """Why a point is not what it says: the kernel went below its frequency while it was measured."""
    if seen is None or not frequency_khz or seen[0] >= 0.99 * frequency_khz:
        return None
    return f"ran at {seen[0]} kHz for a while: heat or supply caps the frequency"


def check_same(stored: PowerTable, wanted: PowerTable, folder: Path) -> None:
    """UsageError where a folder holds another measurement."""
    mine, other = wanted.identity(), stored.identity()
    for name in mine:
        if mine[name] != other[name]:
            raise UsageError(
                f"{folder} holds a power table with {name.replace('_', '-')} {other[name]}, not {mine[name]}. "
                "Choose another --out, or the same flags."
            )
