"""From our canonical array back to the file's own orientation: the steps of an Origin, undone in reverse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from cross.graph import Shape

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Resized:
    """A tensor of a replaced classifier: its dimension `axis` had `old` elements in the file and has `new` now."""

    axis: int
    old: int
    new: int


def undo(array: Array, steps: Sequence[tuple[str, Shape]], resized: Resized | None = None) -> Array:
    """The array before `steps` made it ours; shapes of a replaced classifier follow its new size.

    A bias that the file holds as one number for all features has no way back: it keeps its own shape, which every
    reader of such a bias takes as well.
    """
    axis = resized.axis if resized is not None else 0
    for kind, value in reversed(steps):
        if kind == "transpose":
            array, axis = array.transpose(np.argsort(value)), value[axis]
            continue
        before = value
        if resized is not None:
            place = _same_place(array.shape, axis, before, resized.old)
            if place is None:
                return array
            before, axis = (*before[:place], resized.new, *before[place + 1 :]), place
        if prod(before) != array.size:
            return array
        array = array.reshape(before)
    return array


def _same_place(shape: Shape, axis: int, before: Shape, old: int) -> int | None:
    """The axis of `before`, of size `old`, that a reshape made `axis` of `shape`: as many elements come before it."""
    ahead = prod(shape[:axis])
    places = [i for i, extent in enumerate(before) if extent == old and prod(before[:i]) == ahead]
    return places[-1] if places else None
