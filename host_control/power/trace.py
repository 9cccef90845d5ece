"""What the program on the board said of the board while it measured: samples of its sensors, and when it measured."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from host_control.power.energy import Reading, within


@dataclass(frozen=True)
class Trace:
    """`samples`: (seconds of the board's monotonic clock, watts) of its own sensor; `start`, `end` of the measured
    windows on that clock. `temperature_c`: the highest; `throttle_bits`: all that were seen; `frequency_khz`: the lowest
    and the highest that the kernel said. None: not available. `lost`: the sensor told watts, and then failed."""

    samples: tuple[Reading, ...]
    start: float
    end: float
    source: str | None
    temperature_c: float | None
    throttle_bits: int | None
    frequency_khz: tuple[int, int] | None
    warnings: tuple[str, ...]
    lost: bool = False


def events_of(stdout: str) -> list[dict[str, Any]]:
    """The JSON objects among the lines."""
    found = []
    for line in stdout.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def read_trace(events: Iterable[dict[str, Any]]) -> Trace:
    """From the events of `taste-train bench` or `monitor`."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        kinds.setdefault(str(event.get("event")), []).append(event)
    power, windows = kinds.get("power", []), kinds.get("counters", [])
    start = end = 0.0
    if windows:
        end = windows[-1]["t_ns"] * 1e-9
        start = end - float(windows[-1]["elapsed_s"])
    elif "result" in kinds and "start_ns" in kinds["result"][-1]:
        start, end = (kinds["result"][-1][name] * 1e-9 for name in ("start_ns", "t_ns"))
    inside = [power[i] for i in within([event["t_ns"] * 1e-9 for event in power], start, end)]
    bits = [int(event["throttle_bits"]) for event in inside if event.get("throttle_bits") is not None]
    clocks = [int(event["frequency_khz"]) for event in inside if event.get("frequency_khz")]
    heat = [float(event["temperature_c"]) for event in inside if event.get("temperature_c") is not None]
    samples = tuple((event["t_ns"] * 1e-9, float(event["watts"])) for event in power if event["watts"] is not None)
    warnings = tuple(str(event.get("message")) for event in kinds.get("warning", []))
    return Trace(
        samples=samples,
        start=start,
        end=end,
        source=next((event["source"] for event in power if event.get("source")), None),
        temperature_c=max(heat, default=None),
        throttle_bits=_any_of(bits) if bits else None,
        frequency_khz=(min(clocks), max(clocks)) if clocks else None,
        warnings=warnings,
        # A counter that began again from 0 has no watts once, and no warning.
        lost=bool(warnings and samples)
        and any(event["watts"] is None and event["t_ns"] * 1e-9 > samples[0][0] for event in power),
    )


def _any_of(bits: Iterable[int]) -> int:
    together = 0
    for value in bits:
        together |= value
    return together
