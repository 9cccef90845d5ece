"""This host as findings: Python and packages, tool chain, compiler, emulators, SSH, disk."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from host_control.console import mib
from host_control.doctor.finding import Finding

PACKAGES = ("numpy", "onnx", "optuna", "paramiko", "matplotlib", "pillow", "safetensors", "rich", "cffi", "psutil")
_INSTALL = "Run `make tune`, or pip install it."
_ZIG_S = 60
_LITTLE_DISK_BYTES = 2 << 30


def host_findings(folder: Path) -> list[Finding]:
    """Every finding about this host; `folder` is where runs are written."""
    return [_python(), *_packages(), _tvm(), _zig(), *_emulators(), _ssh(), _disk(folder)]


def _python() -> Finding:
    found = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Finding("Python", found)
    return Finding("Python", found, "fail", "the compiler has no wheels for it", "Use Python 3.11, 3.12 or 3.13.", 22)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _packages() -> Iterator[Finding]:
    missing = [name for name in PACKAGES if _version(name) is None]
    if missing:
        yield Finding(
            "packages", f"missing: {', '.join(missing)}", "fail", "verbs that need them do not start", _INSTALL, 22
        )
    else:
        yield Finding("packages", ", ".join(f"{name} {_version(name)}" for name in PACKAGES))


def _tvm() -> Finding:
    found = _version("apache-tvm")
    if found is None:
        return Finding("TVM", "missing", "fail", "nothing can be built", _INSTALL, 22)
    return Finding("TVM", found)


def _zig(run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> Finding:
    """The C cross-compiler, really started: a wheel of another machine installs and does not run."""
    command = [sys.executable, "-m", "ziglang", "version"]
    try:
        answer = run(command, capture_output=True, text=True, timeout=_ZIG_S, check=False)
        said = answer.stdout.strip() if answer.returncode == 0 else ""
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    if not said:
        return Finding("zig", "does not start", "fail", "nothing can be linked", _INSTALL, 22)
    return Finding("zig", said)


def _emulators() -> Iterator[Finding]:
    for program, architecture in (("qemu-aarch64", "arm64"), ("qemu-riscv64", "RISC-V")):
        if shutil.which(program):
            yield Finding(program, shutil.which(program) or "")
        else:
            consequence = f"{architecture} programs cannot be tried here; real boards need none"
            yield Finding(program, "missing", "warn", consequence, "On Debian: apt-get install qemu-user")


def _ssh() -> Finding:
    if shutil.which("ssh"):
        return Finding("ssh", shutil.which("ssh") or "")
    consequence = "~/.ssh/config is not read: names are taken as they are"
    return Finding("ssh", "missing", "warn", consequence, "On Debian: apt-get install openssh-client")


def _disk(folder: Path) -> Finding:
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if not os.access(there, os.W_OK):
        return Finding("disk", str(there), "fail", "runs cannot be written", "Change to a folder that can be.", 12)
    if free < _LITTLE_DISK_BYTES:
        return Finding("disk", f"{mib(free)} free", "warn", "builds and packed data may not fit", "Free some.")
    return Finding("disk", f"{mib(free)} free")
