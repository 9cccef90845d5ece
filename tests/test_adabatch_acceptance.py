"""AdaBatch on 10,000 images of Fashion-MNIST, resnet8, 10 epochs: the error of the small batch with half its updates or less."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import numpy as np
import pytest

from host_control.cli import main
from host_control.data import PackOptions, read_data_set

pytestmark = [pytest.mark.acceptance, pytest.mark.needs("fashion-mnist", "zig")]


def subset(path: Path, count: int = 10_000) -> Path:
    """The first images of the training split, and all of the test split."""
    data = read_data_set("fashion-mnist", PackOptions())
    assert data.test is not None
    x, xt = (np.stack([split.sample(i) for i in range(n)]) for split, n in ((data.train, count), (data.test, 10_000)))
    y, yt = data.train.labels[:count], data.test.labels
    np.savez(path, x_train=x, y_train=y, x_test=xt, y_test=yt, classes=np.array(data.classes))
    return path


def test_the_error_of_the_small_batch_with_fewer_updates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model", "resnet8", "--data", str(subset(tmp_path / "fashion10k.npz")), "--batch-size", "32"]
    words += ["--compare", "fixed:16,fixed:256,adabatch", "--effective-batch-start", "16"]
    words += ["--effective-batch-cap", "256", "--interval", "2", "--epochs", "10", "--lr", "0.05"]
    # One thread: the CPU's time is then what a machine with nothing else to do takes, whatever else this one does.
    words += ["--eval-every", "2", "--seeds", "3", "--threads", "1", "--json"]
    before = cpu_seconds()
    code = main(["train", *words])
    took = cpu_seconds() - before
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    settings = {s["name"]: s for s in json.loads(out.splitlines()[-1])["settings"]}
    for name, s in settings.items():
        print(f"{name}: error {s['error']}, {s['updates']} updates, {s['seconds']:.0f} s a run")
    small, large, grown = settings["fixed:16"], settings["fixed:256"], settings["adabatch"]
    # Reported, not asserted in size: 0.05 is a small rate for an effective batch of 256.
    gap = large["error"]["mean"] - small["error"]["mean"]
    spread = float(np.hypot(large["error"]["std"], small["error"]["std"]))
    print(f"gap of the fixed large batch: {gap:.2%} +- {spread:.2%}; {took:.0f} s of CPU in all")
    assert not any(s["diverged"] for s in settings.values())
    assert abs(grown["error"]["mean"] - small["error"]["mean"]) <= 0.01
    assert (small["updates"], grown["updates"]) == (6250, 2428) and grown["updates"] <= 0.5 * small["updates"]
    assert took <= 12 * 60


def cpu_seconds() -> float:
    """What this process and its ended children have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
