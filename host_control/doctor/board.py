"""A board's facts and signs as findings. Pure: both were read before, over a link that stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cross.errors import CompatibilityError
from cross.probe import BoardFacts, check_runs_on, choose_target
from cross.target import Target, find_target
from host_control.console import mib
from host_control.doctor.finding import Finding, failed
from host_control.doctor.signs import Signs

LEAST_MEMORY_BYTES, LITTLE_MEMORY_BYTES = 32 << 20, 128 << 20
LEAST_DISK_BYTES, LITTLE_DISK_BYTES = 16 << 20, 256 << 20
HOT_C, CLOCK_OFF_S, BUSY_SHARE = 75.0, 60, 0.5


def board_findings(
    facts: BoardFacts, signs: Signs, host_clock_s: float, program: Target | dict[str, Any] | None = None
) -> list[Finding]:
    """Every finding, in the order of a table. `program`: the target, or the manifest of a build, that is to run there;
    None: what would be chosen."""
    return [
        Finding("user", signs.user or "unknown"),
        Finding("board", facts.model or "unknown", "warn" if facts.emulated else "ok", *_emulated(facts)),
        Finding("kernel", f"{facts.kernel}, {facts.arch}, {facts.userland_bits}-bit userland"),
        _cpu(facts, program),
        Finding("cores", str(facts.cores)),
        Finding("page size", f"{facts.page_size // 1024} KiB"),
        *_memory(facts, signs),
        *_disk(signs),
        _clock(signs, host_clock_s),
        _load(facts, signs),
        *_speed(signs),
        _throttling(signs),
        _temperature(signs),
        _sensors(signs),
        _python(signs),
    ]


def _emulated(facts: BoardFacts) -> tuple[str, str]:
    if not facts.emulated:
        return "", ""
    return "every rate is the emulator's, not a board's", "Measure on a real board."


def _cpu(facts: BoardFacts, program: Target | dict[str, Any] | None) -> Finding:
    """ISA and features against what the binary needs."""
    vectors = f"{facts.vector_bits}-bit vectors" if facts.vector_bits else "vectors of unknown length"
    if facts.vector_bits == 0 and "v" not in facts.features:
        vectors = "no vectors"
    shown = f"{facts.cpu or facts.arch}, {vectors}"
    try:
        chosen = program if program is not None else find_target(choose_target(facts))
        check_runs_on(chosen, facts)
    except CompatibilityError as error:
        return failed("CPU", shown, error)
    name = chosen.name if isinstance(chosen, Target) else str(chosen["target"])
    needs = ", ".join(chosen.features if isinstance(chosen, Target) else chosen["features"]) or "nothing beyond its ISA"
    return Finding("CPU", f"{shown}; runs {name} (needs {needs})")


def _memory(facts: BoardFacts, signs: Signs) -> Iterator[Finding]:
    free, total = facts.memory_available_bytes, signs.memory_bytes
    shown = f"{mib(free)} of {mib(total)} free" if total else f"{mib(free)} free"
    remedy = "End what else runs there, or take a smaller model or --lean."
    if free < LEAST_MEMORY_BYTES:
        yield Finding("memory", shown, "fail", "hardly any model fits", remedy, 10)
    elif free < LITTLE_MEMORY_BYTES:
        yield Finding("memory", shown, "warn", "only small models and batch sizes fit", remedy)
    else:
        yield Finding("memory", shown)
    if facts.swap_bytes:
        consequence = "a board that swaps measures its card, not its CPU"
        yield Finding("swap", mib(facts.swap_bytes), "warn", consequence, "For measuring, there: sudo swapoff -a")
    else:
        yield Finding("swap", "none")
    if free < signs.memory_available_bytes:
        yield Finding(
            "memory limit",
            f"a control group leaves {mib(free)} of {mib(signs.memory_available_bytes)}",
            "warn",
            "batch sizes end at the limit, not at the board's memory",
            "Raise MemoryMax of the user's slice, or of the container.",
        )
    else:
        yield Finding("memory limit", "no control group below what is free")
    limit = signs.address_limit_bytes
    if limit is not None:
        small = limit < free
        consequence = "batch sizes end at the limit, not at the board's memory" if small else ""
        remedy = "Raise `ulimit -v` in the login shell's start or limits.conf." if small else ""
        yield Finding("ulimit -v", mib(limit), "warn" if small else "ok", consequence, remedy)


def _disk(signs: Signs) -> Iterator[Finding]:
    remedy = "Free some, run `board clean`, or pass --remote-dir."
    if not signs.writable:
        yield Finding(
            "folder", signs.folder, "fail", "nothing can be sent there", "Pass a --remote-dir that can be written.", 12
        )
    elif "noexec" in signs.mount_options:
        consequence = f"{signs.mount} is mounted noexec: no program starts there"
        yield Finding("folder", signs.folder, "fail", consequence, "Pass --remote-dir on another file system.", 12)
    else:
        yield Finding("folder", signs.folder)
    free = signs.free_bytes
    if free is None:
        yield Finding("disk", "unknown")
    elif free < LEAST_DISK_BYTES:
        yield Finding("disk", f"{mib(free)} free", "fail", "no build fits", remedy, 11)
    elif free < LITTLE_DISK_BYTES:
        yield Finding("disk", f"{mib(free)} free", "warn", "data sets and checkpoints may not fit", remedy)
    else:
        yield Finding("disk", f"{mib(free)} free")


def _clock(signs: Signs, host_clock_s: float) -> Finding:
    if signs.clock_s is None:
        return Finding("clock", "unknown")
    off = signs.clock_s - host_clock_s
    if abs(off) < CLOCK_OFF_S:
        return Finding("clock", f"{off:+.0f} s from this host")
    consequence = "dates there are wrong; rates and timeouts are not, they use monotonic time"
    return Finding("clock", f"{off:+.0f} s from this host", "warn", consequence, "There: sudo timedatectl set-ntp true")


def _load(facts: BoardFacts, signs: Signs) -> Finding:
    if signs.load is None:
        return Finding("load", "unknown")
    if signs.load < BUSY_SHARE * facts.cores:
        return Finding("load", f"{signs.load:.2f}")
    consequence = "measurements are disturbed by what else runs"
    return Finding("load", f"{signs.load:.2f}", "warn", consequence, "End it, or wait for it.")


def _speed(signs: Signs) -> Iterator[Finding]:
    if not signs.policies:
        yield Finding("governor", "not available")
        return
    governors = sorted({policy.governor for policy in signs.policies})
    if governors == ["performance"]:
        yield Finding("governor", "performance")
    else:
        consequence = "the frequency follows the load, so short measurements vary"
        remedy = (
            "For measuring, there: echo performance | sudo tee /sys/devices/system/cpu/cpufreq/policy*/scaling_governor"
        )
        yield Finding("governor", ", ".join(governors), "warn", consequence, remedy)
    shown = [
        f"{p.current_khz / 1000:.0f} of {p.least_khz / 1000:.0f}..{p.most_khz / 1000:.0f} MHz" for p in signs.policies
    ]
    yield Finding("frequency", "; ".join(shown))


def _throttling(signs: Signs) -> Finding:
    if not signs.throttling:
        return Finding("throttling", "not available")
    if signs.throttled_now:
        cause = ", ".join(signs.throttled_now)
        remedy = (
            "Use the board's own power supply."
            if "under-voltage" in signs.throttled_now
            else "Give it a heat sink or a fan."
        )
        return Finding(
            "throttling",
            f"now: {cause}",
            "warn",
            "the board is slower than it can be, and measurements are discarded",
            remedy,
        )
    if signs.throttled_before:
        cause = ", ".join(signs.throttled_before)
        remedy = "Check its power supply and cooling; a restart forgets the history."
        return Finding("throttling", f"since it was started: {cause}", "warn", "it may happen again under load", remedy)
    return Finding("throttling", "none since it was started")


def _temperature(signs: Signs) -> Finding:
    if not signs.temperatures_c:
        return Finding("temperature", "not available")
    name, hottest = max(signs.temperatures_c, key=lambda zone: zone[1])
    shown = f"{hottest:.0f} C" + (f" ({name})" if name else "")
    if hottest < HOT_C:
        return Finding("temperature", shown)
    return Finding(
        "temperature",
        shown,
        "warn",
        "the board will throttle under load",
        "Let it cool, or give it a heat sink or a fan.",
    )


def _sensors(signs: Signs) -> Finding:
    names = ", ".join(dict.fromkeys(signs.sensors)) or "none"
    power = ", ".join(dict.fromkeys(signs.power_sensors))
    return Finding("sensors", f"{names}; power by {power}" if power else f"{names}; power is not measured")


def _python(signs: Signs) -> Finding:
    if not signs.python:
        return Finding("Python there", "no Python with numpy and cffi: only device_runtime needs it")
    version, numpy, cffi = (signs.python.split() + ["?", "?", "?"])[:3]
    return Finding("Python there", f"{version}, numpy {numpy}, cffi {cffi}")
