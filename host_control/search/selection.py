"""Which batch size a study recommends, and what it says about the curve (methods.md 1.3).

bs_peak is the plain best. bs_opt is the smallest measured size that is as good as the best within the noise: at equal
speed the smaller batch needs less memory and answers sooner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from host_control.search.strategy import SizeResult

TOLERANCE = 0.02
"""Sizes within 2 % of the best are as good as the best."""

WIDEST_SPREAD = 0.1
"""A wider spread says that the measurement was disturbed, not that slower sizes are as good."""


@dataclass(frozen=True)
class Selection:
    """`plateau` is [smallest, largest] measured size as good as the best; on a jagged curve there may be worse between.

    `verdict`: 'plateau' where the largest size measured is as good as the best (a larger batch costs no throughput),
    'peak' where throughput falls again. `speedup`: throughput at bs_opt over that at bs_max, None while bs_max was not
    measured.
    """

    bs_opt: int
    bs_peak: int
    plateau: tuple[int, int]
    verdict: str
    speedup: float | None


def as_good(result: SizeResult, best: SizeResult) -> bool:
    """Whether a size's mean is within max(2 %, its own spread) of the best."""
    allowed = max(TOLERANCE, min(result.spread, WIDEST_SPREAD))
    return result.samples_per_s >= best.samples_per_s * (1 - allowed)


def select(results: Mapping[int, SizeResult], bs_max: int) -> Selection:
    """Choose from what was measured; `results` must not be empty."""
    best = max(results.values(), key=lambda result: result.samples_per_s)
    good = [size for size in sorted(results) if as_good(results[size], best)]
    speedup = results[good[0]].samples_per_s / results[bs_max].samples_per_s if bs_max in results else None
    return Selection(
        bs_opt=good[0],
        bs_peak=best.batch_size,
        plateau=(good[0], good[-1]),
        verdict="plateau" if good[-1] == max(results) else "peak",
        speedup=speedup,
    )
