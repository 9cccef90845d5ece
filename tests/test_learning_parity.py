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
from tests.packed_data import keyed_order, pack, splitmix64
from tests.replay_buffer import ReplayBuffer, fnv1a64
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


def settling_slots(buffer: ReplayBuffer, of: Array, task: int, seed: int, batch: int) -> list[list[int]]:
    """The samples of each of the 30 passes that bring running statistics up to date after a task."""
    at, passes = (splitmix64(seed ^ fnv1a64("settle")) + ((task + 1) << 32)) % 2**64, []
    for first in range(0, 30 * batch, batch):
        passes.append([])
        for i in range(first, first + batch):
            while True:
                slot = splitmix64(at) % len(buffer.samples)
                at = (at + 1) % 2**64
                if i % batch >= batch // 2 or of[buffer.labels[slot]] == task:
                    break
            passes[-1].append(buffer.samples[slot])
    return passes


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


@pytest.mark.needs("torch")
def test_running_statistics_are_those_of_the_weights(built: Callable[..., Path], tmp_path: Path) -> None:
    """After each task 30 forward passes over the buffer, mixed as steps are, move them; updates are as without."""
    folder, model, seed = built("resnet8", host_target(), input_shape=None), load_model("resnet8"), 3
    x, y = images()
    x, y = x[:60], y[:60]
    pack(tmp_path / "train", x, y, MEAN, STD)
    pack(tmp_path / "test", x[:20], y[:20], MEAN, STD)
    flags = ["--samples", tmp_path / "train", "--test", tmp_path / "test", "--weights", folder / "weights.safetensors"]
    of = np.arange(CLASSES) // 5
    flags += ["--task-of", ",".join(map(str, of)), "--batch-size", BATCH, "--buffer", 20, "--lr", RATE]
    flags += ["--lr-rule", "constant", "--seed", seed, "--save", tmp_path / "end", "--report-rate", 1e9]
    events = succeed(folder / "taste-train", "learn", *flags)
    floats = torch.tensor((x.astype(np.float64) / 255 - 0.5) / 0.25)
    labels, module = torch.tensor(y, dtype=torch.long), torch_like(model, "resnet8", torch.float64)
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=RATE), []
    buffer = ReplayBuffer("reservoir", 20, CLASSES, seed)
    for task in range(2):
        rows = np.flatnonzero(of[y] == task)
        for chunk in rows[keyed_order(seed, task, len(rows))].reshape(-1, BATCH // 2):
            both = [*chunk, *(buffer.samples[s] for s in buffer.draw(BATCH // 2))]
            loss = torch.nn.functional.cross_entropy(module(floats[both]), labels[both])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            for row in chunk:
                buffer.add(int(row), int(y[row]))
        with torch.no_grad():
            for both in settling_slots(buffer, of, task, seed, BATCH):
                module(floats[both])
    assert [e["loss"] for e in events if e["event"] == "step"] == pytest.approx(losses, rel=1e-3)
    saved = load_file(tmp_path / "end")
    states = {name: values.numpy() for name, values in module.named_buffers() if values.ndim}
    assert len(states) == 14
    for name, values in states.items():
        assert np.linalg.norm(saved[name] - values) <= 1e-3 * np.linalg.norm(values), name
