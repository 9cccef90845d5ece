"""The C toolchain for every target, this machine included: zig's clang, from the PyPI package ziglang."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cross.errors import MissingToolError
from cross.target import Target

# The oldest CPU of each architecture that Linux runs on: the runtime's own C must start everywhere, to say (exit 13) what a
# CPU lacks for the kernels. Only kernels are built for the board's CPU.
BASELINE_CPUS = {"x86_64": "x86_64", "aarch64": "generic", "riscv64": "baseline_rv64"}


def run_compiler(triple: str, arguments: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """zig's C compiler for a zig triple, to its end; its words are in `stderr`. Paths may be relative to the working folder."""
    if importlib.util.find_spec("ziglang") is None:
        raise MissingToolError("the C toolchain is missing: no Python package 'ziglang'. Run: pip install ziglang")
    words = [str(word.absolute()) if isinstance(word, Path) else word for word in arguments]
    command = [sys.executable, "-m", "ziglang", "cc", "-target", triple, *words]
    # From the root: zig's cache tells a zig below the working folder from one elsewhere, and has a C library for each.
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", stdin=subprocess.DEVNULL)


def cpu_flag(target: Target) -> str:
    """-mcpu for the runtime's own C code."""
    return "-mcpu=" + BASELINE_CPUS[target.arch]
