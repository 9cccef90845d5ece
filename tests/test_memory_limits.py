"""Limits below the plan: the program says what does not fit and the largest batch size that does, and never dies of it."""

from __future__ import annotations

import json
import re
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.native_builds import HOST

pytestmark = pytest.mark.faults

LIMITS = 50
BATCH = 96


def bench(program: Path, batch_size: int, *flags: object, address_space: int | None = None) -> tuple[int, str, int]:
    """Exit code (negative: a signal), stderr and the planned bytes of one short measurement."""
    command = [str(program), "bench", "--batch-size", str(batch_size), "--seconds", "0", "--min-steps", "1"]

    def confine() -> None:
        if address_space is not None:
            resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))

    done = subprocess.run(
        [*command, "--warmup", "0", "--threads", "2", *map(str, flags)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=confine,
    )
    plans = [json.loads(line) for line in done.stdout.splitlines() if '"plan"' in line]
    return done.returncode, done.stderr, int(plans[0]["planned_bytes"]) if plans else 0


def meminfo(folder: Path) -> Callable[[int, str], tuple[object, ...]]:
    """Flags under which the board has so many bytes free, in /proc/meminfo or in a control group."""

    def flags(limit: int, where: str) -> tuple[object, ...]:
        root = folder / where
        (root / "proc" / "self").mkdir(parents=True, exist_ok=True)
        free = limit if where == "free" else 1 << 34
        (root / "proc" / "meminfo").write_text(f"MemTotal: {1 << 25} kB\nMemAvailable: {free // 1024} kB\n")
        if where == "v2":
            (root / "proc" / "self" / "cgroup").write_text("0::/a/b\n")
            group, names = root / "sys/fs/cgroup/a", ("memory.max", "memory.current")
        else:
            (root / "proc" / "self" / "cgroup").write_text("3:memory:/a/b\n" if where == "v1" else "")
            group, names = root / "sys/fs/cgroup/memory/a", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        group.mkdir(parents=True, exist_ok=True)
        if where != "free":
            (group / names[0]).write_text(f"{limit}\n")
            (group / names[1]).write_text("0\n")
        return ("--system-root", root)

    return flags


@pytest.fixture(scope="module")
def planned(build: Callable[..., Path]) -> int:
    return bench(build(HOST, "taste-train"), BATCH)[2]


@pytest.mark.parametrize("where", ["free", "v1", "v2"])
def test_what_is_free_or_left_by_a_control_group_is_never_exceeded(
    where: str, build: Callable[..., Path], planned: int, tmp_path: Path
) -> None:
    program, flags = build(HOST, "taste-train"), meminfo(tmp_path)
    codes = []
    for number in range(LIMITS):
        limit = planned // 20 + planned * number // (LIMITS - 10)
        code, said, _ = bench(program, BATCH, *flags(limit, where))
        assert code in (0, 10), said
        # Free memory is in whole KiB, and the largest batch size leaves a page for rounding.
        assert (code == 0) == (planned <= limit // 1024 * 1024), (limit, said)
        codes.append(code)
        if largest := re.search(r"Largest that fits: (\d+)", said):
            size = int(largest[1])
            assert bench(program, size, *flags(limit, where))[0] == 0
            assert bench(program, size + 2, *flags(limit, where))[0] == 10
    assert 5 < codes.count(0) < 45


def test_an_address_space_that_ends_is_no_death(build: Callable[..., Path], planned: int) -> None:
    program = build(HOST, "taste-train")
    codes = []
    for number in range(LIMITS):
        limit = planned // 4 + planned * 2 * number // LIMITS + (number << 16)
        code, said, _ = bench(program, BATCH, address_space=limit)
        assert code in (0, 10), (limit, planned, code, said)
        assert code == 0 or said.count("\n") == 1
        codes.append(code)
    assert codes[0] == 10 and codes[-1] == 0


def test_the_limits_catch_a_program_that_does_not_look(
    build: Callable[..., Path], planned: int, tmp_path: Path
) -> None:
    program = build(HOST, "taste-train -DTASTE_PLANT_NO_LIMIT")
    assert bench(program, BATCH, *meminfo(tmp_path)(planned // 2, "free"))[0] == 0, "the loops above would fail"
