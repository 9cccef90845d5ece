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

SYSTEMD_PACKAGES = "systemd systemd-sysv dbus dbus-user-session libpam-systemd".split()
"""With these a `-vm` board is started by systemd, which runs a manager of services for every user, in place of busybox."""

_UNITS = "etc/systemd/system"
_FOLDERS = (
    "dev proc sys run tmp mnt root/.ssh home/board home/board/.ssh etc/ssh etc/pam.d var/empty "
    f"{_UNITS} {_UNITS}/multi-user.target.wants"
).split()

_PASSWD = """root:x:0:0:root:/root:/bin/bash
sshd:x:101:65534::/run/sshd:/usr/sbin/nologin
messagebus:x:102:102::/nonexistent:/usr/sbin/nologin
board:x:1000:1000:board user:/home/board:/bin/bash
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""
_GROUP = "root:x:0:\ntty:x:5:\nmessagebus:x:102:\nboard:x:1000:\nnogroup:x:65534:\n"
_SHADOW = "".join(f"{name}:*:19700:0:99999:7:::\n" for name in ("root", "sshd", "messagebus", "board", "nobody"))

_SSHD_CONFIG = """HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
UseDNS no
PrintMotd no
# A busy machine makes logins slow and cuts them off: neither is an attack, and nobody else reaches this server.
LoginGraceTime 0
PerSourcePenalties no
MaxStartups 100
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

# What systemd starts in place of _INITTAB and _RC.
_NETWORK_UNIT = """[Unit]
DefaultDependencies=no
Before=network.target

[Service]
Type=oneshot
ExecStart=/bin/sh -c "ip link set eth0 up; ip addr add 10.0.2.15/24 dev eth0; ip route add default via 10.0.2.2"
"""
_PAM = {
    "auth": "auth required pam_permit.so\n",
    "account": "account required pam_permit.so\n",
    "password": "password required pam_deny.so\n",
    "session": "session required pam_permit.so\nsession optional pam_systemd.so\n",
    "session-noninteractive": "session required pam_permit.so\n",
}
_LINKS = {
    f"{_UNITS}/multi-user.target.wants/board-network.service": "../board-network.service",
    f"{_UNITS}/multi-user.target.wants/ssh.service": "/usr/lib/systemd/system/ssh.service",
    # Nobody types at the console, and without udev its device never appears.
    f"{_UNITS}/serial-getty@.service": "/dev/null",
}


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
        for path, target in _LINKS.items():
            _add(archive, tarfile.SYMTYPE, path, 0o777, link=target)
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
        f"{_UNITS}/board-network.service": (0o644, _NETWORK_UNIT),
        **{f"etc/pam.d/common-{kind}": (0o644, text) for kind, text in _PAM.items()},
        # Without pam_nologin: a slow machine would let nobody in for minutes after its server answers.
        "etc/pam.d/sshd": (0o644, "@include common-auth\n@include common-account\n@include common-session\n"),
        # Any will do: without one, systemd takes every start for the first and enables what it finds.
        "etc/machine-id": (0o444, f"{'7a57e':0<32}\n"),
        "root/.ssh/authorized_keys": (0o600, keys.user_public),
        f"home/{USER}/.ssh/authorized_keys": (0o600, keys.user_public),
    }


def _add(archive: tarfile.TarFile, kind: bytes, path: str, mode: int, content: bytes = b"", link: str = "") -> None:
    entry = tarfile.TarInfo(path)
    entry.type, entry.mode, entry.size, entry.linkname = kind, mode, len(content), link
    entry.uid = entry.gid = USER_ID if path.startswith(f"home/{USER}") else 0
    archive.addfile(entry, io.BytesIO(content))
