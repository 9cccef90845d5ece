"""What is put over the unpacked Debian packages: users, keys, the SSH server's configuration, and the start of it all.

The packages are unpacked and not configured, so nothing foreign is run; these files stand for what their maintainer
scripts would have made.
"""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass

USER = "board"
USER_ID = 1000

PACKAGES = (
    "base-files base-passwd bash busybox-static coreutils dash findutils grep libc-bin login ncurses-base "
    "openssh-server passwd procps sed tar gzip"
).split()
"""Debian packages of a board; what busybox has as well is in APPLETS."""

APPLETS = (
    "awk vi ip ifconfig route hostname mount umount reboot poweroff halt dmesg ping wget less free insmod modprobe "
    "killall pidof taskset clear"
).split()
"""Commands that busybox gives where no package does."""

_FOLDERS = "dev proc sys run tmp mnt root/.ssh home/board home/board/.ssh etc/ssh var/empty".split()

_PASSWD = """root:x:0:0:root:/root:/bin/bash
sshd:x:101:65534::/run/sshd:/usr/sbin/nologin
board:x:1000:1000:board user:/home/board:/bin/bash
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""
_GROUP = "root:x:0:\ntty:x:5:\nboard:x:1000:\nnogroup:x:65534:\n"
_SHADOW = "root:*:19700:0:99999:7:::\nsshd:!:19700::::::\nboard:*:19700:0:99999:7:::\nnobody:*:19700:0:99999:7:::\n"

_SSHD_CONFIG = """HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
UseDNS no
PrintMotd no
Subsystem sftp /usr/lib/openssh/sftp-server
"""

_INITTAB = """::sysinit:/etc/rc.board
::respawn:/usr/sbin/sshd -D
::ctrlaltdel:/usr/bin/reboot
::shutdown:/usr/bin/busybox umount -a -r
"""

_RC = """#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sys /sys
mkdir -p /dev/pts /dev/shm
mount -t devpts -o gid=5,mode=620,ptmxmode=666 pts /dev/pts
for folder in /run /tmp /dev/shm; do mount -t tmpfs tmpfs $folder; done
chmod 1777 /tmp /dev/shm
mount -t cgroup2 cgroup2 /sys/fs/cgroup
echo '+cpu +memory +pids' >/sys/fs/cgroup/cgroup.subtree_control 2>/dev/null
mkdir -p /run/sshd
hostname -F /etc/hostname
ip link set lo up
ip link set eth0 up
ip addr add 10.0.2.15/24 dev eth0
ip route add default via 10.0.2.2
"""


@dataclass(frozen=True)
class Keys:
    """The text of an image's key files: who may log in, and who the board is."""

    user_public: str
    host_private: str
    host_public: str


def pack_overlay(keys: Keys) -> bytes:
    """The files as a tar archive with owners and modes, to be unpacked over the tree."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for folder in _FOLDERS:
            mode = 0o1777 if folder == "tmp" else 0o700 if folder.endswith(".ssh") else 0o755
            _add(archive, tarfile.DIRTYPE, folder, mode)
        for path, (mode, text) in _files(keys).items():
            _add(archive, tarfile.REGTYPE, path, mode, text.encode())
        _add(archive, tarfile.SYMTYPE, "usr/sbin/init", 0o777, link="../bin/busybox")
    return buffer.getvalue()


def _files(keys: Keys) -> dict[str, tuple[int, str]]:
    return {
        "etc/passwd": (0o644, _PASSWD),
        "etc/group": (0o644, _GROUP),
        "etc/shadow": (0o640, _SHADOW),
        "etc/hostname": (0o644, "board\n"),
        "etc/hosts": (0o644, "127.0.0.1 localhost board\n"),
        "etc/inittab": (0o644, _INITTAB),
        "etc/rc.board": (0o755, _RC),
        "etc/ssh/sshd_config": (0o644, _SSHD_CONFIG),
        "etc/ssh/ssh_host_ed25519_key": (0o600, keys.host_private),
        "etc/ssh/ssh_host_ed25519_key.pub": (0o644, keys.host_public),
        "root/.ssh/authorized_keys": (0o600, keys.user_public),
        f"home/{USER}/.ssh/authorized_keys": (0o600, keys.user_public),
    }


def _add(archive: tarfile.TarFile, kind: bytes, path: str, mode: int, content: bytes = b"", link: str = "") -> None:
    entry = tarfile.TarInfo(path)
    entry.type, entry.mode, entry.size, entry.linkname = kind, mode, len(content), link
    entry.uid = entry.gid = USER_ID if path.startswith(f"home/{USER}") else 0
    archive.addfile(entry, io.BytesIO(content))
