"""The search space {1, 2, 4, 6, ..., bs_max}, and how large it may be.

A program's memory is `need(b) = fixed + b * per_sample` by construction (docs/design.md, decision 1), so bs_max is
computed: nothing is compiled or killed to find it. The grid is the paper's (TASTE, section II-B).
"""

from __future__ import annotations

from dataclasses import dataclass

from cross.errors import DoesNotFitError, UsageError

MEMORY_MARGIN = 0.85
"""Share of MemAvailable that a session may take: the rest is for the page cache and what the board starts meanwhile."""

DEFAULT_MAX_BATCH_SIZE = 128

EXHAUSTIVE_UP_TO = 9
"""Spaces of at most so many sizes are measured whole: half of them would be a guess (methods.md 1.3)."""


@dataclass(frozen=True)
class MemoryForm:
    """Bytes of a session by batch size: `fixed_bytes + batch_size * per_sample_bytes`."""

    fixed_bytes: int
    per_sample_bytes: int

    def need(self, batch_size: int) -> int:
        return self.fixed_bytes + batch_size * self.per_sample_bytes

    def largest(self, budget_bytes: int) -> int:
        """The largest batch size whose need is within the budget; 0 where none is."""
        if budget_bytes < self.need(1):
            return 0
        return (budget_bytes - self.fixed_bytes) // max(self.per_sample_bytes, 1)


@dataclass(frozen=True)
class SearchSpace:
    """The batch sizes of a study in rising order, and why they end where they do.

    `limited_by`: 'memory' or 'max-batch-size'. `minimum_note` is a sentence where batch size 1 was left out, else ''.
    """

    sizes: tuple[int, ...]
    limited_by: str = "max-batch-size"
    minimum_note: str = ""

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def bs_max(self) -> int:
        return self.sizes[-1]

    @property
    def exhaustive(self) -> bool:
        return len(self) <= EXHAUSTIVE_UP_TO

    @property
    def budget(self) -> int:
        """Distinct sizes a study may measure: half the space, rounded up; all of a small one."""
        return len(self) if self.exhaustive else -(-len(self) // 2)


def batch_grid(largest: int, minimum: int = 1) -> tuple[int, ...]:
    """1 and the even numbers up to `largest`, from `minimum` on; empty where nothing is left."""
    return tuple(size for size in (1, *range(2, largest + 1, 2)) if minimum <= size <= largest)


def memory_budget(available_bytes: int | None, user_limit_bytes: int | None) -> int | None:
    """Bytes a session may take: the smaller of the user's limit and 0.85 of MemAvailable; None if neither is known."""
    limits = [] if available_bytes is None else [int(MEMORY_MARGIN * available_bytes)]
    limits += [] if user_limit_bytes is None else [user_limit_bytes]
    return min(limits) if limits else None


def make_space(
    memory: MemoryForm | None,
    budget_bytes: int | None,
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
    minimum_batch: int = 1,
) -> SearchSpace:
    """The space of a program on a board.

    memory, budget_bytes: None where unknown (a recorded board): then `max_batch_size` alone is the limit.
    Raises DoesNotFitError where not even `minimum_batch` fits, UsageError where `max_batch_size` is below it.
    """
    note = (
        f"batch size 1 is left out: a batch norm would see one value a channel (smallest: {minimum_batch})"
        if minimum_batch > 1
        else ""
    )
    if max_batch_size < minimum_batch:
        raise UsageError(f"--max-batch-size {max_batch_size}, but {note or 'batch sizes start at 1'}. Raise it.")
    largest, limited_by = max_batch_size, "max-batch-size"
    if memory is not None and budget_bytes is not None and memory.largest(budget_bytes) < max_batch_size:
        largest, limited_by = memory.largest(budget_bytes), "memory"
    sizes = batch_grid(largest, minimum_batch)
    if not sizes:
        assert memory is not None and budget_bytes is not None
        need, have = (value / 2**20 for value in (memory.need(minimum_batch), budget_bytes))
        raise DoesNotFitError(
            f"batch size {minimum_batch} needs {need:.0f} MiB; {have:.0f} MiB may be used. "
            "Free memory on the board, raise --memory, or take a smaller model."
        )
    return SearchSpace(sizes, limited_by, note)
