"""`learn` through the command line: real data on this machine, what it leaves, going on, and what it refuses."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cross.errors import DataError
from host_control.cli import main
from host_control.comparison import spread
from host_control.learning.options import read_task_file
from host_control.preparation import read_build
from tests.host import host_target


@pytest.fixture(autouse=True)
def frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TASTE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def prebuilt(built: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = built("mlp", host_target(), input_shape=(1, 28, 28), classes=10)
    monkeypatch.setattr("host_control.verbs.learn.build_imported", lambda *_: (read_build(folder), None))


def learn(capsys: pytest.CaptureFixture[str], *words: object, lines: bool = True) -> tuple[int, list[Any], str]:
    code = main(["learn", "--model", "mlp", *map(str, words), *(["--json"] if lines else [])])
    out, err = capsys.readouterr()
    return code, [json.loads(line) if lines else line for line in out.splitlines()], err


@pytest.mark.needs("fashion-mnist", "zig")
def test_replay_remembers_and_the_batch_size_matters(
    prebuilt: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Split Fashion-MNIST, 200 samples a class: what methods of the field agree on, with wide bounds."""
    fixed = (
        "--data",
        "fashion-mnist",
        "--samples-per-class",
        200,
        "--buffer",
        200,
        "--seeds",
        3,
        "--seed",
        1,
        "--lr-cap",
        0.2,
    )
    flags = (*fixed, "--compare", "none,10,20,200", "--out", tmp_path / "run")
    code, lines, err = learn(capsys, *flags)
    assert (code, err) == (0, "")
    result = lines[-1]
    settings = {s["name"]: s for s in result["settings"]}
    assert list(settings) == ["none", "10", "20", "200"] and (result["verb"], result["tasks"]) == ("learn", 5)
    final = {name: s["final_average_accuracy"]["mean"] for name, s in settings.items()}
    assert final["20"] - final["none"] >= 0.25
    assert abs(final["10"] - final["20"]) <= 0.08 and final["200"] <= final["20"] - 0.08
    assert settings["none"]["forgetting"]["mean"] > settings["20"]["forgetting"]["mean"]
    # Of each task 400 samples: all rows of a step without replay, half of them with it.
    assert [s["updates"] for s in result["settings"]] == [100, 400, 200, 20]
    assert [s["lr"] for s in result["settings"]] == pytest.approx([0.1, 0.05, 0.1, 0.2])
    assert [s["replay"] for s in result["settings"]] == [False, True, True, True]
    assert not any(s["diverged"] for s in result["settings"])
    _check_files(tmp_path / "run", result)
    # The same command again: everything is there already.
    code, again, _ = learn(capsys, *flags)
    assert code == 0 and not [line for line in again if line["event"] == "step"]
    assert again[-1]["settings"] == result["settings"]
    code, _, err = learn(capsys, *flags, "--passes", 2)
    assert code == 2 and "was begun with passes 1, not 2" in err


def _check_files(folder: Path, result: dict[str, Any]) -> None:
    rows = list(csv.DictReader((folder / "accuracy.csv").read_text().splitlines()))
    assert len(rows) == 4 * 3 * 15
    for setting in result["settings"]:
        for seed, value in zip(("1", "2", "3"), setting["final_average_accuracy"]["values"], strict=True):
            last = [r for r in rows if (r["setting"], r["seed"], r["after_task"]) == (setting["name"], seed, "4")]
            assert np.mean([float(r["accuracy"]) for r in last]) == pytest.approx(value)
    assert (folder / "learn.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "result.json").read_text())["settings"] == result["settings"]
    assert json.loads((folder / "options.json").read_text())["options"]["memory_policy"] == "reservoir"


@pytest.mark.needs("fashion-mnist", "zig")
def test_tasks_of_a_file_known_at_testing_and_a_diverged_setting(
    prebuilt: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tasks.json").write_text(json.dumps([[0, 1, 2], ["Dress", "Coat", 5], [6, 7, 8, "Ankle boot"]]))
    fixed = ("--data", "fashion-mnist", "--samples-per-class", 200, "--buffer", 100, "--seeds", 1)
    code, lines, err = learn(capsys, *fixed, "--scenario", "til", "--task-file", "tasks.json", "--batch-size", 20)
    assert (code, err) == (0, "")
    (setting,) = lines[-1]["settings"]
    assert setting["final_average_accuracy"]["mean"] >= 0.85 and setting["forgetting"]["mean"] <= 0.1
    tasks = [line["classes"] for line in lines if line["event"] == "task"]
    assert tasks == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    code, text, _ = learn(capsys, *fixed, "--batch-size", 40, "--lr", 1e20, "--lr-cap", 1e20, lines=False)
    assert code == 0 and any("diverged" in line for line in text)
    results = [json.loads(file.read_text()) for file in tmp_path.glob("runs/*/result.json")]
    (diverged,) = [r["settings"][0] for r in results if r["settings"][0]["diverged"]]
    assert diverged["final_average_accuracy"] == {"mean": None, "std": None, "values": [None]}


def test_spread() -> None:
    assert spread([0.5, 0.7, None]) == {
        "mean": pytest.approx(0.6),
        "std": pytest.approx(0.2 / np.sqrt(2)),
        "values": [0.5, 0.7, None],
    }
    assert spread([0.25]) == {"mean": 0.25, "std": 0.0, "values": [0.25]}


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ([["cat"]], "'dog' is in no task"),
        ([["cat", "dog"], []], "task 1 of tasks.json has no classes"),
        ([["cat", "dog", "bird"]], "'bird', which the data does not have"),
        ([["cat", "dog", 0]], "names class 0 twice"),
        ({"cat": 0}, "no list of lists"),
    ],
)
def test_bad_task_files(tmp_path: Path, tasks: Any, words: str) -> None:
    Path("tasks.json").write_text(json.dumps(tasks))
    with pytest.raises(DataError, match=words):
        read_task_file(Path("tasks.json"), ["cat", "dog"])


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--tasks", 3), 23, "3 tasks of 2 classes"),
        (("--tasks", 2, "--buffer", 1), 2, "--buffer 1 for 2 classes"),
        (("--tasks", 2, "--max-classes", 1), 2, "the data has 2 classes"),
        (("--tasks", 2, "--compare", "none,none"), 2, "names a setting twice"),
        (("--tasks", 2, "--compare", "fast"), 2, "not a whole number"),
        (("--tasks", 2, "--classes", 2), 2, "Use --max-classes"),
        (("--tasks", 2, "--scenario", "til", "--loss-classes", "seen"), 2, "it is of cil"),
        (("--tasks", 2, "--replay-ratio", 1), 2, "not a share"),
        (("--task-file", "nowhere.json"), 12, "cannot be read"),
    ],
)
def test_bad_flags_are_one_line(
    flags: tuple[object, ...], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = np.zeros((12, 8, 8), np.uint8), np.arange(12) % 2
    np.savez(tmp_path / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y, classes=np.array(["cat", "dog"]))
    try:
        found, _, err = learn(capsys, "--data", tmp_path / "data.npz", *flags)
    except SystemExit as exit_:
        found, err = int(exit_.code or 0), capsys.readouterr().err
    assert (found, words in err) == (code, True), err
    assert not (tmp_path / "runs").exists()
