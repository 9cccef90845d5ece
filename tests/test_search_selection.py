"""Which size a study recommends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_control.search.selection import select
from host_control.search.strategy import Observation, SizeResult, summarise


def _results(speeds: dict[int, float], spread: float = 0.0) -> dict[int, SizeResult]:
    return {size: SizeResult(size, speed, spread, 1) for size, speed in speeds.items()}


def test_a_peak() -> None:
    choice = select(_results({1: 20, 4: 60, 8: 100, 16: 99, 32: 70}), 32)
    assert (choice.bs_opt, choice.bs_peak, choice.plateau, choice.verdict) == (8, 8, (8, 16), "peak")
    assert choice.speedup == pytest.approx(100 / 70)


def test_a_plateau_recommends_its_smallest_size() -> None:
    choice = select(_results({1: 60, 8: 98.5, 16: 99, 32: 100, 64: 99.5}), 64)
    assert (choice.bs_opt, choice.bs_peak, choice.plateau, choice.verdict) == (8, 32, (8, 64), "plateau")


def test_a_rise_to_the_end_recommends_the_end() -> None:
    choice = select(_results({1: 20, 8: 60, 32: 100}), 32)
    assert (choice.bs_opt, choice.verdict, choice.speedup) == (32, "plateau", 1.0)


def test_a_wide_spread_widens_what_counts_as_equal() -> None:
    speeds = {4: 96.0, 8: 100.0, 16: 90.0}
    assert select(_results(speeds), 16).bs_opt == 8
    assert select(_results(speeds, spread=0.05), 16).bs_opt == 4


def test_speedup_is_unknown_while_bs_max_was_not_measured() -> None:
    assert select(_results({4: 96.0, 8: 100.0}), 16).speedup is None


def test_repeats_are_averaged_and_failures_left_out() -> None:
    history = [Observation(8, 100.0, 0.01), Observation(8, 90.0, 0.03), Observation(16, None)]
    assert summarise(history) == {8: SizeResult(8, 95.0, 0.02, 2)}


def test_a_disturbed_measurement_counts_only_where_there_is_no_other() -> None:
    disturbed, steady = Observation(8, 50.0, 0.3, disturbed=True), Observation(8, 100.0, 0.01)
    assert summarise([disturbed]) == {8: SizeResult(8, 50.0, 0.3, 1)}
    assert summarise([disturbed, steady]) == {8: SizeResult(8, 100.0, 0.01, 1)}


def test_a_disturbed_spread_does_not_make_everything_equal() -> None:
    assert select(_results({4: 70.0, 8: 100.0}, spread=8.0), 8).bs_opt == 8


_CURVES = st.dictionaries(st.integers(1, 128), st.floats(0.1, 1000), min_size=1)


@given(_CURVES, st.floats(0, 0.2))
def test_bs_opt_is_never_larger_than_bs_peak_and_never_outside_the_plateau(
    speeds: dict[int, float], spread: float
) -> None:
    choice = select(_results(speeds, spread), max(speeds))
    assert choice.bs_opt <= choice.bs_peak
    assert choice.plateau[0] == choice.bs_opt <= choice.plateau[1]
    assert speeds[choice.bs_opt] >= speeds[choice.bs_peak] * (1 - max(0.02, min(spread, 0.1)))
