"""Joules from samples of watts that come when they come: jittered, with gaps, on another clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Reading = tuple[float, float]
"""(seconds, watts)."""

GAP_FACTOR = 4.0
"""Two samples further apart than so many times the usual distance have a gap between them."""


LEAST_STEP = 0.02
"""Of the power: a smaller one when a load begins is noise."""

REACH_S = 1.0


@dataclass(frozen=True)
class Energy:
    """`joules` within `seconds`; `gap_s`: the part of it in gaps and beyond the samples, where power is bridged or held."""

    joules: float
    seconds: float
    gap_s: float

    @property
    def mean_watts(self) -> float:
        return self.joules / self.seconds if self.seconds > 0 else math.nan


def integrate(samples: Sequence[Reading], start: float, end: float, *, offset_s: float = 0.0) -> Energy:
    """Energy from `start` to `end` (seconds of the work's clock); a sample's own clock shows `offset_s` more.

    The trapezoid rule over the samples as they lie, cut at both ends where the line between two samples crosses them;
    a gap is bridged by the same line, and beyond the first and last sample power is held. NaN without any sample.
    """
    points = sorted((t - offset_s, watts) for t, watts in samples if math.isfinite(watts))
    if not points or end <= start:
        return Energy(math.nan, max(end - start, 0.0), max(end - start, 0.0))
    steps = sorted(b[0] - a[0] for a, b in zip(points, points[1:], strict=False))
    usual = steps[len(steps) // 2] if steps else 0.0
    padded = [(min(start, points[0][0]), points[0][1]), *points, (max(end, points[-1][0]), points[-1][1])]
    joules = gap_s = 0.0
    for (t0, w0), (t1, w1) in zip(padded, padded[1:], strict=False):
        low, high = max(t0, start), min(t1, end)
        if high <= low:
            continue
        slope = (w1 - w0) / (t1 - t0)
        joules += (high - low) * (w0 + slope * ((low + high) / 2 - t0))
        if t1 - t0 > GAP_FACTOR * usual or low < points[0][0] or high > points[-1][0]:
            gap_s += high - low
    return Energy(joules, end - start, gap_s)


def within(times: Sequence[float], start: float, end: float) -> list[int]:
    """Which of rising `times` lie between `start` and `end`; where none does, the nearest on either side within REACH_S: what is
    measured for less than the distance of two samples has its power between them."""
    inside = [i for i, t in enumerate(times) if start <= t <= end]
    if inside:
        return inside
    before = [i for i, t in enumerate(times) if start - REACH_S <= t < start]
    after = [i for i, t in enumerate(times) if end < t <= end + REACH_S]
    return before[-1:] + after[:1]


def find_offset(
    samples: Sequence[Reading], loads: Sequence[tuple[float, float]], *, reach_s: float = 10.0
) -> float | None:
    """How much a meter's clock shows more than the work's: where its steps fit the `loads` (start, end) best.

    Tries offsets up to `reach_s` either way and takes the middle of those with the largest contrast between the mean
    power within the loads and outside them; None where that is below 2 % of the power, as of a meter that does not see the
    board. The error is about half the distance of two samples.
    """
    points = [(t, watts) for t, watts in samples if math.isfinite(watts)]
    step = reach_s / 1000
    scored = [(_contrast(points, loads, k * step), k * step) for k in range(-1000, 1001)]
    best = max(score for score, _ in scored)
    mean = sum(watts for _, watts in points) / max(len(points), 1)
    if not best > LEAST_STEP * abs(mean):
        return None
    good = [offset for score, offset in scored if score >= best - 1e-9 * abs(best)]
    return (good[0] + good[-1]) / 2


def _contrast(points: Sequence[Reading], loads: Sequence[tuple[float, float]], offset: float) -> float:
    first, last = loads[0][0] - 1.0, loads[-1][1] + 1.0
    inside, outside = [], []
    for t, watts in points:
        at = t - offset
        if any(start <= at <= end for start, end in loads):
            inside.append(watts)
        elif first <= at <= last:
            outside.append(watts)
    if not inside or not outside:
        return -math.inf
    return sum(inside) / len(inside) - sum(outside) / len(outside)
