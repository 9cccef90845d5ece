"""One profile: the command line of `taste-train profile`, and its kernels as values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cross.errors import CompatibilityError
from host_control.board import OperatingPoint
from host_control.boards.bench import bench_arguments, bench_limit_s, check_exit, last_record
from host_control.boards.deployed import DeployedBoard


@dataclass(frozen=True)
class Kernel:
    """Median and best time of one call of a step, and how near the median comes to what the CPU can do. `flops` of the direct algorithm,
    `bytes` of every tensor it reads or writes, once each; `share` of the step, `limit_share` of the multiply-add limit."""

    name: str
    ms: float
    best_ms: float
    share: float
    gflops: float
    limit_share: float
    bound: str
    bytes: float
    gb_per_s: float

    @property
    def operator(self) -> str:
        """The name without the tensor that the call makes."""
        return self.name.partition(" ")[0]


@dataclass(frozen=True)
class Profile:
    """A step kernel by kernel, in the order of the step, and the two limits measured just before."""

    program: str
    batch_size: int
    threads: int
    runs: int
    ms: float
    limit_gflops: float
    limit_gb_per_s: float
    emulated: bool
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True)
class Operator:
    """All kernels of one operator together."""

    name: str
    calls: int
    ms: float
    share: float
    gflops: float
    limit_share: float
    gb_per_s: float


def profile(board: DeployedBoard, point: OperatingPoint) -> Profile:
    """Run `taste-train profile` of the current deployment for one point; raises what its exit code stands for."""
    words = bench_arguments(point, board.settings)
    result = board.run_program(["profile", *words[1:]], timeout=bench_limit_s(point, board.settings, board.emulated))
    check_exit(result, f"the profile of batch size {point.batch_size} on {board.name}")
    found = read_profile(last_record(result.stdout, "result") or {}, board.name)
    return replace(found, emulated=found.emulated or board.emulated)


def read_profile(record: Mapping[str, Any], board: str) -> Profile:
    """The record of `taste-train profile`; CompatibilityError where a field is missing."""
    try:
        fields = {key: record[key] for key in Profile.__dataclass_fields__ if key != "kernels"}
        kernels = tuple(Kernel(**{k: row[k] for k in Kernel.__dataclass_fields__}) for row in record["kernels"])
    except (KeyError, TypeError) as error:
        raise CompatibilityError(
            f"the profile of taste-train on {board} lacks or garbles {error}: not this host's version. Deploy again."
        ) from error
    return Profile(kernels=kernels, **fields)


def by_operator(kernels: Iterable[Kernel]) -> list[Operator]:
    """Sums by operator, the slowest first."""
    groups: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault(kernel.operator, []).append(kernel)
    found = []
    for name, rows in groups.items():
        ms = sum(row.ms for row in rows)

        def mean(values: Iterable[float], rows: list[Kernel] = rows, ms: float = ms) -> float:
            return sum(v * row.ms for v, row in zip(values, rows, strict=True)) / ms if ms else 0.0

        found.append(
            Operator(
                name,
                len(rows),
                ms,
                sum(row.share for row in rows),
                mean(row.gflops for row in rows),
                mean(row.limit_share for row in rows),
                mean(row.gb_per_s for row in rows),
            )
        )
    return sorted(found, key=lambda operator: -operator.ms)
