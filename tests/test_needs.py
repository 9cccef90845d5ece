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


def _run_frame(tmp_path: Path, body: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest on one test file with this project's own conftest and settings."""
    test = tmp_path / "test_planted.py"
    test.write_text(body, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(_ROOT / "pyproject.toml")]
    command += ["-p", "tests.conftest", "--rootdir", str(_ROOT), *options, str(test)]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TASTE_")}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=_ROOT, env={**variables, **environment}, timeout=120
    )


_NEEDS_DATA = """
import pytest

@pytest.mark.needs("data")
def test_with_data():
    pass
"""


def test_a_planted_missing_need_is_a_failure_of_the_run(tmp_path: Path) -> None:
    skipped = _run_frame(tmp_path, _NEEDS_DATA)
    assert skipped.returncode == 0, skipped.stdout + skipped.stderr
    assert "1 skipped" in skipped.stdout
    failed = _run_frame(tmp_path, _NEEDS_DATA, TASTE_REQUIRE="data")
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "needs data" in failed.stdout


def test_an_unknown_need_stops_the_run(tmp_path: Path) -> None:
    run = _run_frame(tmp_path, _NEEDS_DATA.replace('"data"', '"moon"'))
    assert run.returncode == 4, run.stdout + run.stderr
    assert "moon" in run.stdout + run.stderr


def test_what_needs_a_board_is_in_the_group_of_boards(tmp_path: Path) -> None:
    body = _NEEDS_DATA.replace('"data"', '"boards"')
    assert _run_frame(tmp_path, body).returncode == 5, "deselected by default"
    assert "1 test" in _run_frame(tmp_path, body, "-m", "boards", "--collect-only").stdout


def test_a_warning_fails_a_test(tmp_path: Path) -> None:
    run = _run_frame(tmp_path, "import warnings\n\ndef test_warns():\n    warnings.warn('planted')\n")
    assert run.returncode == 1, run.stdout + run.stderr
