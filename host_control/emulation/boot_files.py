"""Kernel and initial file system of a virtual board, out of an unpacked Debian kernel package."""

from __future__ import annotations

import gzip
import io
import lzma
from collections.abc import Iterable
from pathlib import Path

from cross.errors import MissingToolError
from host_control.emulation.packages import run_tool

MODULES = ("virtio_pci", "virtio_mmio", "virtio_blk", "virtio_net", "ext4")

INIT = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
while read -r module; do /bin/busybox insmod "/modules/$module"; done </order
tries=0
until [ -b /dev/vda ]; do
    tries=$((tries + 1))
    [ $tries -gt 100 ] && { echo "no root disk"; /bin/busybox poweroff -f; }
    /bin/busybox sleep 0.1
done
/bin/busybox mount -t ext4 -o rw,noatime /dev/vda /mnt && /bin/busybox mount --move /dev /mnt/dev
exec /bin/busybox switch_root /mnt /sbin/init
"""

_FOLDER, _FILE = 0o040755, 0o100755


def make_boot_files(package: Path, busybox: Path, out: Path) -> str:
    """Write `vmlinuz` and `initrd.gz` into `out` from the tree of a kernel package; the kernel's version."""
    kernel = next(iter(sorted((package / "boot").glob("vmlinu*"))), None)
    if kernel is None:
        raise MissingToolError(f"the kernel package holds no kernel in {package}/boot. Try another Debian mirror.")
    version = kernel.name.partition("-")[2]
    (out / "vmlinuz").write_bytes(kernel.read_bytes())
    # From Debian 13 on the package has usr/lib alone, and depmod looks in lib.
    if not (package / "lib").exists():
        (package / "lib").symlink_to("usr/lib")
    run_tool("depmod", "-b", package, version)
    folder = package / "lib" / "modules" / version
    modules = [folder / path for path in _load_order((folder / "modules.dep").read_text(), MODULES)]
    entries = [(f"modules/{_stem(path)}.ko", _FILE, _content(path)) for path in modules]
    entries += [
        ("init", _FILE, INIT.encode()),
        ("bin/busybox", _FILE, busybox.read_bytes()),
        ("order", _FILE, "".join(f"{_stem(path)}.ko\n" for path in modules).encode()),
    ]
    folders: list[tuple[str, int, bytes]] = [(name, _FOLDER, b"") for name in ("bin", "dev", "mnt", "modules")]
    (out / "initrd.gz").write_bytes(gzip.compress(pack_cpio([*folders, *entries]), 6, mtime=0))
    return version


def _load_order(dependencies: str, wanted: Iterable[str]) -> list[str]:
    """Module files in the order to load them, from modules.dep; what is not there is built in."""
    table = dict(line.split(":", 1) for line in dependencies.splitlines() if ":" in line)
    paths = {_stem(Path(path)): path for path in table}
    order: list[str] = []
    for name in wanted:
        if name in paths:
            # A line lists a module's dependencies, the nearest first.
            order += [path for path in (*reversed(table[paths[name]].split()), paths[name]) if path not in order]
    return order


def _stem(path: Path) -> str:
    return path.name.partition(".ko")[0].replace("-", "_")


def _content(path: Path) -> bytes:
    return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()


def pack_cpio(entries: Iterable[tuple[str, int, bytes]]) -> bytes:
    """(path, mode, content) as an archive in cpio's `newc` format, which the kernel unpacks."""
    buffer = io.BytesIO()
    for number, (path, mode, content) in enumerate([*entries, ("TRAILER!!!", 0, b"")], 1):
        name = path.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name), 0)
        for part in (b"070701" + "".join(f"{field:08x}" for field in fields).encode() + name, content):
            buffer.write(part)
            buffer.write(bytes(-buffer.tell() % 4))
    return buffer.getvalue()
