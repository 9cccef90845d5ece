"""Register tiles: how many accumulators a kernel keeps, and how a row of work is cut into tiles.

A tile is `scalars` x `vectors` accumulators, fed by `vectors` vector loads and `scalars` broadcasts a step. Work that the
tile does not divide is cut into tiles of two sizes, `big` and `big - 1`, so no tile ends in a stump and none tests bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

from cross.target import Target

FEW_REGISTERS = 16
"""Vector registers of AVX2: address registers are as few, so a tile addresses at most 6 pixels."""

SECOND_SIZE = 1.03
"""What a second size of tile, which doubles the code, must gain."""

LATENCY = 4.8
"""Cycles from one step to the next at least: four of the multiply-add, and a little for an order that is never perfect."""


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


def largest_divisor(total: int, most: int) -> int:
    """The largest number up to `most` that divides `total`; 1 where `most` is less."""
    return next((d for d in range(min(total, most), 1, -1) if total % d == 0), 1)


def parts_of_sums(target: Target, sums_bytes: int) -> int:
    """Into how many parts work is cut that each sum up on their own: one a core, or 1 where the sums of all parts would take more
    than half a second-level cache."""
    return target.cores if 2 * target.cores * sums_bytes <= target.l2_kib * 1024 else 1


def registers_a_vector(target: Target) -> int:
    """Registers that one channel block fills: 1, or 4 on a core without vectors."""
    return target.channel_block // target.vector_floats


def fits(target: Target, scalars: int, vectors: int) -> bool:
    """Whether the accumulators, the vectors and one broadcast stay in registers."""
    return fits_with(target, scalars * vectors, vectors)


def fits_with(target: Target, sums: int, vectors: int) -> bool:
    """Whether so many accumulators, so many vectors beside them and one broadcast stay in registers."""
    return (sums + vectors) * registers_a_vector(target) + 1 <= target.vector_registers


def _steps(target: Target, scalars: int, vectors: int) -> float:
    """Cycles of one step at two multiply-adds and two loads a cycle, not below their latency, and a little for each load:
    more for vectors, which come from the second-level cache where scalars come from the first."""
    width = registers_a_vector(target)
    loads = scalars + vectors * width
    return max(scalars * vectors * width / 2, loads / 2, LATENCY) + 0.05 * scalars + 0.15 * vectors * width


def _cost(target: Target, scalars: Split, vectors: Split) -> float:
    return sum(
        scalar_tiles * vector_tiles * _steps(target, scalar, vector)
        for scalar, _, scalar_tiles, _ in scalars.parts
        for vector, _, vector_tiles, _ in vectors.parts
    )


def register_tile(target: Target, lines: tuple[tuple[int, int], ...], vectors: int) -> tuple[int, int]:
    """(most scalars, most vectors) a tile, for lines of (scalars, number of such lines) and `vectors` vectors.

    The cheapest of all that fit."""
    most_scalars = 6 if target.vector_registers <= FEW_REGISTERS else 8

    def cost(tile: tuple[int, int]) -> float:
        vector_split, splits = split(vectors, tile[1]), [(split(length, tile[0]), count) for length, count in lines]
        sizes = len(vector_split.parts) * max(len(cut.parts) for cut, _ in splits)
        return sum(count * _cost(target, cut, vector_split) for cut, count in splits) * SECOND_SIZE ** (sizes - 1)

    return min(
        (
            (scalar, vector)
            for scalar in range(1, min(most_scalars, max(length for length, _ in lines)) + 1)
            for vector in range(1, min(4, vectors) + 1)
            if fits(target, scalar, vector) and scalar * vector <= 16
        ),
        key=cost,
    )
