"""`tune` and its neighbours through the command line, on recorded boards: results, files, exit codes, interruption."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from cross.errors import DoesNotFitError, LinkLostError, TasteError
from cross.version import VERSION
from host_control.board import Counters, OperatingPoint
from host_control.boards.recorded import RecordedBoard
from host_control.cli import main
from host_control.run_folder import RunFolder
from host_control.search.space import batch_grid
from host_control.study import STUDY_FILE, STUDY_NAME

_ROOT = Path(__file__).resolve().parent.parent


def _table(path: Path, largest: int = 32, best: int = 12, **more: Any) -> Path:
    rows = [
        {"batch_size": size, "samples_per_s": 100 - abs(size - best), "spread": 0.001, "peak_rss_bytes": size * 2**20}
        | {"planned_bytes": size * 2**20}
        for size in batch_grid(largest)
    ]
    path.write_text(json.dumps({"board": "pi", "emulated": False, "throughput": rows} | more))
    return path


@pytest.fixture
def board(tmp_path: Path) -> str:
    return f"recorded:{_table(tmp_path / 'board.json')}"


def _tune(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, JSON lines and stderr of `tune --json`."""
    code = main(["tune", "--json", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, [json.loads(line) for line in out.splitlines()], err


def _measure_with(monkeypatch: pytest.MonkeyPatch, change: Callable[[Counters], Counters]) -> list[int]:
    """Recorded boards whose measurements go through `change`; the sizes that were measured."""
    measured: list[int] = []
    original = RecordedBoard.measure

    def measure(self: RecordedBoard, point: OperatingPoint) -> Counters:
        measured.append(point.batch_size)
        return change(original(self, point))

    monkeypatch.setattr(RecordedBoard, "measure", measure)
    return measured


def _states(out: Path) -> list[TrialState]:
    study = optuna.load_study(study_name=STUDY_NAME, storage=f"sqlite:///{out / STUDY_FILE}")
    return [trial.state for trial in study.get_trials()]


def test_result_and_files(board: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    code, lines, err = _tune(capsys, "--board", board, "--out", out)
    assert (code, err) == (0, "")
    assert [line["event"] for line in lines][:2] == ["forecast", "trial"]
    result = lines[-1]
    assert (result["event"], result["verb"]) == ("result", "tune")
    assert (result["bs_peak"], result["bs_max"], result["verdict"]) == (12, 32, "peak")
    assert result["bs_opt"] in (10, 12) and result["plateau"][0] == result["bs_opt"]
    assert result["speedup"] == pytest.approx((100 - abs(result["bs_opt"] - 12)) / 80)
    assert (result["budget"], result["space_size"], result["complete"], result["seed"]) == (9, 17, True, 0)
    assert (result["board"], result["emulated"]) == ("pi", False)
    assert len(result["throughput"]) == 9
    assert {"batch_size", "samples_per_s", "spread", "peak_rss_bytes", "tainted"} <= set(result["throughput"][0])
    stored = json.loads((out / "result.json").read_text())
    assert {key: stored[key] for key in stored if key != "verb"} == {
        key: result[key] for key in result if key not in ("event", "verb", "out")
    }
    assert (out / "throughput.png").read_bytes().startswith(b"\x89PNG")
    environment = json.loads((out / "environment.json").read_text())
    assert environment["versions"]["optuna"] == optuna.__version__
    assert environment["versions"]["taste-edge"] == VERSION
    assert {"date", "command", "host", "board"} <= set(environment)
    with open(out / "trials.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == ["complete"] * len(rows)
    assert {int(row["batch_size"]) for row in rows} == {row["batch_size"] for row in result["throughput"]}
    assert not [path for path in out.iterdir() if path.name.endswith(".part")]


def test_output_for_people(board: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--board", board, "--out", str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert "searching 17 sizes from 1 to 32" in text
    assert "forecast: at least" in text
    assert "bs_max" in text and "samples/s on pi, 1.2" in text
    assert "{" not in text


def test_a_plateau_says_what_is_gained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _table(tmp_path / "flat.json")
    table = json.loads(path.read_text())
    for row in table["throughput"]:
        row["samples_per_s"] = 100 if row["batch_size"] >= 8 else 50
    path.write_text(json.dumps(table))
    assert main(["tune", "--board", f"recorded:{path}", "--out", str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert (
        "Throughput is flat from 8 to 32 samples: what bs_opt gains is memory and latency (8.0 MiB instead of" in text
    )
    assert "not throughput." in text
    assert json.loads((tmp_path / "run" / "result.json").read_text())["verdict"] == "plateau"


def test_a_rise_to_the_end_says_that_nothing_is_gained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    board = f"recorded:{_table(tmp_path / 'rise.json', best=90)}"
    assert main(["tune", "--board", board, "--out", str(tmp_path / "run"), "--max-batch-size", "16"]) == 0
    assert "there is nothing to gain from a smaller batch" in capsys.readouterr().out


def test_an_emulated_table_stays_emulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    board = f"recorded:{_table(tmp_path / 'qemu.json', emulated=True)}"
    assert main(["tune", "--board", board, "--out", str(tmp_path / "run")]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert "samples/s" not in line or "emulated" in line
    assert json.loads((tmp_path / "run" / "result.json").read_text())["emulated"] is True


@pytest.mark.parametrize(("flags", "bs_max"), ((("--max-batch-size", "20"), 20), (("--memory", "25M"), 24)))
def test_limits(flags: tuple[str, ...], bs_max: int, board: str, tmp_path: Path, capsys: Any) -> None:
    code, lines, _ = _tune(capsys, "--board", board, "--out", tmp_path / "run", *flags)
    assert (code, lines[-1]["bs_max"]) == (0, bs_max)


@pytest.mark.parametrize("search", ("paper", "grid", "random"))
def test_other_searches(search: str, board: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--search", search, "--max-batch-size", "18")
    code, lines, _ = _tune(capsys, "--board", board, "--out", tmp_path / "run", *flags)
    assert code == 0
    assert len(lines[-1]["throughput"]) <= {"grid": 10}.get(search, 5)


def test_ctrl_c_saves_and_the_same_command_goes_on(
    board: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        measured: list[int] = []

        def interrupt(counters: Counters) -> Counters:
            measured.append(counters.batch_size)
            if len(measured) == 5:
                raise KeyboardInterrupt
            return counters

        _measure_with(patch, interrupt)
        code, lines, err = _tune(capsys, "--board", board, "--out", out)
    assert code == 130
    assert lines[-1]["event"] == "error" and lines[-1]["code"] == 130
    assert err.count("\n") == 1
    assert "4 measurements saved" in err and f"--out {out}" in err
    assert json.loads((out / "result.json").read_text())["complete"] is False
    assert TrialState.RUNNING not in _states(out)
    measured = _measure_with(monkeypatch, lambda counters: counters)
    code, lines, _ = _tune(capsys, "--board", board, "--out", out)
    assert code == 0 and lines[-1]["complete"]
    assert len(set(measured)) == 5
    assert len(lines[-1]["throughput"]) == 9


def test_resume_finds_the_unfinished_study(
    board: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _tune(capsys, "--board", board, "--resume")[0] == 2
    assert _tune(capsys, "--board", board, "--time-budget", "0.001s")[0] == 0
    (folder,) = (tmp_path / "runs").iterdir()
    code, lines, _ = _tune(capsys, "--board", board, "--resume")
    assert (code, lines[-1]["complete"], lines[-1]["out"]) == (0, True, f"runs/{folder.name}")
    assert _tune(capsys, "--board", board, "--resume")[0] == 2, "it is complete now"


@pytest.mark.parametrize(
    ("flags", "change", "goes_on"), [([], {}, True), (["--new"], {}, False), ([], {"seed": 1}, False)]
)
def test_the_same_command_goes_on(
    flags: list[str],
    change: dict[str, int],
    goes_on: bool,
    board: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By itself; not with --new, and not where what was measured is another study than the flags say (a build that changed)."""
    monkeypatch.chdir(tmp_path)
    assert _tune(capsys, "--board", board, "--time-budget", "0.001s")[0] == 0
    (folder,) = (tmp_path / "runs").iterdir()
    _change_key(folder, change)
    os.rename(folder, folder.with_name("earlier"))
    code, lines, _ = _tune(capsys, "--board", board, *flags)
    assert (code, lines[-1]["complete"]) == (0, True)
    assert (lines[-1]["out"] == "runs/earlier") == goes_on


def _change_key(folder: Path, change: dict[str, int]) -> None:
    study = optuna.load_study(study_name="tune", storage=f"sqlite:///{folder / 'study.db'}")
    study.set_user_attr("key", study.user_attrs["key"] | change)


def test_other_flags_in_the_same_folder_are_refused(board: str, tmp_path: Path, capsys: Any) -> None:
    assert _tune(capsys, "--board", board, "--out", tmp_path / "run")[0] == 0
    code, _, err = _tune(capsys, "--board", board, "--out", tmp_path / "run", "--seed", "1")
    assert code == 2 and "seed 0, not 1" in err


def test_a_second_run_in_the_folder_is_refused(board: str, tmp_path: Path, capsys: Any) -> None:
    with RunFolder(tmp_path / "run"):
        code, _, err = _tune(capsys, "--board", board, "--out", tmp_path / "run")
    assert code == 16
    assert f"in use by process {os.getpid()}" in err


def test_a_killed_study_goes_on_with_its_budget_exact(board: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "host_control", "tune", "--json", "--board", board, "--out", str(out)]
    with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True) as tuner:
        assert tuner.stdout is not None
        trials = 0
        while trials < 3:
            trials += json.loads(tuner.stdout.readline())["event"] == "trial"
        tuner.send_signal(signal.SIGKILL)
    done = _states(out).count(TrialState.COMPLETE)
    assert done >= 3
    finished = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout.splitlines()[-1])
    assert result["complete"] and len(result["throughput"]) == result["budget"]
    assert TrialState.RUNNING not in _states(out)


@pytest.mark.parametrize(
    ("error", "code"),
    (
        (LinkLostError("pi does not answer. Check the cable."), 17),
        (TasteError("crashed. Report it."), 1),
        (RuntimeError("a bug\nin two lines"), 1),
        (OSError(28, "No space left on device"), 11),
        (OSError(5, "Input/output error"), 12),
    ),
)
def test_an_error_ends_the_study_with_its_code_and_one_line(
    error: Exception, code: int, board: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Counters) -> Counters:
        raise error

    _measure_with(monkeypatch, fail)
    found, lines, err = _tune(capsys, "--board", board, "--out", tmp_path / "run")
    assert found == code
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err
    assert lines[-1] == {"event": "error", "code": code, "message": err.removeprefix("error: ").rstrip("\n")}
    assert _states(tmp_path / "run") == [TrialState.FAIL]


def test_a_plan_error_is_reported(
    board: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(counters: Counters) -> Counters:
        if counters.batch_size == 32:
            raise DoesNotFitError("batch size 32 needs 900 MiB; 800 MiB free. Largest that fits: 28.")
        return counters

    _measure_with(monkeypatch, refuse)
    assert main(["tune", "--board", board, "--out", str(tmp_path / "run")]) == 0
    assert "Plan error: batch size 32" in capsys.readouterr().out
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["plan_errors"] == [32] and result["speedup"] is None


def test_nothing_fits(board: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(counters: Counters) -> Counters:
        raise DoesNotFitError(f"batch size {counters.batch_size} needs 900 MiB; 2 MiB free.")

    _measure_with(monkeypatch, refuse)
    assert _tune(capsys, "--board", board, "--out", tmp_path / "run")[0] == 10


def test_a_board_that_is_never_steady(
    board: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    _measure_with(monkeypatch, lambda counters: replace(counters, tainted=True, taint="hot"))
    code, lines, err = _tune(capsys, "--board", board, "--out", tmp_path / "run")
    assert code == 18 and "(hot)" in err
    assert any(line["event"] == "cool_down" for line in lines)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert all(row["tainted"] for row in result["throughput"])


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--board", "recorded:/nowhere.json", "--out", "/dev/null/x", "--debug"]) != 0
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    (
        (["tune", "--board", "recorded:nowhere.json"], 2, "no recorded table nowhere.json"),
        (["tune"], 2, "Name a model with --model"),
        (["bench", "--model", "resnet18", "--batch-size", "0"], 2, "0 is not at least 1"),
        (["bench", "--model", "resnet18", "--batch-size", "many"], 2, "'many' is not a whole number"),
        (["tune", "--model", "resnet18", "--board", "emulated:cray"], 2, "cray"),
        (["tune", "--model", "resnet18", "--target", "cray"], 2, "unknown target 'cray'"),
        (["tune", "--model", "no-such-model", "--target", "x86-64-avx2"], 2, "no-such-model"),
        (["tune", "--build", "."], 2, "has no manifest.json"),
        (["tune", "--search", "bisect"], 2, "invalid choice: 'bisect'"),
        (["tune", "--time-budget", "soon"], 2, "not a time such as"),
        (["tune", "--memory", "lots"], 2, "not a size such as"),
        (["paint"], 2, "invalid choice: 'paint'"),
        ([], 2, "VERB"),
    ),
)
def test_bad_usage_is_one_line(
    arguments: list[str], code: int, words: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize("content", (b"", b"not a model", b"\x08\x07\x12\x04torch" + b"\xff" * 40))
def test_a_file_that_is_no_model_is_corrupt_input(content: bytes, tmp_path: Path, capsys: Any) -> None:
    model = tmp_path / "broken.onnx"
    model.write_bytes(content)
    code = main(["tune", "--model", str(model), "--target", "x86-64-avx2", "--out", str(tmp_path / "run")])
    assert code == 14
    assert capsys.readouterr().err.count("\n") == 1


def test_bench_of_a_recorded_board(board: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--board", board, "--batch-size", "8", "--out", str(tmp_path / "run"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["event"], result["verb"], result["batch_size"], result["samples_per_s"]) == (
        "result",
        "bench",
        8,
        96,
    )


def test_board_list_names_every_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["board", "list"]) == 0
    text = capsys.readouterr().out
    assert "rpi4" in text and "Banana Pi BPI-F3 (SpacemiT X60, V at 256 bits)" in text
    assert main(["board", "list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["boards"]) >= 11
