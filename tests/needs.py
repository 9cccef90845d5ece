"""What a test may need from the machine, and how each need is probed.

`@pytest.mark.needs("torch", "qemu")` names them. A probe returns None where the need is met, else one line: what is
missing and how to get it. tests/conftest.py skips with that line, or fails where TASTE_REQUIRE lists the need.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import psutil

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's dataset-fashion-mnist puts its four IDX files."""

IMAGE_MEMORY = 8 << 30
"""Bytes that the layers of tests/test_dockerfiles.py may take."""

_OVERLAY = """
set -e
mount -t tmpfs none /tmp
mkdir /tmp/lower /tmp/upper /tmp/work /tmp/merged
mount -t overlay -o lowerdir=/tmp/lower,upperdir=/tmp/upper,workdir=/tmp/work none /tmp/merged
"""

Probe = Callable[[], str | None]


def data_folder() -> Path | None:
    """The folder of real data sets that TASTE_TEST_DATA names, or None."""
    named = os.environ.get("TASTE_TEST_DATA")
    return Path(named) if named and Path(named).is_dir() else None


def find_sshd() -> str | None:
    """Path of OpenSSH's server, which is rarely on an ordinary user's PATH."""
    return shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin")


def _module(name: str) -> Probe:
    def probe() -> str | None:
        return None if find_spec(name) else f"{name} is not installed: `make test` installs it"

    return probe


def _programs(*names: str, package: str) -> Probe:
    def probe() -> str | None:
        missing = [name for name in names if not shutil.which(name)]
        return f"{', '.join(missing)} not found: install {package}" if missing else None

    return probe


def _pyarrow() -> str | None:
    return None if find_spec("pyarrow") else "pyarrow is not installed, being large for one format: pip install pyarrow"


def _data() -> str | None:
    return None if data_folder() else "TASTE_TEST_DATA names no folder of real data sets"


def _fashion_mnist() -> str | None:
    return None if FASHION_MNIST.is_dir() else f"no {FASHION_MNIST}: install dataset-fashion-mnist"


def _clang() -> str | None:
    """clang is of use to the sanitizer builds only together with its runtime, which Debian packages apart."""
    clang = shutil.which("clang")
    if not clang:
        return "clang not found: install clang and libclang-rt-dev"
    resources = subprocess.run([clang, "-print-resource-dir"], capture_output=True, text=True, check=True).stdout
    found = any(Path(resources.strip()).glob("lib/**/libclang_rt.asan*"))
    return None if found else "clang has no sanitizer runtime: install libclang-rt-dev"


def _sshd() -> str | None:
    if not find_sshd():
        return "sshd not found: install openssh-server"
    return _programs("ssh", "ssh-keygen", package="openssh-client")()


def _boards() -> str | None:
    return NEEDS["qemu"]() or _sshd()


def _packages(by_program: Mapping[str, str]) -> str | None:
    """Those to install, of programs that are not here."""
    missing = [package for program, package in by_program.items() if not shutil.which(program)]
    return f"install {', '.join(missing)}" if missing else None


def _buildah() -> str | None:
    if os.geteuid() != 0:
        return "images are built as root"
    packages = {"buildah": "buildah", "mmdebstrap": "mmdebstrap", "unshare": "util-linux", "nsenter": "util-linux"}
    if missing := _packages(packages):
        return missing
    free = psutil.virtual_memory().available
    if free < IMAGE_MEMORY:
        return f"images are built in memory, in {IMAGE_MEMORY >> 30} GiB of it, and {free >> 30} are free"
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", _OVERLAY]
    tried = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60)
    return " ".join(f"root may mount no overlay here: {tried.stderr}".split()) if tried.returncode else None


def _debian_roots() -> str | None:
    if os.geteuid() != 0:
        return "roots are unpacked and entered as root"
    return _packages({"mmdebstrap": "mmdebstrap", "qemu-aarch64-static": "qemu-user-static", "unshare": "util-linux"})


def _emulated(board: str, *, cpufreq: bool = False) -> Probe:
    """What `board up` itself finds missing, packages for an image included."""

    def probe() -> str | None:
        from cross.errors import MissingToolError
        from host_control.emulation.catalogue import find_emulated
        from host_control.emulation.namespace_board import check_rights
        from host_control.emulation.packages import check_packages

        try:
            check_packages(find_emulated(board), build=True, cpufreq=cpufreq)
            if board.endswith("-netns"):
                check_rights(find_emulated(board))
        except MissingToolError as error:
            return str(error)
        return None

    return probe


def _cpu(flag: str) -> Probe:
    def probe() -> str | None:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        return None if f" {flag} " in cpuinfo.replace("\n", " ") else f"this CPU has no {flag}"

    return probe


NEEDS: Mapping[str, Probe] = {
    "torch": _module("torch"),
    "onnxruntime": _module("onnxruntime"),
    "onnxscript": _module("onnxscript"),
    "rapidocr": _module("rapidocr"),
    "pyarrow": _pyarrow,
    "zig": _module("ziglang"),
    "data": _data,
    "fashion-mnist": _fashion_mnist,
    "qemu": _programs("qemu-aarch64", "qemu-riscv64", package="qemu-user"),
    "clang": _clang,
    "sshd": _sshd,
    "busybox": _programs("busybox", package="busybox"),
    "boards": _boards,
    "buildah": _buildah,
    "debian-roots": _debian_roots,
    "vm-boards": lambda: _emulated("rpi4-vm", cpufreq=True)() or _emulated("bpi-f3-vm")(),
    "netns-boards": lambda: _emulated("rpi4-netns")() or _emulated("bpi-f3-netns")(),
    "avx2": _cpu("avx2"),
    "avx512": _cpu("avx512f"),
}
"""Every need a test may name, and its probe."""


@cache
def missing(name: str) -> str | None:
    """Why `name` is not there, or None; probed once a session."""
    return NEEDS[name]()


def unmet(names: Iterable[str], required: Iterable[str]) -> tuple[str, str] | None:
    """What to do with a test that needs `names`: None to run it, else ("skip" or "fail", reason).

    `required` are the needs whose absence is a failure. Raises KeyError on a need nobody defined.
    """
    required = set(required)
    for name in names:
        reason = missing(name)
        if reason:
            return ("fail" if name in required else "skip"), f"needs {name}: {reason}"
    return None
