"""Planned bytes against the peak that the kernel saw: within max(3 %, 2 MiB), and never above the plan by more than 1 %."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.host import host_target

FULL = [pytest.param(m, marks=pytest.mark.acceptance) for m in ("resnet18", "mobilenetv2")]


def bench(name: str, batch: int, built: Callable[..., Path]) -> tuple[int, int]:
    """Planned bytes, and the peak that was measured."""
    program = built(name, host_target(), input_shape=None) / "taste-train"
    command = [str(program), "bench", "--batch-size", str(batch), "--seconds", "0.1", "--min-steps", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    counters = json.loads(result.stdout.splitlines()[-1])
    return counters["planned_bytes"], counters["peak_rss_bytes"]


def declared(planned: int, peak: int) -> bool:
    return peak <= 1.01 * planned and abs(planned - peak) <= max(0.03 * planned, 2 * 2**20)


@pytest.mark.parametrize("batch", [1, 8, 33])
@pytest.mark.parametrize("name", ["mlp", "resnet8", *FULL])
def test_declared_peak_is_the_measured_one(name: str, batch: int, built: Callable[..., Path]) -> None:
    planned, peak = bench(name, batch, built)
    assert declared(planned, peak), (planned, peak)


def test_a_plan_that_forgets_some_of_the_batch_is_seen(built: Callable[..., Path]) -> None:
    """One that plans for 20 rows what 33 take, and one that plans for them what 20 take."""
    (few, less), (many, more) = bench("resnet8", 20, built), bench("resnet8", 33, built)
    assert declared(few, less) and declared(many, more)
    assert not declared(few, more) and not declared(many, less)
