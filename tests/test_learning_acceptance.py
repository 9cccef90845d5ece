"""Split Fashion-MNIST, 5 tasks of 2 classes, resnet8: what replay and the batch size do, at full length (15 minutes)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from host_control.cli import main

pytestmark = [pytest.mark.acceptance, pytest.mark.needs("fashion-mnist", "zig")]


@pytest.fixture(autouse=True)
def frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def learn(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """The settings by name; prints them for the record."""
    fixed = ("--model", "resnet8", "--data", "fashion-mnist", "--samples-per-class", 2000, "--buffer", 500, "--json")
    code = main(["learn", *map(str, (*fixed, *words))])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    settings = {s["name"]: s for s in json.loads(out.splitlines()[-1])["settings"]}
    for name, s in settings.items():
        print(name, s["final_average_accuracy"], s["forgetting"]["mean"], s["updates"], round(s["seconds"], 1))
    assert not any(s["diverged"] for s in settings.values())
    return {name: s["final_average_accuracy"]["mean"] for name, s in settings.items()}


def test_class_incremental(capsys: pytest.CaptureFixture[str]) -> None:
    """Replay is worth 25 points and more; 40 updates of 1024 rows learn too little, without diverging.

    auto and max are of the machine: printed, with no bound.
    """
    final = learn(capsys, "--compare", "none,20,40,auto,max,1024", "--seeds", 5)
    assert final["20"] - final["none"] >= 0.25
    assert final["1024"] <= final["20"] - 0.08
    assert abs(final["40"] - final["20"]) <= 0.03


def test_task_incremental(capsys: pytest.CaptureFixture[str]) -> None:
    assert learn(capsys, "--scenario", "til", "--batch-size", 20, "--seeds", 2)["20"] >= 0.9
