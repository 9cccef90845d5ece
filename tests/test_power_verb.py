"""`power` through the command line: the real program on a tree with cpufreq and sensors, and a build of mlp."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from host_control.cli import main
from host_control.power import steering
from host_control.preparation import Built
from host_control.training.view import TrainView
from tests import board_tree
from tests.host import host_target


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """A board's tree: four frequencies, and a Jetson's sensors."""
    return board_tree.jetson_nano(board_tree.cpufreq(tmp_path / "board"))


@pytest.fixture
def build(built: Callable[..., Path], board: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """mlp for images of 1 x 8 x 8; its program sees the tree in place of this machine's /proc and /sys."""
    real = built("mlp", host_target(), input_shape=(1, 8, 8), classes=3)
    folder = tmp_path / "wrapped"
    manifest = wrap(real, folder, board)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TASTE_CACHE", str(tmp_path / "cache"))
    for module in ("verbs.train", "power.proxy_run"):
        monkeypatch.setattr(f"host_control.{module}.build_imported", lambda *_: (Built(folder, manifest), None))
    return folder


def wrap(real: Path, folder: Path, root: Path) -> dict[str, Any]:
    """A build whose program is started with --system-root; its manifest."""
    folder.mkdir(exist_ok=True)
    program = folder / "taste-train"
    program.write_text(f'#!/bin/sh\nexec "{real / "taste-train"}" "$@" --system-root "{root}"\n')
    program.chmod(0o755)
    manifest: dict[str, Any] = json.loads((real / "manifest.json").read_text())
    manifest["files"]["taste-train"]["sha256"] = hashlib.sha256(program.read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "weights.safetensors").write_bytes((real / "weights.safetensors").read_bytes())
    return manifest


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """320 images in three classes that a small network tells apart, 64 to test on."""
    rng = np.random.default_rng(0)
    y = np.arange(384) % 3
    x = (rng.integers(0, 120, (384, 8, 8)) + rng.integers(0, 40, (3, 8, 8))[y]).astype(np.uint8)
    file = tmp_path / "data.npz"
    np.savez(file, x_train=x[:320], y_train=y[:320], x_test=x[320:], y_test=y[320:], classes=np.array(["a", "b", "c"]))
    return file


def power(capsys: pytest.CaptureFixture[str], *words: object, lines: bool = True) -> tuple[int, list[Any], str]:
    code = main(["power", *map(str, words), *(["--json"] if lines else [])])
    out, err = capsys.readouterr()
    return code, [json.loads(line) if lines else line for line in out.splitlines()], err


def measured(build: Path, out: Path, *words: object) -> tuple[object, ...]:
    fixed = ("measure", "--build", build, "--batch-sizes", "2,16", "--seconds", 0.1, "--power-every", 0.02)
    return (*fixed, "--out", out, *words)


def check_selections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`select` from the table in tmp_path/table, under a limit that some points keep and one that none keeps."""
    code, lines, err = power(
        capsys, "select", "--table", tmp_path / "table", "--limit-watts", 4, "--out", tmp_path / "s"
    )
    assert code == 0 and lines[-1]["choice"]["frequency_khz"] == 1_000_000
    # The clock of the tree changes nothing on this machine, so the best of all is whatever noise made it.
    assert lines[-1]["exhaustive"]["relative_time"] <= 1 and lines[-1]["pareto"]
    assert lines[-1]["baseline1"]["batch_size"] == 16 and lines[-1]["choice"]["relative_time"] == 1
    code, text, _ = power(
        capsys, "select", "--table", tmp_path / "table", "--limit-watts", 4, "--out", tmp_path / "s2", lines=False
    )
    assert code == 0 and "(estimated)" in "\n".join(text) and "no --relation" in text[0]
    code, _, err = power(
        capsys, "select", "--table", tmp_path / "table", "--limit-watts", 2, "--out", tmp_path / "none"
    )
    assert code == 24 and err.startswith(
        "error: no operating point is below 2 W: the lowest power seen (estimated) is 2.40 W"
    )
    assert err.count("\n") == 1 and not (tmp_path / "none").exists()


def test_measure_select_and_train_under_a_limit(
    build: Path,
    board: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = board_tree.settings(board)
    code, lines, err = power(capsys, *measured(build, tmp_path / "table", "--power-source", "model:idle=2,busy=4"))
    assert (code, err) == (0, "")
    result = lines[-1]
    assert result["visits"] == 8 and result["estimated"] and result["frequencies_khz"] == list(board_tree.STEPS_KHZ)
    assert [line["event"] for line in lines].count("point") == 8
    assert board_tree.settings(board) == before
    table = json.loads((tmp_path / "table/power.json").read_text())
    assert all(p["lowest_khz"] == p["highest_khz"] == p["frequency_khz"] for p in table["points"])
    assert all(p["temperature_c"] == 38.5 and len(p["samples"]) >= 2 for p in table["points"])
    watts = {p["frequency_khz"]: p["watts"] for p in table["points"]}
    assert watts == {f: pytest.approx(2 + 4 * (f / 1_500_000) ** 2.5) for f in board_tree.STEPS_KHZ}
    rows = list(csv.DictReader((tmp_path / "table/power.csv").read_text().splitlines()))
    assert len(rows) == 8 and all(row["source"] == "model (estimated)" for row in rows)
    assert (tmp_path / "table/pareto.png").read_bytes().startswith(b"\x89PNG")

    check_selections(tmp_path, capsys)

    limit, show = tmp_path / "limit", TrainView.show
    limit.write_text("10")
    monkeypatch.setattr(steering, "_LOOK_S", 0.02)

    def watched(self: TrainView, event: Mapping[str, Any]) -> None:
        show(self, event)
        if event["event"] == "step" and event["step"] > 300:
            limit.write_text("2.5")

    monkeypatch.setattr(TrainView, "show", watched)
    words = ("train", "--model", "mlp", "--data", data, "--table", tmp_path / "table", "--limit-file", limit)
    code, lines, err = power(
        capsys, *words, "--steps", 1500, "--effective-batch", 16, "--eval-every", 0, "--out", tmp_path / "run"
    )
    assert code == 0, err
    moves = [(e["batch_size"], e["frequency_khz"]) for e in lines if e["event"] == "operating_point"]
    assert moves[0][1] == 1_500_000 and moves[-1][1] == 600_000 and len(moves) == 2
    assert lines[-1]["verb"] == "train" and lines[-1]["effective_batch"] == 16 and lines[-1]["steps"] == 1500
    assert board_tree.settings(board) == before
    assert (tmp_path / "run/weights.safetensors").is_file()


def test_pruned_measuring_with_the_boards_sensor_goes_on_where_it_was(
    build: Path, board: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from host_control.boards.deployed import DeployedBoard

    bench, count = DeployedBoard.bench, 0

    def third_is_interrupted(self: DeployedBoard, point: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return bench(self, point)

    monkeypatch.setattr(DeployedBoard, "bench", third_is_interrupted)
    words = measured(build, tmp_path / "table", "--limit-watts", 5)
    code, _, err = power(capsys, *words)
    assert code == 130 and "2 points kept" in err and "--out" in err
    code, lines, _ = power(capsys, *words, lines=False)
    assert code == 0 and "going on with 2 points" in "\n".join(lines)
    table = json.loads((tmp_path / "table/power.json").read_text())
    # 5.064 V x 0.912 A, whatever runs: the first row goes up to the highest frequency, and the others begin there.
    assert all(p["watts"] == pytest.approx(4.618368) for p in table["points"])
    assert (
        table["source"] == "board:ina3221" and not table["estimated"] and table["visits"] == len(table["points"]) == 5
    )
    code, _, err = power(capsys, *measured(build, tmp_path / "table", "--limit-watts", 6))
    assert code == 2 and "limit-watts 5.0, not 6.0" in err
    code, _, err = power(capsys, *measured(build, tmp_path / "low", "--limit-watts", 4))
    assert code == 24 and "no operating point is below 4 W: the lowest power seen is 4.62 W at batch size" in err
    table = json.loads((tmp_path / "low/power.json").read_text())
    assert [(p["frequency_khz"], p["attempts"]) for p in table["points"]] == [(600_000, 2)] * 2
    code, _, err = power(capsys, *measured(build, tmp_path / "other", "--frequencies", "600,900"))
    assert code == 13 and "--frequencies 900: local has 600, 750, 1000, 1500 MHz" in err
    (board / board_tree.INA / "in_voltage0_input").write_text("?\n")
    code, _, err = power(capsys, *measured(build, tmp_path / "bad"))
    assert code == 12 and "holds '?', no number" in err and err.count("\n") == 1


def test_a_board_without_sensor_says_so(
    built: Callable[..., Path], build: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none").mkdir()
    wrap(built("mlp", host_target(), input_shape=(1, 8, 8), classes=3), build, tmp_path / "none")
    code, _, err = power(capsys, *measured(build, tmp_path / "table"))
    assert code == 2 and "power of local is not available" in err
    code, lines, _ = power(capsys, *measured(build, tmp_path / "table", "--power-source", "model"))
    assert code == 0 and lines[-1]["frequencies_khz"] == [0] and lines[-1]["visits"] == 2
    code, _, err = power(capsys, *measured(build, tmp_path / "other", "--power-source", "model", "--frequencies", 900))
    assert code == 13 and "no cpufreq" in err
    code, _, err = power(capsys, *measured(build, tmp_path / "other", "--power-source", "watts"))
    assert code == 2 and "--power-source watts is not known" in err


def test_proxy_runs_give_r(build: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("proxy", "--model", "mlp", "--data", data, "--batch-sizes", "8,64", "--target-accuracy", 0.9, "--seeds", 2)
    code, lines, err = power(capsys, *words, "--epochs", 12, "--lr", 0.002, "--out", tmp_path / "r")
    assert code == 0, err
    runs = [line for line in lines if line["event"] == "proxy"]
    assert [(e["batch_size"], e["seed"]) for e in runs] == [(8, 0), (8, 1), (64, 0), (64, 1)]
    r = lines[-1]["relation"]
    assert max(r.values()) == 1.0 and 0 < r["8"] <= 1
    means = {b: np.mean([e["epochs"] for e in runs if e["batch_size"] == b]) for b in (8, 64)}
    assert r == {str(b): pytest.approx(mean / max(means.values())) for b, mean in means.items()}
    code, lines, _ = power(capsys, *words, "--epochs", 12, "--lr", 0.002, "--out", tmp_path / "r")
    assert code == 0 and not [line for line in lines if line["event"] == "proxy"], "all runs are there"
    code, _, err = power(capsys, *words, "--epochs", 13, "--lr", 0.002, "--out", tmp_path / "r")
    assert code == 2 and "most-epochs 12.0, not 13.0" in err
    code, _, err = power(capsys, *words, "--epochs", 2, "--lr", 1e-6, "--out", tmp_path / "low")
    assert code == 2 and "no batch size reached 90.0% within 2 epochs" in err and err.count("\n") == 1
    assert json.loads((tmp_path / "low/relation.json").read_text())["epochs"] == {"8": [None] * 2, "64": [None] * 2}
    code, _, err = power(capsys, *words, "--epochs", 2, "--lr", 1e20, "--optimizer", "sgd", "--out", tmp_path / "nan")
    assert code == 2 and "no batch size reached" in err, "one that diverges is an answer"
    code, _, err = power(capsys, *words, "--batch-sizes", 321, "--out", tmp_path / "large")
    assert code == 2 and "320 samples to train on" in err


def test_tune_for_energy_over_everything_that_can_be_set(
    build: Path, board: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "tune",
        "--build",
        build,
        "--max-batch-size",
        4,
        "--seconds",
        0.03,
        "--power-every",
        0.01,
        "--joint",
        "--json",
    )
    code = main([*map(str, (*words, "--objective", "energy", "--budget", 5, "--out", tmp_path / "t"))])
    out, err = capsys.readouterr()
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    result = lines[-1]
    assert [line["event"] for line in lines].count("trial") == 5 == result["budget"] and result["complete"]
    assert result["source"] == "board:ina3221" and not result["estimated"]
    assert result["choice"]["joules_per_sample"] == min(o["joules_per_sample"] for o in result["measured"])
    assert {o["frequency_khz"] for o in result["measured"]} <= set(board_tree.STEPS_KHZ)
    assert board_tree.settings(board)["scaling_governor"] == "ondemand"
    assert (tmp_path / "t/pareto.csv").read_text().count("\n") == 1 + len(result["pareto"])
    for wrong, words_of_error in (("--inference", "not for a joint search"), ("--objective", "needs to know")):
        more = [wrong, "time-to-accuracy"] if wrong == "--objective" else [wrong]
        assert main([*map(str, words), *more]) == 2
        assert words_of_error in capsys.readouterr().err


def test_an_external_meter_and_an_idle_board(
    build: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = "command:sh -c 'while :; do echo 4.25; sleep 0.005; done'"
    few = ("--frequencies", "600", "--power-source")
    code, lines, err = power(capsys, *measured(build, tmp_path / "meter", *few, meter))
    assert code == 0, err
    assert lines[-1]["source"] == "command:sh" and {p["watts"] for p in lines[-1]["points"]} == {4.25}
    assert all(p["joules_per_sample"] == pytest.approx(4.25 / p["samples_per_s"]) for p in lines[-1]["points"])
    monkeypatch.setattr("host_control.power.measure_run.IDLE_S", 0.1)
    code, lines, err = power(capsys, *measured(build, tmp_path / "idle", *few, "board", "--subtract-idle"))
    assert code == 0, err
    assert lines[-1]["idle_watts"] == pytest.approx(4.618368)
    assert all(p["watts"] == pytest.approx(0, abs=1e-6) for p in lines[-1]["points"])
