"""The two commands on machines that lack something: one line says what is missing, and nothing is half done."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent
_INSTALL = _ROOT / "tests" / "install-debian-packages"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A PATH with a shell's usual tools and nothing else: no Python, no sudo, no package manager."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "sh", "env", "cat", "cp", "test", "true", "uname"):
        found = shutil.which(name)
        assert found, name
        (folder / name).symlink_to(found)
    return folder


def _program(machine: Path, name: str, *lines: str) -> None:
    path = machine / name
    path.write_text("\n".join(("#!/bin/sh", *lines, "")), encoding="utf-8")
    path.chmod(0o755)


def _run(machine: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(machine), "HOME": str(machine)}
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, cwd=machine
    )


def test_elsewhere_than_on_debian_the_packages_are_named(machine: Path) -> None:
    run = _run(machine, "bash", _INSTALL, "qemu-user", "clang")
    assert run.returncode == 22
    assert "not a Debian system" in run.stderr and "qemu-user clang" in run.stderr


def test_without_root_the_command_is_named(machine: Path) -> None:
    _program(machine, "dpkg-query", "[ \"$4\" = clang ] && printf 'installed'")
    _program(machine, "id", "echo 1000")
    run = _run(machine, "bash", _INSTALL, "qemu-user", "clang")
    assert run.returncode == 22
    assert "apt-get install --no-install-recommends qemu-user\n" in run.stderr


def test_what_is_there_is_not_installed_again(machine: Path) -> None:
    _program(machine, "dpkg-query", "printf 'installed'")
    run = _run(machine, "bash", _INSTALL, "qemu-user", "clang")
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_a_failed_installation_is_an_error(machine: Path) -> None:
    _program(machine, "dpkg-query", "exit 1")
    _program(machine, "id", "echo 0")
    _program(machine, "apt-get", "exit 100")
    run = _run(machine, "bash", _INSTALL, "qemu-user")
    assert run.returncode == 22
    assert run.stderr.startswith("error: apt-get could not install qemu-user.")


def _make(machine: Path, checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    make = shutil.which("make")
    assert make
    for name in ("Makefile", "requirements.lock", "tests"):
        target = checkout / name
        target.symlink_to(_ROOT / name)
    return _run(machine, make, "-C", str(checkout), *arguments)


def test_make_without_a_python_says_so(machine: Path, tmp_path: Path) -> None:
    run = _make(machine, tmp_path, "tune")
    assert run.returncode != 0
    assert "error: no Python 3.11, 3.12 or 3.13 on PATH." in run.stderr
    assert not os.path.lexists(tmp_path / ".venv")


def test_make_passes_over_a_python_that_is_too_old(machine: Path, tmp_path: Path) -> None:
    _program(machine, "python3", "exit 1")
    _program(machine, "python3.12", 'case "$2" in *ensurepip*) exit 1 ;; esac')
    run = _make(machine, tmp_path, "tune")
    assert run.returncode != 0
    assert "error: python3.12 cannot make a virtual environment." in run.stderr
    assert not os.path.lexists(tmp_path / ".venv")
