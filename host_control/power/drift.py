"""What a few points measured anew say of a whole table: scaled by interpolation, or no longer to be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from host_control.power.selection import frontier
from host_control.power.table import Point, PowerTable

PROBES = 3
TOLERANCE = 0.02
"""Two rates within 2 % of each other have no order."""


@dataclass(frozen=True)
class Visit:
    """A point measured while training goes on. `watts` None: it could not be read."""

    batch_size: int
    frequency_khz: int
    samples_per_s: float
    watts: float | None

    @property
    def key(self) -> tuple[int, int]:
        return self.batch_size, self.frequency_khz


def probes(table: PowerTable, limit_watts: float, largest: int, count: int = PROBES) -> list[Point]:
    """The fastest points below the limit with at most `largest` rows, one a batch size: those whose order decides."""
    usable = [p for p in table.points if p.batch_size <= largest]
    return sorted(frontier(usable, limit_watts), key=lambda p: -p.samples_per_s)[:count]


def order_has_changed(table: PowerTable, visits: Sequence[Visit]) -> bool:
    """Whether two of the points have changed places, by more than noise."""
    pairs = [(v, table.at(*v.key)) for v in visits]
    rates = [(p.samples_per_s, v.samples_per_s) for v, p in pairs if p is not None]
    apart = 1 + TOLERANCE
    return any(a > b * apart and now_b > now_a * apart for a, now_a in rates for b, now_b in rates)


def rescaled(table: PowerTable, visits: Sequence[Visit]) -> PowerTable:
    """The table with visited points as they are now, and all others times the ratios of now to then around them.

    Ratios are interpolated in (log batch size, log frequency) by inverse squares of distances, of logarithms, so that a board
    that is slower throughout is slower by the same share everywhere.
    """
    known = [(v, p) for v in visits if (p := table.at(*v.key)) is not None]
    if not known:
        return table
    now = {v.key: v for v in visits}

    def scaled(p: Point) -> Point:
        visit = now.get(p.key)
        speed = power = 0.0
        weights = [1 / max(_distance(p, q) ** 2, 1e-9) for _, q in known]
        for weight, (v, q) in zip(weights, known, strict=True):
            speed += weight * math.log(v.samples_per_s / q.samples_per_s)
            power += weight * (math.log(v.watts / q.watts) if v.watts and q.watts > 0 else 0.0)
        rate, watts = math.exp(speed / sum(weights)), math.exp(power / sum(weights))
        if visit is not None:
            rate = visit.samples_per_s / p.samples_per_s
            watts = visit.watts / p.watts if visit.watts and p.watts > 0 else watts
        return replace(
            p,
            samples_per_s=p.samples_per_s * rate,
            watts=p.watts * watts,
            mean_watts=p.mean_watts * watts,
            joules_per_sample=p.joules_per_sample * watts / rate,
        )

    return replace(table, points=tuple(scaled(p) for p in table.points))


def _distance(p: Point, q: Point) -> float:
    frequency = math.log2(p.frequency_khz / q.frequency_khz) if p.frequency_khz and q.frequency_khz else 0.0
    return math.hypot(math.log2(p.batch_size / q.batch_size), frequency)
