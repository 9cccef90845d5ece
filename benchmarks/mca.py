"""Cycles of the inner loops, as LLVM's model of each core sees them, against the core's own multiply-add limit.

    python benchmarks/mca.py [--model resnet18] [--targets rpi3,rpi4,visionfive2,bpi-f3] [--json]

Every kernel of the model's convolutions and weight gradients is built for the target, its object is disassembled, and the
innermost loop with the most multiply-adds is given to llvm-mca. `of the limit` is the time that the multiply-adds alone
would take, by the same model (a loop of independent ones), over the time of the loop. The model knows pipelines and
latencies; it does not know caches (every load hits), branches or the world outside the loop. Needs llvm-mca and
llvm-objdump, of version 22 for the Spacemit X60 (Debian: llvm-22).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.exit_code import one_line_errors  # noqa: E402  the checkout comes first
from cross.compile_kernels import operator_of  # noqa: E402
from cross.errors import MissingToolError, TasteError  # noqa: E402
from cross.target import Target, find_target  # noqa: E402
from host_control.console import Console  # noqa: E402
from host_control.flags import input_shape, positive  # noqa: E402

Row = dict[str, Any]
TARGETS = "rpi3,rpi4,visionfive2,bpi-f3"
KERNELS = ("conv2d", "conv2d_input_gradient", "conv2d_weight_gradient", "winograd_forward", "winograd_input_gradient")
KERNELS += ("winograd_weight_gradient",)
MULTIPLY_ADD = re.compile(r"^(fmla|fmls|fmadd|fmadd\.s|fmsub\.s|fnmsub\.s|vfmacc\.v[vf]|vfmadd\.v[vf])\b")
VERSIONS = (22, 23, 24, 21, 20, 19)
"""Of LLVM, in the order in which they are taken: the one that compiled the kernels, then later ones."""

VECTOR_SETTING = ("# LLVM-MCA-RISCV-LMUL M1", "# LLVM-MCA-RISCV-SEW E32")

ITERATIONS = 100
LIMIT_BLOCKS = {
    "aarch64": [f"fmla v{i}.4s, v30.4s, v31.s[0]" for i in range(24)],
    "scalar": [f"fmadd.s f{i}, f30, f31, f{i}" for i in range(24)],
    "vector": [f"vfmacc.vf v{i}, ft0, v31" for i in range(24)],
}
"""Multiply-adds that wait for nothing: as many sums as no latency fills."""


@dataclass(frozen=True)
class Tools:
    """Paths of the two programs, of one version."""

    mca: str
    objdump: str


@dataclass(frozen=True)
class Loop:
    """An innermost loop: its instructions without the branch back, and how many of them multiply and add."""

    code: tuple[str, ...]
    multiply_adds: int


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    targets, tools = [find_target(name) for name in args.targets.split(",")], find_tools()
    rows = [row for target in targets for row in _rows(args, target, tools)]
    if args.json:
        print(json.dumps({"model": args.model, "mca": tools.mca, "rows": rows}))
    else:
        _print(args.model, rows)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="resnet18", help="a zoo name or an ONNX file (default: resnet18)")
    parser.add_argument("--input-shape", type=input_shape, default=(3, 32, 32), metavar="C,H,W")
    parser.add_argument("--classes", type=positive, default=10)
    parser.add_argument("--targets", default=TARGETS, help=f"names of docs/boards.md (default: {TARGETS})")
    parser.add_argument("--direct", action="store_true", help="direct kernels only")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def find_tools() -> Tools:
    """llvm-mca and llvm-objdump of one version; MissingToolError (22) names the Debian package."""
    for version in VERSIONS:
        mca, objdump = (shutil.which(f"{name}-{version}") for name in ("llvm-mca", "llvm-objdump"))
        if mca and objdump:
            return Tools(mca, objdump)
    raise MissingToolError(
        f"llvm-mca and llvm-objdump {min(VERSIONS)} or later are not installed. On Debian: apt-get install llvm-22."
    )


def _rows(args: argparse.Namespace, target: Target, tools: Tools) -> list[Row]:
    """A row a distinct loop of a target, the kernels that have it counted."""
    limit = cycles_of(tools, target, _limit_block(target)) / len(_limit_block(target))
    rows: dict[tuple[str, Loop], Row] = {}
    for symbol, path in _objects(args, target).items():
        loop = heaviest_loop(_disassembled(tools, target, path))
        if loop is None:
            raise TasteError(f"{symbol} for {target.name} has no loop with multiply-adds. Report this as a bug.")
        key = (operator_of(symbol), loop)
        if key in rows:
            rows[key]["kernels"] += 1
            continue
        cycles = cycles_of(tools, target, loop.code)
        row: Row = {"target": target.name, "cpu": target.cpu, "operator": operator_of(symbol), "kernels": 1}
        row |= {"instructions": len(loop.code), "multiply_adds": loop.multiply_adds, "cycles": cycles}
        rows[key] = row | {"cycles_a_multiply_add": limit, "limit_share": loop.multiply_adds * limit / cycles}
    return list(rows.values())


def _objects(args: argparse.Namespace, target: Target) -> dict[str, Path]:
    """Objects of the convolutions' kernels, from the cache of builds or made now."""
    from dataclasses import replace

    from cross.assign_storage import assign_storage
    from cross.build import cache_root
    from cross.compile_kernels import compile_kernels
    from cross.load_model import load_model
    from cross.lower import lower
    from cross.training_graph import build_training_graph

    model = load_model(args.model, input_shape=args.input_shape, classes=args.classes)
    graph = build_training_graph(model, "cross_entropy")
    kernels = lower(assign_storage(graph, target), target, frozenset() if args.direct else None)
    wanted = {symbol: build for symbol, build in kernels.builders.items() if operator_of(symbol) in KERNELS}
    print(f"compiling {len(wanted)} kernels for {target.name}", file=sys.stderr, flush=True)
    return compile_kernels(replace(kernels, builders=wanted), cache_root() / "kernels")


def _disassembled(tools: Tools, target: Target, path: Path) -> str:
    features = ["--mattr=+m,+a,+f,+d,+c,+v,+zba,+zbb,+zbs"] if target.arch == "riscv64" else []
    command = [tools.objdump, "-d", "--no-show-raw-insn", *features]
    return _output([*command, str(path)])


def heaviest_loop(assembly: str) -> Loop | None:
    """The innermost loop with the most multiply-adds (of equals the shortest) in what llvm-objdump printed."""
    best: Loop | None = None
    for body in _innermost(assembly):
        loop = Loop(body, sum(bool(MULTIPLY_ADD.match(line)) for line in body))
        if loop.multiply_adds and (best is None or _weight(loop) > _weight(best)):
            best = loop
    return best


def _weight(loop: Loop) -> tuple[int, int]:
    return loop.multiply_adds, -len(loop.code)


def _innermost(assembly: str) -> list[tuple[str, ...]]:
    """Instructions from the target of a branch back to that branch, where no other branch lies between: straight code."""
    loops: list[tuple[str, ...]] = []
    body: list[tuple[int, str]] = []
    for line in assembly.splitlines():
        found = re.match(r"^\s*([0-9a-f]+):\s+(.*)$", line)
        if found is None:
            body = []
            continue
        # A hash begins a comment on RISC-V and a number on ARM.
        code = " ".join(re.split(r"//|# ", found[2])[0].split())
        branch = re.search(r"0x([0-9a-f]+) <[^>]*>$", code)
        if branch is None:
            body.append((int(found[1], 16), code))
            continue
        loop = [text for address, text in body if address >= int(branch[1], 16)]
        # Where the target lies before the last branch, what is left of the body begins later than it.
        if loop and body[-len(loop)][0] == int(branch[1], 16):
            loops.append(tuple(loop))
        body = []
    return loops


def cycles_of(tools: Tools, target: Target, code: Sequence[str]) -> float:
    """Cycles that one run of straight code takes in the steady state."""
    triple = f"{target.arch}-linux-gnu"
    command = [tools.mca, f"-mtriple={triple}", f"-mcpu={target.cpu}", f"-iterations={ITERATIONS}"]
    command += ["-instruction-info=0", "-resource-pressure=0"]
    # What a vector instruction costs depends on what vsetvli set before the loop: here a remark, which takes no time.
    before = list(VECTOR_SETTING) if target.takes_vectors("conv2d") else []
    text = _output(command, "\n".join([*before, *code]) + "\n")
    found = re.search(r"^Total Cycles:\s+(\d+)$", text, re.MULTILINE)
    if found is None:
        raise TasteError(f"llvm-mca says nothing of cycles: {text.strip()[:200]}. Report this as a bug.")
    return int(found[1]) / ITERATIONS


def _limit_block(target: Target) -> list[str]:
    if target.arch == "aarch64":
        return LIMIT_BLOCKS["aarch64"]
    return LIMIT_BLOCKS["vector" if target.takes_vectors("conv2d") else "scalar"]


def _output(command: Sequence[str], given: str = "") -> str:
    result = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise TasteError(f"{Path(command[0]).name} failed: {' '.join(result.stderr.split())[:300]}")
    return result.stdout


def _print(model: str, rows: Sequence[Row]) -> None:
    columns = [
        ("target", "left"),
        ("core", "left"),
        ("loop of", "left"),
        ("kernels", "right"),
        ("instructions", "right"),
    ]
    columns += [("multiply-adds", "right"), ("cycles", "right"), ("of the limit", "right")]
    cells = []
    for row in rows:
        counted = [str(row[key]) for key in ("kernels", "instructions", "multiply_adds")]
        cells.append(
            [row["target"], row["cpu"], row["operator"], *counted, f"{row['cycles']:.1f}", f"{row['limit_share']:.0%}"]
        )
    Console().table(columns, cells, title=f"inner loops of {model}")


if __name__ == "__main__":
    sys.exit(main())
