"""A checkpoint against the run that would go on with it: whatever they disagree in, one fact at a time, is refused by name (13).

The facts are those that the program's sources note, so that one added there is looked at here. A program that compares none
must be seen.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.native_builds import CLASSES, HOST, NATIVE, run, succeed
from tests.packed_data import pack

Build = Callable[..., Path]


def noted(*sources: str) -> set[str]:
    """The facts that a checkpoint carries, by the sources."""
    texts = [(NATIVE / "taste-train" / source).read_text(encoding="utf-8") for source in ("checkpoint.c", *sources)]
    return {key for text in texts for key in re.findall(r'checkpoint_note\(facts, "(\w+)"', text)}


def commands(folder: Path) -> dict[str, list[object]]:
    """A run of each kind that leaves one checkpoint in `folder`/run, and goes on from it when it is given again."""
    draw = np.random.default_rng(6)
    x, y = draw.integers(0, 256, (30, 2, 4, 5)).astype(np.uint8), (np.arange(30) % CLASSES).astype(np.int32)
    data = ("--samples", pack(folder / "train", x, y), "--checkpoint", folder / "run", "--resume", "--threads", 1)
    train = ["train", *data, "--batch-size", 4, "--steps", 3, "--lr", 0.003, "--optimizer", "adamw", "--warmup", 0.5]
    learn = ["learn", *data, "--test", folder / "train", "--batch-size", 6, "--buffer", 9, "--tasks", 3, "--lr", 0.01]
    return {"training.c": train, "learning.c": learn}


def other(value: str) -> str:
    """Another value of the same length, so that nothing else of the file changes."""
    return value[:-1] + ("1" if value[-1] != "1" else "2")


def agreed(program: Path, command: list[object], checkpoint: Path, keys: set[str]) -> list[str]:
    """The facts that may be changed in the checkpoint, with a hash that fits, and are not refused by name."""
    original = checkpoint.read_bytes()
    header = json.loads(original[8 : 8 + int.from_bytes(original[:8], "little")])["__metadata__"]
    assert keys <= set(header), f"not in the checkpoint: {keys - set(header)}"
    passed = []
    for key in sorted(keys):
        theirs = other(header[key])
        changed = original.replace(f'"{key}":"{header[key]}"'.encode(), f'"{key}":"{theirs}"'.encode(), 1)
        at = changed.index(b'"sha256":"') + 10
        changed = changed[:at] + b"0" * 64 + changed[at + 64 :]
        checkpoint.write_bytes(changed[:at] + hashlib.sha256(changed).hexdigest().encode() + changed[at + 64 :])
        code, _, said = run(program, *command)
        if code != 13 or f"{key} {theirs}, this run has {header[key]}" not in said or said.count("\n") != 1:
            passed.append(key)
    checkpoint.write_bytes(original)
    return passed


@pytest.mark.faults
@pytest.mark.parametrize("source", ["training.c", "learning.c"])
def test_every_fact_that_is_another_is_refused(source: str, build: Build, tmp_path: Path) -> None:
    program, command, keys = build(HOST, "taste-train"), commands(tmp_path)[source], noted(source)
    succeed(program, *command)
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*.safetensors")
    before = checkpoint.read_bytes()
    assert agreed(program, command, checkpoint, keys) == []
    assert checkpoint.read_bytes() == before and run(program, *command)[0] == 0
    planted = build(HOST, "taste-train -DTASTE_PLANT_ANY_RUN")
    assert agreed(planted, command, checkpoint, keys) == sorted(keys)
