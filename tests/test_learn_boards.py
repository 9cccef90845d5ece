"""`learn` on an emulated board behind a real SSH server: the same bits as the same program run by hand, and it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import host_control.boards as boards
from cross.target import find_target
from host_control.boards import open_board
from host_control.cli import main
from host_control.preparation import read_build
from tests.native_builds import succeed
from tests.sshd.emulated_board import run_emulated_board
from tests.sshd.server import ALIAS

CLASSES = ["ant", "bee", "cat", "dog"]


def write_data(path: Path) -> Path:
    draw = np.random.default_rng(4)
    patterns = draw.integers(0, 200, (4, 8, 8))
    arrays = {}
    for split, count in (("train", 120), ("test", 40)):
        y = np.arange(count) % 4
        x = (patterns[y] + draw.integers(0, 56, (count, 8, 8))).astype(np.uint8)
        arrays |= {f"x_{split}": x, f"y_{split}": y}
    np.savez(path, classes=np.array(CLASSES), **arrays)
    return path


@pytest.mark.needs("boards", "zig")
@pytest.mark.parametrize("target", ["rpi4"])
def test_learn_over_ssh(
    target: str,
    built: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = built("mlp", target, input_shape=(1, 8, 8), classes=4)
    monkeypatch.setattr("host_control.verbs.learn.build_imported", lambda *_: (read_build(folder), None))
    monkeypatch.setenv("TASTE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "sshd").mkdir()
    fixed = ["--model", "mlp", "--data", str(write_data(tmp_path / "data.npz")), "--tasks", "2", "--buffer", "20"]
    words = ["learn", *fixed, "--compare", "none,8", "--seeds", "1", "--board", ALIAS, "--json"]
    words += ["--remote-dir", str(tmp_path / "there"), "--out", str(tmp_path / "run")]
    with run_emulated_board(tmp_path / "sshd", target, step=[], loss=0.0, table={}) as emulated:
        monkeypatch.setattr(boards, "open_board", partial(open_board, ssh_config=emulated.sshd.config))
        assert main(words) == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert main(words) == 0
        again = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [s["updates"] for s in result["settings"]] == [6, 30]
    assert again[-1]["settings"] == result["settings"] and not any(e["event"] == "step" for e in again)
    learned: dict[str, Any] = json.loads((tmp_path / "run/learned.json").read_text())
    (packed,) = (tmp_path / "cache/data").iterdir()
    flags = ["--samples", packed / "train.safetensors", "--test", packed / "test.safetensors", "--tasks", 2]
    flags += ["--lr", 0.1, "--grad-clip", 1, "--seed", 0, "--order-seed", 0]
    emulator = tuple(find_target(target).emulator("")[:-1])
    for name, size, buffer in (("none", 20, 0), ("8", 8, 20)):
        command = ("learn", *flags, "--batch-size", size, "--buffer", buffer)
        by_hand = succeed(folder / "taste-train", *command, emulator=emulator)[-1]
        found = learned[f"{name} {size} 0"]
        assert (found["sha256"], found["accuracy_matrix"]) == (by_hand["sha256"], by_hand["accuracy_matrix"])
