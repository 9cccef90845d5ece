"""What every format is read into: class names and splits whose samples come one at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cross.errors import DataError, UsageError

Bytes = NDArray[np.uint8]
Resize = Literal["crop", "pad", "stretch"]

MAX_CLASSES = 65536
TEST_NAMES = ("val", "valid", "validation", "test", "testing")
"""What people call the split that is not trained on; the first that is there is taken."""

DEFAULT_VAL_SPLIT = 0.2
"""Share held out where a source has one split only; of text DEFAULT_TEXT_SPLIT, and from its end."""
DEFAULT_TEXT_SPLIT = 0.1


class BadSampleError(DataError):
    """One sample that cannot be used, and that `--skip-bad` leaves out; the data set around it is fine."""


@dataclass(frozen=True)
class PackOptions:
    """How a source becomes packed data; part of the cache's key.

    `size` is (H, W). `mean` and `std` are a plane each, in the order stored and in units of x/255; None: of the
    training split. `val_split` None: the defaults above where the source has one split. `domain`: a regular expression
    whose one group is the domain in a sample's name (a speaker, a camera).
    """

    size: tuple[int, int] | None = None
    resize: Resize = "crop"
    val_split: float | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    bgr: bool = False
    gray: bool = False
    skip_bad: bool = False
    seed: int = 0
    window: int = 64
    domain: str | None = None

    def __post_init__(self) -> None:
        if self.domain is not None:
            _check_pattern(self.domain)
        if self.bgr and self.gray:
            raise UsageError("--bgr orders three planes and --gray leaves one. Give one of them.")
        if (self.mean is None) != (self.std is None):
            raise UsageError("--mean and --std belong together. Give both, or neither.")
        if self.std is not None and not all(1e-6 <= value <= 10 for value in self.std):
            raise UsageError(
                f"--std {','.join(map(str, self.std))} is not of x/255, from 1e-6 to 10. Divide it by 255."
            )
        if self.mean is not None and not all(-10 <= value <= 10 for value in self.mean):
            raise UsageError(f"--mean {','.join(map(str, self.mean))} is not of x/255, within 10. Divide it by 255.")


@dataclass(frozen=True)
class Split:
    """Samples of one split.

    labels: int64 [N], or for text the next tokens, uint8 [N, T].
    sample(i): the bytes of an image file; or planes, uint8 [C,H,W] (R,G,B or gray); or tokens, uint8 [T]. Cheap in
    rising order of i. Raises BadSampleError.
    name(i): where sample i comes from, for messages.
    key(i): the same wherever the source lies: which samples are held out depends on it. None: the name.
    domain(i): the domain of sample i by name; None where the source knows of none.
    """

    labels: NDArray[Any]
    sample: Callable[[int], bytes | Bytes]
    name: Callable[[int], str]
    key: Callable[[int], str] | None = None
    domain: Callable[[int], str] | None = None

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class DataSet:
    """A source that was recognised. `kind` is what samples are; `notes` are for the user, a line each."""

    format: str
    source: str
    kind: Literal["images", "text"]
    classes: tuple[str, ...]
    train: Split
    test: Split | None = None
    notes: tuple[str, ...] = field(default=())


def _check_pattern(pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise UsageError(f"--domain {pattern!r} is no regular expression: {error}. Correct it.") from None
    if groups != 1:
        raise UsageError(
            f"--domain {pattern!r} has {groups} groups. Give one, such as '_([a-z]+)_', around the domain."
        )


def with_domains(split: Split, pattern: str) -> Split:
    """The split with the domains that `pattern` finds in the names of its samples (of files: below the data set's folder).

    Looked up when the domain is: DataError (23) names the first sample without one.
    """
    name = split.key or split.name

    def domain(i: int) -> str:
        found = re.search(pattern, name(i))
        if found is None or not found[1]:
            raise DataError(f"{name(i)} has no domain: --domain {pattern!r} finds none in it. Correct the pattern.")
        return found[1]

    return replace(split, domain=domain)


def check_labels(labels: NDArray[Any], classes: int, name: Callable[[int], str]) -> NDArray[np.int64]:
    """The labels as int64 [N]; DataError names the first that is not in 0..classes-1."""
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        first = int(wrong[0])
        raise DataError(
            f"{name(first)} has label {int(labels[first])}, and {classes} classes allow 0 to {classes - 1}"
            f"{f'; so have {len(wrong) - 1} others' if len(wrong) > 1 else ''}. Correct the labels."
        )
    return labels.astype(np.int64)


def numbered_classes(labels: Sequence[NDArray[Any]], source: str) -> tuple[str, ...]:
    """'0', '1', ... for labels without names; DataError where they do not count classes."""
    low = min((int(part.min()) for part in labels if len(part)), default=0)
    high = max((int(part.max()) for part in labels if len(part)), default=0)
    if low < 0 or high >= MAX_CLASSES:
        raise DataError(
            f"{source} has labels from {low} to {high}; classes are numbered from 0, at most {MAX_CLASSES}. "
            "Correct the labels."
        )
    return tuple(str(number) for number in range(high + 1))


def chosen_test(names: Sequence[str]) -> tuple[str | None, str | None]:
    """Which of the splits there are is taken for testing, and a note where others are left out."""
    there = [name for name in TEST_NAMES if name in names]
    if len(there) < 2:
        return (there[0] if there else None), None
    return there[0], f"tested on {there[0]}; {', '.join(there[1:])} is left out: pack it apart where you need it"
