"""The frame itself: a missing need skips with its reason, and fails where it is required."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import needs

_ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """One need that is met and one that is not."""
    reasons = {"torch": None, "data": "no data here"}
    monkeypatch.setattr(needs, "missing", reasons.__getitem__)


@pytest.mark.usefixtures("absent")
def test_a_met_need_runs_the_test() -> None:
    assert needs.unmet(["torch"], required=["torch", "data"]) is None


@pytest.mark.usefixtures("absent")
def test_a_missing_need_skips_with_its_reason() -> None:
    assert needs.unmet(["torch", "data"], required=["torch"]) == ("skip", "needs data: no data here")


@pytest.mark.usefixtures("absent")
def test_a_missing_need_fails_where_it_is_required() -> None:
    assert needs.unmet(["data"], required=["data"]) == ("fail", "needs data: no data here")


def test_every_probe_answers() -> None:
    for name, probe in needs.NEEDS.items():
        reason = probe()
        assert reason is None or reason.strip(), name


def _run_frame(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest on a folder of planted tests with this project's own conftest and settings."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(_ROOT / "pyproject.toml")]
    command += ["-p", "tests.conftest", "--rootdir", str(_ROOT), *options, str(folder)]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TASTE_")}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=_ROOT, env={**variables, **environment}, timeout=120
    )


_TESTS = """
import warnings

import pytest

@pytest.mark.needs("data")
def test_with_data():
    pass

@pytest.mark.needs("boards")
def test_on_a_board():
    pass

def test_that_warns():
    warnings.warn("planted")
"""
_MODULE_THAT_SKIPS_ITSELF = """
import pytest

pytest.skip("could not import 'data'", allow_module_level=True)
"""


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    (tmp_path / "test_planted.py").write_text(_TESTS, encoding="utf-8")
    (tmp_path / "test_skipping_module.py").write_text(_MODULE_THAT_SKIPS_ITSELF, encoding="utf-8")
    return tmp_path


def test_missing_needs_skip_boards_are_left_out_and_warnings_fail(planted: Path) -> None:
    run = _run_frame(planted)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "1 failed, 2 skipped, 1 deselected" in run.stdout
    assert "UserWarning: planted" in run.stdout


def test_required_needs_fail_in_tests_and_in_modules(planted: Path) -> None:
    run = _run_frame(planted, "--continue-on-collection-errors", "-k", "data", TASTE_REQUIRE="data")
    assert run.returncode == 1, run.stdout + run.stderr
    assert "2 deselected, 2 errors" in run.stdout
    assert run.stdout.count("TASTE_REQUIRE forbids") >= 2


def test_an_unknown_need_stops_the_run(planted: Path) -> None:
    (planted / "test_unknown.py").write_text(_TESTS.replace('"data"', '"moon"'), encoding="utf-8")
    run = _run_frame(planted)
    assert run.returncode == 4, run.stdout + run.stderr
    assert "moon" in run.stdout + run.stderr
