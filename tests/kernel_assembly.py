"""What becomes of a kernel: its assembly, and the loop in it that does most of the work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cross.compile_kernels import compile_kernel, with_vector_features
from cross.target import Target
from cross.toolchain import run_compiler


def assembly_of_build(function: Any, target: Target, folder: Path) -> str:
    """A convolution's kernel as `cross.compile_kernels` makes it, up to the last step."""
    module = compile_kernel("taste_conv2d_0123456789ab", function, target).mod
    if not target.rvv:
        return str(module.inspect_source("s"))
    source, output = folder / "kernel.ll", folder / "kernel.s"
    source.write_text(with_vector_features(module.inspect_source("ll"), target))
    flags: list[str | Path] = ["-O3", "-Wno-override-module", "-fPIC", "-S", source, "-o", output]
    run_compiler(target.zig_static_triple, flags).check_returncode()
    return output.read_text()


def heaviest_loop(assembly: str, product: re.Pattern[str]) -> list[str]:
    """Of all stretches from a label to a branch back to it, without a label between: the one with most products."""
    loops: list[list[str]] = []
    label, body = "", list[str]()
    for line in (" ".join(re.split(r"//|# ", line)[0].split()) for line in assembly.splitlines()):
        if line.endswith(":"):
            label, body = line[:-1], []
        elif label and line.endswith(label):
            loops.append(body)
        elif line and not line.startswith("."):
            body.append(line)
    return max(loops, key=lambda loop: sum(bool(product.match(line)) for line in loop))
