"""The device tree of a `-vm` with `--cpufreq`: QEMU's own, with CPU clocks and a thermal zone that its machine lacks.

Nothing here is a stand-in of ours: Debian's kernel binds its own cpufreq-dt to four operating points whose clock is chosen
by three multiplexers on the machine's GPIO lines, and its own bcm2835_thermal to a sensor. The sensor's registers are the
last page of memory, kept out of the kernel's hands and filled by QEMU at reset. No clock changes how fast QEMU is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from host_control.emulation.packages import run_tool

RATES_MHZ = (600, 1000, 1200, 1500)
"""What a Raspberry Pi 4 has between its lowest and its highest."""

CELSIUS = 48
FILE = "board.dtb"
_MEMORY_BASE, _PAGE = 0x40000000, 0x1000
_GPIO = "/pl061@9030000"
# BCM2835's sensor: degrees = 407 - 0.538 x reading, in ten bits, valid with the eleventh set (its data sheet, TSENSSTAT).
_SLOPE, _AT_ZERO, _VALID = -538, 407000, 1 << 10


def write_device_tree(machine: Sequence[str], memory_bytes: int, cores: int, folder: Path) -> None:
    """Write FILE into `folder`: the tree of the QEMU command `machine`, and what _overlay adds."""
    plain, source, overlay = (folder / f"{name}.part" for name in ("plain", "source", "overlay"))
    at = machine.index("virt")
    words = [*machine[:at], f"virt,dumpdtb={plain}", *machine[at + 1 :]]
    run_tool(*words, "-nodefaults", "-display", "none")
    gpio = int(run_tool("fdtget", plain, _GPIO, "phandle"))
    source.write_text(_overlay(memory_bytes, cores, gpio))
    run_tool("dtc", "-q", "-I", "dts", "-O", "dtb", "-o", overlay, source)
    run_tool("fdtoverlay", "-i", plain, "-o", folder / FILE, overlay)
    for part in (plain, source, overlay):
        part.unlink()


def sensor_arguments(memory_bytes: int) -> list[str]:
    """QEMU's flags that make the sensor read CELSIUS."""
    reading = _VALID | round((_AT_ZERO - CELSIUS * 1000) / -_SLOPE)
    return ["-device", f"loader,addr={_sensor(memory_bytes) + 4:#x},data={reading:#x},data-len=4"]


def _sensor(memory_bytes: int) -> int:
    return _MEMORY_BASE + (memory_bytes >> 20 << 20) - _PAGE


def _overlay(memory_bytes: int, cores: int, gpio: int) -> str:
    page = _sensor(memory_bytes)
    fixed = "".join(
        f'clock_{rate}: clock-{rate} {{ compatible = "fixed-clock"; #clock-cells = <0>; '
        f"clock-frequency = <{rate}000000>; }};\n"
        for rate in RATES_MHZ
    )
    points = "".join(f"opp-{rate} {{ opp-hz = /bits/ 64 <{rate}000000>; }};\n" for rate in RATES_MHZ)
    low, high = (_multiplexer(name, RATES_MHZ[i : i + 2], gpio, i // 2) for i, name in ((0, "low"), (2, "high")))
    cpus = "".join(
        f"&{{/cpus/cpu@{core}}} {{ clocks = <&clock_cpu>; operating-points-v2 = <&points>; #cooling-cells = <2>; }};\n"
        for core in range(cores)
    )
    return f"""/dts-v1/;
/plugin/;
&{{/}} {{
{fixed}{low}{high}{_multiplexer("cpu", ("low", "high"), gpio, 2)}
points: opp-table {{ compatible = "operating-points-v2"; opp-shared;
{points}}};
reserved-memory {{ #address-cells = <2>; #size-cells = <2>; ranges;
    sensor-page@{page:x} {{ reg = <0 {page:#x} 0 {_PAGE:#x}>; no-map; }};
}};
sensor: thermal@{page:x} {{ compatible = "brcm,bcm2837-thermal"; reg = <0 {page:#x} 0 8>; clocks = <&clock_{RATES_MHZ[0]}>;
    #thermal-sensor-cells = <0>; }};
thermal-zones {{ cpu-thermal {{ polling-delay-passive = <0>; polling-delay = <1000>; thermal-sensors = <&sensor>;
    coefficients = <({_SLOPE}) {_AT_ZERO}>;
    trips {{ critical {{ temperature = <90000>; hysteresis = <0>; type = "critical"; }}; }};
}}; }};
}};
{cpus}"""


def _multiplexer(name: str, inputs: Sequence[int | str], gpio: int, line: int) -> str:
    """A clock that is one of two others, as a GPIO line says."""
    first, second = (f"&clock_{one}" for one in inputs)
    return (
        f'clock_{name}: clock-{name} {{ compatible = "gpio-mux-clock"; #clock-cells = <0>; clocks = <{first}>, <{second}>; '
        f"select-gpios = <{gpio:#x} {line} 0>; }};\n"
    )
