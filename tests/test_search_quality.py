"""The default search against curves whose maximum is known (issue: simulated studies), and against random search.

Regret is judged on the true curve; measurements carry 2 % noise. `make test` runs some seeds, `make acceptance` all.
"""

from __future__ import annotations

from functools import cache

import pytest

from host_control.search.quality import Quality, judge, run_search, space_of
from host_control.search.selection import select
from host_control.search.simulated import FAMILIES, SimulatedBoard, make_curve
from host_control.search.strategy import distinct_sizes, summarise

ALL_SEEDS = 100
SOME_SEEDS = {17: 100, 33: 30, 65: 12}
SIZES = tuple(SOME_SEEDS)
BEATS_RANDOM = ("peaked", "jagged")


@cache
def _random(family: str, count: int) -> Quality:
    return judge("random", family, count, ALL_SEEDS)


def _faults(found: Quality, reference: Quality) -> list[str]:
    """What acceptance demands of a search and `found` does not hold."""
    faults = []
    if found.peak_regret > 0.01:
        faults.append(f"mean regret of bs_peak {found.peak_regret:.2%} is above 1 %")
    if found.family in BEATS_RANDOM and found.peak_regret > reference.peak_regret / 2:
        faults.append(f"mean regret {found.peak_regret:.2%} is above half of random's {reference.peak_regret:.2%}")
    if found.gap > 0.02:
        faults.append(f"bs_opt is {found.gap:.2%} below bs_peak")
    if found.most_sizes > found.budget:
        faults.append(f"{found.most_sizes} sizes for a budget of {found.budget}")
    return faults


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_search_finds_the_best_size(family: str, count: int) -> None:
    assert _faults(judge("tpe", family, count, SOME_SEEDS[count]), _random(family, count)) == []


@pytest.mark.acceptance
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_search_finds_the_best_size_with_all_seeds(family: str, count: int) -> None:
    assert _faults(judge("tpe", family, count, ALL_SEEDS), _random(family, count)) == []


def test_the_judgement_rejects_a_poor_search() -> None:
    found = judge("random", "jagged", 17, 20)
    assert len(_faults(found, _random("jagged", 17))) == 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", (9, 10, 12, 21))
def test_small_spaces_keep_their_budget_too(family: str, count: int) -> None:
    found = judge("tpe", family, count, 5)
    assert found.most_sizes == found.budget == (count if count <= 9 else -(-count // 2))
    assert found.peak_regret < 0.03


def test_without_noise_a_peak_is_found_exactly_and_measured_once() -> None:
    space = space_of(33)
    for seed in range(10):
        board = SimulatedBoard(space.sizes, make_curve("peaked", space.sizes, seed), noise=0.0)
        history = run_search("tpe", board, space, seed)
        assert len(history) == len(distinct_sizes(history)) == space.budget
        assert board.regret(select(summarise(history), space.bs_max).bs_peak) < 0.01


def test_curves_are_fixed_by_their_seed() -> None:
    sizes = space_of(33).sizes
    for family in FAMILIES:
        assert (make_curve(family, sizes, 3) == make_curve(family, sizes, 3)).all()
        assert (make_curve(family, sizes, 3) != make_curve(family, sizes, 4)).any()
        assert make_curve(family, sizes, 3, 7.0).max() == pytest.approx(7.0)
