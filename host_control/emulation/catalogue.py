"""Which emulated boards there are: a `-vm` and a `-netns` of every target of boards.toml that QEMU has the CPU of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from cross.errors import UsageError
from cross.target import Target, load_targets

Kind = Literal["vm", "netns"]

_ARCHITECTURES = {"aarch64": "arm64", "riscv64": "riscv64"}


@dataclass(frozen=True)
class EmulatedKind:
    """An emulated board that can be started: `name` is `TARGET-vm` or `TARGET-netns`."""

    name: str
    target: Target
    kind: Kind

    @property
    def architecture(self) -> str:
        """Debian's name of it."""
        return _ARCHITECTURES[self.target.arch]

    @property
    def cpu(self) -> str:
        """QEMU's -cpu: the board's own."""
        return self.target.qemu[1]

    @property
    def resumes(self) -> bool:
        """Whether a snapshot of its machine is of use: a RISC-V one, resumed by QEMU 7.2, which does not save the harts'
        timers, answers and then hangs at some login."""
        return self.architecture == "arm64"


@cache
def load_catalogue() -> dict[str, EmulatedKind]:
    """Every emulated board by name."""
    kinds: tuple[Kind, ...] = ("vm", "netns")
    targets = [target for target in load_targets().values() if target.arch in _ARCHITECTURES and target.qemu]
    boards = [EmulatedKind(f"{target.name}-{kind}", target, kind) for target in targets for kind in kinds]
    return {board.name: board for board in boards}


def find_emulated(name: str) -> EmulatedKind:
    """The emulated board called `name`; UsageError names the known ones."""
    known = load_catalogue()
    if name not in known:
        raise UsageError(f"unknown emulated board {name!r}. Known: {', '.join(known)}.")
    return known[name]
