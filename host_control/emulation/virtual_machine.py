"""A `-vm` board: a QEMU machine with Debian's kernel and the board's CPU, resumed from a snapshot of its first boot."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cross.errors import FileError
from host_control.emulation import device_tree
from host_control.emulation.catalogue import EmulatedKind
from host_control.emulation.launch import guarded, wait_for_ssh
from host_control.emulation.packages import run_tool
from host_control.emulation.qmp import SOCKET, ask_monitor
from host_control.emulation.state import Running, boot_id, write_board

DEFAULT_MEMORY_BYTES = 512 << 20
_ADDRESS = "127.0.0.1"
_CORES = 2
CONSOLE = "console"
_SNAPSHOT = "ready"
_PROGRAMS = {"arm64": ("qemu-system-aarch64", "ttyAMA0"), "riscv64": ("qemu-system-riscv64", "ttyS0")}


@dataclass(frozen=True)
class MachineSettings:
    """`icount`: time is the number of instructions, 2 ns each, so that what is timed repeats; one core then.
    `cpufreq`: the kernel sets the CPU's clock, of four, and reads a temperature; an arm64 machine."""

    memory_bytes: int = DEFAULT_MEMORY_BYTES
    icount: bool = False
    cpufreq: bool = False

    @property
    def cores(self) -> int:
        return 1 if self.icount else _CORES


def start_machine(
    board: EmulatedKind, image: Path, folder: Path, settings: MachineSettings, report: Callable[[str, int, int], None]
) -> Running:
    """Start the machine in `folder`, from its snapshot where there is one; returns when SSH answers."""
    machine = _machine_arguments(board, settings)
    if settings.cpufreq:
        device_tree.write_device_tree(machine, settings.memory_bytes, settings.cores, folder)
        machine += ["-dtb", device_tree.FILE, *device_tree.sensor_arguments(settings.memory_bytes)]
    snapshot = image / f"snapshot-{_snapshot_key(board, machine)}.qcow2"
    disk, resumed = folder / "disk.qcow2", board.resumes and snapshot.exists()
    if resumed:
        run_tool("cp", "--sparse=always", snapshot, disk)
    else:
        run_tool("qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", image / "root.ext4", disk)
    port = _free_port()
    command = [*machine, *_device_arguments(board, image, port), *(["-loadvm", _SNAPSHOT] if resumed else [])]
    report("resuming" if resumed else "first boot" if board.resumes else "boot", 0, 1)
    with guarded(command, folder) as process:
        wait_for_ssh(board.name, _ADDRESS, port, process, folder / CONSOLE)
        if board.resumes and not resumed:
            report("snapshot", 0, 1)
            _keep_snapshot(folder, snapshot)
        running = Running(board.name, _ADDRESS, port, process.pid, process.started, boot_id(), str(image))
        write_board(running, image)
    report("up", 1, 1)
    return running


def set_link(folder: Path, up: bool) -> None:
    """Pull the board's cable, or put it back."""
    ask_monitor(folder, f"set_link n0 {'on' if up else 'off'}")


def _machine_arguments(board: EmulatedKind, settings: MachineSettings) -> list[str]:
    """What a snapshot depends on: it resumes under the same CPU, cores, memory and clock only."""
    program, _ = _PROGRAMS[board.architecture]
    clock = ["-accel", "tcg", "-icount", "shift=1"] if settings.icount else ["-accel", "tcg,thread=multi"]
    memory = f"{settings.memory_bytes >> 20}M"
    return [program, "-M", "virt", "-cpu", board.cpu, "-smp", str(settings.cores), "-m", memory, *clock]


def _device_arguments(board: EmulatedKind, image: Path, port: int) -> list[str]:
    _, console = _PROGRAMS[board.architecture]
    # restrict=on: the board reaches nothing but through the one forwarded port, which is open on loopback only.
    network = f"user,id=n0,restrict=on,hostfwd=tcp:{_ADDRESS}:{port}-:22"
    return [
        *("-kernel", str(image / "vmlinuz"), "-initrd", str(image / "initrd.gz")),
        *("-append", f"console={console} quiet panic=-1"),
        *("-drive", "if=none,id=d0,file=disk.qcow2,format=qcow2,cache=unsafe", "-device", "virtio-blk-pci,drive=d0"),
        *("-netdev", network, "-device", "virtio-net-pci,netdev=n0,romfile="),
        *("-device", "virtio-rng-pci", "-display", "none", "-serial", f"file:{CONSOLE}", "-monitor", "none"),
        *("-qmp", f"unix:{SOCKET},server=on,wait=off"),
    ]


def _snapshot_key(board: EmulatedKind, machine: list[str]) -> str:
    program, _ = _PROGRAMS[board.architecture]
    version = run_tool(program, "--version")
    return hashlib.sha256(repr((machine, version, _device_arguments(board, Path(), 0))).encode()).hexdigest()[:16]


def _keep_snapshot(folder: Path, snapshot: Path) -> None:
    """Save the machine's state in its disk, and a copy of that disk in the image's folder for the next start."""
    said = ask_monitor(folder, f"savevm {_SNAPSHOT}").strip()
    if said:
        raise FileError(f"QEMU could not save a snapshot: {said}. Check the free space of {folder}.")
    for left in snapshot.parent.glob(f".{snapshot.name}.*.part"):
        if not Path(f"/proc/{left.name.split('.')[-2]}").exists():
            left.unlink(missing_ok=True)
    part = snapshot.with_name(f".{snapshot.name}.{os.getpid()}.part")
    try:
        # The running machine goes on writing to the disk: no byte of the snapshot changes by that, but a table might
        # while it is copied.
        ask_monitor(folder, "stop")
        run_tool("cp", "--sparse=always", folder / "disk.qcow2", part)
        part.rename(snapshot)
    finally:
        part.unlink(missing_ok=True)
        ask_monitor(folder, "cont")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_ADDRESS, 0))
        return int(probe.getsockname()[1])
