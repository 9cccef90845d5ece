"""What a `-netns` board shows in /proc in place of this machine's: the CPU it emulates and the memory it has."""

from __future__ import annotations

import re
from pathlib import Path

from cross.probe import cpu_fields
from cross.target import Target


def write_face(folder: Path, target: Target, cores: int) -> None:
    """Write `cpuinfo` and `meminfo`; the `vendor_id` in the first says that this is an emulator."""
    folder.mkdir(exist_ok=True)
    fields = {"vendor_id": "QEMU user emulation", **cpu_fields(target)}
    processors = [{"processor": str(number), **fields} for number in range(cores)]
    text = "".join("".join(f"{key}\t: {value}\n" for key, value in one.items()) + "\n" for one in processors)
    (folder / "cpuinfo").write_text(text)
    total = target.ram_mib << 10
    here = re.search(r"^MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    available = min(total * 9 // 10, int(here[1]) if here else total)
    table = {"MemTotal": total, "MemFree": available, "MemAvailable": available, "SwapTotal": 0, "SwapFree": 0}
    (folder / "meminfo").write_text("".join(f"{key}:{value:>16} kB\n" for key, value in table.items()))
