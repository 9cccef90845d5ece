"""`doctor`: signs read by its script from trees of boards, what they mean, and the verb on this host, here and over SSH."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import host_control.boards as boards
from cross.probe import BoardFacts, parse_probe
from cross.target import find_target
from host_control.boards import open_board
from host_control.cli import main
from host_control.doctor.board import board_findings
from host_control.doctor.finding import Finding
from host_control.doctor.host import _zig, host_findings
from host_control.doctor.signs import SIGNS_SCRIPT, Signs, parse_signs
from tests.sshd.server import ALIAS, make_key, run_sshd

PROBES = Path(__file__).parent / "probes"
MEMINFO = "MemTotal:  3884324 kB\nMemAvailable: 3512345 kB\nSwapFree: 102396 kB\n"
PI_COOLING = {"sys/class/thermal/thermal_zone0/temp": "48312", "sys/class/thermal/thermal_zone0/type": "cpu-thermal"}


def policy(number: int, governor: str, current: int, least: int, most: int) -> dict[str, str]:
    folder = f"sys/devices/system/cpu/cpufreq/policy{number}"
    values = {"governor": governor, "cur_freq": current, "min_freq": least, "max_freq": most}
    return {f"{folder}/scaling_{name}": str(value) for name, value in values.items()}


@dataclass(frozen=True)
class Machine:
    """A board's tree below TASTE_ROOT, and what its programs say; `probe`: its recorded facts."""

    probe: str
    files: dict[str, str] = field(default_factory=dict)
    programs: dict[str, str] = field(default_factory=dict)


MACHINES = {
    "rpi4": Machine(
        "rpi4",
        PI_COOLING | policy(0, "ondemand", 600000, 600000, 1500000) | {"sys/class/hwmon/hwmon0/name": "cpu_thermal"},
        {"vcgencmd": "throttled=0x50005"},
    ),
    "rpi5": Machine(
        "rpi5",
        PI_COOLING
        | policy(0, "performance", 2400000, 1500000, 2400000)
        | {"sys/class/hwmon/hwmon1/name": "rpi_volt", "sys/class/hwmon/hwmon1/in0_lcrit_alarm": "0"},
        {"vcgencmd": "throttled=0x0"},
    ),
    "jetson": Machine(
        "jetson-xavier",
        {"sys/class/thermal/thermal_zone0/temp": "81500", "sys/class/thermal/thermal_zone0/type": "CPU-therm"}
        | {"sys/class/thermal/thermal_zone1/temp": "-256000", "sys/class/thermal/thermal_zone1/type": "PMIC-Die"}
        | policy(0, "schedutil", 1190400, 115200, 2265600)
        | policy(2, "schedutil", 1190400, 115200, 2265600)
        | {
            "sys/bus/iio/devices/iio:device0/name": "ina3221x",
            "sys/bus/iio/devices/iio:device0/in_power0_input": "900",
        },
    ),
    "visionfive2": Machine("visionfive2", policy(0, "performance", 1500000, 375000, 1500000)),
    "nothing": Machine("rpi3"),
}


def read(machine: Machine, folder: Path, shell: tuple[str, ...] = ("sh",)) -> Signs:
    """The script, really run, on the tree of a machine."""
    root, programs = folder / "root", folder / "bin"
    for name, text in ({"proc/meminfo": MEMINFO, "proc/loadavg": "0.12 0.2 0.1 1/99 1\n"} | machine.files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    programs.mkdir()
    for name, says in ({"python3": ""} | machine.programs).items():
        (programs / name).write_text(f"#!/bin/sh\necho '{says}'\n")
        (programs / name).chmod(0o755)
    environment = {**os.environ, "TASTE_ROOT": str(root), "PATH": f"{programs}:/usr/bin:/bin"}
    command = [*shell, "-c", SIGNS_SCRIPT, "taste-doctor", str(folder / "not there" / "yet")]
    said = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=60)
    return parse_signs(said.stdout)


def facts_of(name: str) -> BoardFacts:
    return parse_probe((PROBES / f"{name}.txt").read_text(encoding="utf-8"))


def findings(name: str, folder: Path, **changes: Any) -> dict[str, Finding]:
    signs = replace(read(MACHINES[name], folder), **changes)
    return {f.name: f for f in board_findings(facts_of(MACHINES[name].probe), signs, signs.clock_s or 0)}


def test_a_pi_4_that_was_throttled(tmp_path: Path) -> None:
    found = findings("rpi4", tmp_path)
    assert found["CPU"].value == "cortex-a72, 128-bit vectors; runs rpi4 (needs neon)" and found["CPU"].level == "ok"
    assert found["throttling"].value == "now: under-voltage, throttled" and found["throttling"].level == "warn"
    assert "power supply" in found["throttling"].remedy
    assert found["governor"].level == "warn" and "scaling_governor" in found["governor"].remedy
    assert found["frequency"].value == "600 of 600..1500 MHz" and found["temperature"].value == "48 C (cpu-thermal)"
    assert found["memory"].value == "3430 MiB of 3793 MiB free" and found["swap"].level == "warn"
    assert found["sensors"].value == "cpu_thermal; power is not measured"
    assert found["folder"].value == str(tmp_path) and found["disk"].level in ("ok", "warn")


def test_a_pi_4_that_was_throttled_before(tmp_path: Path) -> None:
    signs = parse_signs("\n== throttled\nthrottled=0x80000\n")
    assert (signs.throttling, signs.throttled_now, signs.throttled_before) == (
        True,
        (),
        ("at the soft temperature limit",),
    )
    (found,) = [f for f in board_findings(facts_of("rpi4"), signs, 0) if f.name == "throttling"]
    assert found.value.startswith("since it was started") and found.level == "warn"


def test_a_pi_5_at_its_best(tmp_path: Path) -> None:
    found = findings("rpi5", tmp_path)
    assert found["page size"].value == "16 KiB" and found["throttling"].value == "none since it was started"
    assert found["governor"] == Finding("governor", "performance")
    assert "runs rpi5" in found["CPU"].value


def test_a_jetson_that_is_hot_and_measures_its_power(tmp_path: Path) -> None:
    found = findings("jetson", tmp_path)
    assert found["temperature"].value == "82 C (CPU-therm)" and found["temperature"].level == "warn"
    assert found["sensors"].value == "ina3221x; power by ina3221x" and found["throttling"].value == "not available"
    assert found["frequency"].value.count("1190 of 115..2266 MHz") == 2


def test_a_visionfive_2(tmp_path: Path) -> None:
    found = findings("visionfive2", tmp_path)
    assert found["CPU"].value == "sifive-u74, no vectors; runs visionfive2 (needs rv64gc)"
    assert found["temperature"].value == "not available"


def test_a_board_that_shows_nothing(tmp_path: Path) -> None:
    found = findings("nothing", tmp_path)
    assert {f.level for name, f in found.items() if name not in ("swap",)} <= {"ok", "warn"}
    assert found["governor"].value == "not available" and found["Python there"].value.startswith("no Python")
    empty = board_findings(facts_of("rpi3"), parse_signs(""), 0)
    assert {"clock", "disk", "load"} <= {f.name for f in empty if f.value == "unknown"}


SHELLS = [("sh",), ("bash", "--posix"), pytest.param(("busybox", "sh"), marks=pytest.mark.needs("busybox"))]


@pytest.mark.parametrize("shell", SHELLS, ids=["sh", "bash", "busybox"])
def test_every_shell_of_boards_runs_the_script(shell: tuple[str, ...], tmp_path: Path) -> None:
    signs = read(MACHINES["rpi4"], tmp_path, shell)
    assert signs.throttled_before == ("under-voltage", "throttled") and signs.writable and signs.free_bytes
    assert signs.user and signs.policies[0].most_khz == 1500000 and signs.load == 0.12


@pytest.mark.parametrize(
    ("changes", "name", "level", "code"),
    [
        ({"writable": False}, "folder", "fail", 12),
        ({"mount": "/home", "mount_options": ("rw", "noexec")}, "folder", "fail", 12),
        ({"free_bytes": 1 << 20}, "disk", "fail", 11),
        ({"free_bytes": 100 << 20}, "disk", "warn", 1),
        ({"clock_s": 10**9}, "clock", "ok", 1),
        ({"load": 3.9}, "load", "warn", 1),
        ({"address_limit_bytes": 64 << 20}, "ulimit -v", "warn", 1),
        ({"address_limit_bytes": 1 << 40}, "ulimit -v", "ok", 1),
        ({"memory_available_bytes": 8 << 30}, "memory limit", "warn", 1),
    ],
)
def test_what_stands_in_the_way(changes: dict[str, Any], name: str, level: str, code: int, tmp_path: Path) -> None:
    found = findings("rpi4", tmp_path, **changes)[name]
    assert (found.level, found.exit_code) == (level, code)
    assert bool(found.consequence) == bool(found.remedy) == (level != "ok")


def test_a_clock_without_a_battery(tmp_path: Path) -> None:
    signs = read(MACHINES["rpi4"], tmp_path)
    assert signs.clock_s
    (found,) = [f for f in board_findings(facts_of("rpi4"), signs, signs.clock_s + 86400) if f.name == "clock"]
    assert found.value == "-86400 s from this host" and "timedatectl" in found.remedy


@pytest.mark.parametrize(
    ("probe", "program", "words"),
    [
        ("rpi4", "rpi5", "needs"),
        ("rpi4", "bpi-f3", "the board's CPU is aarch64"),
        ("visionfive2", "bpi-f3", "needs v"),
        ("rpi3-32-bit-kernel", None, "32-bit kernel"),
    ],
)
def test_a_binary_that_the_cpu_cannot_run_is_said_before_any_build(probe: str, program: str | None, words: str) -> None:
    target = find_target(program) if program else None
    (found,) = [f for f in board_findings(facts_of(probe), parse_signs(""), 0, target) if f.name == "CPU"]
    assert (found.level, found.exit_code) == ("fail", 13) and words in found.consequence and found.remedy.endswith(".")


def test_little_memory_and_a_32_bit_userland() -> None:
    facts = facts_of("rpi4-32-bit-userland")
    for free, level in ((20 << 20, "fail"), (100 << 20, "warn"), (1 << 30, "ok")):
        found = {f.name: f for f in board_findings(replace(facts, memory_available_bytes=free), parse_signs(""), 0)}
        assert found["memory"].level == level
        assert "32-bit userland" in found["kernel"].value and found["CPU"].level == "ok"


def doctor(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any], str]:
    code = main(["doctor", *map(str, words), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out.splitlines()[-1]), err


def test_this_host(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, result, err = doctor(capsys)
    names = {finding["name"] for finding in result["findings"]}
    assert {"Python", "packages", "TVM", "zig", "qemu-aarch64", "qemu-riscv64", "ssh", "disk"} <= names
    assert all(set(f) == {"name", "value", "level", "consequence", "remedy"} for f in result["findings"])
    assert (code, err) == (0, "") and not list(tmp_path.iterdir()), "it leaves nothing"


def test_a_host_where_something_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    assert {f.name for f in host_findings(Path()) if f.level == "warn"} >= {"qemu-aarch64", "qemu-riscv64", "ssh"}

    def broken(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        raise OSError("exec format error")

    assert _zig(broken).level == "fail"
    monkeypatch.setattr("host_control.doctor.host._version", lambda name: None if name == "apache-tvm" else "1")
    code, _, err = doctor(capsys)
    assert code == 22 and err == "error: TVM: nothing can be built. Run `make tune`, or pip install it.\n"


def test_this_machine_as_the_board(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, result, _ = doctor(capsys, "--board", "local", "--remote-dir", tmp_path / "board")
    found = {finding["name"]: finding for finding in result["findings"]}
    assert found["folder"]["value"] == str(tmp_path) and found["reachable"]["level"] == "ok"
    assert code == 0 and result["board"] == "local"
    assert main(["doctor", "--board", "local"]) == 0
    assert "consequence" in capsys.readouterr().out


@pytest.mark.needs("sshd")
def test_a_board_over_ssh_and_what_keeps_one_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_sshd(tmp_path) as server:
        monkeypatch.setattr(boards, "open_board", partial(open_board, ssh_config=server.config))
        words = ("--board", ALIAS, "--remote-dir", tmp_path / "there")
        code, result, err = doctor(capsys, *words)
        assert code == 19 and err.startswith("error: host key: the host key of") and err.count("\n") == 1
        assert [f["name"] for f in result["findings"]] == ["host key"]
        server.know()
        code, result, err = doctor(capsys, *words)
        assert code == 0 and {"reachable", "host key", "run"} <= {f["name"] for f in result["findings"]}
        config = tmp_path / "other"
        config.write_text(server.config.read_text().replace(str(server.user_key), str(make_key(tmp_path / "wrong"))))
        monkeypatch.setattr(boards, "open_board", partial(open_board, ssh_config=config))
        assert doctor(capsys, *words)[0] == 21
    code, result, err = doctor(capsys, *words)
    assert code == 17 and result["findings"][0]["level"] == "fail" and "Check that it is up" in err
