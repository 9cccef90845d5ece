"""`--search random`: the budget's number of distinct sizes, drawn without replacement. The baseline TPE has to beat."""

from __future__ import annotations

import random
from collections.abc import Sequence

from host_control.search.space import SearchSpace
from host_control.search.strategy import Observation, distinct_sizes


class RandomSearch:
    """The first `budget` sizes of a permutation that the seed fixes."""

    name = "random"

    def __init__(self, space: SearchSpace, seed: int = 0) -> None:
        self.space = space
        self.budget = space.budget
        self._order = random.Random(seed).sample(space.sizes, space.budget)

    def propose(self, history: Sequence[Observation]) -> int | None:
        seen = distinct_sizes(history)
        return next((size for size in self._order if size not in seen), None)
