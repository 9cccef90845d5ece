"""`--search paper`: the paper's plain setting, for comparison (TASTE, section II-B).

TPE as it comes, as many measurements as half the space, no seeds, no refinement. A repeated proposal is measured again
and costs budget, as it does for anyone who writes `study.optimize(objective, n_trials=len(space) // 2)`.
"""

from __future__ import annotations

from collections.abc import Sequence

from host_control.search.parzen import ParzenEstimator
from host_control.search.space import SearchSpace
from host_control.search.strategy import Observation

OPTUNA_STARTUP_TRIALS = 10
"""Optuna's default: with 20 sizes or fewer the whole study is random search."""


class PaperSearch:
    """Plain TPE; its budget counts measurements, not distinct sizes."""

    name = "paper"

    def __init__(self, space: SearchSpace, seed: int = 0) -> None:
        self.space = space
        self.budget = -(-len(space) // 2)
        self._estimator = ParzenEstimator(space, seed, OPTUNA_STARTUP_TRIALS)

    def propose(self, history: Sequence[Observation]) -> int | None:
        if len(history) >= self.budget:
            return None
        return self._estimator.propose(history)
