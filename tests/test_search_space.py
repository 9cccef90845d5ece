"""The space of a study: its grid, its memory limit, its budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cross.errors import DoesNotFitError, UsageError
from host_control.search.space import MemoryForm, SearchSpace, batch_grid, make_space, memory_budget

MIB = 2**20


def test_the_grid_is_one_and_the_even_numbers() -> None:
    assert batch_grid(9) == (1, 2, 4, 6, 8)
    assert batch_grid(1) == (1,)
    assert batch_grid(8, minimum=2) == (2, 4, 6, 8)
    assert batch_grid(0) == ()


@given(st.integers(1, 600), st.integers(1, 4))
def test_grid_rises_and_stays_within_its_ends(largest: int, minimum: int) -> None:
    grid = batch_grid(largest, minimum)
    assert list(grid) == sorted(set(grid))
    assert all(minimum <= size <= largest and (size == 1 or size % 2 == 0) for size in grid)
    assert len(grid) == len(
        [size for size in range(1, largest + 1) if size >= minimum and (size == 1 or size % 2 == 0)]
    )


@given(st.integers(0, 10**9), st.integers(1, 10**8), st.integers(1, 10**10))
def test_bs_max_is_the_largest_that_fits(fixed: int, per_sample: int, budget: int) -> None:
    form = MemoryForm(fixed, per_sample)
    largest = form.largest(budget)
    assert largest == 0 or form.need(largest) <= budget
    assert form.need(largest + 1) > budget


@given(st.integers(1, 300))
def test_budget_is_half_the_space_or_all_of_a_small_one(count: int) -> None:
    space = SearchSpace(tuple(range(1, count + 1)))
    assert space.budget == (count if count <= 9 else (count + 1) // 2)


def test_memory_budget_is_the_smaller_limit() -> None:
    assert memory_budget(1000, None) == 850
    assert memory_budget(1000, 500) == 500
    assert memory_budget(1000, 900) == 850
    assert memory_budget(None, 500) == 500
    assert memory_budget(None, None) is None


def test_memory_limits_the_space() -> None:
    space = make_space(MemoryForm(10 * MIB, MIB), 47 * MIB, 128)
    assert (space.bs_max, space.limited_by) == (36, "memory")
    half = make_space(MemoryForm(10 * MIB, MIB), 23 * MIB, 128)
    assert half.bs_max == 12


def test_the_users_limit_holds_where_memory_allows_more() -> None:
    space = make_space(MemoryForm(10 * MIB, MIB), 4096 * MIB, 64)
    assert (space.bs_max, len(space), space.budget, space.limited_by) == (64, 33, 17, "max-batch-size")


def test_a_batch_norm_that_would_see_one_value_leaves_out_one_and_says_so() -> None:
    space = make_space(None, None, 32, minimum_batch=2)
    assert space.sizes[0] == 2
    assert "one value a channel" in space.minimum_note
    assert make_space(None, None, 32).minimum_note == ""


def test_nothing_fits() -> None:
    with pytest.raises(DoesNotFitError, match="batch size 1 needs 101 MiB; 50 MiB may be used"):
        make_space(MemoryForm(100 * MIB, MIB), 50 * MIB)


def test_a_limit_below_the_smallest_size() -> None:
    with pytest.raises(UsageError, match="--max-batch-size 1"):
        make_space(None, None, 1, minimum_batch=2)
