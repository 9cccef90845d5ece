"""The C toolchain for every target, this machine included: zig's clang, from the PyPI package ziglang."""

from __future__ import annotations

import importlib.util
import sys

from cross.errors import MissingToolError
from cross.target import Target

# zig's names for the CPUs of boards.toml, where they differ from LLVM's (dashes become underscores everywhere).
ZIG_CPUS = {"x86-64-v3": "x86_64_v3", "generic-rv64": "baseline_rv64", "generic": "generic"}


def compiler(triple: str) -> list[str]:
    """Command of the C compiler for a zig triple."""
    if importlib.util.find_spec("ziglang") is None:
        raise MissingToolError("the C toolchain is missing: no Python package 'ziglang'. Run: pip install ziglang")
    return [sys.executable, "-m", "ziglang", "cc", "-target", triple]


def cpu_flag(target: Target) -> str:
    """-mcpu for the runtime's own C code. Vector extensions of RISC-V stay off there: only kernels use them."""
    if target.arch == "riscv64":
        return "-mcpu=baseline_rv64"
    return "-mcpu=" + ZIG_CPUS.get(target.cpu, target.cpu.replace("-", "_"))
