"""taste-train on boards with sensors and a settable clock (trees of files): power, frequency, operating points."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_runtime.errors import DeviceError
from device_runtime.monitor import Monitor
from tests import board_tree
from tests.native_builds import CLASSES, HOST
from tests.packed_data import pack

_KILLS = 50
_SEED = 20261130


@pytest.fixture(scope="session")
def program(build: Callable[..., Path]) -> Path:
    return build(HOST, "taste-train")


def start(program: Path, root: Path, *words: object) -> subprocess.Popen[str]:
    command = [str(program), *map(str, words), "--system-root", str(root)]
    home = os.environ | {"HOME": "/home/pi", "XDG_STATE_HOME": ""}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=home)


def run(program: Path, root: Path, *words: object) -> tuple[int, list[dict[str, Any]], str]:
    with start(program, root, *words) as process:
        out, errors = process.communicate(timeout=60)
    return process.returncode, [json.loads(line) for line in out.splitlines()], errors


def watched(program: Path, root: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    code, events, errors = run(program, root, "monitor", "--seconds", 0.1, "--power-every", 0.02)
    assert code == 0, errors
    return [event for event in events if event["event"] == "power"], events[-1]


@pytest.mark.parametrize(
    ("board", "source", "watts", "celsius"),
    [
        (board_tree.jetson_nano, "ina3221", 5.064 * 0.912, 38.5),
        (board_tree.jetson_orin, "ina", 13.0, None),
        (board_tree.hwmon_power, "hwmon", 3.25, None),
        (board_tree.raspberry_pi_5, "pmic", board_tree.PMIC_WATTS, 55.0),
        (board_tree.raspberry_pi_4, None, None, 55.0),
        (lambda root: root, None, None, None),
    ],
)
def test_each_board_is_read_by_its_own_sensor(
    program: Path,
    tmp_path: Path,
    board: Callable[[Path], Path],
    source: str | None,
    watts: float | None,
    celsius: float,
) -> None:
    """Also by what it is not: not the sum of rails of which one feeds the others, not mV as mW, not the PMIC's 100 C."""
    samples, result = watched(program, board(tmp_path))
    assert len(samples) >= 3 and result["source"] == source
    assert all(sample["watts"] == (pytest.approx(watts, rel=1e-6) if watts else None) for sample in samples)
    assert all(sample["temperature_c"] == celsius for sample in samples)
    times = [sample["t_ns"] for sample in samples]
    assert times == sorted(times) and times[0] <= result["t_ns"]


def test_energy_counters_become_watts_also_where_they_begin_again(program: Path, tmp_path: Path) -> None:
    board_tree.rapl(tmp_path, microjoules=2**38 - 20_000)
    file = tmp_path / "sys/class/powercap/intel-rapl:0/energy_uj"
    with start(program, tmp_path, "monitor", "--seconds", 0.5, "--power-every", 0.1) as process:
        time.sleep(0.25)
        part = file.with_name("part")
        part.write_text("30000\n")
        part.replace(file)
        out, _ = process.communicate(timeout=30)
    watts = [event["watts"] for event in map(json.loads, out.splitlines()) if event["event"] == "power"]
    assert watts[0] is None
    assert sum(watts[1:]) * 0.1 == pytest.approx(0.05, rel=0.3)


def test_a_sensor_that_fails_says_so_in_one_line(program: Path, tmp_path: Path) -> None:
    board_tree.jetson_nano(tmp_path)
    current = tmp_path / board_tree.INA / "in_current0_input"
    current.write_text("garbled\n")
    code, _, errors = run(program, tmp_path, "monitor", "--seconds", 0.05)
    assert code == 12 and errors.count("\n") == 1 and "holds 'garbled', no number" in errors
    current.write_text("912\n")
    with start(program, tmp_path, "bench", "--batch-size", 2, "--seconds", 1, "--power-every", 0.02) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        current.unlink()
        lines += process.stdout.readlines()
    events = [json.loads(line) for line in lines]
    assert process.returncode == 0 and events[-1]["event"] == "result"
    warnings = [event["message"] for event in events if event["event"] == "warning"]
    assert len(warnings) == 1 and "in_current0_input cannot be read (No such file or directory)" in warnings[0]
    watts = [event["watts"] for event in events if event["event"] == "power"]
    assert watts[0] == pytest.approx(4.618368) and watts[-1] is None


@pytest.mark.parametrize(
    ("board", "file", "text", "message"),
    [
        (board_tree.jetson_orin, "sys/class/hwmon/hwmon3/curr1_input", "", "hwmon3/curr1_input cannot be read"),
        (board_tree.hwmon_power, "sys/class/hwmon/hwmon0/power1_input", "3.25 W", "holds '3.25 W', no number"),
        (board_tree.rapl, "sys/class/powercap/intel-rapl:0/energy_uj", "", "energy_uj cannot be read"),
        (
            board_tree.raspberry_pi_5,
            "usr/bin/vcgencmd",
            "#!/bin/sh\necho VDD_CORE_A current(7)=lots",
            "gave no rail with",
        ),
        (board_tree.raspberry_pi_5, "usr/bin/vcgencmd", "#!/bin/sh\necho A\nexec sleep 60", "gave no rail with"),
        (board_tree.raspberry_pi_5, "usr/bin/vcgencmd", "", "gave no rail with"),
    ],
)
def test_a_sensor_that_goes_bad_while_a_step_runs_is_one_warning(
    program: Path, tmp_path: Path, board: Callable[[Path], Path], file: str, text: str, message: str
) -> None:
    """`text` empty: the file is gone."""
    path = board(tmp_path) / file
    # An answer that does not come is waited for, and nothing is told behind the result.
    seconds = 3 if "sleep" in text else 0.3
    with start(program, tmp_path, "bench", "--batch-size", 2, "--seconds", seconds, "--power-every", 0.02) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        path.with_name("part").write_text(f"{text}\n")
        path.with_name("part").chmod(path.stat().st_mode)
        path.with_name("part").replace(path)
        if not text:
            path.unlink()
        out, _ = process.communicate(timeout=30)
    events = [json.loads(line) for line in [*lines, *out.splitlines()]]
    warnings = [event["message"] for event in events if event["event"] == "warning"]
    assert process.returncode == 0 and events[-1]["event"] == "result"
    assert len(warnings) == 1 and message in warnings[0] and warnings[0].count("\n") == 0


# Frequency


@pytest.mark.parametrize("userspace", [True, False])
@pytest.mark.parametrize("end", ["normal", "error", "interrupt", "terminate"])
def test_the_frequency_is_set_read_back_and_restored(program: Path, tmp_path: Path, userspace: bool, end: str) -> None:
    board_tree.cpufreq(tmp_path, userspace=userspace, policies=(0, 4))
    before = board_tree.settings(tmp_path), board_tree.settings(tmp_path, 4)
    size = 10**8 if end == "error" else 2
    words = ("bench", "--batch-size", size, "--seconds", 0.3 if end == "normal" else 20, "--power-every", 0.02)
    with start(program, tmp_path, *words, "--frequency", 1_100_000) as process:
        assert process.stdout is not None
        seen = 0
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "power":
                assert event["frequency_khz"] == 1_000_000, "the highest step that is not above what was asked for"
                seen += 1
            if seen == 3 and end in ("interrupt", "terminate"):
                process.send_signal(signal.SIGINT if end == "interrupt" else signal.SIGTERM)
                seen += 1
    assert process.returncode == {"normal": 0, "error": 10}.get(end, 130)
    assert end == "error" or seen >= 3
    assert (board_tree.settings(tmp_path), board_tree.settings(tmp_path, 4)) == before
    assert not (tmp_path / "home/pi/.local/state/taste-edge/frequency").exists()


def test_what_a_frequency_can_fail_at(program: Path, tmp_path: Path) -> None:
    bench = ("bench", "--batch-size", 2, "--seconds", 0.02, "--frequency", 1_000_000)
    code, _, errors = run(program, tmp_path / "none", *bench)
    assert code == 13 and "no cpufreq" in errors
    board_tree.cpufreq(tmp_path, listed=False)
    info = run(program, tmp_path, "info")[1][-1]
    assert info["policies"][0]["frequencies_khz"] == [khz * 1000 for khz in range(600, 1501, 100)]
    current = tmp_path / f"{board_tree.POLICY}0/scaling_cur_freq"
    before = board_tree.settings(tmp_path)
    current.unlink()
    current.write_text("600000\n")
    code, _, errors = run(program, tmp_path, *bench)
    assert code == 18 and "runs at 600000 kHz, not at the 1000000 asked for" in errors
    assert board_tree.settings(tmp_path) == before
    limit = tmp_path / f"{board_tree.POLICY}0/scaling_max_freq"
    limit.unlink()
    limit.symlink_to("/proc/version")
    code, _, errors = run(program, tmp_path, *bench)
    assert code == 12 and errors.count("\n") == 1 and "scaling_max_freq" in errors


def test_two_cannot_set_the_frequency_at_once(program: Path, tmp_path: Path) -> None:
    board_tree.cpufreq(tmp_path)
    bench = ("bench", "--batch-size", 2, "--frequency", 1_000_000)
    with start(program, tmp_path, *bench, "--seconds", 20) as first:
        assert first.stdout is not None
        first.stdout.readline()
        code, _, errors = run(program, tmp_path, *bench, "--seconds", 0.05)
        assert code == 16 and "another taste-train" in errors
        assert run(program, tmp_path, "info")[1][0]["event"] == "info", "a living run is not put right"
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=30)
    assert board_tree.settings(tmp_path)["scaling_governor"] == "ondemand"


def _kill_somewhere(program: Path, root: Path, generator: random.Random) -> None:
    with start(program, root, "bench", "--batch-size", 2, "--seconds", 20, "--frequency", 750_000) as process:
        time.sleep(generator.uniform(0.0, 0.03))
        process.kill()


def _faults_of_a_kill_loop(program: Path, folder: Path, kills: int) -> list[str]:
    """Kills at random times; after each the next start has to find and leave the board as it was."""
    generator, faults = random.Random(_SEED), []
    for number in range(kills):
        root = board_tree.cpufreq(folder / str(number), userspace=number % 3 != 0)
        before = board_tree.settings(root)
        _kill_somewhere(program, root, generator)
        code, events, errors = run(program, root, "info")
        if code != 0 or board_tree.settings(root) != before:
            faults.append(f"kill {number}: {board_tree.settings(root)} {errors}")
        if events[0]["event"] == "warning":
            assert "as it was before" in events[0]["message"]
        run(program, root, "bench", "--batch-size", 2, "--seconds", 0.001, "--frequency", 750_000)
        if left := [path.name for path in (root / "home").rglob("frequency*") if path.suffix != ".lock"]:
            faults.append(f"kill {number}: {left}")
    return faults


@pytest.mark.faults
def test_a_killed_run_leaves_no_frequency_behind(program: Path, tmp_path: Path) -> None:
    print(f"seed {_SEED}")
    assert _faults_of_a_kill_loop(program, tmp_path, _KILLS) == []


@pytest.mark.faults
def test_the_kill_loop_sees_a_program_that_writes_no_state(build: Callable[..., Path], tmp_path: Path) -> None:
    planted = build(HOST, "taste-train -DTASTE_PLANT_NO_FREQUENCY_STATE")
    assert _faults_of_a_kill_loop(planted, tmp_path, 10)


def test_a_reboot_makes_the_file_void(program: Path, tmp_path: Path) -> None:
    board_tree.cpufreq(tmp_path)
    with start(program, tmp_path, "bench", "--batch-size", 2, "--seconds", 20, "--frequency", 750_000) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    board_tree.write(tmp_path, {"proc/sys/kernel/random/boot_id": "another"})
    board_tree.write(tmp_path, {f"{board_tree.POLICY}0/scaling_governor": "performance"})
    assert run(program, tmp_path, "info")[1][0]["event"] == "info"
    assert board_tree.settings(tmp_path)["scaling_governor"] == "performance"
    assert not (tmp_path / "home/pi/.local/state/taste-edge/frequency").exists()


# Operating points


@contextmanager
def training(program: Path, root: Path, folder: Path, control: Path) -> Iterator[subprocess.Popen[str]]:
    random = np.random.default_rng(8)
    x = random.integers(0, 256, (96, 2, 4, 5)).astype(np.uint8)
    data = pack(folder / "train", x, random.integers(0, CLASSES, 96).astype(np.int32))
    words = ("train", "--samples", data, "--batch-size", 16, "--effective-batch", 16, "--lr", 0.01, "--steps", 300)
    words += ("--control", control, "--report-rate", 10**6, "--frequency", 600_000, "--save", folder / "saved")
    with start(program, root, *words) as process:
        yield process


def point(control: Path, text: str) -> None:
    part = control.with_name("part")
    part.write_text(text)
    part.replace(control)


def test_a_control_file_moves_the_operating_point_between_two_steps(program: Path, tmp_path: Path) -> None:
    board_tree.cpufreq(tmp_path)
    control = tmp_path / "control"
    point(control, "batch_size 4\nfrequency_khz 750000\n")
    moved, losses = [], {}
    with training(program, tmp_path, tmp_path, control) as process:
        assert process.stdout is not None
        for event in map(json.loads, process.stdout):
            if event["event"] == "operating_point":
                moved.append((event["step"], event["batch_size"], event["frequency_khz"]))
                assert (tmp_path / f"{board_tree.POLICY}0/scaling_setspeed").read_text().strip() in (
                    "750000",
                    "1500000",
                )
            if event["event"] == "step":
                losses[event["step"]] = event["loss"]
            if event.get("step") == 60 and len(moved) == 1:
                point(control, "batch_size 16\nfrequency_khz 1500000\n")
            if event.get("step") == 200 and event["event"] == "step":
                point(control, "batch_size 17\n")
            if event["event"] == "warning":
                assert re.search("not one the run was opened for. The run goes on at batch size 16", event["message"])
                moved.append(("refused", 0, 0))
        assert process.wait() == 0
    assert moved[0] == (0, 4, 750_000) and moved[1][1:] == (16, 1_500_000) and 60 <= moved[1][0]
    assert moved[2][0] == "refused" and len(moved) == 3
    assert event["batch_size"] == 16 and event["steps"] == 300 and event["epochs"] == 50
    assert board_tree.settings(tmp_path)["scaling_governor"] == "ondemand"
    # The effective batch is the same, so what is learned is: within rounding.
    missing = tmp_path / "missing"
    with training(program, tmp_path, tmp_path, missing) as process:
        assert process.stdout is not None
        straight = {e["step"]: e["loss"] for e in map(json.loads, process.stdout) if e["event"] == "step"}
    assert [losses[step] for step in sorted(straight)[:40]] == pytest.approx(
        [straight[step] for step in sorted(straight)[:40]], rel=1e-4
    )


# The same from Python on the board


@pytest.mark.parametrize(
    "board",
    [
        board_tree.jetson_nano,
        board_tree.jetson_orin,
        board_tree.hwmon_power,
        board_tree.raspberry_pi_5,
        board_tree.raspberry_pi_4,
        board_tree.cpufreq,
        lambda root: root,
    ],
)
def test_the_monitor_in_python_reads_what_the_program_reads(
    program: Path, tmp_path: Path, board: Callable[[Path], Path]
) -> None:
    samples, result = watched(program, board(tmp_path))
    monitor = Monitor(tmp_path)
    reading = monitor.read()
    assert monitor.power_source == result["source"]
    for name in ("watts", "temperature_c", "frequency_khz", "throttle_bits"):
        theirs = samples[-1][name]
        assert getattr(reading, name) == (theirs if theirs is None else pytest.approx(theirs)), name


def test_the_monitor_reads_memory_and_load_and_counts_energy(tmp_path: Path) -> None:
    board_tree.rapl(tmp_path, microjoules=2**38 - 20_000)
    board_tree.write(
        tmp_path, {"proc/loadavg": "1.25 0.9 0.5 2/100 77", "proc/meminfo": "MemTotal:  2048 kB\nMemAvailable: 512 kB"}
    )
    monitor = Monitor(tmp_path)
    first = monitor.read()
    assert (first.load, first.memory_total_bytes, first.memory_available_bytes) == (1.25, 2 << 20, 512 << 10)
    assert first.watts is None and monitor.power_source == "rapl" and first.throttle_bits is None
    file = tmp_path / "sys/class/powercap/intel-rapl:0/energy_uj"
    file.write_text("30000\n")
    second = monitor.read()
    assert second.watts == pytest.approx(0.05 / (second.t_s - first.t_s), rel=0.5)
    for text, words in (("volts", "holds 'volts'"), ("", "cannot be read")):
        file.write_text(text)
        with pytest.raises(DeviceError, match=words) as raised:
            monitor.read()
        assert raised.value.exit_code == 12
    assert Monitor().read().memory_total_bytes
