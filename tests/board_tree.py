"""Trees in place of a board's /proc and /sys: sensors of several boards, and a CPU whose frequency can be set."""

from __future__ import annotations

from pathlib import Path

INA = "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0"
POLICY = "sys/devices/system/cpu/cpufreq/policy"
STEPS_KHZ = (600_000, 750_000, 1_000_000, 1_500_000)

PMIC_ANSWER = """\
     3V7_WL_SW_A current(0)=0.00390372A
       VDD_CORE_A current(7)=2.50000000A
     3V7_WL_SW_V volt(8)=3.70000000V
       VDD_CORE_V volt(15)=0.80000000V
          EXT5V_V volt(24)=5.15386000V
           BATT_V volt(25)=0.00000000V
"""
PMIC_WATTS = 0.00390372 * 3.7 + 2.5 * 0.8


def write(root: Path, files: dict[str, object]) -> Path:
    """Files by their paths below `root`, each with a line."""
    for name, value in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return root


def jetson_nano(root: Path) -> Path:
    """The whole board's input 5,064 mV x 912 mA = 4.618 W; GPU and CPU hang on it."""
    rails = [("POM_5V_IN", 5064, 912), ("POM_5V_GPU", 5040, 100), ("POM_5V_CPU", 5040, 410)]
    files: dict[str, object] = {}
    for n, (name, millivolts, milliamperes) in enumerate(rails):
        files |= {f"{INA}/rail_name_{n}": name, f"{INA}/in_voltage{n}_input": millivolts}
        files |= {
            f"{INA}/in_current{n}_input": milliamperes,
            f"{INA}/in_power{n}_input": millivolts * milliamperes // 1000,
        }
    zones = {"PMIC-Die": 100_000, "AO-therm": 41_000, "CPU-therm": 38_500}
    for n, (kind, value) in enumerate(zones.items()):
        files |= {f"sys/class/thermal/thermal_zone{n}/type": kind, f"sys/class/thermal/thermal_zone{n}/temp": value}
    return write(root, files)


def jetson_orin(root: Path) -> Path:
    """AGX Orin: no rail that all hang on; 5.0 x 2.0 + 5.0 x 0.6 = 13 W in two chips, a third chip measures no power."""
    base = "sys/class/hwmon/hwmon"
    files: dict[str, object] = {f"{base}0/name": "tmp451", f"{base}0/in1_input": 3300, f"{base}0/curr1_input": 9000}
    for chip, name, milliamperes in ((1, "VDD_GPU_SOC", 2000), (3, "VDD_CPU_CV", 600)):
        files |= {f"{base}{chip}/name": "ina3221", f"{base}{chip}/in1_label": name, f"{base}{chip}/in1_input": 5000}
        files |= {f"{base}{chip}/curr1_input": milliamperes, f"{base}{chip}/in4_input": 16}
    return write(root, files)


def hwmon_power(root: Path, microwatts: int = 3_250_000) -> Path:
    base = "sys/class/hwmon/hwmon0"
    return write(root, {f"{base}/name": "ina226", f"{base}/power1_input": microwatts})


def hwmon_energy(root: Path) -> Path:
    base = "sys/class/hwmon/hwmon0"
    return write(root, {f"{base}/name": "scmi_sensors", f"{base}/energy1_input": 1_000_000})


def raspberry_pi_5(root: Path) -> Path:
    return vcgencmd(root, f"cat <<'END'\n{PMIC_ANSWER}END")


def raspberry_pi_4(root: Path) -> Path:
    """Its firmware does not know the question."""
    return vcgencmd(root, "echo 'error=1 error_msg=\"Command not registered\"'; exit 255")


def vcgencmd(root: Path, body: str) -> Path:
    tool = root / "usr/bin/vcgencmd"
    tool.parent.mkdir(parents=True, exist_ok=True)
    tool.write_text(f'#!/bin/sh\n[ "$1" = pmic_read_adc ] || exit 1\n{body}\n')
    tool.chmod(0o755)
    files = {"sys/class/thermal/thermal_zone0/temp": 55_000, "sys/class/thermal/thermal_zone0/type": "cpu-thermal"}
    return write(root, files | {"sys/devices/platform/soc/soc:firmware/get_throttled": "50000"})


def rapl(root: Path, microjoules: int = 5_000_000) -> Path:
    base = "sys/class/powercap/intel-rapl:0"
    return write(
        root, {f"{base}/name": "package-0", f"{base}/energy_uj": microjoules, f"{base}/max_energy_range_uj": 2**38}
    )


def cpufreq(root: Path, *, userspace: bool = True, policies: tuple[int, ...] = (0,), listed: bool = True) -> Path:
    """A clock that follows at once: what is current is a link to what is asked for."""
    for number in policies:
        base = f"{POLICY}{number}"
        governors = "conservative ondemand userspace powersave performance" if userspace else "powersave performance"
        files: dict[str, object] = {
            "scaling_governor": "ondemand" if userspace else "powersave",
            "scaling_available_governors": governors,
            "scaling_min_freq": STEPS_KHZ[0],
            "scaling_max_freq": STEPS_KHZ[-1],
            "cpuinfo_min_freq": STEPS_KHZ[0],
            "cpuinfo_max_freq": STEPS_KHZ[-1],
            "affected_cpus": number,
            "scaling_setspeed": STEPS_KHZ[0] if userspace else "<unsupported>",
        }
        if listed:
            files["scaling_available_frequencies"] = " ".join(map(str, STEPS_KHZ))
        write(root / base, files)
        (root / base / "scaling_cur_freq").symlink_to("scaling_setspeed" if userspace else "scaling_max_freq")
    return write(root, {"proc/sys/kernel/random/boot_id": "5d2a-boot"})


def settings(root: Path, number: int = 0) -> dict[str, str]:
    """What cpufreq is set to: all that has to be as before."""
    names = ("scaling_governor", "scaling_min_freq", "scaling_max_freq")
    return {name: (root / f"{POLICY}{number}" / name).read_text().strip() for name in names}
