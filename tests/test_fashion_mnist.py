"""ResNet-8 on all of Debian's Fashion-MNIST: accuracy and time of one command, and its bits, again and on one thread."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from host_control.cli import main

COMMAND = (
    "train --model resnet8 --data fashion-mnist --batch-size 32 --effective-batch 128 --epochs 3 --lr 0.1 "
    "--schedule cosine --warmup 0.1 --seed 0 --json"
)


def trained(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    """The result of the command, and the seconds it took in all."""
    start = time.monotonic()
    assert main([*COMMAND.split(), *more]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    return {**result, "seconds": time.monotonic() - start}


@pytest.mark.acceptance
@pytest.mark.needs("fashion-mnist", "zig")
def test_ninety_percent_within_six_minutes_and_the_same_bits_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TASTE_CACHE", str(tmp_path / "cache"))
    ways = {"first": (), "again": (), "one thread": ("--threads", "1"), "two threads": ("--threads", "2")}
    results = {way: trained(capsys, *flags, "--out", way) for way, flags in ways.items()}
    with capsys.disabled():
        for way, r in results.items():
            print(f"{way}: accuracy {r['test_accuracy']:.2%}, {r['seconds']:.0f} s, {r['samples_per_s']:.0f} samples/s")
    assert results["first"]["test_accuracy"] >= 0.9
    assert results["first"]["seconds"] <= 360
    assert len({r["sha256"] for r in results.values()}) == 1
