"""Which operating points are visited: all of them, or only those at the edge of what a limit allows (methods: pruned
profiling; power grows with the batch size and with the frequency)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Measure = Callable[[int, int, int], float]
"""Watts at (batch size, frequency), in the attempt of this number, from 0."""


def profile_all(batch_sizes: Sequence[int], frequencies: Sequence[int], measure: Measure) -> None:
    """Every point, the lowest frequency and the smallest batch size first."""
    for frequency in sorted(frequencies):
        for batch_size in sorted(batch_sizes):
            measure(batch_size, frequency, 0)


def profile_pruned(
    batch_sizes: Sequence[int], frequencies: Sequence[int], limit_watts: float, measure: Measure
) -> dict[int, int]:
    """From the largest batch size down, up the frequencies until one is not below the limit; the next row begins at the
    last frequency that was. Returns {batch size: highest frequency below the limit}.

    On a monotone table at most 2 |B| + |F| points are visited. A point that is not below the limit is measured once more
    before its row ends: one sample proves nothing. Where a row's first point is above the limit although the batch size
    before was below it (no monotone table, or noise), the row goes down instead.
    """
    steps, begin, frontier = sorted(frequencies), 0, {}

    def below(batch_size: int, j: int) -> bool:
        return any(measure(batch_size, steps[j], attempt) < limit_watts for attempt in (0, 1))

    for batch_size in sorted(batch_sizes, reverse=True):
        j = begin
        if below(batch_size, j):
            while j + 1 < len(steps) and below(batch_size, j + 1):
                j += 1
        else:
            j -= 1
            while j >= 0 and not below(batch_size, j):
                j -= 1
        if j >= 0:
            frontier[batch_size] = steps[j]
            begin = j
    return frontier
