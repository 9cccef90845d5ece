"""What a board shows of itself beside the facts of cross/probe.py: one POSIX script, and its text as values.

The script takes the folder that builds are sent to. TASTE_ROOT stands before /proc and /sys, for trees that a test made.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cross.probe import read_sections
from host_control.deploy import mount_of

SIGNS_SCRIPT = r"""
root=${TASTE_ROOT-}
say() { printf '\n== %s\n' "$1"; }
show() { for file do [ -r "$file" ] && printf '%s ' "$(cat "$file")" || printf -- '- '; done; echo; }
say user; id -un
say clock; date +%s
folder=$1
case $folder in '~/'*) folder=$HOME/${folder#??} ;; /*) ;; *) folder=$HOME/$folder ;; esac
while [ ! -d "$folder" ]; do folder=${folder%/*}; [ -n "$folder" ] || folder=/; done
say folder; cd "$folder" && pwd -P
say writable; [ -w . ] && echo yes || echo no
say disk; df -Pk .
say limit_kib; ulimit -v
for file in /proc/mounts /proc/meminfo /proc/loadavg; do say "$file"; [ -r "$root$file" ] && cat "$root$file"; done
say frequencies
for policy in "$root"/sys/devices/system/cpu/cpufreq/policy*; do
  [ -d "$policy" ] || continue
  printf '%s ' "${policy##*/}"
  show "$policy/scaling_governor" "$policy/scaling_cur_freq" "$policy/scaling_min_freq" "$policy/scaling_max_freq"
done
say temperatures
for zone in "$root"/sys/class/thermal/thermal_zone*; do [ -d "$zone" ] && show "$zone/temp" "$zone/type"; done
say sensors
for device in "$root"/sys/class/hwmon/hwmon* "$root"/sys/bus/iio/devices/iio:device*; do
  [ -r "$device/name" ] || continue
  printf '%s' "$(cat "$device/name")"
  for file in "$device"/in*_input "$device"/curr*_input "$device"/power*_input "$device"/energy*_input \
      "$device"/in_voltage*_input "$device"/in_current*_input "$device"/in_power*_input; do
    [ -e "$file" ] && printf ' %s' "${file##*/}"
  done
  echo
done
say throttled; vcgencmd get_throttled
say python; python3 -c 'import sys, numpy, cffi; print("%d.%d" % sys.version_info[:2], numpy.__version__, cffi.__version__)'
exit 0
"""
"""Prints sections, each after a line `== NAME`. Needs sh, cat, df, id, date; another missing tool costs a section."""

_THROTTLE_BITS = {
    0: "under-voltage",
    1: "frequency capped",
    2: "throttled",
    3: "at the soft temperature limit",
}
_SINCE_BOOT = 16
_POWER_FILES = re.compile(r"\b(power|energy|curr|in_current|in_power)\w*")


@dataclass(frozen=True)
class Policy:
    """Cores that change their frequency together; kHz, 0 where the kernel does not say."""

    name: str
    governor: str
    current_khz: int
    least_khz: int
    most_khz: int


@dataclass(frozen=True)
class Signs:
    """Sizes in bytes, None where the board did not say. `throttled_now`, `throttled_before` (since it was started): by
    what. `throttling` False: it has nothing that would tell. `power_sensors`: those that measure power or current."""

    user: str
    clock_s: int | None
    folder: str
    writable: bool
    free_bytes: int | None
    mount: str
    mount_options: tuple[str, ...]
    address_limit_bytes: int | None
    memory_available_bytes: int
    memory_bytes: int
    load: float | None
    policies: tuple[Policy, ...]
    temperatures_c: tuple[tuple[str, float], ...]
    sensors: tuple[str, ...]
    power_sensors: tuple[str, ...]
    throttling: bool
    throttled_now: tuple[str, ...]
    throttled_before: tuple[str, ...]
    python: str


def parse_signs(text: str) -> Signs:
    """Values from the output of `SIGNS_SCRIPT`; what a board does not show is empty or None."""
    sections = read_sections(text)

    def lines(name: str) -> list[str]:
        return [line for line in sections.get(name, "").splitlines() if line.strip()]

    user, folder = lines("user"), sections.get("folder", "")
    memory = {
        name: int(kib) * 1024
        for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", sections.get("/proc/meminfo", ""), re.M)
    }
    mount, options = mount_of(folder, sections.get("/proc/mounts", ""))
    throttled = re.search(r"throttled=(0x[0-9a-fA-F]+)", sections.get("throttled", ""))
    bits = int(throttled[1], 16) if throttled else 0
    limit = _number(sections.get("limit_kib"))
    disk = re.findall(r"\s(\d+)\s+\d+%\s+/", sections.get("disk", ""))
    load = lines("/proc/loadavg")
    sensors = [(name, rest) for name, _, rest in (line.partition(" ") for line in lines("sensors"))]
    return Signs(
        user=user[0] if user else "",
        clock_s=_number(sections.get("clock")),
        folder=folder,
        writable=sections.get("writable") == "yes",
        free_bytes=int(disk[-1]) * 1024 if disk else None,
        mount=mount,
        mount_options=options,
        address_limit_bytes=None if limit is None else limit * 1024,
        memory_available_bytes=memory.get("MemAvailable", memory.get("MemFree", 0) + memory.get("Cached", 0)),
        memory_bytes=memory.get("MemTotal", 0),
        load=float(load[0].split()[0]) if load and re.match(r"[\d.]+ ", load[0]) else None,
        policies=tuple(policy for line in lines("frequencies") if (policy := _policy(line.split()))),
        temperatures_c=tuple(zone for line in lines("temperatures") if (zone := _zone(line.split(None, 1)))),
        sensors=tuple(name for name, _ in sensors),
        power_sensors=tuple(name for name, files in sensors if _POWER_FILES.search(files)),
        throttling=throttled is not None,
        throttled_now=_named(bits),
        throttled_before=_named(bits >> _SINCE_BOOT),
        python=sections.get("python", "").split("\n")[0],
    )


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _policy(words: list[str]) -> Policy | None:
    if len(words) != 5:
        return None
    current, least, most = (_number(word) or 0 for word in words[2:])
    return Policy(words[0], words[1], current, least, most)


def _zone(words: list[str]) -> tuple[str, float] | None:
    """A thermal zone; sensors that are not connected show temperatures of no board."""
    if not words or not re.fullmatch(r"-?\d+", words[0]):
        return None
    celsius = int(words[0]) / 1000
    return (words[1].strip() if len(words) > 1 else "", celsius) if -40 < celsius < 150 and celsius != 0 else None


def _named(bits: int) -> tuple[str, ...]:
    return tuple(name for bit, name in _THROTTLE_BITS.items() if bits >> bit & 1)
