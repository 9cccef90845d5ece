"""`emulated:TARGET`: a target's programs under QEMU here, with the board's own CPU. Proves results, never speed."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

from cross.errors import MissingToolError, UsageError
from cross.probe import BoardFacts
from cross.target import Target, find_target
from host_control.boards.bench import BenchSettings
from host_control.boards.deployed import DeployedBoard
from host_control.boards.local import LocalConnection


class EmulatedBoard(DeployedBoard):
    """A DeployedBoard whose programs run under QEMU; every Counters of it says `emulated`."""

    def __init__(self, target: Target, remote_dir: str, settings: BenchSettings) -> None:
        name = f"emulated:{target.name}"
        launcher = tuple(target.emulator("")[:-1])
        super().__init__(name, LocalConnection(name), remote_dir, settings, launcher=launcher, emulated=True)
        self.target = target

    def facts(self) -> BoardFacts:
        """The target's CPU with this host's kernel and free memory, never more than the board has."""
        host = super().facts()
        return replace(
            host,
            arch=self.target.arch,
            cores=min(self.target.cores, host.cores),
            features=self.target.features,
            vector_bits=self.target.vector_bits,
            memory_available_bytes=min(host.memory_available_bytes, self.target.ram_mib << 20),
            kernel=f"{self.target.qemu[0]} on {host.kernel}",
            userland_bits=64,
            emulated=True,
            model=self.target.title,
            cpu=self.target.cpu,
        )


def open_emulated(name: str, remote_dir: str | None, settings: BenchSettings) -> EmulatedBoard:
    """The board `emulated:NAME`; MissingToolError (22) names the Debian package where QEMU is not installed."""
    target = find_target(name)
    if not target.qemu:
        raise UsageError(f"target {name} has no emulator. Run it on such a machine with --board local.")
    if shutil.which(target.qemu[0]) is None:
        raise MissingToolError(f"{target.qemu[0]} is not installed. On Debian: apt-get install qemu-user.")
    return EmulatedBoard(target, os.path.abspath(remote_dir or f"build/boards/{target.name}"), settings)
