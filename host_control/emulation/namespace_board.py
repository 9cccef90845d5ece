"""A `-netns` board: the image's tree with a network, processes, mounts and a host name of its own, under this kernel.

Everything it has dies with its first process: the namespaces, and with them the mounts and the cable. What is left for
`board down` are its folder, its control group and the entry in binfmt_misc.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from cross.errors import LinkLostError, MissingToolError
from host_control.emulation.binfmt import register
from host_control.emulation.catalogue import EmulatedKind
from host_control.emulation.control_group import make_group
from host_control.emulation.face import write_face
from host_control.emulation.launch import Started, guarded, wait_for_ssh
from host_control.emulation.packages import TOOL_ENVIRONMENT, binfmt_file, run_tool
from host_control.emulation.state import Running, boot_id, write_board

CABLE = "taste-"
"""What the names of our interfaces start with."""
_NETWORK = "10.77"
_NETWORKS_LOCK = Path("/run/lock/taste-edge-boards")
_CABLE_S = 30.0

# $1: folder of the board, $2: its name, $3: QEMU's -cpu. Runs as the first process of the new namespaces.
_INSIDE = r"""
set -eu
root=$1/root
hostname "$2"
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o mode=755 dev "$root/dev"
mkdir "$root/dev/pts" "$root/dev/shm" "$root/run/sshd"
chmod 1777 "$root/dev/shm"
for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mount -t devpts -o newinstance,ptmxmode=0666 pts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for file in cpuinfo meminfo; do mount --bind -o ro "$1/face/$file" "$root/proc/$file"; done
mkdir -p "$root/sys/fs/cgroup"
mount --rbind -o ro /sys/fs/cgroup "$root/sys/fs/cgroup"
ip link set lo up
cd "$root"
pivot_root . mnt
cd /
umount -l /mnt
export QEMU_CPU="$3" PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin
exec /usr/sbin/sshd -D -e -o "SetEnv=QEMU_CPU=$3"
"""

# $1: control group or nothing, $2: the script above, then its arguments.
_OUTSIDE = r"""
set -eu
[ -z "$1" ] || echo $$ >"$1/cgroup.procs"
inside=$2; shift 2
exec unshare --mount --uts --ipc --net --pid --fork --kill-child sh -c "$inside" board "$@"
"""


def check_rights(board: EmulatedKind) -> None:
    """MissingToolError (22) with the reason where this process may not make namespaces."""
    instead = f"Start {board.target.name}-vm, which needs no rights"
    if os.geteuid() != 0:
        raise MissingToolError(f"{board.name} needs root: it mounts, and makes network namespaces. {instead}.")
    command = ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "true"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False, env=TOOL_ENVIRONMENT)
    if tried.returncode != 0:
        raise MissingToolError(f"root may not make namespaces here ({' '.join(tried.stderr.split())}). {instead}.")


def start_namespaces(
    board: EmulatedKind, image: Path, folder: Path, memory_bytes: int | None, report: Callable[[str, int, int], None]
) -> Running:
    """Start the board in `folder`, with the rights that `check_rights` found; returns when SSH answers."""
    report("unpacking", 0, 2)
    (folder / "root").mkdir()
    run_tool("tar", "-C", folder / "root", "-xf", image / "root.tar")
    write_face(folder / "face", board.target, min(board.target.cores, os.cpu_count() or 1))
    register(binfmt_file(board))
    interface = f"{CABLE}{uuid.uuid4().hex[:8]}"
    group = make_group(f"{interface}-{board.name}", memory_bytes) if memory_bytes is not None else None
    # Known before anything runs in it, so that `board down` finds it whatever happens.
    (folder / "group").write_text(str(group or ""))
    report("starting", 1, 2)
    arguments = [str(group or ""), _INSIDE, str(folder), board.name, board.cpu]
    with guarded(["sh", "-c", _OUTSIDE, "board", *arguments], folder) as process:
        address = _connect(board.name, process, interface)
        wait_for_ssh(board.name, address, 22, process)
        running = Running(
            *(board.name, address, 22, process.pid, process.started, boot_id(), str(image), interface),
            str(group or ""),
        )
        write_board(running, image)
    report("up", 2, 2)
    return running


def set_cable(running: Running, up: bool) -> None:
    """Pull the board's cable, or put it back."""
    run_tool("ip", "link", "set", running.interface, "up" if up else "down")


def _connect(name: str, process: Started, interface: str) -> str:
    """A cable from here into the board's network; the board's address."""
    until = time.monotonic() + _CABLE_S
    while (child := _first_child(process.pid)) is None or _same_network(child):
        if not process.alive or time.monotonic() > until:
            raise LinkLostError(f"{name} made no network of its own: {process.log.read_text(errors='replace').strip()}")
        time.sleep(0.02)
    # Two boards that start at once must not take the same network.
    with _NETWORKS_LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        number = _free_network()
        run_tool("ip", "link", "add", interface, "type", "veth", "peer", "name", "eth0", "netns", str(child))
        run_tool("ip", "address", "add", f"{_NETWORK}.{number}.1/24", "dev", interface)
        run_tool("ip", "link", "set", interface, "up")
    inside = ("nsenter", "--net", "--target", str(child), "ip")
    for words in (["address", "add", f"{_NETWORK}.{number}.2/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
        run_tool(*inside, *words)
    return f"{_NETWORK}.{number}.2"


def _first_child(pid: int) -> int | None:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None


def _same_network(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")
    except OSError:
        return True


def _free_network() -> int:
    shown = run_tool("ip", "-j", "address")
    taken = {entry["local"] for link in json.loads(shown) for entry in link.get("addr_info", ())}
    free = [number for number in range(1, 255) if f"{_NETWORK}.{number}.1" not in taken]
    if not free:
        raise LinkLostError(f"all networks {_NETWORK}.1 to {_NETWORK}.254 are in use. End some boards.")
    return free[0]
