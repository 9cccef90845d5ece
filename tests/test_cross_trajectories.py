"""Twenty training steps on every instruction set drift from float64 no more than PyTorch's float32 does (tests/test_parity.py)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.test_cross_builds import TARGETS, command_of
from tests.test_parity import (
    DECAY,
    MOMENTUM,
    RATE,
    STEPS,
    Array,
    batch_of,
    distance,
    in_float32,
    seeded,
    torch,
    torch_trajectory,
)

BATCH, BATCHES, SEEDS = 2, 4, range(3)


def batches_of(name: str, seed: int) -> list[tuple[Array, Array]]:
    model = seeded(name, seed)
    return [batch_of(100 * seed + i, model.input_shape, BATCH, model.classes) for i in range(BATCHES)]


@cache
def oracle(name: str, seed: int) -> tuple[dict[str, Array], float]:
    """Float64's weights after the steps, and how far PyTorch's float32 came from them: the median of its runs."""
    model, batches = seeded(name, seed), batches_of(name, seed)
    true = torch_trajectory(model, name, batches, torch.float64)
    runs = zip(*([(x, y, last) for x, last in in_float32(x)] for x, y in batches), strict=True)
    theirs = [
        torch_trajectory(model, name, [(x, y) for x, y, _ in run], torch.float32, channels_last=run[0][2])
        for run in runs
    ]
    return true, float(np.median([distance(run, true) for run in theirs]))


def trained(name: str, seed: int, program: list[str], folder: Path) -> dict[str, Array]:
    """Weights after the same steps by the program."""
    model, batches = seeded(name, seed), batches_of(name, seed)
    save_file({k: np.concatenate([batch[i] for batch in batches]) for i, k in enumerate("xy")}, folder / "samples")
    save_file({**model.parameters, **model.states}, folder / "weights")
    flags = ["--weights", folder / "weights", "--samples", folder / "samples", "--save", folder / "trained"]
    flags += ["--batch-size", BATCH, "--steps", STEPS, "--lr", RATE, "--momentum", MOMENTUM, "--weight-decay", DECAY]
    command = [*program, "train", *map(str, flags)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert result.returncode == 0, result.stderr
    return load_file(folder / "trained")


@pytest.mark.needs("torch", "zig")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["resnet8", pytest.param("resnet18", marks=pytest.mark.acceptance)])
def test_trajectory_drifts_no_more_than_pytorch(
    name: str, target: str, built: Callable[..., Path], tmp_path: Path
) -> None:
    """At most twice as far, with one of three seeds: a fault would be in all of them, while a single activation that falls to
    the other side of zero sends one trajectory elsewhere (PyTorch's float32 too, see tests/test_parity.py)."""
    program = command_of(built(name, target, input_shape=None), target)

    def drifts_too_far(seed: int) -> bool:
        true, theirs = oracle(name, seed)
        return distance(trained(name, seed, program, tmp_path), true) > 2 * theirs

    assert not all(drifts_too_far(seed) for seed in SEEDS)
