"""The programs that an emulated board needs, and the Debian packages they come from."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from cross.errors import FileError, MissingToolError
from host_control.emulation.catalogue import EmulatedKind

SEARCH_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
"""An ordinary user's PATH lacks the folders of mke2fs and depmod."""

TOOL_ENVIRONMENT = {**os.environ, "PATH": SEARCH_PATH}

_BUILD = {
    "mmdebstrap": "mmdebstrap",
    "mke2fs": "e2fsprogs",
    "depmod": "kmod",
    "dpkg-deb": "dpkg",
    "ssh-keygen": "openssh-client",
}
_MACHINES = {
    "arm64": ("qemu-system-aarch64", "qemu-system-arm"),
    "riscv64": ("qemu-system-riscv64", "qemu-system-misc"),
}


def binfmt_file(board: EmulatedKind) -> Path:
    """The line for binfmt_misc that Debian's qemu-user-static brings (from Debian 13 on qemu-user-binfmt)."""
    return Path(f"/usr/lib/binfmt.d/{board.target.qemu[0]}.conf")


def check_packages(board: EmulatedKind, *, build: bool, cpufreq: bool = False) -> None:
    """MissingToolError (22) with all packages that are missing, in one line; `build`: an image has to be built too;
    `cpufreq`: so has a device tree."""
    programs = dict(_BUILD) if build else {}
    if build and os.geteuid() != 0:
        programs["fakeroot"] = "fakeroot"
    if cpufreq:
        programs |= dict.fromkeys(("dtc", "fdtget", "fdtoverlay"), "device-tree-compiler")
    programs["ssh"] = "openssh-client"
    if board.kind == "vm":
        program, package = _MACHINES[board.architecture]
        programs |= {program: package, "qemu-img": "qemu-utils"}
    else:
        programs |= {"ip": "iproute2", "unshare": "util-linux", "tar": "tar"}
    missing = {package for program, package in programs.items() if not shutil.which(program, path=SEARCH_PATH)}
    if board.kind == "netns" and not binfmt_file(board).exists():
        missing.add("qemu-user-static")
    if missing:
        raise MissingToolError(
            f"{board.name} needs Debian packages that are not installed. "
            f"As root: apt-get install --no-install-recommends {' '.join(sorted(missing))}"
        )


def run_tool(*words: str | Path) -> str:
    """Run a program that cannot fail on good days; what it printed. FileError (12) with what it said otherwise."""
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        check=False,
        env=TOOL_ENVIRONMENT,
    )
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise FileError(
            f"`{' '.join(str(word) for word in words[:4])} ...` failed: {said}. Check space and permissions."
        )
    return done.stdout
