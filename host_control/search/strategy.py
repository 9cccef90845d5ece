"""What a strategy is: a function of what has been measured so far.

A strategy keeps no memory of its own beyond caches: `propose` depends on space, seed and history only. So a study that
was killed and started again goes on exactly as if it had never stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from host_control.search.space import SearchSpace


@dataclass(frozen=True)
class Observation:
    """One measurement of one size. `samples_per_s` is None where the trial failed (never proposed again)."""

    batch_size: int
    samples_per_s: float | None
    spread: float = 0.0


@dataclass(frozen=True)
class SizeResult:
    """All measurements of one size: mean samples/s, largest spread, how many."""

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
    values: dict[int, list[Observation]] = {}
    for seen in history:
        if seen.samples_per_s is not None:
            values.setdefault(seen.batch_size, []).append(seen)
    return {
        size: SizeResult(
            size,
            fmean(seen.samples_per_s for seen in values[size] if seen.samples_per_s is not None),
            max(seen.spread for seen in values[size]),
            len(values[size]),
        )
        for size in sorted(values)
    }


def distinct_sizes(history: Sequence[Observation]) -> set[int]:
    """Every size tried so far, failed ones too: what the budget counts."""
    return {seen.batch_size for seen in history}
