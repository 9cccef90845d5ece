"""Twenty training steps on every instruction set drift from float64 no more than PyTorch's float32 does (tests/test_parity.py)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cross.load_model import load_model
from tests.test_cross_builds import TARGETS, command_of
from tests.test_parity import Array, batch_of, distance, in_float32, torch, torch_trajectory

BATCH, BATCHES, SEEDS = 4, 4, 3


def batches_of(name: str, seed: int) -> list[tuple[Array, Array]]:
    model = load_model(name)
    return [batch_of(100 * seed + i, model.input_shape, BATCH, model.classes) for i in range(BATCHES)]


@cache
def oracle(name: str) -> tuple[dict[str, Array], float]:
    """Float64's weights after the steps over the first seed's batches, and how far PyTorch's float32 came from its own."""
    model, theirs = load_model(name), []
    wanted: dict[str, Array] = {}
    for seed in range(SEEDS):
        batches = batches_of(name, seed)
        true = torch_trajectory(model, name, batches, torch.float64)
        wanted = wanted or true
        runs = zip(*([(x, y, last) for x, last in in_float32(x)] for x, y in batches), strict=True)
        for run in runs:
            moved = torch_trajectory(model, name, [(x, y) for x, y, _ in run], torch.float32, channels_last=run[0][2])
            theirs.append(distance(moved, true))
    return wanted, max(theirs)


@pytest.mark.needs("torch", "boards")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["resnet8", pytest.param("resnet18", marks=pytest.mark.acceptance)])
def test_trajectory_drifts_no_more_than_pytorch(
    name: str, target: str, built: Callable[..., Path], tmp_path: Path
) -> None:
    batches = batches_of(name, 0)
    samples = {k: np.concatenate([batch[i] for batch in batches]) for i, k in enumerate("xy")}
    save_file(samples, tmp_path / "samples.safetensors")
    folder = built(name, target, input_shape=None)
    flags = ["--weights", folder / "weights.safetensors", "--samples", tmp_path / "samples.safetensors"]
    flags += ["--batch-size", BATCH, "--steps", 20, "--lr", 0.01, "--momentum", 0.9, "--weight-decay", 5e-4]
    flags += ["--save", tmp_path / "trained.safetensors"]
    command = [*command_of(folder, target), "train", *map(str, flags)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert result.returncode == 0, result.stderr
    wanted, allowed = oracle(name)
    assert distance(load_file(tmp_path / "trained.safetensors"), wanted) <= 2 * allowed
