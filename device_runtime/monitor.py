"""What a board says of itself: memory, load, frequency, temperature, throttling, power. Files of the kernel alone, no package.

    from device_runtime.monitor import Monitor

    monitor = Monitor()
    reading = monitor.read()
    print(reading.temperature_c, reading.watts, monitor.power_source)   # None: not available

`root` stands before every path, so that a tree of files can stand for a board. The same sensors in the same order as
`taste-train monitor` reads them (native/taste-train/sensors.c).
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from device_runtime.errors import DeviceError

_ANSWER_S = 2.0


@dataclass(frozen=True)
class Reading:
    """One look at the board; None: not available. `t_s` is the monotonic clock's. `throttle_bits` are those of the Raspberry Pi's
    firmware: 0 to 3 now, 16 to 19 since it started."""

    t_s: float
    memory_total_bytes: int | None
    memory_available_bytes: int | None
    load: float | None
    frequency_khz: int | None
    temperature_c: float | None
    throttle_bits: int | None
    watts: float | None


@dataclass(frozen=True)
class _Rail:
    """Files whose product times `scale` is watts, or joules of an energy counter that starts again after `wrap`."""

    name: str
    files: tuple[Path, ...]
    scale: float
    wrap: Path | None = None


class Monitor:
    """Finds the power sensor once; `read` looks at everything. `power_source`: ina3221, ina, hwmon, energy, pmic, rapl or None."""

    def __init__(self, root: str | Path = "") -> None:
        self._root = Path(root or "/")
        self._last: tuple[float, tuple[float, ...]] | None = None
        self.power_source, self._rails = self._find_power()

    def read(self) -> Reading:
        """Everything now. Watts of an energy counter are the mean since the last reading, None at the first.

        Raises DeviceError (12), one line, where a power sensor that was there is gone or holds no number.
        """
        memory = dict(re.findall(r"^(\w+):\s+(\d+) kB", self._text("proc/meminfo") or "", re.MULTILINE))
        load = self._text("proc/loadavg")
        bits = self._text("sys/devices/platform/soc/soc:firmware/get_throttled")
        return Reading(
            t_s=time.monotonic(),
            memory_total_bytes=int(memory["MemTotal"]) * 1024 if "MemTotal" in memory else None,
            memory_available_bytes=int(memory["MemAvailable"]) * 1024 if "MemAvailable" in memory else None,
            load=float(load.split()[0]) if load else None,
            frequency_khz=self._frequency(),
            temperature_c=self._temperature(),
            throttle_bits=int(bits, 16) if bits else None,
            watts=self._watts(),
        )

    def _text(self, path: str) -> str | None:
        return _text(self._root / path)

    def _frequency(self) -> int | None:
        found = [_text(file) for file in self._root.glob("sys/devices/system/cpu/cpufreq/policy*/scaling_cur_freq")]
        return max((int(text) for text in found if text and text.isdigit()), default=None)

    def _temperature(self) -> float | None:
        """Of the CPU's zone, or the first one; a Jetson's PMIC zone always says 100."""
        zones = sorted(self._root.glob("sys/class/thermal/thermal_zone*"), key=lambda zone: int(zone.name[12:]))
        found = [((_text(zone / "type") or "").lower(), _text(zone / "temp")) for zone in zones]
        kinds = [(kind, int(text) / 1000) for kind, text in found if text and text.lstrip("-").isdigit()]
        named = [degrees for kind, degrees in kinds if "cpu" in kind]
        others = [degrees for kind, degrees in kinds if "pmic" not in kind]
        return (named + others + [None])[0]

    # Power

    def _find_power(self) -> tuple[str | None, tuple[_Rail, ...]]:
        searches: tuple[tuple[str, Callable[[], list[_Rail]]], ...] = (
            ("ina3221", self._iio),
            ("ina", lambda: self._hwmon("ina")),
            ("hwmon", lambda: self._hwmon("power")),
            ("energy", lambda: self._hwmon("energy")),
        )
        for source, search in searches:
            rails = search()
            whole = [rail for rail in rails if rail.name.upper().endswith("_IN") and len(rail.name) > 3]
            if rails:
                return source, tuple(whole[:1] or rails)
        if self._pmic() is not None:
            return "pmic", ()
        rails = [
            _Rail(_text(zone / "name") or "package", (zone / "energy_uj",), 1e-6, zone / "max_energy_range_uj")
            for zone in sorted(self._root.glob("sys/class/powercap/intel-rapl:?"))
            if _text(zone / "energy_uj")
        ]
        return ("rapl", tuple(rails)) if rails else (None, ())

    def _iio(self) -> list[_Rail]:
        return [
            _Rail(
                _text(device / f"rail_name_{n}") or "rail",
                (device / f"in_voltage{n}_input", device / f"in_current{n}_input"),
                1e-6,
            )
            for device in sorted(self._root.glob("sys/bus/i2c/drivers/ina3221x/*/iio:device*"))
            for n in range(3)
            if _text(device / f"in_voltage{n}_input") and _text(device / f"in_current{n}_input")
        ]

    def _hwmon(self, kind: str) -> list[_Rail]:
        rails = []
        for chip in sorted(self._root.glob("sys/class/hwmon/hwmon*"), key=lambda chip: int(chip.name[5:])):
            ina = (_text(chip / "name") or "").startswith("ina")
            for n in range(1, 16):
                stems = ("in", "curr") if kind == "ina" else (kind,)
                files = tuple(chip / f"{stem}{n}_input" for stem in stems)
                if (ina or kind != "ina") and all(_text(file) for file in files):
                    rails.append(_Rail(_text(chip / f"{stems[0]}{n}_label") or kind, files, 1e-6))
        return rails

    def _pmic(self) -> float | None:
        """A Raspberry Pi 5's rails, as the firmware's own tool tells them: volts times amperes."""
        tool = self._root / "usr/bin/vcgencmd"
        if not tool.is_file():
            return None
        try:
            answer = subprocess.run(
                [tool, "pmic_read_adc"], capture_output=True, text=True, timeout=_ANSWER_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        pairs = re.findall(r"(\w+)_[AV] (current|volt)\(\d+\)=([\d.]+)", answer.stdout)
        values = {(name, what): float(value) for name, what, value in pairs}
        both = [name for name, what in values if what == "current" and (name, "volt") in values]
        return sum(values[name, "current"] * values[name, "volt"] for name in both) if both else None

    def _watts(self) -> float | None:
        if self.power_source == "pmic":
            watts = self._pmic()
            if watts is None:
                raise DeviceError("vcgencmd pmic_read_adc gave no rail. Run it by hand, and look at its rights.", 12)
            return watts
        counts = tuple(_product(rail) for rail in self._rails)
        if self.power_source not in ("energy", "rapl"):
            return sum(counts) if counts else None
        now, last = time.monotonic(), self._last
        self._last = (now, counts)
        if last is None:
            return None
        joules = 0.0
        for rail, count, before in zip(self._rails, counts, last[1]):
            restarted = count < before and rail.wrap is not None
            joules += count - before + (_number(rail.wrap) * rail.scale if restarted and rail.wrap else 0.0)
        return joules / (now - last[0])


def _product(rail: _Rail) -> float:
    value = rail.scale
    for file in rail.files:
        value *= _number(file)
    return value


def _number(file: Path) -> int:
    text = _text(file)
    if text is None:
        raise DeviceError(f"power sensor {file} cannot be read. Look at the board's sensor and its driver.", 12)
    try:
        return int(text)
    except ValueError:
        raise DeviceError(
            f"power sensor {file} holds {text[:40]!r}, no number. Look at the board's sensor and its driver.", 12
        ) from None


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None
