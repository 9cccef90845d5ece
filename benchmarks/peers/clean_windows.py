"""Timing on a machine that others use too: a window counts only if its threads did not wait for a core.

Linux counts how long each thread stood ready without a core (/proc/self/task/*/schedstat, second field). A window in
which that share of wall time x threads is small is `clean`; medians are over clean windows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MOST_DELAY = 0.05
WINDOW_S = 0.3
WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Timing:
    """Median seconds a step over `clean` of `windows` windows, their IQR / median, and whether too few were clean."""

    step_s: float
    spread: float
    windows: int
    clean: int
    tainted: bool


def run_queue_delay_ns(process: int | str = "self") -> int:
    """Nanoseconds that the threads of a process have waited for a core so far."""
    total = 0
    for task in Path(f"/proc/{process}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[1])
        except (OSError, IndexError, ValueError):
            continue
    return total


def time_steps(step: Callable[[], object], threads: int, seconds: float = 2.0) -> Timing:
    """Warm up, then windows until `seconds` of them are clean, at most four times as long."""
    last = 0.0
    for _ in range(WARM_UP_STEPS):
        start = time.perf_counter()
        step()
        last = time.perf_counter() - start
    steps = max(1, round(WINDOW_S / max(last, 1e-6)))
    windows: list[tuple[float, float]] = []
    began = time.perf_counter()
    while not _enough(windows, seconds, time.perf_counter() - began, steps):
        delay, start = run_queue_delay_ns(), time.perf_counter()
        for _ in range(steps):
            step()
        wall = time.perf_counter() - start
        windows.append((wall / steps, (run_queue_delay_ns() - delay) * 1e-9 / wall / threads))
    return summary(windows)


def _enough(windows: list[tuple[float, float]], seconds: float, elapsed: float, steps: int) -> bool:
    clean = [step_s * steps for step_s, delay in windows if delay <= MOST_DELAY]
    return (len(clean) >= 3 and sum(clean) >= seconds) or (len(windows) >= 3 and elapsed >= 4 * seconds)


def summary(windows: list[tuple[float, float]]) -> Timing:
    """Of windows (seconds a step, share of the time x threads that waited for a core)."""
    clean = [step_s for step_s, delay in windows if delay <= MOST_DELAY]
    tainted = len(clean) < 3
    # Too few clean windows: the least disturbed third, said to be tainted.
    used = [step_s for step_s, _ in sorted(windows, key=lambda one: one[1])[: max(3, len(windows) // 3)]]
    times = used if tainted else clean
    median = statistics.median(times)
    quarters = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [median] * 3
    return Timing(median, (quarters[2] - quarters[0]) / median, len(windows), len(clean), tainted)
