"""The documentation against the code: links, verbs, flags, exit codes, targets and Make's targets."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from cross import errors
from cross.target import load_targets
from host_control.cli import load_verbs, make_parser

_ROOT = Path(__file__).resolve().parent.parent
_PAGES = sorted(path.relative_to(_ROOT) for path in [*_ROOT.glob("*.md"), *_ROOT.glob("docs/*.md")])
_INTERFACE = (_ROOT / "docs" / "interface.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", _PAGES, ids=str)
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = (_ROOT / page).read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (_ROOT / page.parent / link).exists()] == []


def _section(title: str) -> str:
    return _INTERFACE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """Every long flag of a parser and of its sub-parsers."""
    flags: set[str] = set()
    for action in parser._actions:
        flags |= {word for word in action.option_strings if word.startswith("--")}
        if isinstance(action, argparse._SubParsersAction):
            flags |= {flag for child in action.choices.values() for flag in _options(child)}
    return flags


def test_verbs_are_those_of_the_command_line() -> None:
    documented = {row.split()[0] for row in re.findall(r"^\| `([^`]+)`", _section("Verbs"), re.MULTILINE)}
    assert documented == set(load_verbs())


def test_flags_are_those_of_the_command_line() -> None:
    columns = [row.split("|")[1] for row in _section("Flags").splitlines() if row.startswith("| `--")]
    documented = {flag for column in columns for flag in re.findall(r"--[a-z0-9-]+", column)}
    assert documented == _options(make_parser()) - {"--help"}


def test_exit_codes_are_those_of_the_exceptions() -> None:
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", _section("Errors and exit codes"), re.MULTILINE)}
    codes = {kind.exit_code for kind in (errors.TasteError, *errors.TasteError.__subclasses__())}
    assert documented == codes | {0, errors.INTERRUPTED}


def test_targets_are_those_of_the_board_table() -> None:
    page = (_ROOT / "docs" / "boards.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)) == set(load_targets())


def test_promises_name_tests_that_exist() -> None:
    """And bugs that are planted somewhere; each row has a test."""
    page = (_ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    tests = {path.name: path.read_text(encoding="utf-8") for path in (_ROOT / "tests").glob("test_*.py")}
    planted = "".join(path.read_text(encoding="utf-8") for path in (_ROOT / "native").rglob("*.[ch]"))
    rows = re.findall(r"^\|(.*)\|$", page, re.MULTILINE)[2:]
    assert len(rows) > 15
    for row in rows:
        names = re.findall(r"`(?:(test_\w+\.py)(?:::)?)?(test_\w+)?`", row.split("|")[2])
        assert any(names), row
        file = ""
        for named, name in (*names, *re.findall(r"`(x)?(test_\w+)`", row.split("|")[3])):
            file = named or file
            assert file in tests and (not name or f"def {name}(" in tests[file]), (file, name)
        for define in re.findall(r"`([A-Z_]+)`", row.split("|")[3]):
            assert f"TASTE_PLANT_{define}" in planted, define


def test_make_targets_exist() -> None:
    makefile = (_ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for page in _PAGES:
        text = (_ROOT / page).read_text(encoding="utf-8")
        # Commands only: the word in prose is a verb too.
        named = set(re.findall(r"(?:`|^    )make ([a-z][a-z-]*)", text, re.MULTILINE))
        assert named <= targets, page
