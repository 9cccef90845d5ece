"""Local refinement: which size near the best ones is worth measuring next.

Two moves, taken in turn by the default strategy:

    gap        between two measured sizes, one of them among the best, lie sizes nobody looked at: the roundest of them
               (the highest power of two in it, so that vectors and tiles are full), nearest the middle on a log scale
    neighbour  the size right beside the best, on the side that was faster further out: it finds teeth whose period is
               no power of two, and the edge of a cliff
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log2, sqrt

from host_control.search.strategy import SizeResult


@dataclass(frozen=True)
class GapRule:
    """Which gaps count: those with an end within `within` of the best. `speed_weight`: octaves of width that the whole
    throughput is worth, so a gap at faster sizes comes before a wider one at slower sizes.
    """

    within: float
    speed_weight: float


NEAR = GapRule(within=0.03, speed_weight=8.0)
"""Beside sizes that may still be the best, at 2 % noise."""

WIDE = GapRule(within=0.5, speed_weight=2.0)
"""Anywhere but beside sizes at half speed: a second peak hides between two measured sizes an octave apart."""


Move = Callable[[Sequence[int], Mapping[int, SizeResult], set[int]], int | None]
"""A move: from the space, the results and the sizes tried to an untried size, or None where it has none to propose."""


def roundness(size: int) -> int:
    """The exponent of the largest power of two that divides `size`."""
    return (size & -size).bit_length() - 1


def gap_move(
    sizes: Sequence[int], results: Mapping[int, SizeResult], tried: set[int], rule: GapRule = NEAR
) -> int | None:
    """The roundest untried size in the most promising gap; None where all gaps that count are closed."""
    best = max(result.samples_per_s for result in results.values())
    moves: list[tuple[float, int]] = []
    order = sorted(tried)
    for low, high in zip(order, order[1:], strict=False):
        inside = [size for size in sizes if low < size < high]
        speed = max((results[end].samples_per_s for end in (low, high) if end in results), default=0.0) / best
        if inside and speed >= 1 - rule.within:
            middle = sqrt(low * high)
            roundest = max(inside, key=lambda size: (roundness(size), -abs(log2(size / middle))))
            moves.append((log2(high / low) + rule.speed_weight * (speed - 1), roundest))
    return max(moves)[1] if moves else None


def neighbour_move(sizes: Sequence[int], results: Mapping[int, SizeResult], tried: set[int]) -> int | None:
    """The untried size right beside the best one, on the side that is faster further out; None where both are tried."""
    best = max(results.values(), key=lambda result: result.samples_per_s).batch_size
    at = sizes.index(best)
    beyond = {step: _nearest_speed(sizes, results, at, step) for step in (-1, 1)}
    free = [step for step in (-1, 1) if 0 <= at + step < len(sizes) and sizes[at + step] not in tried]
    return sizes[at + max(free, key=lambda step: beyond[step])] if free else None


def _nearest_speed(sizes: Sequence[int], results: Mapping[int, SizeResult], at: int, step: int) -> float:
    """Throughput of the nearest measured size from `at` in a direction; 0 where there is none."""
    at += step
    while 0 <= at < len(sizes):
        if sizes[at] in results:
            return results[sizes[at]].samples_per_s
        at += step
    return 0.0
