"""The C toolchain for every target, this machine included: zig's clang, from the PyPI package ziglang."""

from __future__ import annotations

import importlib.util
import sys

from cross.errors import MissingToolError
from cross.target import Target

# The oldest CPU of each architecture that Linux runs on: the runtime's own C must start everywhere, to say (exit 13) what a
# CPU lacks for the kernels. Only kernels are built for the board's CPU.
BASELINE_CPUS = {"x86_64": "x86_64", "aarch64": "generic", "riscv64": "baseline_rv64"}


def compiler(triple: str) -> list[str]:
    """Command of the C compiler for a zig triple."""
    if importlib.util.find_spec("ziglang") is None:
        raise MissingToolError("the C toolchain is missing: no Python package 'ziglang'. Run: pip install ziglang")
    return [sys.executable, "-m", "ziglang", "cc", "-target", triple]


def cpu_flag(target: Target) -> str:
    """-mcpu for the runtime's own C code."""
    return "-mcpu=" + BASELINE_CPUS[target.arch]
