"""`train --compare` through the command line, with the stand-in for the board's program: runs, folders, going on, refusals."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from host_control.cli import main
from host_control.training.compare import Outcome
from host_control.training.schedule import Schedule
from host_control.training.view import TrainView
from tests.test_adabatch import options
from tests.test_host_training import calls, data, frame, use

__all__ = ["data", "frame"]
LIST = "fixed:6,fixed:20,adabatch"


def compare(capsys: pytest.CaptureFixture[str], *words: object, lines: bool = True) -> tuple[int, list[Any], str]:
    fixed = ["train", "--model", "mlp", "--batch-size", "4", "--steps", "20", "--interval", "1"]
    code = main([*fixed, *map(str, words), *(["--json"] if lines else [])])
    out, err = capsys.readouterr()
    return code, [json.loads(line) if lines else line for line in out.splitlines()], err


def flag(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_settings_side_by_side(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grows = ("--effective-batch-start", 5, "--effective-batch-cap", 20, "--batch-factor", 3, "--lr", 0.25)
    words = ("--data", data, "--compare", LIST, "--seeds", 2, "--seed", 7, *grows, "--out", "run")
    code, lines, err = compare(capsys, *words)
    assert (code, err) == (0, "")
    result = lines[-1]
    assert [s["name"] for s in result["settings"]] == LIST.split(",") and result["seeds"] == 2
    for setting in result["settings"]:
        assert setting["error"] == {"mean": 0.25, "std": 0.0, "values": [0.25, 0.25]}
        assert (setting["updates"], setting["diverged"], setting["seconds"]) == (20, False, 0.4)
    sizes = [(s["effective_batch"], s["effective_batch_cap"], s["batch_size"]) for s in result["settings"]]
    assert sizes == [(6, 6, 4), (20, 20, 4), (5, 20, 4)]
    sent = [
        (flag(c, "--effective-batch"), flag(c, "--effective-batch-cap"), flag(c, "--seed")) for c in calls(tmp_path)
    ]
    assert sent == [(str(a), str(b), seed) for a, b, _ in sizes for seed in ("7", "8")]
    assert {(flag(c, "--lr"), flag(c, "--interval"), flag(c, "--lr-decay")) for c in calls(tmp_path)} == {
        ("0.25", "1", "0.375")
    }
    steps = {(line["setting"], line["seed"]) for line in lines if line["event"] == "step"}
    assert steps == {(name, seed) for name in LIST.split(",") for seed in (7, 8)}
    run = tmp_path / "run"
    assert (run / "comparison.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((run / "comparison.csv").read_text().splitlines()))
    assert len(rows) == 3 * 2 * 2 and {row["error"] for row in rows} == {"0.25"}
    assert json.loads((run / "result.json").read_text())["settings"] == result["settings"]
    one = run / "fixed-6-8"
    assert (one / "weights.safetensors").is_file() and json.loads((one / "result.json").read_text())["seed"] == 8
    code, _, err = compare(capsys, *words)
    assert code == 2 and "is finished" in err
    assert main(["eval", "--run", str(run)]) == 2
    assert "is a comparison. Name one of the runs in it" in capsys.readouterr().err


def test_an_interrupted_comparison_goes_on(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is finished is not done again, what was begun goes on, and its seconds add up."""
    use(tmp_path, monkeypatch, pause=0.02)
    show = TrainView.show

    def interrupted(self: TrainView, event: Mapping[str, Any]) -> None:
        show(self, event)
        if event.get("step") == 15 and event["event"] == "step" and len(calls(tmp_path)) == 2:
            monkeypatch.setattr(TrainView, "show", show)
            raise KeyboardInterrupt

    monkeypatch.setattr(TrainView, "show", interrupted)
    words = ("--data", data, "--compare", "fixed:6,adabatch", "--seeds", 1, "--out", "run")
    code, _, err = compare(capsys, *words)
    assert code == 130 and "same command and --out run --resume" in err
    code, lines, err = compare(capsys, *words, "--resume")
    assert (code, err) == (0, "") and len(calls(tmp_path)) == 3 and calls(tmp_path)[-1][-1] == "--resume"
    assert {line["setting"] for line in lines if line["event"] == "step"} == {"adabatch"}
    tests = [
        json.loads(line)
        for line in (tmp_path / "run" / "adabatch-0" / "metrics.jsonl").read_text().splitlines()
        if '"eval"' in line
    ]
    # The stand-in says seconds only at its tests: those of ten steps before, and of the steps after the checkpoint.
    stopped = next(line["step"] for line in lines if line["event"] == "resume")
    assert [t["seconds"] for t in tests] == pytest.approx([0.2, 0.2 + (20 - stopped) / 50])


def test_a_setting_that_diverges_has_no_error(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--data", data, "--compare", "fixed:39,fixed:6", "--seeds", 2, "--out", "run")
    code, lines, _ = compare(capsys, *words, lines=False)
    text = "\n".join(lines)
    assert code == 0 and "diverged: step 2: loss is not finite" in text and "- diverged" in text
    assert "25.0% +- 0.0%" in text and "comparison.png" in text
    settings = json.loads((tmp_path / "run" / "result.json").read_text())["settings"]
    assert settings[0]["diverged"] and settings[0]["error"] == {"mean": None, "std": None, "values": [None, None]}
    assert settings[0]["seconds"] is None and not settings[1]["diverged"]


def test_points_are_means_over_what_was_tested() -> None:
    schedule = Schedule(options("--interval", 1), 50)
    runs: tuple[dict[str, Any], ...] = (
        {"diverged": False, "curve": [[1, 2.0, 0.5], [2, 4.0, 0.25]]},
        {"diverged": False, "curve": [[1, 4.0, 0.75]]},
        {"diverged": True, "curve": []},
    )
    points = Outcome("adabatch", schedule, (0, 1, 2), runs).points()
    assert points == [(1, 3.0, 0.625, pytest.approx(0.25 / 2**0.5)), (2, 4.0, 0.25, 0.0)]


def test_a_dry_run_of_all_settings(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = compare(capsys, "--data", data, "--compare", LIST, "--dry-run")
    assert code == 0 and not (tmp_path / "run").exists()
    first = [s["schedule"][0]["effective_batch"] for s in lines[-1]["settings"]]
    assert first == [6, 20, 16] and [s["name"] for s in lines[-1]["settings"]] == LIST.split(",")
    code, text, _ = compare(capsys, "--data", data, "--batch-schedule", "adabatch", "--dry-run", lines=False)
    assert code == 0 and any(line.split() == ["0", "16", "4", "3", "0.00354"] for line in text), text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--compare", "fixed:6,fixed:6"), "names a setting twice"),
        (("--compare", "fixed:none"), "not a whole number"),
        (("--compare", "grows"), "'grows' is no setting: use adabatch and fixed:N"),
        (("--compare", "fixed:41"), "fixed:41 is more than the 40 training samples"),
        (("--compare", "fixed:6", "--schedule", "cosine"), "--schedule cosine with --batch-schedule adabatch"),
        (("--seeds", 3), "--seeds is of --compare"),
        (("--batch-schedule", "fixed"), "--interval is of --batch-schedule adabatch"),
        (("--batch-schedule", "adabatch", "--interval", 0), "0 is not at least 1"),
        (("--batch-schedule", "adabatch", "--batch-factor", 1), "1 is not above 1"),
        (("--batch-schedule", "adabatch", "--effective-batch-cap", 41), "cap 41 is more than the 40"),
        (("--batch-schedule", "adabatch", "--effective-batch-start", 9, "--effective-batch-cap", 8), "9 is above"),
    ],
)
def test_bad_flags_are_one_line_and_leave_nothing(
    words: tuple[object, ...], message: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = compare(capsys, "--data", data, *words, lines=False)
    assert code == 2 and message in err and err.count("\n") == 1, err
    assert not list(tmp_path.glob("runs/*"))
