"""Kernel and initial file system of a virtual board, out of an unpacked Debian kernel package."""

from __future__ import annotations

import gzip
import io
import lzma
import subprocess
from collections.abc import Iterable
from pathlib import Path

from cross.errors import MissingToolError
from host_control.emulation.debian_tree import USER_ID
from host_control.emulation.packages import TOOL_ENVIRONMENT, run_tool

MODULES = (
    *("virtio_pci", "virtio_mmio", "virtio_blk", "virtio_net", "ext4"),
    # Of a machine whose device tree has clocks and a sensor (device_tree.py); without effect on any other.
    *("cpufreq_dt", "cpufreq_userspace", "bcm2835_thermal"),
)

INIT = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
exec >/dev/console 2>&1
while read -r module; do /bin/busybox insmod "/modules/$module"; done </order
tries=0
until [ -b /dev/vda ]; do
    tries=$((tries + 1))
    [ $tries -gt 100 ] && { echo "there is no root disk"; /bin/busybox poweroff -f; }
    /bin/busybox sleep 0.1
done
/bin/busybox mount -t ext4 -o rw,noatime /dev/vda /mnt || { echo "the root disk cannot be mounted"; /bin/busybox poweroff -f; }
/bin/busybox mount --move /dev /mnt/dev
# The rights that docs/power.md has systemd-tmpfiles give: these files are the kernel's, whatever they are mounted as.
/bin/busybox mount -t sysfs sys /sys
for name in governor min_freq max_freq setspeed; do
    for file in /sys/devices/system/cpu/cpufreq/policy*/scaling_$name; do
        [ -e "$file" ] && /bin/busybox chgrp USER_ID "$file" && /bin/busybox chmod g+w "$file"
    done
done
/bin/busybox umount /sys
exec /bin/busybox switch_root /mnt /sbin/init
""".replace("USER_ID", str(USER_ID))

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
    modules = _load_order(package, version, MODULES)
    entries = [(f"modules/{_stem(path)}.ko", _FILE, _content(path)) for path in modules]
    entries += [
        ("init", _FILE, INIT.encode()),
        ("bin/busybox", _FILE, busybox.read_bytes()),
        ("order", _FILE, "".join(f"{_stem(path)}.ko\n" for path in modules).encode()),
    ]
    folders: list[tuple[str, int, bytes]] = [(name, _FOLDER, b"") for name in ("bin", "dev", "mnt", "modules", "sys")]
    (out / "initrd.gz").write_bytes(gzip.compress(pack_cpio([*folders, *entries]), 6, mtime=0))
    return version


def _load_order(package: Path, version: str, wanted: Iterable[str]) -> list[Path]:
    """Module files in the order to load them, as modprobe would: it knows of weak dependencies too (ext4 needs a crc32c)."""
    shown = ""
    for name in wanted:
        command: list[str | Path] = ["modprobe", "-d", package, "-S", version, "--show-depends", name]
        # What is neither a module nor built in is another machine's bus.
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=TOOL_ENVIRONMENT)
        shown += done.stdout
    return load_order(shown)


def load_order(shown: str) -> list[Path]:
    """The files of `insmod` lines, each once; lines of built-in modules name none."""
    words = [line.split() for line in shown.splitlines()]
    return list(dict.fromkeys(Path(line[1]) for line in words if line[:1] == ["insmod"]))


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
