"""`--search grid`: every size once, whatever the budget. The reference that the others are judged against."""

from __future__ import annotations

from collections.abc import Sequence

from host_control.search.space import SearchSpace
from host_control.search.strategy import Observation, distinct_sizes


class GridSearch:
    """The whole space in rising order: cheap sizes first, so that an interrupted study has most of the curve."""

    name = "grid"

    def __init__(self, space: SearchSpace, seed: int = 0) -> None:
        self.space = space
        self.budget = len(space)

    def propose(self, history: Sequence[Observation]) -> int | None:
        seen = distinct_sizes(history)
        return next((size for size in self.space.sizes if size not in seen), None)
