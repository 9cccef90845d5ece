"""Planned bytes against the peak that the kernel saw: within max(3 %, 2 MiB), and never above the plan by more than 1 %."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.host import host_target

FULL = [pytest.param(m, marks=pytest.mark.acceptance) for m in ("resnet18", "mobilenetv2")]


@pytest.mark.parametrize("batch", [1, 8, 33])
@pytest.mark.parametrize("name", ["mlp", "resnet8", *FULL])
def test_declared_peak_is_the_measured_one(name: str, batch: int, built: Callable[..., Path]) -> None:
    program = built(name, host_target(), input_shape=None) / "taste-train"
    command = [str(program), "bench", "--batch-size", str(batch), "--seconds", "0.1", "--min-steps", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    counters = json.loads(result.stdout.splitlines()[-1])
    planned, peak = counters["planned_bytes"], counters["peak_rss_bytes"]
    assert peak <= 1.01 * planned
    assert abs(planned - peak) <= max(0.03 * planned, 2 * 2**20)
