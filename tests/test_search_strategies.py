"""What every strategy keeps to: its budget, its space, and that it depends on the history alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cross.errors import UsageError
from host_control.search.quality import run_search, space_of
from host_control.search.refine import gap_move, neighbour_move, roundness
from host_control.search.simulated import SimulatedBoard, make_curve
from host_control.search.space import SearchSpace, batch_grid
from host_control.search.strategies import NAMES, make_strategy
from host_control.search.strategy import Observation, SizeResult, distinct_sizes
from host_control.search.tpe import seed_sizes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", (1, 2, 5, 9, 10, 17, 40))
def test_budget_and_space_are_kept(name: str, count: int) -> None:
    space = SearchSpace(batch_grid(max(2 * (count - 1), 1)))
    board = SimulatedBoard(space.sizes, make_curve("jagged", space.sizes, 1), seed=1)
    history = run_search(name, board, space, 1)
    sizes = distinct_sizes(history)
    assert sizes <= set(space.sizes)
    expected = {"grid": len(space), "paper": -(-len(space) // 2)}.get(name, space.budget)
    assert len(sizes) <= expected
    assert name == "paper" or len(sizes) == expected


@given(
    name=st.sampled_from(NAMES),
    largest=st.integers(1, 60),
    minimum=st.integers(1, 2),
    seed=st.integers(0, 2**32),
    failing=st.sets(st.integers(1, 60), max_size=10),
)
@settings(max_examples=25)
def test_failures_are_counted_and_never_proposed_again(
    name: str, largest: int, minimum: int, seed: int, failing: set[int]
) -> None:
    space = SearchSpace(batch_grid(max(largest, minimum), minimum))
    strategy = make_strategy(name, space, seed)
    history: list[Observation] = []
    while (size := strategy.propose(history)) is not None:
        assert size in space.sizes
        assert name == "paper" or Observation(size, None) not in history
        history.append(Observation(size, None if size in failing else 100.0 / (1 + abs(size - 12)), 0.02))
        assert len(history) <= 2 * len(space) + 2
    assert len(distinct_sizes(history)) <= strategy.budget


@pytest.mark.parametrize("name", NAMES)
def test_a_search_that_goes_on_proposes_what_it_would_have_proposed(name: str) -> None:
    space = space_of(25)
    board = SimulatedBoard(space.sizes, make_curve("peaked", space.sizes, 5), seed=5)
    history = run_search(name, board, space, 5)
    for cut in range(0, len(history) + 1, 3):
        fresh = make_strategy(name, space, 5)
        expected = history[cut].batch_size if cut < len(history) else None
        assert fresh.propose(history[:cut]) == expected


def test_the_seed_decides() -> None:
    space = space_of(65)

    def sizes(seed: int) -> list[int]:
        board = SimulatedBoard(space.sizes, make_curve("plateau", space.sizes, 0), seed=0)
        return [seen.batch_size for seen in run_search("tpe", board, space, seed)]

    assert sizes(1) == sizes(1)
    assert sizes(1) != sizes(2)


def test_unknown_search() -> None:
    with pytest.raises(UsageError, match="unknown search 'bisect'. Known: tpe, paper, grid, random"):
        make_strategy("bisect", space_of(9), 0)


def test_seeds_are_log_spaced_with_both_ends() -> None:
    assert seed_sizes(space_of(65)) == (1, 4, 8, 16, 32, 64, 128)
    assert seed_sizes(SearchSpace(batch_grid(90))) == (1, 4, 8, 16, 32, 64, 90)
    assert seed_sizes(space_of(17)) == (4, 8, 16, 32)
    assert seed_sizes(space_of(9)) == (1, 2, 4, 6, 8, 10, 12, 14, 16)


def _results(speeds: dict[int, float]) -> dict[int, SizeResult]:
    return {size: SizeResult(size, speed, 0.01, 1) for size, speed in speeds.items()}


def test_gap_move_takes_the_roundest_size_beside_the_best() -> None:
    sizes = batch_grid(64)
    assert gap_move(sizes, _results({8: 80, 16: 100, 32: 90, 64: 70}), {8, 16, 32, 64}) == 24
    assert gap_move(sizes, _results({8: 80, 16: 100, 24: 80}), {8, 16, 24}) in (12, 20)
    assert gap_move(sizes, _results({14: 80, 16: 100, 18: 80, 64: 10}), {14, 16, 18, 64}) is None


def test_neighbour_move_looks_on_the_faster_side_first() -> None:
    sizes = batch_grid(64)
    assert neighbour_move(sizes, _results({8: 80, 16: 100, 32: 90}), {8, 16, 32}) == 18
    assert neighbour_move(sizes, _results({8: 95, 16: 100, 32: 90}), {8, 16, 32}) == 14
    assert neighbour_move(sizes, _results({14: 95, 16: 100, 18: 90}), {14, 16, 18}) is None
    assert neighbour_move(sizes, _results({32: 80, 64: 100}), {32, 64}) == 62


def test_roundness() -> None:
    assert [roundness(size) for size in (1, 2, 6, 12, 24, 64)] == [0, 1, 1, 2, 3, 6]
