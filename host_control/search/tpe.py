"""`--search tpe`, the default: seeds, then TPE and local refinement in turn, then a run-off of what looks best.

The paper's tuner is TPE with half the space as its budget (TASTE, section II-B). Plain TPE is no better than random
search while it has seen few sizes, and a board offers few: so

1. seeds: the powers of two and both ends, rising (1 and 2 are left out of spaces of up to 20 sizes, where nine
   measurements must find the peak);
2. in turn a gap move, a wide move, a neighbour move (`refine`) and a TPE proposal, until half the space is measured;
   the last four sizes near the best. A proposal that was measured already goes to the nearest size that was not:
   duplicates are what costs plain TPE 12 to 29 % of its budget;
3. the run-off: a single measurement picks a lucky size, not the best one. bs_opt and the sizes as good as the best are
   measured again, the one with the fewest looks first. Repeats are not counted as sizes.

Measured with `benchmarks/search_quality.py --seeds 100` (2 % noise; mean regret of bs_peak in % of the true maximum, in
brackets that of random search with the same budget; bs_opt gives away 0.0 to 0.6 points more on average):

    N    budget   peaked        jagged        cliff         plateau
    17   9        0.49 (1.19)   0.20 (3.01)   0.33 (1.75)   0.51 (0.83)
    33   17       0.32 (1.29)   0.13 (2.20)   0.39 (1.46)   0.65 (0.83)
    65   33       0.32 (1.24)   0.21 (2.77)   0.31 (1.40)   0.67 (0.71)

The constants were chosen on these curves; on seeds that had no part in it regret was 0.17 to 0.62, at most 0.45 of random
search's on peaked and jagged curves. What is left is noise: on a flat top a size that is 1 % slower looks best often
enough. The search itself is weakest on teeth whose period is no power of two (10 % deep sine waves: 1.3, 1.5 and 0.8,
random search 2.2, 1.9 and 1.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from host_control.search.parzen import ParzenEstimator
from host_control.search.refine import WIDE, Move, gap_move, neighbour_move
from host_control.search.selection import as_good, select
from host_control.search.space import SearchSpace
from host_control.search.strategy import Observation, SizeResult, distinct_sizes, summarise

STARTUP_TRIALS = 3
"""Random proposals before TPE models; the seeds are more than that already. Optuna's default is 10."""

SMALL_SPACE = 20
"""Up to so many sizes, 1 and 2 are no seeds."""

MOVES: dict[str, Move] = {"gap": gap_move, "wide": partial(gap_move, rule=WIDE), "neighbour": neighbour_move}
PATTERN: tuple[str, ...] = ("gap", "wide", "neighbour", "tpe")
LAST_PATTERN: tuple[str, ...] = ("gap", "neighbour")
LAST = 4
"""The last sizes of the budget are spent near the best."""

CONTENDERS = 3
LOOKS = 4
REPEAT_SHARE = 2
"""Run-off: bs_opt and so many sizes, at most so many measurements of each, budget / 2 repeats in all."""


class TpeSearch:
    """Never more than `budget` distinct sizes; the same history always gives the same proposal."""

    name = "tpe"

    def __init__(self, space: SearchSpace, seed: int = 0) -> None:
        self.space = space
        self.budget = space.budget
        self._estimator = ParzenEstimator(space, seed, STARTUP_TRIALS)
        self._seeds = seed_sizes(space)

    def propose(self, history: Sequence[Observation]) -> int | None:
        tried = distinct_sizes(history)
        if len(tried) < self.budget:
            return self._new_size(history, tried)
        return run_off(history, self.space)

    def _new_size(self, history: Sequence[Observation], tried: set[int]) -> int:
        if seeds := [size for size in self._seeds if size not in tried]:
            return seeds[0]
        results = summarise(history)
        left = self.budget - len(tried)
        pattern = LAST_PATTERN if left <= LAST else PATTERN
        turn = (len(tried) - len(self._seeds)) % len(pattern)
        for move in (pattern[turn], *LAST_PATTERN) if results else ():
            if move == "tpe":
                break
            size = MOVES[move](self.space.sizes, results, tried)
            if size is not None:
                return size
        wanted = self._estimator.propose(history)
        free = [size for size in self.space.sizes if size not in tried]
        return min(free, key=lambda size: (abs(size - wanted), size))


def seed_sizes(space: SearchSpace) -> tuple[int, ...]:
    """What is measured first, rising: cheap sizes come early. A space that is measured whole is its own seeds."""
    if space.exhaustive:
        return space.sizes
    powers = {size for size in space.sizes if size & (size - 1) == 0 and size > 2}
    ends = {space.bs_max} if len(space) <= SMALL_SPACE else {space.sizes[0], space.bs_max}
    return tuple(sorted(powers | ends))


def run_off(history: Sequence[Observation], space: SearchSpace) -> int | None:
    """Which size to measure again, or None when the choice is as sure as repeats can make it.

    Where no spread was reported at all, the measurements are taken as exact (a recorded table) and never repeated.
    """
    results = summarise(history)
    repeats = len(history) - len(distinct_sizes(history))
    if not results or repeats >= -(-space.budget // REPEAT_SHARE):
        return None
    best = max(results.values(), key=lambda result: result.samples_per_s)
    good = sorted((one for one in results.values() if as_good(one, best)), key=lambda one: -one.samples_per_s)
    if len(good) < 2 or all(one.spread == 0 for one in good):
        return None
    recommended = results[select(results, space.bs_max).bs_opt]
    pool: list[SizeResult] = [recommended, *good[:CONTENDERS]]
    fewest = min(pool, key=lambda one: one.measurements)
    return fewest.batch_size if fewest.measurements < LOOKS else None
