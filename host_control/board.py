"""What a board is to everything above it: `measure(point) -> Counters`, and nothing else.

Measuring and choosing are apart (docs/design.md, decision 12): a strategy sees batch sizes and samples/s, never SSH, a
process or an emulator. Real boards are made by `host_control.boards.open_board`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cross.probe import BoardFacts as BoardFacts


@dataclass(frozen=True)
class OperatingPoint:
    """What to run: `batch_size` rows a step of `program`; None means all threads, all cores, frequency unchanged."""

    batch_size: int
    program: str = "train"
    threads: int | None = None
    cores: tuple[int, ...] | None = None
    frequency_khz: int | None = None


@dataclass(frozen=True)
class Counters:
    """What one measurement gave.

    `samples_per_s` is the median over windows, `spread` their IQR / median (a fraction), the three times are medians of
    seconds a step (the loss is in `backward_s`), bytes are bytes. `tainted`: throttled, swapping or disturbed while it
    was measured, `taint` says by what. `emulated`: measured under an emulator, so no statement about speed. `program`: what
    the board ran; of a training step 'train_fused' where the build has it, 'train' where it does not.
    """

    batch_size: int
    samples_per_s: float
    spread: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    peak_rss_bytes: int
    planned_bytes: int
    page_faults: int
    emulated: bool
    tainted: bool
    taint: str | None = None
    program: str = "train"


@dataclass(frozen=True)
class DeployResult:
    """Where a build lies on the board, its program's SHA-256, and what had to be sent (0: it was there already)."""

    remote_dir: str
    sha256: str
    sent_bytes: int


class Board(Protocol):
    """Anything that measures; raises the `TasteError` that the program's exit code stands for."""

    name: str

    def measure(self, point: OperatingPoint) -> Counters: ...


class DeployedBoard(Board, Protocol):
    """A board that programs are sent to."""

    def facts(self) -> BoardFacts: ...

    def deploy(self, build_dir: Path) -> DeployResult: ...

    def clean(self) -> None: ...

    def close(self) -> None: ...


def counters_from(record: Mapping[str, Any], *, emulated: bool | None = None) -> Counters:
    """`Counters` of a `bench` result or of one row of a recorded table; what a recorded row lacks is 0 or False."""
    return Counters(
        batch_size=int(record["batch_size"]),
        samples_per_s=float(record["samples_per_s"]),
        spread=float(record.get("spread", 0.0)),
        forward_s=float(record.get("forward_s", 0.0)),
        backward_s=float(record.get("backward_s", 0.0)),
        optimizer_s=float(record.get("optimizer_s", 0.0)),
        peak_rss_bytes=int(record.get("peak_rss_bytes", 0)),
        planned_bytes=int(record.get("planned_bytes", 0)),
        page_faults=int(record.get("page_faults", 0)),
        emulated=bool(record.get("emulated", False)) if emulated is None else emulated,
        tainted=bool(record.get("tainted", False)),
        taint=record.get("taint"),
        program=str(record.get("program", "train")),
    )
