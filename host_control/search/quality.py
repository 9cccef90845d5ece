"""Judges a strategy on simulated curves: the numbers behind the defaults, and the tests that keep them true."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from host_control.board import OperatingPoint
from host_control.search.selection import select
from host_control.search.simulated import SimulatedBoard, make_curve
from host_control.search.space import SearchSpace, batch_grid
from host_control.search.strategies import make_strategy
from host_control.search.strategy import Observation, distinct_sizes, summarise


@dataclass(frozen=True)
class Quality:
    """Means over seeds, fractions of the true maximum; `gap` is true(bs_peak) - true(bs_opt), minutes are simulated."""

    search: str
    family: str
    space_size: int
    budget: int
    peak_regret: float
    peak_regret_95: float
    opt_regret: float
    gap: float
    most_sizes: int
    minutes: float
    most_minutes: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def cells(self) -> list[str]:
        """One row for people."""
        shares = (self.peak_regret, self.peak_regret_95, self.opt_regret, self.gap)
        return [
            self.search,
            self.family,
            str(self.space_size),
            str(self.budget),
            *(f"{100 * share:.2f} %" for share in shares),
            str(self.most_sizes),
            f"{self.minutes:.1f} (at most {self.most_minutes:.1f})",
        ]


def space_of(count: int) -> SearchSpace:
    """The space of `count` sizes: 1, 2, 4, ..., 2 * (count - 1)."""
    return SearchSpace(batch_grid(2 * (count - 1)))


def run_search(search: str, board: SimulatedBoard, space: SearchSpace, seed: int) -> list[Observation]:
    """A whole search on a simulated board, without a study around it."""
    strategy = make_strategy(search, space, seed)
    history: list[Observation] = []
    while (size := strategy.propose(history)) is not None:
        counters = board.measure(OperatingPoint(size))
        history.append(Observation(size, counters.samples_per_s, counters.spread))
    return history


def judge(search: str, family: str, count: int, seeds: int, *, noise: float = 0.02, peak: float = 7.0) -> Quality:
    """Run `search` over `count` sizes on curves of `family`, seeds 0 to `seeds` - 1."""
    space = space_of(count)
    peaks, opts, gaps, sizes, minutes = [], [], [], [], []
    for seed in range(seeds):
        board = SimulatedBoard(space.sizes, make_curve(family, space.sizes, seed, peak), seed=seed, noise=noise)
        history = run_search(search, board, space, seed)
        choice = select(summarise(history), space.bs_max)
        peaks.append(board.regret(choice.bs_peak))
        opts.append(board.regret(choice.bs_opt))
        gaps.append(opts[-1] - peaks[-1])
        sizes.append(len(distinct_sizes(history)))
        minutes.append(board.now / 60)
    return Quality(
        search,
        family,
        count,
        space.budget,
        float(np.mean(peaks)),
        float(np.quantile(peaks, 0.95)),
        float(np.mean(opts)),
        float(np.mean(gaps)),
        max(sizes),
        float(np.mean(minutes)),
        max(minutes),
    )
