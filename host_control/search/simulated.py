"""Simulated boards: throughput curves whose true maximum is known, and a clock that is a number.

Four families, after what was measured and reported (methods.md 1.3; TASTE, figure 2), each with parameters drawn by the
seed. A curve gives the true samples/s of every size; a simulated board adds noise and takes simulated time, by the same
rule as the board's program. Strategies are judged by their regret on the TRUE curve: 1 - true(chosen) / max(true).

    peaked   rises like b / (b + h), then falls to a lower level: activations outgrow the caches
    jagged   the same, times the share of full vectors: b / (v * ceil(b / v)) for v of 4, 8 or 16
    cliff    rises, then loses 15 to 50 % at once where a working set stops to fit
    plateau  rises and stays: inference, and training with large caches
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, log
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from host_control.board import Counters, OperatingPoint
from host_control.search.forecast import trial_seconds

Curve = NDArray[np.float64]
"""True samples/s, one value a size of the space."""


def peaked_curve(sizes: Sequence[int], random: np.random.Generator) -> Curve:
    """A smooth peak anywhere between size 4 and the end, steeper or flatter."""
    b = np.asarray(sizes, float)
    half = random.uniform(1, 8)
    turn = exp(random.uniform(log(6), log(max(sizes[-1], 7))))
    return _rise(b, half) * _fall(b, turn, random)


def jagged_curve(sizes: Sequence[int], random: np.random.Generator) -> Curve:
    """A peak under teeth: sizes that do not fill the last vector of `v` samples lose up to the unused share of it."""
    b = np.asarray(sizes, float)
    vector = int(random.choice([4, 8, 16]))
    depth = random.uniform(0.4, 1.0)
    full: Curve = b / (vector * np.ceil(b / vector))
    half = random.uniform(1, 6)
    turn = exp(random.uniform(log(8), log(2 * max(sizes[-1], 8))))
    return _rise(b, half) * _fall(b, turn, random) * (1 - depth * (1 - full))


def _rise(b: Curve, half: float) -> Curve:
    """Half the throughput at size `half`, all of it at infinity: the fixed cost of a step, spread over its samples."""
    rise: Curve = b / (b + half)
    return rise


def _fall(b: Curve, turn: float, random: np.random.Generator) -> Curve:
    """From 1 down to between 0.25 and 0.6, which is what memory instead of cache leaves; half way at `turn`."""
    floor = random.uniform(0.25, 0.6)
    fall: Curve = floor + (1 - floor) / (1 + (b / turn) ** random.uniform(1, 3))
    return fall


def cliff_curve(sizes: Sequence[int], random: np.random.Generator) -> Curve:
    """A saturating rise that drops within two or three sizes and stays down."""
    b = np.asarray(sizes, float)
    edge = exp(random.uniform(log(4), log(max(sizes[-1], 5))))
    drop = random.uniform(0.15, 0.5)
    fallen: Curve = 1 / (1 + np.exp(np.clip(-(b - edge) / random.uniform(0.3, 1.5), -60, 60)))
    return _rise(b, random.uniform(1, 8)) * (1 - drop * fallen)


def plateau_curve(sizes: Sequence[int], random: np.random.Generator) -> Curve:
    """A rise that ends flat, with ripples of half a percent."""
    b = np.asarray(sizes, float)
    ripple: Curve = 1 + 0.005 * np.sin(b * random.uniform(0.1, 2.0) + random.uniform(0, 6))
    return _rise(b, random.uniform(0.3, 3)) * ripple


FAMILIES: dict[str, Callable[[Sequence[int], np.random.Generator], Curve]] = {
    "peaked": peaked_curve,
    "jagged": jagged_curve,
    "cliff": cliff_curve,
    "plateau": plateau_curve,
}


def make_curve(family: str, sizes: Sequence[int], seed: int, peak_samples_per_s: float = 100.0) -> Curve:
    """The curve of a family that a seed draws, scaled so that its maximum is `peak_samples_per_s`."""
    shape = FAMILIES[family](sizes, np.random.default_rng([seed, crc32(family.encode())]))
    scaled: Curve = shape / shape.max() * peak_samples_per_s
    return scaled


@dataclass
class SimulatedBoard:
    """A board whose truth is `curve` over `sizes`; `now` is its clock in seconds, moved by measuring and by `sleep`.

    `noise` is the standard deviation of a measurement as a fraction; the spread it reports scatters around that.
    """

    sizes: Sequence[int]
    curve: Curve
    seed: int = 0
    noise: float = 0.02
    seconds: float = 2.0
    name: str = "simulated"
    now: float = 0.0
    measured: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng([self.seed, 7])
        self._true = dict(zip(self.sizes, self.curve, strict=True))

    def true(self, batch_size: int) -> float:
        return float(self._true[batch_size])

    def regret(self, batch_size: int) -> float:
        """What is lost by choosing a size, as a fraction of the true maximum."""
        return 1 - self.true(batch_size) / float(max(self.curve))

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def measure(self, point: OperatingPoint) -> Counters:
        """One noisy measurement, which takes as long as it would on a board."""
        self.measured.append(point.batch_size)
        true = self.true(point.batch_size)
        seen = true * max(1 + self.noise * self._random.standard_normal(), 0.01)
        self.now += trial_seconds(point.batch_size / true, self.seconds)
        step = point.batch_size / seen
        return Counters(
            batch_size=point.batch_size,
            samples_per_s=seen,
            spread=self.noise * float(self._random.uniform(0.3, 1.2)),
            forward_s=step * 0.3,
            backward_s=step * 0.65,
            optimizer_s=step * 0.05,
            peak_rss_bytes=0,
            planned_bytes=0,
            page_faults=0,
            emulated=False,
            tainted=False,
        )
