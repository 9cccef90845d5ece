"""Build targets: what `cross/boards.toml` says of a CPU, as one frozen value."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from cross.errors import UsageError


@dataclass(frozen=True)
class Target:
    """A CPU to build for. Sizes in KiB / MiB as in boards.toml; `vector_floats` is v, the channel block."""

    name: str
    title: str
    arch: str
    cpu: str
    features: tuple[str, ...]
    vector_floats: int
    vector_registers: int
    cores: int
    l1_kib: int
    l2_kib: int
    ram_mib: int
    l3_kib: int = 0
    llvm_attrs: tuple[str, ...] = ()
    rvv: bool = False
    in_order: bool = False
    scalar_kernels: tuple[str, ...] = ()
    qemu: tuple[str, ...] = ()

    @property
    def zig_static_triple(self) -> str:
        return f"{self.arch}-linux-musl"

    @property
    def zig_shared_triple(self) -> str:
        return f"{self.arch}-linux-gnu." + ("2.27" if self.arch == "riscv64" else "2.17")

    @property
    def channel_block(self) -> int:
        """Channels a block of NCHW[v]c: the vector length, or 4 on a scalar core (a register tile of 4 output channels)."""
        return self.vector_floats if self.vector_floats > 1 else 4

    @property
    def vector_bits(self) -> int:
        return self.vector_floats * 32 if self.vector_floats > 1 else 0

    @property
    def loads_together(self) -> bool:
        """Whether a load waits for the multiply-adds before it, so that many loads are best done at once: in-order ARM cores,
        whose vector loads and multiply-adds do not begin together. Else they are best spread between them."""
        return self.in_order and self.arch == "aarch64"

    def takes_vectors(self, operator: str) -> bool:
        """Whether this operator's kernels are compiled with V: on RISC-V some take fewer instructions without."""
        return self.rvv and not {operator, "*"} & set(self.scalar_kernels)

    def emulator(self, program: str) -> list[str]:
        """Command that runs `program` under QEMU with this board's own CPU."""
        return [self.qemu[0], "-cpu", self.qemu[1], program]


@cache
def load_targets() -> dict[str, Target]:
    """Every target of boards.toml, by name."""
    table = tomllib.loads(resources.files("cross").joinpath("boards.toml").read_text(encoding="utf-8"))
    return {name: _target(name, entry) for name, entry in table.items()}


def _target(name: str, entry: dict[str, Any]) -> Target:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return Target(name=name, **fields)


def find_target(name: str) -> Target:
    """The target called `name`; UsageError names the known ones."""
    targets = load_targets()
    if name not in targets:
        raise UsageError(f"unknown target {name!r}. Known: {', '.join(sorted(targets))}.")
    return targets[name]
