"""What a strategy is: a function of what has been measured so far.

A strategy keeps no memory of its own beyond caches: `propose` depends on space, seed and history only. So a study that
was killed and started again goes on exactly as if it had never stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Protocol

from host_control.search.space import SearchSpace


@dataclass(frozen=True)
class Observation:
    """One measurement of one size. `samples_per_s` is None where the trial failed (never proposed again).

    `disturbed`: measured while something else slowed the board; it counts only while the size has nothing better.
    """

    batch_size: int
    samples_per_s: float | None
    spread: float = 0.0
    disturbed: bool = False


@dataclass(frozen=True)
class SizeResult:
    """The measurements of one size that count: mean samples/s, median spread, how many."""

    batch_size: int
    samples_per_s: float
    spread: float
    measurements: int


class Strategy(Protocol):
    """Proposes the next batch size to measure, or None when the study is finished; `budget`: distinct sizes at most."""

    name: str
    space: SearchSpace
    budget: int

    def propose(self, history: Sequence[Observation]) -> int | None: ...


MakeStrategy = Callable[[SearchSpace, int], Strategy]
"""A strategy's class, called with the space and the seed."""


def summarise(history: Sequence[Observation]) -> dict[int, SizeResult]:
    """What was measured of every size, by batch size in rising order; failed trials are not in it."""
    measured: dict[int, list[Observation]] = {}
    for seen in history:
        if seen.samples_per_s is not None:
            measured.setdefault(seen.batch_size, []).append(seen)
    return {size: _summary(size, measured[size]) for size in sorted(measured)}


def _summary(size: int, measured: Sequence[Observation]) -> SizeResult:
    steady = [seen for seen in measured if not seen.disturbed] or measured
    speeds = [seen.samples_per_s for seen in steady if seen.samples_per_s is not None]
    return SizeResult(size, fmean(speeds), median(seen.spread for seen in steady), len(steady))


def distinct_sizes(history: Sequence[Observation]) -> set[int]:
    """Every size tried so far, failed ones too: what the budget counts."""
    return {seen.batch_size for seen in history}
