"""The operating point with the least time to accuracy under a power limit, and what it is to be compared with.

minimise T_s(b, f) N_acc(b) subject to P(b, f) < P_max (Ahmed et al., section 3): of every batch size only its highest
frequency below the limit is a candidate, since time falls with frequency.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cross.errors import NoOperatingPointError, UsageError
from host_control.power.table import Point, PowerTable, megahertz

Relation = Mapping[int, float]
"""r: batch size -> examples to accuracy, over the largest of them; a batch size that is not in it is not a candidate."""


@dataclass(frozen=True)
class Choice:
    """A point, its r, and its cost: `time` and `energy` are seconds and joules per sample times r (relative, of a fixed
    accuracy)."""

    point: Point
    relation: float

    @property
    def time(self) -> float:
        return self.point.seconds_per_sample * self.relation

    @property
    def energy(self) -> float:
        return self.point.joules_per_sample * self.relation


@dataclass(frozen=True)
class Selection:
    """`baseline1`: the largest batch size at the safe frequency; `baseline2`: the batch size that needs fewest examples, at
    the same; None where that point was not measured or no frequency is safe. `candidates`: one a batch size."""

    choice: Choice
    baseline1: Choice | None
    baseline2: Choice | None
    exhaustive: Choice
    candidates: tuple[Choice, ...]
    safe_khz: int | None


def select(table: PowerTable, limit_watts: float, relation: Relation | None, safe_khz: int | None = None) -> Selection:
    """`relation` None: every batch size needs as many examples. `safe_khz`: of the baselines; default the highest frequency at
    which the largest batch size, which takes most, is below the limit. NoOperatingPointError (24) names the lowest power."""
    r = relation or {b: 1.0 for b in table.batch_sizes}
    usable = [p for p in table.points if p.batch_size in r]
    if not usable:
        raise UsageError(
            f"no batch size of the table ({', '.join(map(str, table.batch_sizes))}) is in the relation "
            f"({', '.join(map(str, sorted(r)))}). Measure the same ones."
        )
    candidates = tuple(Choice(p, r[p.batch_size]) for p in frontier(usable, limit_watts))
    if not candidates:
        raise NoOperatingPointError(no_point(usable, limit_watts, table.labels))
    under = [Choice(p, r[p.batch_size]) for p in usable if p.watts < limit_watts]
    safe = safe_khz if safe_khz is not None else _safe(usable, limit_watts)
    largest, fewest = max(p.batch_size for p in usable), min(r, key=lambda b: (r[b], -b))
    return Selection(
        choice=min(candidates, key=lambda c: c.time),
        baseline1=_at(table, largest, safe, r),
        baseline2=_at(table, fewest, safe, r),
        exhaustive=min(under, key=lambda c: c.time),
        candidates=candidates,
        safe_khz=safe,
    )


def frontier(points: Iterable[Point], limit_watts: float) -> list[Point]:
    """Of every batch size its highest frequency strictly below the limit; a batch size without one is left out."""
    best: dict[int, Point] = {}
    for p in points:
        known = best.get(p.batch_size)
        if p.watts < limit_watts and (known is None or p.frequency_khz > known.frequency_khz):
            best[p.batch_size] = p
    return [best[b] for b in sorted(best)]


def no_point(points: Sequence[Point], limit_watts: float, labels: str) -> str:
    """The line of NoOperatingPointError."""
    least = min(points, key=lambda p: p.watts)
    return (
        f"no operating point is below {limit_watts:g} W: the lowest power seen{labels} is {least.watts:.2f} W at batch size "
        f"{least.batch_size}, {megahertz(least.frequency_khz)}. Raise --limit-watts, or measure lower frequencies."
    )


def _safe(points: Sequence[Point], limit_watts: float) -> int | None:
    largest = max(p.batch_size for p in points)
    return next((p.frequency_khz for p in frontier(points, limit_watts) if p.batch_size == largest), None)


def _at(table: PowerTable, batch_size: int, frequency_khz: int | None, r: Relation) -> Choice | None:
    point = None if frequency_khz is None else table.at(batch_size, frequency_khz)
    return None if point is None else Choice(point, r[batch_size])


def pareto(points: Iterable[Point]) -> list[Point]:
    """Those that no other point beats or equals in samples/s, joules a sample and watts at once, fastest first."""
    found = list(points)

    def beaten(p: Point) -> bool:
        return any(_beats(q, p) for q in found)

    return sorted((p for p in found if not beaten(p)), key=lambda p: -p.samples_per_s)


def _beats(q: Point, p: Point) -> bool:
    mine = (-p.samples_per_s, p.joules_per_sample, p.watts)
    other = (-q.samples_per_s, q.joules_per_sample, q.watts)
    return all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine


def sensitivity(
    table: PowerTable, limit_watts: float, relations: Mapping[str, Relation]
) -> list[tuple[str, str, Choice, float]]:
    """Rows (proxy, target, choice by the proxy, its extra time on the target as a fraction), as in the paper's figure 5: every
    relation in turn decides, and every one in turn is the truth."""
    rows = []
    for proxy, r in relations.items():
        chosen = select(table, limit_watts, r).choice.point
        for target, truth in relations.items():
            if chosen.batch_size in truth:
                cost = Choice(chosen, truth[chosen.batch_size])
                rows.append((proxy, target, cost, cost.time / select(table, limit_watts, truth).exhaustive.time - 1))
    return rows
