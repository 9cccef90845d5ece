"""Builds of the C runtime with the hand-written test model, each made once a session."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cross.toolchain import run_compiler

ROOT = Path(__file__).resolve().parent.parent
NATIVE, TESTS = ROOT / "native", ROOT / "tests" / "native"
FLAGS = ("-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-D_GNU_SOURCE")
INCLUDES = (f"-I{NATIVE / 'include'}", f"-I{NATIVE / 'src'}", f"-I{NATIVE / 'taste-train'}", f"-I{TESTS}")

LIBRARY = sorted((NATIVE / "src").glob("*.c"))
MODEL = [TESTS / "tables_mlp.c", TESTS / "kernels_mlp.c"]
MODEL_OF_ANOTHER_CPU = [TESTS / "tables_other_cpu.c", TESTS / "kernels_mlp.c"]
PROGRAM = sorted((NATIVE / "taste-train").glob("*.c"))
CHECKS = [*sorted(TESTS.glob("test_*.c")), NATIVE / "taste-train" / "batches.c"]
PARTS = [source for source in PROGRAM if source.name != "main.c"]
FAULT_LOOP = [TESTS / "fault_loop.c", *PARTS]

CHECKPOINT_LOOP = [TESTS / "checkpoint_loop.c", TESTS / "disk_model.c", *PARTS]
MAINS = {
    "checks": (MODEL, CHECKS),
    "taste-train": (MODEL, PROGRAM),
    "taste-train-other-cpu": (MODEL_OF_ANOTHER_CPU, PROGRAM),
    "taste-train-text": ([TESTS / "tables_text.c"], PROGRAM),
    "fuzz-safetensors": (MODEL, [TESTS / "fuzz_safetensors.c"]),
    "fuzz-checkpoint": ([TESTS / "tables_text.c"], [TESTS / "fuzz_checkpoint.c", *PARTS]),
    "fuzz-samples": (MODEL, [TESTS / "fuzz_samples.c", *PARTS]),
    "fault-loop": (MODEL, FAULT_LOOP),
    "checkpoint-loop": (MODEL, CHECKPOINT_LOOP),
    "learn-power": (MODEL, [TESTS / "learn_power.c", TESTS / "disk_model.c", *PARTS]),
    "replay-trace": (MODEL, [TESTS / "replay_trace.c"]),
}
"""What the fixture `build` makes, by name; a name may be followed by `-D` flags."""

INPUTS, HIDDEN, CLASSES = 40, 1002, 5
"""Sizes of the test model (tests/native/mlp.h)."""


@dataclass(frozen=True)
class Toolchain:
    """A compiler with its flags, and how to run what it makes. `triple`: zig's compiler; None: Debian's clang."""

    name: str
    triple: str | None
    flags: tuple[str, ...]
    emulator: tuple[str, ...] = ()


def zig(triple: str, *flags: str, emulator: tuple[str, ...] = ()) -> Toolchain:
    # -fPIC and -s as the product's own builds have them: zig has a C library for each such choice, half a minute to build.
    return Toolchain(triple, triple, ("-O2", "-g0", "-fPIC", "-s", *flags), emulator)


def sanitized(*kinds: str) -> Toolchain:
    flags = ("-O1", "-g", f"-fsanitize={','.join(kinds)}", "-fno-sanitize-recover=all")
    return Toolchain("-".join(kinds), None, flags)


HOST = zig("x86_64-linux-musl", "-static")
ADDRESS = sanitized("address", "undefined")
FUZZER = sanitized("fuzzer", "address", "undefined")
THREAD = sanitized("thread")
ARM = zig("aarch64-linux-musl", "-static", emulator=("qemu-aarch64", "-cpu", "cortex-a53"))
RISCV = zig("riscv64-linux-musl", "-static", emulator=("qemu-riscv64", "-cpu", "rv64"))


def compile_c(toolchain: Toolchain, sources: Sequence[Path], out: Path, *extra: str) -> Path:
    """One program or library from C sources; the compiler's words in the failure."""
    words = [*FLAGS, *toolchain.flags, *INCLUDES, *extra, *sources, "-o", out, "-lm", "-lpthread"]
    if toolchain.triple is None:
        result = subprocess.run(["clang", *map(str, words)], capture_output=True, text=True, check=False)
    else:
        result = run_compiler(toolchain.triple, words)
    assert result.returncode == 0, result.stderr[-4000:]
    return out


def build_main(toolchain: Toolchain, what: str, out: Path) -> Path:
    """One of MAINS; "taste-train -DTASTE_PLANT_SKIP_HASH" with a define."""
    name, *defines = what.split()
    model, main = MAINS[name]
    return compile_c(toolchain, LIBRARY + model + main, out, *defines)


def run(program: Path, *arguments: object, emulator: tuple[str, ...] = ()) -> tuple[int, list[dict[str, Any]], str]:
    command = [*emulator, str(program), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return result.returncode, [json.loads(line) for line in result.stdout.splitlines()], result.stderr


def succeed(program: Path, *arguments: object, emulator: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    code, events, stderr = run(program, *arguments, emulator=emulator)
    assert (code, stderr) == (0, "")
    return events


def refuse(code: int, words: str, program: Path, *arguments: object) -> None:
    got, events, stderr = run(program, *arguments)
    assert (got, words in stderr) == (code, True), (got, stderr)
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    assert events[-1] == {"event": "error", "exit_code": code, "message": stderr[len("error: ") : -1]}
