"""A Debian of any suite and architecture with its own Python, in a folder, and commands in it without any network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from host_control.emulation.packages import TOOL_ENVIRONMENT
from host_control.emulation.root_image import find_mirror


@dataclass(frozen=True)
class DebianRoot:
    """An unpacked Debian; `launcher` runs its programs here, `cpu` is QEMU's."""

    folder: Path
    launcher: tuple[str, ...] = ()
    cpu: str = ""

    def run(self, where: str, *words: str, **environment: str) -> str:
        """Standard output of a program in the root, started in the folder `where` of it, as root and offline."""
        command = ["unshare", "--net", f"--root={self.folder}", f"--wd={where}", *self.launcher, *words]
        variables = {"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", "QEMU_CPU": self.cpu, **environment}
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=variables)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout


def make_root(folder: Path, suite: str, architecture: str, packages: str, wheels: tuple[str, ...] = ()) -> DebianRoot:
    """Unpack packages, none of whose scripts is run; `wheels` are PyPI's, for a Python 3.9 of this machine's architecture."""
    command = ["mmdebstrap", "--quiet", "--mode=root", f"--arch={architecture}", "--variant=extract"]
    command += [
        f"--include=base-files,{packages}",  # Debian 13 has its loader where base-files links to
        "--skip=check/qemu,chroot/mount,output/dev",
        "--dpkgopt=path-exclude=/usr/share/doc/*",
    ]
    subprocess.run([*command, suite, str(folder), find_mirror()], check=True, env=TOOL_ENVIRONMENT)
    for name in ("blas/libblas.so.3", "lapack/liblapack.so.3"):
        for library in folder.glob(f"usr/lib/*-linux-gnu/{name}"):
            (library.parent.parent / library.name).symlink_to(name)  # what a configured system's alternatives do
    if wheels:
        pip = [sys.executable, "-m", "pip", "--quiet", "install", "--no-deps", "--only-binary=:all:"]
        pip += ["--python-version", "3.9", "--target", str(folder / "usr/lib/python3/dist-packages"), *wheels]
        subprocess.run(pip, check=True, stderr=subprocess.DEVNULL)
    emulator = {"arm64": "qemu-aarch64-static", "riscv64": "qemu-riscv64-static"}.get(architecture)
    if emulator is None:
        return DebianRoot(folder)
    shutil.copy(shutil.which(emulator) or "", folder / "emulator")
    return DebianRoot(folder, ("/emulator",), "cortex-a72" if architecture == "arm64" else "rv64")
