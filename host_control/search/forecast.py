"""How long trials take, foreseen from what was measured so far.

The model is the measuring rule of the board's program (native/taste-train/measure.c): three warm-up steps, then at
least the wanted seconds and five steps; where a step takes half of those seconds, one warm-up and two steps that agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from host_control.search.space import SearchSpace
from host_control.search.strategy import Observation, SizeResult, Strategy, distinct_sizes, summarise

OVERHEAD_S = 1.0
"""Starting the program, allocating and touching its arena, and the way to the board and back."""


def trial_seconds(step_s: float, seconds: float = 2.0) -> float:
    """Seconds one measurement takes where a step takes `step_s`."""
    if step_s >= seconds / 2:
        return OVERHEAD_S + 3 * step_s
    return OVERHEAD_S + 3 * step_s + max(seconds, 5 * step_s)


@dataclass(frozen=True)
class Forecast:
    """What is left of a study. `remaining_s` is a lower bound while nothing is measured (`known` is False)."""

    space: SearchSpace
    results: dict[int, SizeResult]
    seconds: float
    remaining_sizes: int

    @classmethod
    def of(cls, strategy: Strategy, history: Sequence[Observation], seconds: float) -> Forecast:
        """The forecast after `history`; `seconds` is the shortest measurement."""
        left = max(strategy.budget - len(distinct_sizes(history)), 0)
        return cls(strategy.space, summarise(history), seconds, left)

    @property
    def known(self) -> bool:
        return bool(self.results)

    def step_seconds(self, batch_size: int) -> float:
        """Seconds a step of `batch_size`, at the throughput of the nearest measured size; 0 before the first."""
        if not self.results:
            return 0.0
        nearest = min(self.results, key=lambda size: (abs(size - batch_size), size))
        return batch_size / self.results[nearest].samples_per_s

    def trial_seconds(self, batch_size: int) -> float:
        return trial_seconds(self.step_seconds(batch_size), self.seconds)

    @property
    def remaining_s(self) -> float:
        """Seconds for the sizes the budget still allows, at the mean of what the unmeasured ones would take."""
        unmeasured = [size for size in self.space.sizes if size not in self.results]
        if not unmeasured or not self.remaining_sizes:
            return 0.0
        mean = sum(self.trial_seconds(size) for size in unmeasured) / len(unmeasured)
        return self.remaining_sizes * mean
