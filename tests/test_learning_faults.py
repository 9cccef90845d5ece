"""`learn` killed at any time and under power cuts: nothing committed is lost, and it ends with the bits of a straight run.

Planted bugs that must be found: a build that reports checkpoints before they are written, one that forgets the buffer, and a
run that never syncs its files.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.native_builds import ARM, CLASSES, HOST, RISCV, Toolchain
from tests.packed_data import pack
from tests.test_checkpoints import kill_loop, of, survive

pytestmark = pytest.mark.faults
Build = Callable[..., Path]
COUNT = 20_000


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw, folder = np.random.default_rng(6), tmp_path_factory.mktemp("stream")
    y = (np.arange(COUNT) % CLASSES).astype(np.int32)
    x = draw.integers(0, 256, (COUNT, 2, 4, 5)).astype(np.uint8)
    pack(folder / "train", x, y)
    pack(folder / "test", x[:20], y[:20])
    return folder


def learn(packed: Path, per_class: int, *more: object) -> list[str]:
    """A stream with everything that has a state, `per_class` samples of each class."""
    base = ("learn", "--samples", packed / "train", "--test", packed / "test", "--samples-per-class", per_class)
    rates = ("--lr", 0.01, "--momentum", 0.9, "--seed", 9, "--threads", 1, "--augment", "crop-flip")
    return [str(a) for a in (*base, "--batch-size", 6, "--buffer", 9, "--tasks", 3, *rates, *more)]


def learn_for(packed: Path) -> Callable[..., list[str]]:
    """`learn` of at least so many steps."""

    def arguments(steps: int, *more: object) -> list[str]:
        per_class = min(steps, COUNT // CLASSES)
        return learn(packed, per_class, "--passes", -(-steps // per_class), *more)

    return arguments


def test_kills_lose_nothing_that_was_committed(build: Build, packed: Path, tmp_path: Path) -> None:
    survive(build(HOST, "taste-train"), learn_for(packed), tmp_path / "kills", 500, 0.05)


@pytest.mark.needs("qemu")
@pytest.mark.parametrize("toolchain", [ARM, RISCV], ids=lambda t: t.name)
def test_kills_under_qemu(build: Build, toolchain: Toolchain, packed: Path, tmp_path: Path) -> None:
    program = build(toolchain, "taste-train")
    survive(program, learn_for(packed), tmp_path / "kills", 100, 0.3, *toolchain.emulator)


def test_a_checkpoint_reported_too_early_is_found_by_kills(build: Build, packed: Path, tmp_path: Path) -> None:
    planted = build(HOST, "taste-train -DTASTE_PLANT_EARLY_EVENT")
    options = ("--checkpoint", tmp_path / "run", "--checkpoint-every", "1steps", "--resume")
    command = [str(planted), *learn(packed, COUNT // CLASSES, *options)]
    assert any(kill_loop(command, 12, 0.12, seed)[0] for seed in range(10))


def cut_everywhere(program: Path, packed: Path, folder: Path, kind: str) -> tuple[list[str], int]:
    """(what was lost, how many cuts): the power goes before every operation on the disk (tests/native/learn_power.c)."""
    folder.mkdir()
    flags = learn(packed, 4, "--checkpoint", folder / "run", "--checkpoint-every", "1steps", "--report-rate", 0)
    command = [str(program), str(folder / "after"), kind, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    runs: list[list[dict[str, Any]]] = [[]]
    for event in map(json.loads, done.stdout.splitlines()):
        runs += [[]] if event["event"] == "cut" else []
        runs[-1].append(event)
    straight, *cuts = runs
    committed = [0]  # by the number of operations there have been: the step that is sure
    for event in straight:
        committed += committed[-1:] * (event.get("count", 0) + 1 - len(committed) if event["event"] == "disk" else 0)
        committed[-1] = event["step"] if event["event"] == "checkpoint" else committed[-1]
    lost = []
    for cut, *events in cuts:
        resumed, end = sum(e["step"] for e in of(events, "resume")), events[-1]
        same = all(end.get(key) == straight[-1][key] for key in ("sha256", "accuracy_matrix", "buffer_samples"))
        if resumed < committed[cut["count"]] or not same:
            lost.append(f"{committed[cut['count']]} was committed, {resumed} is there: {end}")
    return lost, len(cuts)


def test_power_cuts_lose_nothing_that_was_committed(build: Build, packed: Path, tmp_path: Path) -> None:
    program = build(HOST, "learn-power")
    lost, cuts = cut_everywhere(program, packed, tmp_path / "right", "right")
    assert lost == [] and cuts > 100
    assert cut_everywhere(program, packed, tmp_path / "planted", "planted")[0]


def test_a_forgotten_buffer_is_found_by_cuts(build: Build, packed: Path, tmp_path: Path) -> None:
    planted = build(HOST, "learn-power -DTASTE_PLANT_FORGET_BUFFER")
    assert cut_everywhere(planted, packed, tmp_path / "planted", "right")[0]
