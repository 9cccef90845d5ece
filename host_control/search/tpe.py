"""`--search tpe`: seeds, TPE, and a second look at what looks best."""

from __future__ import annotations

from collections.abc import Sequence

from host_control.search.parzen import ParzenEstimator
from host_control.search.space import SearchSpace
from host_control.search.strategy import Observation, distinct_sizes

STARTUP_TRIALS = 3


class TpeSearch:
    """Log-spaced seeds and both ends, then TPE over the sizes not measured yet."""

    name = "tpe"

    def __init__(self, space: SearchSpace, seed: int = 0) -> None:
        self.space = space
        self._estimator = ParzenEstimator(space, seed, STARTUP_TRIALS)
        self._seeds = [size for size in space.sizes if size & (size - 1) == 0 or size == space.bs_max]

    def propose(self, history: Sequence[Observation]) -> int | None:
        seen = distinct_sizes(history)
        if len(seen) >= self.space.budget:
            return None
        pending = self.space.sizes if self.space.exhaustive else self._seeds
        for size in pending:
            if size not in seen:
                return size
        wanted = self._estimator.propose(history)
        return min((size for size in self.space.sizes if size not in seen), key=lambda size: (abs(size - wanted), size))
