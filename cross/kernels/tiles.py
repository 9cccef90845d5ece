"""Register tiles: how many accumulators a kernel keeps, and how a row of work is cut into tiles.

A tile is `scalars` x `vectors` accumulators, fed by `vectors` vector loads and `scalars` broadcasts a step. Work that the
tile does not divide is cut into tiles of two sizes, `big` and `big - 1`, so no tile ends in a stump and none tests bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

from cross.target import Target

FEW_REGISTERS = 16
"""Vector registers of AVX2: address registers are as few, so a tile addresses at most 6 pixels."""


@dataclass(frozen=True)
class Split:
    """`total` cut into `count` tiles: the first `big_count` have `big` items, the others `big - 1`."""

    total: int
    count: int
    big: int
    big_count: int

    @property
    def parts(self) -> tuple[tuple[int, int, int, int], ...]:
        """(size, first tile, tiles, first item) of each size."""
        small = self.count - self.big_count
        parts = [(self.big, 0, self.big_count, 0)]
        if small:
            parts.append((self.big - 1, self.big_count, small, self.big_count * self.big))
        return tuple(parts)


def split(total: int, most: int) -> Split:
    """Cut `total` items into as few tiles of at most `most` as will do, as even as possible."""
    count = -(-total // most)
    big = -(-total // count)
    return Split(total, count, big, total - count * (big - 1))


def chunk(total: int, most: int) -> int:
    """The size of even chunks of at most `most`: the last chunk may be smaller."""
    return -(-total // -(-total // max(1, min(most, total))))


def registers_a_vector(target: Target) -> int:
    """Registers that one channel block fills: 1, or 4 on a core without vectors."""
    return target.channel_block // target.vector_floats


def fits(target: Target, scalars: int, vectors: int) -> bool:
    """Whether the accumulators, the vectors and one broadcast stay in registers."""
    return (scalars + 1) * vectors * registers_a_vector(target) + 1 <= target.vector_registers


def _steps(scalars: int, vectors: int) -> float:
    """Cycles of one step at two multiply-adds and two loads a cycle and a latency of four cycles, and a little for each load."""
    return max(scalars * vectors / 2, (scalars + vectors) / 2, 4.0) + 0.05 * (scalars + vectors)


def _cost(scalars: Split, vectors: Split) -> float:
    return sum(
        scalar_tiles * vector_tiles * _steps(scalar, vector)
        for scalar, _, scalar_tiles, _ in scalars.parts
        for vector, _, vector_tiles, _ in vectors.parts
    )


def register_tile(target: Target, scalars: tuple[int, ...], vectors: int, most_scalars: int = 8) -> tuple[int, int]:
    """(most scalars, most vectors) a tile, for lines of `scalars` items (a line each, cut apart) and `vectors` vectors."""
    most = min(most_scalars, 6) if target.vector_registers <= FEW_REGISTERS else most_scalars
    candidates = [
        (scalar, vector)
        for scalar in range(1, min(most, max(scalars)) + 1)
        for vector in range(1, min(4, vectors) + 1)
        if fits(target, scalar, vector) and scalar * vector <= 16
    ]
    return min(
        candidates,
        key=lambda tile: sum(_cost(split(line, tile[0]), split(vectors, tile[1])) for line in scalars if line),
    )
