"""A study whose tuner is killed with SIGKILL, again and again: nothing measured is lost, nothing is left running."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from host_control.study import STUDY_FILE, STUDY_NAME

_ROOT = Path(__file__).resolve().parent.parent
_KILLS = 8
_SEED = 20261129


def _tune(out: Path) -> list[str]:
    board = "recorded:examples/recorded_board.json"
    return [sys.executable, "-m", "host_control", "tune", "--board", board, "--out", str(out), "--json"]


def _kill_after(out: Path, measurements: int, delay_s: float) -> int:
    """Kills the tuner `delay_s` after it reported that many measurements; how many it had reported by then."""
    with subprocess.Popen(_tune(out), cwd=_ROOT, stdout=subprocess.PIPE, text=True) as tuner:
        assert tuner.stdout is not None
        reported = 0
        while reported < measurements and (line := tuner.stdout.readline()):
            reported += json.loads(line)["event"] == "trial"
        time.sleep(delay_s)
        tuner.send_signal(signal.SIGKILL)
        reported += sum(json.loads(line)["event"] == "trial" for line in tuner.stdout if line.endswith("\n"))
    return reported


def _trials(out: Path) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name=STUDY_NAME, storage=f"sqlite:///{out / STUDY_FILE}").get_trials()


def _faults(out: Path, reported: int, budget: int | None = None) -> list[str]:
    """Lost measurements; with `budget`, of a study that ended, also unfinished trials and a wrong number of them."""
    states = [trial.state for trial in _trials(out)]
    done = states.count(TrialState.COMPLETE)
    faults = []
    if done < reported:
        faults.append(f"{reported} measurements were reported, {done} are kept")
    if budget is not None and TrialState.RUNNING in states:
        faults.append("a trial is left running")
    if budget is not None and done != budget:
        faults.append(f"{done} measurements for a budget of {budget}")
    return faults


@pytest.mark.faults
def test_a_killed_tuner_goes_on_with_every_measurement(tmp_path: Path) -> None:
    generator = random.Random(_SEED)
    print(f"seed {_SEED}")
    out = tmp_path / "run"
    reported = 0
    for _ in range(_KILLS):
        reported += _kill_after(out, generator.randint(0, 1), generator.uniform(0.0, 0.02))
        if (out / STUDY_FILE).is_file() and reported:
            assert _faults(out, reported) == []
    finished = subprocess.run(_tune(out), cwd=_ROOT, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout.splitlines()[-1])
    assert result["complete"] and len(result["throughput"]) == result["budget"]
    assert _faults(out, reported, result["budget"]) == []


@pytest.mark.faults
def test_the_harness_sees_a_planted_fault(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / STUDY_FILE}"
    study = optuna.create_study(study_name=STUDY_NAME, storage=storage)
    study.tell(study.ask(), 1.0)
    study.ask()
    assert _faults(tmp_path, reported=2, budget=2) == [
        "2 measurements were reported, 1 are kept",
        "a trial is left running",
        "1 measurements for a budget of 2",
    ]
