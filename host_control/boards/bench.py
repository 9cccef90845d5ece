"""One measurement: the command line of `taste-train bench`, and what its output and exit code mean."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cross.errors import (
    CompatibilityError,
    DoesNotFitError,
    FileError,
    TasteError,
    UsageError,
    error_for_exit_code,
)
from host_control.board import Counters, OperatingPoint, counters_from
from host_control.connection import RunResult

_KILLED = 128 + signal.SIGKILL
_ILLEGAL_INSTRUCTION = 128 + signal.SIGILL
_ENDED = (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127


@dataclass(frozen=True)
class BenchSettings:
    """What stays the same over a study: at least `seconds` and `min_steps` a size; None leaves it to the program.

    `owner` names whoever measures: a measurement that went on without its owner is collected by the same one only.
    `record` is what the board keeps of it for whoever attaches.
    `power_every`: seconds between samples of the board's sensors, None for none.
    """

    seconds: float = 2.0
    min_steps: int | None = None
    warmup: int | None = None
    seed: int | None = None
    memory_bytes: int | None = None
    weights: str | None = None
    owner: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)
    power_every: float | None = None


def bench_arguments(point: OperatingPoint, settings: BenchSettings) -> list[str]:
    """Arguments of taste-train (without its path) that measure `point`."""
    if point.batch_size < 1:
        raise UsageError(f"batch size {point.batch_size} is not at least 1.")
    flags: list[tuple[str, object]] = [
        ("--batch-size", point.batch_size),
        # Without it the program takes what `train` would: train_fused where the build has it.
        ("--program", None if point.program == "train" else point.program),
        ("--seconds", f"{settings.seconds:g}"),
        ("--min-steps", settings.min_steps),
        ("--warmup", settings.warmup),
        ("--threads", point.threads),
        ("--cores", ",".join(map(str, point.cores)) if point.cores is not None else None),
        ("--weights", settings.weights),
        ("--memory", settings.memory_bytes),
        ("--seed", settings.seed),
        ("--frequency", point.frequency_khz),
        ("--power-every", settings.power_every),
    ]
    return ["bench", *(word for flag, value in flags if value is not None for word in (flag, str(value)))]


def bench_limit_s(point: OperatingPoint, settings: BenchSettings, emulated: bool) -> float:
    """Seconds after which a measurement counts as hung: eight steps at 0.7 samples/s, and a quarter of that in QEMU."""
    return 120.0 + 30.0 * settings.seconds + 12.0 * point.batch_size * (4 if emulated else 1)


def read_bench(result: RunResult, point: OperatingPoint, board: str, *, emulated: bool | None = None) -> Counters:
    """Counters from a finished bench; raises the TasteError its exit code stands for, with its own line of stderr.

    `emulated=None` takes the program's own word for it.
    """
    check_exit(result, f"batch size {point.batch_size} on {board}")
    record = last_record(result.stdout, "result")
    if record is None:
        raise TasteError(
            f"taste-train on {board} ended with exit code 0 but printed no result for batch size {point.batch_size}: "
            f"{last_line(result.stdout) or 'no output'}. Deploy again; if it stays, report it."
        )
    try:
        return counters_from(record, emulated=emulated)
    except (KeyError, TypeError, ValueError) as error:
        raise CompatibilityError(
            f"the result of taste-train on {board} lacks or garbles {error}: not this host's version. Deploy again."
        ) from error


def check_exit(result: RunResult, what: str) -> None:
    """Return where `result` is exit 0; otherwise raise what its exit code or signal means for `what`."""
    code, said = result.exit_code, last_line(result.stderr)
    if code == 0:
        return
    if code == _KILLED:
        planned = (last_record(result.stdout, "plan") or {}).get("planned_bytes")
        size = f" ({planned / 2**20:.0f} MiB planned)" if isinstance(planned, int) else ""
        raise DoesNotFitError(
            f"{what}{size} was killed by the board's kernel (exit 137), as it does when memory runs out. "
            "Use a smaller batch size, or free memory on the board."
        )
    if code == _ILLEGAL_INSTRUCTION:
        raise CompatibilityError(
            f"{what}: the board's CPU met an instruction it does not have (SIGILL, exit 132). Build for its own target."
        )
    if code in (_NOT_EXECUTABLE, _NOT_FOUND):
        state = "is not there any more" if code == _NOT_FOUND else "cannot be executed"
        raise FileError(f"{what}: {result.arguments[0]} {state} (exit {code}): {said or 'no message'}. Deploy again.")
    if code in _ENDED:
        raise TasteError(f"{what} was ended from outside (signal {code - 128}). Run it again.")
    if code > 128:
        name = signal.Signals(code - 128).name if code - 128 in set(signal.Signals) else f"signal {code - 128}"
        raise TasteError(
            f"{what} crashed with {name} (exit {code}). This is a bug: report it with the model and target."
        )
    message = said.removeprefix("error: ").removeprefix("taste-train: ")
    raise error_for_exit_code(code, message or f"{what} failed with exit code {code} and said nothing.")


def last_record(stdout: str, event: str) -> dict[str, Any] | None:
    """The last JSON Lines object whose `event` is this one; text that is not JSON is passed over."""
    for line in reversed(stdout.splitlines()):
        if line.startswith("{"):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record.get("event") == event:
                return dict(record)
    return None


def last_line(text: str) -> str:
    """The last line that is not blank, or ''."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
