"""LUT_time and LUT_power: what was measured over batch sizes and frequencies, on disk whole or not at all."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cross.errors import CorruptInputError, UsageError
from host_control.run_folder import write_whole

TABLE, TABLE_CSV = "power.json", "power.csv"
FORMAT = "taste-power 1"

_COLUMNS = (
    "batch_size frequency_khz samples_per_s spread watts mean_watts joules_per_sample temperature_c throttle_bits "
    "lowest_khz highest_khz attempts tainted taint"
).split()


@dataclass(frozen=True)
class Point:
    """One operating point. `frequency_khz` 0: as the board's governor has it. `watts` is the peak of the readings while it was
    measured, less what was asked to be subtracted; `samples` are all of them, (seconds from the start, watts).
    `lowest_khz`, `highest_khz`, `temperature_c` and `throttle_bits` are what the kernel and the firmware said; None: nothing."""

    batch_size: int
    frequency_khz: int
    samples_per_s: float
    spread: float
    watts: float
    mean_watts: float
    joules_per_sample: float
    temperature_c: float | None = None
    throttle_bits: int | None = None
    lowest_khz: int | None = None
    highest_khz: int | None = None
    attempts: int = 1
    tainted: bool = False
    taint: str | None = None
    samples: tuple[tuple[float, float], ...] = ()

    @property
    def key(self) -> tuple[int, int]:
        return self.batch_size, self.frequency_khz

    @property
    def seconds_per_sample(self) -> float:
        return 1.0 / self.samples_per_s


@dataclass(frozen=True)
class PowerTable:
    """Everything that was measured of one build on one board. `estimated`: the watts are a model's, not a sensor's.
    `limit_watts` is that of a pruned profile; None: every point was to be measured. `idle_watts`: what was subtracted."""

    model: str
    build: str
    board: str
    emulated: bool
    source: str
    estimated: bool
    batch_sizes: tuple[int, ...]
    frequencies_khz: tuple[int, ...]
    limit_watts: float | None
    seconds: float
    idle_watts: float | None = None
    visits: int = 0
    points: tuple[Point, ...] = ()

    def at(self, batch_size: int, frequency_khz: int) -> Point | None:
        """The point, or None where it was not measured."""
        return next((p for p in self.points if p.key == (batch_size, frequency_khz)), None)

    def with_point(self, point: Point) -> PowerTable:
        """With one visit more; a point that was there already is replaced."""
        kept = tuple(p for p in self.points if p.key != point.key)
        return replace(self, points=(*kept, point), visits=self.visits + 1)

    def identity(self) -> dict[str, Any]:
        """What has to agree for a measurement to go on."""
        names = "model build board source batch_sizes frequencies_khz limit_watts seconds"
        return {name: getattr(self, name) for name in names.split()}

    @property
    def labels(self) -> str:
        """What has to stand beside every number: 'estimated', 'emulated', both, or nothing."""
        words = [word for word, holds in (("estimated", self.estimated), ("emulated", self.emulated)) if holds]
        return f" ({', '.join(words)})" if words else ""


def write_table(folder: Path, table: PowerTable) -> None:
    """power.json with everything, power.csv without the raw samples."""
    record = {"format": FORMAT, **asdict(table)}
    write_whole(folder / TABLE, (json.dumps(record, indent=1) + "\n").encode())
    text = io.StringIO()
    rows = csv.DictWriter(text, [*_COLUMNS, "source"], extrasaction="ignore", lineterminator="\n")
    rows.writeheader()
    source = table.source + table.labels
    rows.writerows(asdict(p) | {"source": source} for p in sorted(table.points, key=lambda p: p.key))
    write_whole(folder / TABLE_CSV, text.getvalue().encode())


def read_table(path: Path) -> PowerTable:
    """The table in a folder that `power measure` left, or its power.json; UsageError where there is none."""
    file = path / TABLE if path.is_dir() else path
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if record.pop("format") != FORMAT:
            raise ValueError(f"it is not of the format {FORMAT}")
        points = tuple(_read_point(row) for row in record.pop("points"))
        batch_sizes, frequencies = (tuple(int(v) for v in record.pop(n)) for n in ("batch_sizes", "frequencies_khz"))
        return PowerTable(**record, batch_sizes=batch_sizes, frequencies_khz=frequencies, points=points)
    except FileNotFoundError:
        raise UsageError(f"no power table {file}. Make one with `power measure --out {path}`.") from None
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise CorruptInputError(f"{file} is not a power table: {reason}. Measure again with another --out.") from error


def _read_point(row: dict[str, Any]) -> Point:
    samples = tuple((float(t), float(w)) for t, w in row.pop("samples", ()))
    point = Point(**row, samples=samples)
    numbers = (point.samples_per_s, point.watts)
    if not all(isinstance(n, (int, float)) and math.isfinite(n) for n in numbers) or point.samples_per_s <= 0:
        raise ValueError(f"batch size {point.batch_size} at {point.samples_per_s} samples/s and {point.watts} W")
    return point


def megahertz(khz: int) -> str:
    """'1500 MHz', or 'as it is' for 0."""
    return f"{khz / 1000:g} MHz" if khz else "frequency as it is"
