"""benchmarks/limits.c: builds without a warning for every architecture, and prints numbers that can be."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.native_builds import ARM, HOST, RISCV, ROOT, Toolchain, compile_c

LIMITS = ROOT / "benchmarks" / "limits.c"


def _build(toolchain: Toolchain, folder: Path) -> Path:
    return compile_c(toolchain, [LIMITS], folder / "limits", "-O3")


def test_limits_of_this_machine(tmp_path: Path) -> None:
    program = _build(HOST, tmp_path)
    run = subprocess.run([str(program), "1", "0.001"], capture_output=True, text=True, timeout=60, check=True)
    fma, *memory = [json.loads(line) for line in run.stdout.splitlines()]
    assert (fma["test"], fma["threads"]) == ("fma", 1) and fma["gflops"] > 0.1
    assert [row["kib"] for row in memory] == [32, 256, 2048, 16384, 131072]
    assert all(row[key] > 0 for row in memory for key in ("read_gb_per_s", "copy_gb_per_s", "triad_gb_per_s"))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_line_is_handed_from_core_to_core(tmp_path: Path) -> None:
    with subprocess.Popen([str(_build(HOST, tmp_path)), "2", "0.001"], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        row = json.loads(run.stdout.readline())
        run.kill()
    assert row["test"] == "handover" and row["cores"] == sorted(os.sched_getaffinity(0))[:2] and row["ns"] > 1


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    program = _build(HOST, tmp_path)
    for arguments in (["0"], ["100000"], ["1", "0"]):
        run = subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=60, check=False)
        assert (run.returncode, run.stdout) == (2, "") and run.stderr.startswith("error: ")


@pytest.mark.parametrize("toolchain", [ARM, RISCV], ids=lambda toolchain: toolchain.name)
def test_limits_build_for_boards(toolchain: Toolchain, tmp_path: Path) -> None:
    assert _build(toolchain, tmp_path).stat().st_size > 0
