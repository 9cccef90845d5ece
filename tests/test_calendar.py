"""A board's calendar jumps (it has no battery, then the network tells it the time): no rate, limit or study notices.

The calendar of a program is set an hour back or forward at every look, by a preloaded library; the program is linked
dynamically for that. One that measures by the calendar must be seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.native_builds import LIBRARY, MODEL, PROGRAM, ROOT, TESTS, compile_c, zig

pytestmark = pytest.mark.faults
JUMPS = ("-3600", "3600")
GLIBC = "x86_64-linux-gnu.2.17"
_LOOK = "import time; a = time.time(); b = time.time(); print(round((b - a) / 3600))"


@pytest.fixture(scope="module")
def calendar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = TESTS / "calendar.c"
    return compile_c(zig(GLIBC, "-shared"), [source], tmp_path_factory.mktemp("calendar") / "calendar.so")


def under(calendar: Path, jump: str) -> dict[str, str]:
    return {**os.environ, "LD_PRELOAD": str(calendar), "TASTE_TEST_JUMP_S": jump}


def bench(program: Path, environment: dict[str, str] | None) -> dict[str, Any]:
    """What a bench of 0.3 s says, and `took`: how long it was; a rate of 0 where it did not end within 20 s."""
    command = [str(program), "bench", "--batch-size", "4", "--seconds", "0.3", "--threads", "1"]
    began = time.monotonic()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=20)
    except subprocess.TimeoutExpired:
        return {"samples_per_s": 0.0, "took": 20.0}
    result = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"samples_per_s": 0.0}
    return {**result, "took": time.monotonic() - began}


def steady(jumped: dict[str, Any], quiet: dict[str, Any]) -> bool:
    """The same rate, as far as a busy machine can tell; an hour in a window would make it thousands of times another."""
    return bool(
        quiet["samples_per_s"] / 20 < jumped["samples_per_s"] < 20 * quiet["samples_per_s"] and jumped["took"] < 15
    )


def test_a_calendar_that_jumps_changes_no_rate(calendar: Path, tmp_path: Path) -> None:
    program = compile_c(zig(GLIBC), LIBRARY + MODEL + PROGRAM, tmp_path / "taste-train")
    planted = compile_c(zig(GLIBC, "-DTASTE_PLANT_CALENDAR"), LIBRARY + MODEL + PROGRAM, tmp_path / "planted")
    quiet = bench(program, None)
    assert steady(bench(planted, None), quiet), "without a jump there is nothing to see"
    for jump in JUMPS:
        assert steady(bench(program, under(calendar, jump)), quiet)
        assert not steady(bench(planted, under(calendar, jump)), quiet)


@pytest.mark.parametrize("jump", JUMPS)
def test_a_calendar_that_jumps_changes_no_limit_and_no_study_of_the_host(
    jump: str, calendar: Path, tmp_path: Path
) -> None:
    def python(*words: str) -> subprocess.CompletedProcess[str]:
        command, environment = [sys.executable, *words], under(calendar, jump)
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)

    assert python("-c", _LOOK).stdout.strip() == str(int(jump) // 3600), "the host's calendar does not jump"
    # A silent server is given up in its time, neither at once nor never.
    silence = "tests/test_ssh_silence.py::test_a_server_that_falls_silent_is_given_up_in_bounded_time"
    pytest_of, stages = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", ""), ("auth", "exec", "stat")
    silent = python(*pytest_of, *(f"{silence}[{stage}]" for stage in stages))
    assert silent.returncode == 0, silent.stdout[-2000:]
    if int(jump) > 0:  # set back, it would wait for an hour
        planted = python(*pytest_of, "-p", "tests.planted_calendar", f"{silence}[exec]")
        assert planted.returncode == 1 and "1 failed" in planted.stdout, planted.stdout[-2000:]

    def tuned(environment: Callable[..., subprocess.CompletedProcess[str]], name: str) -> dict[str, Any]:
        words = ["-m", "host_control", "tune", "--board", "recorded:examples/recorded_board.json", "--json"]
        done = environment(*words, "--out", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout.splitlines()[-1]))

    def quietly(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=100)

    jumped, quiet = tuned(python, "jumped"), tuned(quietly, "quiet")
    for name in ("bs_opt", "bs_peak", "complete", "throughput", "verdict"):
        assert jumped[name] == quiet[name]
