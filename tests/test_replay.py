"""The replay buffer: the same content as its twin in Python on three architectures, and the right probabilities."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.native_builds import ADDRESS, ARM, HOST, RISCV, Toolchain
from tests.packed_data import splitmix64
from tests.replay_buffer import ReplayBuffer

Build = Callable[..., Path]
POLICIES = ("reservoir", "class-balanced", "ring")


def trace(program: Path, *arguments: object, emulator: tuple[str, ...] = ()) -> list[list[int]]:
    command = [*emulator, str(program), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return [[int(word) for word in line.split()] for line in result.stdout.splitlines()]


def follow(policy: str, capacity: int, classes: int, seed: int, added: int, drawn: int) -> list[list[int]]:
    buffer, lines = ReplayBuffer(policy, capacity, classes, seed), []
    for i in range(added):
        buffer.add(i, splitmix64(i) % (1 + i * classes // added))
        lines.append(buffer.draw(drawn))
    return lines + [list(pair) for pair in zip(buffer.labels, buffer.samples, strict=True)]


TOOLCHAINS = [
    HOST,
    pytest.param(ADDRESS, marks=pytest.mark.needs("clang")),
    pytest.param(ARM, marks=pytest.mark.needs("qemu")),
    pytest.param(RISCV, marks=pytest.mark.needs("qemu")),
]


@pytest.mark.parametrize("toolchain", TOOLCHAINS, ids=lambda t: t.name)
def test_the_buffer_is_that_of_its_twin(build: Build, toolchain: Toolchain) -> None:
    program = build(toolchain, "replay-trace")
    for number, policy in enumerate(POLICIES):
        for capacity, classes, seed, added, drawn in ((7, 3, 1, 60, 3), (1, 1, 2, 5, 4), (50, 10, 2**31, 700, 10)):
            wanted = follow(policy, capacity, classes, seed, added, drawn)
            numbers = (number, capacity, classes, seed, added, drawn)
            assert trace(program, "trace", *numbers, emulator=toolchain.emulator) == wanted


def test_each_sample_of_a_stream_is_kept_equally_often(build: Build) -> None:
    """Chi-square over 20,000 streams of 60 samples into 12 slots, and over streams of 20,000 samples in 20 stretches."""
    for capacity, added, streams, bins in ((12, 60, 20_000, 60), (500, 20_000, 40, 20)):
        kept = np.array(trace(build(HOST, "replay-trace"), "inclusion", capacity, added, streams)).ravel()
        assert kept.sum() == capacity * streams
        share, counts = capacity / added, kept.reshape(bins, -1).sum(axis=1)
        trials = streams * added // bins
        chi_square = np.sum((counts - trials * share) ** 2) / (trials * share * (1 - share))
        # A fixed number is kept of each stream: bins - 1 degrees of freedom, mean bins - 1, variance twice that.
        assert abs(chi_square - (bins - 1)) <= 4 * np.sqrt(2 * (bins - 1))


def test_policies_keep_what_they_promise() -> None:
    """A stream of 900 samples of class 0, then 60 of class 1 and 40 of class 2, into 60 slots."""
    labels = [0] * 900 + [1] * 60 + [2] * 40
    stored = {}
    for policy in POLICIES:
        buffer = ReplayBuffer(policy, 60, 3, 5)
        for i, label in enumerate(labels):
            buffer.add(i, label)
        stored[policy] = [buffer.labels.count(c) for c in range(3)]
    assert stored["reservoir"][0] > 45
    assert stored["class-balanced"] == [20, 20, 20] and stored["ring"] == [20, 20, 20]
    assert sorted(s for s, c in zip(buffer.samples, buffer.labels, strict=True) if c == 0) == list(range(880, 900))
