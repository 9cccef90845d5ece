"""Where watts come from: the board's own sensor, an external meter (a CSV file or a command), or a model, which is no measurement."""

from __future__ import annotations

import csv
import math
import shlex
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from cross.errors import FileError, MissingToolError, UsageError
from host_control.power.energy import Reading, within
from host_control.power.trace import Trace

BOARD, MODEL = "board", "model"
_LATE_S = 5.0
"""Longest wait for a meter's samples up to the end of what was measured."""


@dataclass(frozen=True)
class Load:
    """What ran while power was read: cores in use of all, and the frequency it ran at of the highest (1.0: unknown)."""

    cores_share: float
    frequency_share: float


class Source(Protocol):
    """`name` as the table has it; `estimated`: no measurement. `readings` are (seconds of the board's clock, watts)."""

    name: str
    estimated: bool

    def readings(self, trace: Trace, load: Load, board_offset_s: float) -> list[Reading]:
        """What was read between `trace.start` and `trace.end`. `board_offset_s`: board's clock minus time.monotonic() here.
        FileError (12) where a sensor failed or said nothing."""
        ...

    def close(self) -> None: ...


class BoardSensor:
    """What the program on the board reads: INA3221, hwmon, a Pi 5's PMIC, RAPL."""

    estimated = False

    def __init__(self, kind: str | None, board: str) -> None:
        if kind is None:
            raise UsageError(
                f"power of {board} is not available: it has no sensor that is known. Use --power-source csv:FILE or command:CMD "
                "for an external meter, or model for an estimate."
            )
        self.name = f"board:{kind}"

    def readings(self, trace: Trace, load: Load, board_offset_s: float) -> list[Reading]:
        found = [trace.samples[i] for i in within([t for t, _ in trace.samples], trace.start, trace.end)]
        if trace.lost or not found:
            raise FileError(
                trace.warnings[-1] if trace.warnings else "the board's sensor gave no sample. Use longer --seconds."
            )
        return found

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class PowerModel:
    """watts = idle + busy x share of the cores x (f / highest f) ^ exponent: an estimate with the numbers it is given.

    Dynamic power goes with f V^2 and the voltage roughly with f: between the first and the third power of f.
    """

    idle_watts: float = 2.0
    busy_watts: float = 4.0
    exponent: float = 2.5

    name = MODEL
    estimated = True

    def watts(self, load: Load) -> float:
        return float(self.idle_watts + self.busy_watts * load.cores_share * load.frequency_share**self.exponent)

    def readings(self, trace: Trace, load: Load, board_offset_s: float) -> list[Reading]:
        return [(trace.start, self.watts(load)), (trace.end, self.watts(load))]

    def close(self) -> None:
        """Nothing is open."""


class Meter:
    """An external meter; `offset_s`: how much its clock shows more than this machine's."""

    estimated = False
    name = "meter"

    def __init__(self, offset_s: float) -> None:
        self.offset_s = offset_s

    def samples(self) -> list[Reading]:
        """All so far, at times of the meter's clock in terms of time.monotonic()."""
        raise NotImplementedError

    def wait_until(self, when: float) -> list[Reading]:
        """The samples, once there is one at or after `when` (monotonic), or _LATE_S later."""
        until = time.monotonic() + _LATE_S
        while True:
            found = self.samples()
            if (found and found[-1][0] - self.offset_s >= when) or time.monotonic() > until:
                return found
            time.sleep(0.05)

    def readings(self, trace: Trace, load: Load, board_offset_s: float) -> list[Reading]:
        shift = board_offset_s - self.offset_s
        wanted = self.wait_until(trace.end - board_offset_s)
        shifted = [(t + shift, watts) for t, watts in wanted]
        found = [shifted[i] for i in within([t for t, _ in shifted], trace.start, trace.end)]
        if not found:
            last = f"its last sample is {trace.end - wanted[-1][0] - shift:.1f} s old" if wanted else "it gave none"
            raise FileError(
                f"{self.name} has no sample of the {trace.end - trace.start:.1f} s measured ({last}). Look at the meter, its "
                "clock (--meter-offset) and its rate, or use longer --seconds."
            )
        return found

    def close(self) -> None:
        """Nothing is open."""


class CsvMeter(Meter):
    """A file that a meter's own software appends to: a header, and the columns time (seconds since 1970, or ISO 8601) and watts."""

    def __init__(self, path: Path, offset_s: float = 0.0) -> None:
        super().__init__(offset_s)
        self.path, self.name = path, f"csv:{path.name}"
        self._origin = time.monotonic() - time.time()
        self.samples()

    def samples(self) -> list[Reading]:
        try:
            with self.path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        except OSError as error:
            raise FileError(f"{self.path}: {error.strerror}. Name the file that the meter writes.") from error
        found = []
        for number, row in enumerate(rows, start=2):
            if row.get("time") is None or row.get("watts") is None:
                if number - 1 == len(rows):
                    break  # the line that is being written
                raise UsageError(
                    f"{self.path} line {number} has no time and watts. It needs a header with these two columns."
                )
            try:
                found.append((_epoch(str(row["time"])) + self._origin, float(str(row["watts"]))))
            except ValueError:
                if number - 1 < len(rows):
                    raise UsageError(
                        f"{self.path} line {number}: {row['time']!r}, {row['watts']!r} are no time and watts. Repair the file."
                    ) from None
        return found


class CommandMeter(Meter):
    """A command that prints a number of watts a line as it measures; a line's time is that of its arrival."""

    def __init__(self, command: str, offset_s: float = 0.0) -> None:
        super().__init__(offset_s)
        words = shlex.split(command)
        if not words:
            raise UsageError("--power-source command: names no command. Use command:'CMD ARG ...'.")
        self.name, self._found, self._wrong = f"command:{words[0]}", list[Reading](), ""
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        except OSError as error:
            raise MissingToolError(
                f"{words[0]}: {error.strerror}. Install the meter's tool, or correct its name."
            ) from error
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self._found.append((time.monotonic(), float(line)))
            except ValueError:
                self._wrong = line.strip()

    def samples(self) -> list[Reading]:
        if self._wrong and not self._found:
            raise UsageError(f"{self.name} prints {self._wrong[:60]!r}, no number of watts. Let it print one a line.")
        if self._process.poll() is not None and not self._found:
            raise FileError(
                f"{self.name} ended with exit code {self._process.returncode} and no sample. Run it by hand."
            )
        return list(self._found)

    def close(self) -> None:
        """End the command."""
        self._process.terminate()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def open_source(text: str, kind: str | None, board: str, meter_offset_s: float = 0.0) -> Source:
    """`board`, `model[:idle=W,busy=W,exponent=N]`, `csv:FILE` or `command:CMD`. `kind`: what sensor the board has."""
    name, _, rest = text.partition(":")
    if name == BOARD and not rest:
        return BoardSensor(kind, board)
    if name == MODEL:
        return _model(rest)
    if name == "csv" and rest:
        return CsvMeter(Path(rest), meter_offset_s)
    if name == "command" and rest:
        return CommandMeter(rest, meter_offset_s)
    raise UsageError(f"--power-source {text} is not known. Use board, model, csv:FILE or command:CMD.")


def _model(text: str) -> PowerModel:
    names = {"idle": "idle_watts", "busy": "busy_watts", "exponent": "exponent"}
    values: dict[str, float] = {}
    for word in filter(None, text.split(",")):
        key, _, value = word.partition("=")
        try:
            values[names[key]] = float(value)
        except (KeyError, ValueError):
            raise UsageError(
                f"{word!r} is no number of the power model. Use model:idle=2,busy=4,exponent=2.5."
            ) from None
    if not all(math.isfinite(v) and v >= 0 for v in values.values()):
        raise UsageError(f"model:{text} has a number below zero. Use model:idle=2,busy=4,exponent=2.5.")
    return PowerModel(**values)


def _epoch(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()


def peak(readings: Sequence[Reading]) -> float:
    """The paper's power of a point: the highest reading while it was measured."""
    return max(watts for _, watts in readings)
