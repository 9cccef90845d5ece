"""A stream with replay through real kernels against PyTorch: the same rows, draws and weights, with masks and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cross.load_model import load_model
from tests.host import host_target
from tests.native_builds import succeed
from tests.packed_data import keyed_order, pack
from tests.replay_buffer import ReplayBuffer
from tests.test_parity import Array, distance, in_float32, torch, torch_like

MEAN, STD = [0.5, 0.5, 0.5], [0.25, 0.25, 0.25]
CLASSES, TASKS, BATCH, BUFFER, RATE = 10, 5, 12, 30, 0.02
Batch = tuple[Array, Array]


def images() -> Batch:
    draw = np.random.default_rng(5)
    y = np.tile(np.arange(CLASSES), 60).astype(np.int32)
    patterns = draw.integers(0, 160, (CLASSES, 3, 32, 32))
    return (patterns[y] + draw.integers(0, 96, (len(y), 3, 32, 32))).astype(np.uint8), y


def stream_of(x: Array, y: Array, of: Array, seed: int) -> list[Batch]:
    """What every update sees."""
    floats = (x.astype(np.float32) * np.float32(1 / (255 * 0.25)) + np.float32(-2)).astype(np.float32)
    buffer, batches = ReplayBuffer("reservoir", BUFFER, CLASSES, seed), []
    for task in range(TASKS):
        rows = np.flatnonzero(of[y] == task)
        rows = rows[keyed_order(seed, task, len(rows))]
        for first in range(0, len(rows), BATCH // 2):
            chunk = rows[first : first + BATCH // 2]
            both = np.concatenate([chunk, np.array([buffer.samples[s] for s in buffer.draw(BATCH // 2)], int)])
            batches.append((floats[both], y[both]))
            for row in chunk:
                buffer.add(int(row), int(y[row]))
    return batches


def follow(
    model: Any, name: str, batches: list[Batch], groups: Any, dtype: Any
) -> tuple[list[float], dict[str, Array]]:
    module = torch_like(model, name, dtype)
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=RATE), []
    for x, y in batches:
        labels = torch.tensor(y, dtype=torch.long)
        logits = module(torch.tensor(x, dtype=dtype))
        if groups is not None:
            logits = logits.masked_fill(groups[None, :] != groups[labels][:, None], -torch.inf)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    named = module.named_parameters()
    return losses, {n: p.detach().numpy().reshape(model.parameters[n].shape) for n, p in named}


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("name", "scenario"),
    [
        ("mlp", "til"),
        pytest.param("resnet8", "til", marks=pytest.mark.acceptance),
        pytest.param("resnet8", "cil", marks=pytest.mark.acceptance),
    ],
)
def test_a_stream_drifts_no_more_than_pytorch(
    name: str, scenario: str, built: Callable[..., Path], tmp_path: Path
) -> None:
    """The first loss to 1e-5; after 100 updates at most twice as far from float64 as PyTorch's float32 is."""
    folder, model = built(name, host_target(), input_shape=None), load_model(name)
    x, y = images()
    pack(tmp_path / "train", x, y, MEAN, STD)
    pack(tmp_path / "test", x[:20], y[:20], MEAN, STD)
    of = np.arange(CLASSES) // 2
    flags = ["--samples", tmp_path / "train", "--test", tmp_path / "test", "--weights", folder / "weights.safetensors"]
    flags += ["--scenario", scenario, "--task-of", ",".join(map(str, of)), "--batch-size", BATCH, "--buffer", BUFFER]
    flags += ["--lr", RATE, "--lr-rule", "constant", "--seed", 3, "--save", tmp_path / "end", "--report-rate", 1e9]
    events = succeed(folder / "taste-train", "learn", *flags)
    batches = stream_of(x, y, of, 3)
    groups = torch.tensor(of) if scenario == "til" else None
    losses, exact = follow(model, name, batches, groups, torch.float64)
    ours = [e["loss"] for e in events if e["event"] == "step"]
    assert len(ours) == len(losses) == 100 and ours[0] == pytest.approx(losses[0], rel=1e-5)
    runs = zip(*([moved for moved, last in in_float32(rows) if not last] for rows, _ in batches), strict=True)
    theirs = [
        distance(
            follow(model, name, [(rows, y) for rows, (_, y) in zip(run, batches, strict=True)], groups, torch.float32)[
                1
            ],
            exact,
        )
        for run in list(runs)[:3]
    ]
    assert distance(load_file(tmp_path / "end"), exact) <= 2 * max(theirs)
